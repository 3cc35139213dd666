"""How much a test tries: some in `make test`, more in `make sweep`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings

__all__ = ["chosen", "examples", "some_or_all", "swept"]

_ALL = 100

some_or_all = pytest.mark.parametrize(
    "every", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.sweep)]
)
"""`make test` tries one case of `every` seven, `make sweep` each."""


def chosen(last: int, every: int) -> list[int]:
    """Numbers from 1 on, one of `every` so many, and the last."""
    return sorted({*range(1, last + 1, every), last})


def examples(most: int) -> int:
    """How many examples a property test tries: half of `most` in `make sweep`, else a fifth.

    The profile of Hypothesis decides: its own number of examples is the part, of a hundred.
    """
    return max(most * settings().max_examples // _ALL, min(most, 5))


def swept[T](cases: Sequence[T], *, but: Sequence[T]) -> list[object]:
    """Parameters of which `make test` tries only `but`, and `make sweep` the others."""
    return [case if case in but else pytest.param(case, marks=pytest.mark.sweep) for case in cases]
