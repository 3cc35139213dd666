"""The formulae of `tests/benchmarks/scale.py` give the requests and bytes that are measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    yield importlib.import_module("scale")
    for name in ("scale", "folds"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaf_chunks", "pages"),
    [(1_000_000, 0), (50, 0), (20, 1), (10, 2)],
    ids=["one leaf", "leaves in the base", "the first page of leaves", "pages of leaves"],
)
def test_what_is_planned_is_what_is_measured(scale: Any, leaf_chunks: int, pages: int) -> None:
    planned = scale.plan(10_000, scale.measure(5_000, leaf_chunks), leaf_chunks)
    found = scale.measure(10_000, leaf_chunks)
    assert len(found.layout.pages) == len(planned.layout.pages) == pages
    assert len(found.layout.manifests) == len(planned.layout.manifests)
    assert planned.costs.keys() == found.costs.keys() == scale.OPERATIONS.keys()
    for name, cost in found.costs.items():
        expected = planned.costs[name]
        assert (expected.reads, expected.writes) == (cost.reads, cost.writes), name
        assert expected.bytes_read == pytest.approx(cost.bytes_read, rel=0.1), name
        assert expected.bytes_written == pytest.approx(cost.bytes_written, rel=0.1), name


def test_prices(scale: Any) -> None:
    prices = scale.Prices(thousand_writes=5.0, thousand_reads=0.4)
    assert scale.Cost(10, 20, 0, 0).dollars(prices) == pytest.approx(0.104)
    assert [scale.sized(n) for n in (999, 1_500, 2_000_000, 3e10)] == [
        "999 B",
        "1.5 kB",
        "2 MB",
        "30 GB",
    ]
