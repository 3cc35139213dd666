"""How much a test tries: some in `make test`, all in `make sweep`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings

__all__ = ["examples", "swept"]

_ALL = 100


def examples(most: int) -> int:
    """How many examples a property test tries: `most` in `make sweep`, a part in `make test`.

    The profile of Hypothesis decides: its own number of examples is the part, of a hundred.
    """
    return max(most * settings().max_examples // _ALL, min(most, 5))


def swept[T](cases: Sequence[T], *, but: Sequence[T]) -> list[object]:
    """Parameters of which `make test` tries only `but`, and `make sweep` the others."""
    return [case if case in but else pytest.param(case, marks=pytest.mark.sweep) for case in cases]
