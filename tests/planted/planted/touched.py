"""A plugin of pytest that notes which functions of the package each test calls, and its time.

`pytest -p planted.touched` writes a file for each worker into the folder `PLANTED_TOUCHED`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

_PACKAGE = str(Path(__file__).parents[3] / "zarr_manifests") + os.sep
_TOOL = 4  # of the numbers that sys.monitoring gives to tools, one that nobody uses
_EVENTS = sys.monitoring.events

_called: set[str] = set()
_by_test: dict[str, tuple[float, list[str]]] = {}


def _note(code: CodeType, _: int) -> object:
    if code.co_filename.startswith(_PACKAGE):
        _called.add(f"{code.co_filename[len(_PACKAGE) :]}:{code.co_firstlineno}")
    return sys.monitoring.DISABLE


def pytest_configure() -> None:
    sys.monitoring.use_tool_id(_TOOL, "touched")
    sys.monitoring.register_callback(_TOOL, _EVENTS.PY_START, _note)
    sys.monitoring.set_events(_TOOL, _EVENTS.PY_START)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _called.clear()
    sys.monitoring.restart_events()
    begun = time.monotonic()
    done = yield
    _by_test[item.nodeid] = (round(time.monotonic() - begun, 3), sorted(_called))
    return done


def pytest_sessionfinish() -> None:
    sys.monitoring.set_events(_TOOL, 0)
    sys.monitoring.free_tool_id(_TOOL)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "all")
    if _by_test:
        into = Path(os.environ["PLANTED_TOUCHED"]) / f"{worker}.json"
        into.write_text(json.dumps(_by_test), encoding="utf-8")
