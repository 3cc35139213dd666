"""Settings for every test."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# How long an example takes depends on the machine; how long it may take is no property of the code.
settings.register_profile(
    "sweep",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=40,
)
# `make sweep` tries more; see `examples` in tests/support/effort.py.
settings.register_profile("zarr-manifests", settings.get_profile("sweep"), max_examples=20)
# `make mutants` asks only whether an example fails, not for the smallest.
settings.register_profile(
    "planted", settings.get_profile("zarr-manifests"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("zarr-manifests")

os.environ["ZARR_MANIFESTS_WHO"] = ""  # so that commits are the same on every machine
# Workers of Spark and other children of tests find what tests share, too.
_SUPPORT = str(Path(__file__).parent / "tests" / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SUPPORT, os.environ.get("PYTHONPATH"))))

# They are run by hand, and import one another as scripts do.
collect_ignore = ["tests/benchmarks", "tests/api/virtual/make_icechunk.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=60, help="seeds that the simulation tries")
    parser.addoption("--commit", default="", help="draw examples and seeds as this commit does")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Draw by the commit: each tries other examples and seeds, and the same one the same."""
    config.option.commit = config.option.commit or _head()  # workers are handed it
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(int(config.option.commit, 16))


def pytest_report_header(config: pytest.Config) -> str:
    return f"to draw the same examples and seeds again: --commit {config.option.commit}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what starts Spark in one process, for which one JVM is started."""
    for item in items:
        if item.get_closest_marker("spark") is not None:
            item.add_marker(pytest.mark.xdist_group("jvm"))


def pytest_collection_finish() -> None:
    """Let collections look only at what tests make: the tests themselves are a million objects."""
    gc.collect()
    gc.freeze()


def _head() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # an archive, not a checkout
        return "0"
    return found.stdout.strip()


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    """Close what a test has drawn: matplotlib warns when many figures are open."""
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
