"""Settings for every test."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes depends on the machine; how long it may take is no property of the code.
settings.register_profile("explore", deadline=None, print_blob=True)
# The same code gives the same result: a change is judged by what it changes. `make explore` draws
# other examples.
settings.register_profile("sweep", settings.get_profile("explore"), derandomize=True)
# `make sweep` tries the rest; see `examples` in tests/support/effort.py.
settings.register_profile("zarr-manifests", settings.get_profile("sweep"), max_examples=20)
settings.load_profile("zarr-manifests")

# They are run by hand, and import one another as scripts do.
collect_ignore = ["tests/benchmarks", "tests/virtual/make_icechunk.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=200, help="seeds that the simulation tries")
    parser.addoption(
        "--examples", type=int, default=1, help="calls of a public entrance, for each parameter"
    )


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    """Close what a test has drawn: matplotlib warns when many figures are open."""
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
