"""Which labels of an append are there already, and what is to be done with each row.

Labels are the values of the index coordinate of the dimension that is appended along. Whatever is
to come out of a write is decided here, from the labels that are there and those that are given, so
that it can be decided again whenever the ones that are there have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.grid import IndexArray

__all__ = ["AppendPlan", "OnExisting", "Run", "aligned_blocks", "plan_append"]

type OnExisting = Literal["error", "skip", "replace"]
"""What to do with labels that are there already."""

_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that replace what is there, side by side.

    Parameters
    ----------
    rows : tuple of int
        Rows of the dataset.
    start : int
        Where the first of them goes.
    """

    rows: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """What is to be done with each row of a dataset; rows in neither are left out.

    Parameters
    ----------
    start : int
        How many labels there are, which is where the first row is appended.
    appended : tuple of int
        Rows that go behind what is there, in this order.
    replaced : tuple of Run
        Rows that go where their labels are.
    """

    start: int
    appended: tuple[int, ...]
    replaced: tuple[Run, ...] = ()


def plan_append(
    dim: str,
    there: npt.NDArray[Any],
    given: npt.NDArray[Any],
    on_existing: OnExisting,
    *,
    keep_order: bool = False,
) -> AppendPlan:
    """What is to be done with the rows that have the labels `given`.

    Parameters
    ----------
    dim : str
        Name of the dimension, for messages.
    there, given : ndarray
        Labels of what is there, and of the rows, in one type whose values can be compared.
    on_existing : {"error", "skip", "replace"}
        What to do with rows whose labels are there.
    keep_order : bool
        Whether rows may be appended that leave the labels unsorted.

    Raises
    ------
    AlreadyExistsError
        If labels are there, and nothing was said about them.
    InvalidArgumentError
        If a label is given twice, or one that is to be replaced is there twice, or the labels
        would not be sorted, or are of kinds that cannot be compared.
    """
    old, new = _codes(dim, there, given)
    _check_single(dim, given, new)
    known = np.isin(new, old)
    if known.any() and on_existing == "error":
        raise AlreadyExistsError(
            f"{_listed(given[known])} of {dim!r} {_are(known)} there already; nothing was written. "
            "Give on_existing='skip' to append only what is not there, or on_existing='replace' to "
            "write over what is"
        )
    appended = np.flatnonzero(~known)
    if not keep_order:
        _check_sorted(dim, np.concatenate((there, given[appended])), old, new[appended])
    replaced = _runs(dim, given, old, new, known) if on_existing == "replace" else ()
    return AppendPlan(len(there), tuple(appended.tolist()), replaced)


def aligned_blocks(blocks: Iterable[int], start: int, chunk: int) -> tuple[int, ...]:
    """Blocks of about the same lengths, which end where chunks end if the first begins at `start`.

    Examples
    --------
    >>> aligned_blocks([4, 4, 2], start=3, chunk=2)
    (3, 4, 3)
    """
    blocks = tuple(blocks)
    length, whole = sum(blocks), max(max(blocks, default=0) // chunk, 1) * chunk
    ends = [*range(whole - start % chunk, length, whole), length]
    return tuple(np.diff([0, *ends]).tolist()) if length else (0,)


def _codes(
    dim: str, there: npt.NDArray[Any], given: npt.NDArray[Any]
) -> tuple[IndexArray, IndexArray]:
    """Numbers for the labels, in the order of the labels; missing ones are equal, and last."""
    both = np.concatenate((there, given))
    try:
        codes = np.unique(both, return_inverse=True)[1].astype(np.int64)
    except TypeError as error:
        raise InvalidArgumentError(
            f"the labels of {dim!r} cannot be compared ({error}), so that an append cannot tell "
            "which of them are there already"
        ) from None
    return codes[: len(there)], codes[len(there) :]


def _check_single(dim: str, given: npt.NDArray[Any], new: IndexArray) -> None:
    _, first, counts = np.unique(new, return_index=True, return_counts=True)
    again = first[counts > 1]
    if again.size:
        raise InvalidArgumentError(
            f"{_listed(given[np.sort(again)])} of {dim!r} {_are(again)} in the dataset more than "
            f"once; nothing was written. Drop what is there twice, such as by "
            f"ds.drop_duplicates({dim!r})"
        )


def _check_sorted(
    dim: str, labels: npt.NDArray[Any], old: IndexArray, appended: IndexArray
) -> None:
    """Refuse an append that would leave the labels unsorted.

    They ascend or descend as what is there does, or else what is appended; one label after one
    other has to ascend.
    """
    if not appended.size:
        return
    directions = [int(np.sign(c[-1] - c[0])) for c in (old, appended) if c.size]
    direction = next((d for d in directions if d), 1)
    steps = np.diff(np.concatenate((old, appended))) * direction
    wrong = np.flatnonzero(steps < 0)
    if not wrong.size:
        return
    at = int(wrong[0]) + 1
    pair = f"{_shown(labels[at])} after {_shown(labels[at - 1])}"
    if at < len(old):
        what = f"{dim!r} is not sorted already ({pair})"
    elif at > len(old):
        what = f"the dataset is not sorted along {dim!r} ({pair}): sort it by ds.sortby({dim!r})"
    else:
        what = f"{dim!r} would not be sorted any more: {pair}"
    raise InvalidArgumentError(
        f"{what}. Nothing was written; give sort='keep' to append in the order given nonetheless"
    )


def _runs(
    dim: str,
    given: npt.NDArray[Any],
    old: IndexArray,
    new: IndexArray,
    known: npt.NDArray[np.bool_],
) -> tuple[Run, ...]:
    """Where the rows go whose labels are there, in the order of what is there."""
    rows = np.flatnonzero(known)
    if not rows.size:
        return ()
    order = np.argsort(old, kind="stable")
    ranked = old[order]
    first = np.searchsorted(ranked, new[rows], "left")
    several = np.searchsorted(ranked, new[rows], "right") - first > 1
    if several.any():
        raise InvalidArgumentError(
            f"{_listed(given[rows[several]])} of {dim!r} {_are(several)} there more than once, so "
            "that nobody knows which is to be replaced; nothing was written. Write with region="
        )
    at = order[first]
    rows, at = rows[np.argsort(at)], np.sort(at)
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    return tuple(
        Run(tuple(part.tolist()), int(start[0]))
        for part, start in zip(np.split(rows, cuts), np.split(at, cuts), strict=True)
    )


def _listed(labels: npt.NDArray[Any]) -> str:
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(map(_shown, labels[:_LISTED])) + more


def _shown(label: Any) -> str:
    is_time = isinstance(label, np.datetime64)
    return str(np.datetime_as_string(label, unit="auto")) if is_time else str(label)


def _are(which: npt.NDArray[Any]) -> str:
    n = int(np.count_nonzero(which)) if which.dtype == bool else which.size
    return "is" if n == 1 else "are"
