"""Which labels of an append exist already, and what to do with each row.

Labels are the values of the index coordinate along the appended dimension. A write is decided here
from the existing and the given labels alone, so that it can be decided again whenever the existing
ones have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.grid import IndexArray

type OnExisting = Literal["error", "skip", "replace"]
"""What to do with labels that exist already."""

_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows that replace existing ones.

    Parameters
    ----------
    rows : tuple of int
        Rows of the dataset.
    start : int
        Position of the first of them.
    """

    rows: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """What to do with each row of a dataset; rows in neither field are left out.

    Parameters
    ----------
    start : int
        The number of existing labels, which is where the first row is appended.
    appended : tuple of int
        Rows to append, in this order.
    replaced : tuple of Run
        Rows that are written over the ones with the same labels.
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
    """Return what to do with the rows that have the labels `given`.

    Parameters
    ----------
    dim : str
        Name of the dimension, for messages.
    there, given : ndarray
        Labels of the existing rows, and of the given ones, of one comparable type.
    on_existing : {"error", "skip", "replace"}
        What to do with rows whose labels exist already.
    keep_order : bool
        Whether rows may be appended that leave the labels unsorted.

    Raises
    ------
    AlreadyExistsError
        If labels exist already, and `on_existing` is "error".
    InvalidArgumentError
        If a label is given twice, a label to replace exists twice, the labels would become
        unsorted, or they cannot be compared.
    """
    old, new = _codes(dim, there, given)
    _check_single(dim, given, new)
    known = np.isin(new, old)
    if known.any() and on_existing == "error":
        raise AlreadyExistsError(
            f"{_listed(given[known])} of {dim!r} {_are(known)} there already; nothing was written. "
            "Pass on_existing='skip' to append only new labels, or on_existing='replace' to "
            "overwrite existing ones"
        )
    appended = np.flatnonzero(~known)
    if not keep_order:
        _check_sorted(dim, np.concatenate((there, given[appended])), old, new[appended])
    replaced = _runs(dim, given, old, new, known) if on_existing == "replace" else ()
    return AppendPlan(len(there), tuple(appended.tolist()), replaced)


def aligned_blocks(blocks: Iterable[int], start: int, chunk: int) -> tuple[int, ...]:
    """Return blocks of about the same lengths that end at chunk boundaries, from `start` on.

    Blocks that do are returned as they are.

    Examples
    --------
    >>> aligned_blocks([4, 4, 2], start=3, chunk=2)
    (3, 4, 3)
    """
    blocks = tuple(blocks)
    if not any((start + end) % chunk for end in accumulate(blocks[:-1])):
        return blocks or (0,)
    length, whole = sum(blocks), max(max(blocks, default=0) // chunk, 1) * chunk
    ends = [*range(whole - start % chunk, length, whole), length]
    return tuple(np.diff([0, *ends]).tolist()) if length else (0,)


def _codes(
    dim: str, there: npt.NDArray[Any], given: npt.NDArray[Any]
) -> tuple[IndexArray, IndexArray]:
    """Number the labels in their order; missing ones are equal, and last."""
    both = np.concatenate((there, given))
    try:
        codes = np.unique(both, return_inverse=True)[1].astype(np.int64)
    except TypeError as error:
        raise InvalidArgumentError(
            f"the labels of {dim!r} cannot be compared ({error}), so it is not known which exist "
            "already"
        ) from None
    return codes[: len(there)], codes[len(there) :]


def _check_single(dim: str, given: npt.NDArray[Any], new: IndexArray) -> None:
    _, first, counts = np.unique(new, return_index=True, return_counts=True)
    again = first[counts > 1]
    if again.size:
        raise InvalidArgumentError(
            f"{_listed(given[np.sort(again)])} of {dim!r} {_are(again)} in the dataset more than "
            f"once; nothing was written. Drop duplicates, such as by ds.drop_duplicates({dim!r})"
        )


def _check_sorted(
    dim: str, labels: npt.NDArray[Any], old: IndexArray, appended: IndexArray
) -> None:
    """Refuse an append that would leave the labels unsorted.

    Labels ascend or descend as the existing ones do, else as the appended ones do. If neither has
    a direction, they have to ascend.
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
    pair = f"{label_text(labels[at])} after {label_text(labels[at - 1])}"
    if at < len(old):
        what = f"{dim!r} is not sorted already ({pair})"
    elif at > len(old):
        what = f"the dataset is not sorted along {dim!r} ({pair}): sort it by ds.sortby({dim!r})"
    else:
        what = f"{dim!r} would not be sorted any more: {pair}"
    raise InvalidArgumentError(
        f"{what}. Nothing was written; pass sort='keep' to append in the given order all the same"
    )


def _runs(
    dim: str,
    given: npt.NDArray[Any],
    old: IndexArray,
    new: IndexArray,
    known: npt.NDArray[np.bool_],
) -> tuple[Run, ...]:
    """The places of rows whose labels exist already, in order of the existing rows."""
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
            "it is not clear which to replace; nothing was written. Write with region="
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
    return ", ".join(map(label_text, labels[:_LISTED])) + more


def label_text(label: Any) -> str:
    """A label as errors show it."""
    is_time = isinstance(label, np.datetime64)
    return str(np.datetime_as_string(label, unit="auto")) if is_time else str(label)


def _are(which: npt.NDArray[Any]) -> str:
    n = int(np.count_nonzero(which)) if which.dtype == bool else which.size
    return "is" if n == 1 else "are"
