"""Settings for every test."""

import gc
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
settings.load_profile("zarr-manifests")

os.environ["ZARR_MANIFESTS_WHO"] = ""  # so that commits are the same on every machine

_SLOW = 8
"""Of so many slow tests, `--cases` keeps one."""

# They are run by hand, and import one another as scripts do.
collect_ignore = ["tests/benchmarks", "tests/virtual/make_icechunk.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=60, help="seeds that the simulation tries")
    parser.addoption(
        "--cases", type=int, help="of a test with many cases run so many (default: all)"
    )
    parser.addoption(
        "--commit", default="", help="draw cases, examples and seeds as this commit does"
    )
    parser.addoption(
        "--rest", action="store_true", help="run what --cases leaves out, and what tries examples"
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Draw by the commit: each tries other examples and seeds, and the same one the same."""
    config.option.commit = config.option.commit or _head()  # workers are handed it
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(int(config.option.commit, 16))


def pytest_report_header(config: pytest.Config) -> str:
    return f"to draw the same cases, examples and seeds again: --commit {config.option.commit}"


@pytest.hookimpl(trylast=True)  # of the cases that the marks leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep `--cases` of a test with twice as many or more, and a part of what is slow.

    With `--rest`, keep all others, and of those that are run anyway the ones that try examples.
    """
    most, commit = config.option.cases, config.option.commit
    if most is None:
        return
    groups: defaultdict[object, list[pytest.Item]] = defaultdict(list)
    sweeps = {item for item in items if item.get_closest_marker("sweep") is not None}
    for item in items:
        if config.option.rest and item in sweeps:
            continue
        slow = item.get_closest_marker("slow") is not None
        groups["slow" if slow else getattr(item, "function", item)].append(item)
    left_out = set[pytest.Item]()
    for group, cases in groups.items():
        cases.sort(key=lambda item: sha256(f"{commit} {item.nodeid}".encode()).digest())
        if group == "slow":
            left_out.update(cases[len(cases) // _SLOW :])
        elif len(cases) >= 2 * most:
            left_out.update(cases[most:])
    if config.option.rest:
        left_out = {item for item in items if item not in left_out | sweeps and not _tries(item)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _tries(item: pytest.Item) -> bool:
    """Whether it tries examples, of which there are more by night."""
    function = getattr(item, "function", None)
    inside = item.get_closest_marker("hypothesis") is not None
    return inside or getattr(function, "is_hypothesis_test", False)


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
