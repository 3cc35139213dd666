"""How much a property test tries: some in `make test`, more in `make sweep`."""

from __future__ import annotations

from hypothesis import settings

_ALL = 100


def chosen(last: int, every: int) -> list[int]:
    """Numbers from 1 on, one of `every` so many, and the last."""
    return sorted({*range(1, last + 1, every), last})


def examples(most: int) -> int:
    """How many examples a property test tries: half of `most` in `make sweep`, else a fifth.

    The profile of Hypothesis decides: its own number of examples is the part, of a hundred.
    """
    return max(most * settings().max_examples // _ALL, min(most, 5))
