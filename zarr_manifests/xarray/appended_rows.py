"""What to do with each row that is appended: by its label, or with those of its file.

Labels are the values of the index coordinate along the appended dimension. A write is decided here
from the existing and the given labels alone, so that it can be decided again whenever the existing
ones have changed.

Files that become rows of arrays: whether they agree, where their rows go, who writes them
------------------------------------------------------------------------------------------

Files are joined along one dimension. All decisions rest on facts that tasks have read from the
files. Nothing here does I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.grid import IndexArray
from zarr_manifests.xarray.fit import times_differ

type OnExisting = Literal["error", "skip", "replace"]
"""What to do with labels that exist already."""

_LISTED: Final = 5


class AppendPlan(Struct, frozen=True):
    """What to do with each row of a dataset; rows in neither field are left out.

    Parameters
    ----------
    start : int
        The number of existing labels, which is where the first row is appended.
    appended : tuple of int
        Rows to append, in this order.
    replaced : tuple of (int, tuple of int)
        Rows that are written over the ones with the same labels: where, and which of the dataset.
    """

    start: int
    appended: tuple[int, ...]
    replaced: tuple[tuple[int, tuple[int, ...]], ...] = ()


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
            f"{_told(dim, given[known])} there already; nothing was written. "
            "Pass on_existing='skip' to append only new labels, or on_existing='replace' to "
            "overwrite existing ones; of a virtual dataset, leave those rows out"
        )
    appended = np.flatnonzero(~known)
    if not keep_order:
        _check_sorted(dim, np.concatenate((there, given[appended])), old, new[appended])
    replaced = _runs(dim, given, old, new, known) if on_existing == "replace" else ()
    return AppendPlan(len(there), tuple(appended.tolist()), replaced)


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
            f"{_told(dim, given[np.sort(again)])} in the dataset more than "
            f"once; nothing was written. Drop duplicates, such as by ds.drop_duplicates({dim!r})"
        )


def _check_sorted(
    dim: str, labels: npt.NDArray[Any], old: IndexArray, appended: IndexArray
) -> None:
    """Refuse an append that would leave the labels unsorted.

    Labels ascend or descend as the existing ones do, else as the appended ones do. If neither has
    a direction, they have to ascend.
    """
    steps = np.diff(np.concatenate((old, appended))) * (-1 if _descends([old, appended]) else 1)
    wrong = np.flatnonzero(steps < 0)
    if not (appended.size and wrong.size):
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
) -> tuple[tuple[int, tuple[int, ...]], ...]:
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
            f"{_told(dim, given[rows[several]])} there more than once, so "
            "it is not clear which to replace; nothing was written. Write with region="
        )
    at = order[first]
    rows, at = rows[np.argsort(at)], np.sort(at)
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    return tuple(
        (int(start[0]), tuple(part.tolist()))
        for part, start in zip(np.split(rows, cuts), np.split(at, cuts), strict=True)
    )


def label_text(label: Any) -> str:
    """A label as errors show it."""
    is_time = isinstance(label, np.datetime64)
    return str(np.datetime_as_string(label, unit="auto")) if is_time else str(label)


def _told(dim: str, labels: npt.NDArray[Any]) -> str:
    """The first of the labels, how many others there are, and `is` or `are`."""
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    first = ", ".join(map(label_text, labels[:_LISTED]))
    return f"{first}{more} of {dim!r} {'is' if len(labels) == 1 else 'are'}"


# --- file rows ------------------------------------------------------------------------------------

_CLOSE: Final = 1e-6
"""Relative; coordinates that differ by less are from the same grid."""


class VariableFacts(Struct, frozen=True):
    """What has to be the same in all files, of one variable.

    Parameters
    ----------
    dims : tuple of str
        Its dimensions.
    dtype : str
        The type of its stored values, without the order of bytes.
    meaning : tuple of (str, object)
        Units, calendar and packing, sorted by name.
    digest : bytes
        Hash of the values that all files have in common; empty if it grows with the files.
    values : bytes
        These values as float64, if they are few numbers.
    """

    dims: tuple[str, ...]
    dtype: str
    meaning: tuple[tuple[str, Any], ...] = ()
    digest: bytes = b""
    values: bytes = b""


class FileLayout(Struct, frozen=True):
    """What has to be the same in all files.

    Parameters
    ----------
    sizes : tuple of (str, int)
        Lengths of the dimensions but the one that files are joined along, sorted by name.
    variables : tuple of (str, VariableFacts)
        The variables, sorted by name.
    """

    sizes: tuple[tuple[str, int], ...]
    variables: tuple[tuple[str, VariableFacts], ...]


class FileFacts(Struct, frozen=True, eq=False):
    """A file that can be opened.

    Parameters
    ----------
    url : str
        Where it is.
    stamps : tuple
        Its size; what changes when its bytes do, a time or an etag; and what changes when it is
        opened in another way.
    layout : FileLayout
        What other files must have too.
    rows : int
        How many there are along the dimension.
    axis : mapping of str to ndarray
        The decoded values of variables with a few bytes a row, such as its labels.
    """

    url: str
    stamps: tuple[int, str, str]
    layout: FileLayout
    rows: int
    axis: Mapping[str, npt.NDArray[Any]] = {}

    def labels(self, dim: str) -> npt.NDArray[Any] | None:
        """The labels of the rows; None if the dimension has no coordinate."""
        found = self.axis.get(dim)
        return found if found is not None and found.ndim == 1 else None


class FileRows(Struct, frozen=True, eq=False):
    """Rows of a file, and where they go.

    Parameters
    ----------
    file : FileFacts
        The file.
    start, stop : int
        Where the rows go, in the arrays.
    first : int
        Where they begin, in the file.
    """

    file: FileFacts
    start: int
    stop: int
    first: int = 0


# --- agreement -------------------------------------------------------------------------------


def difference(given: FileLayout, due: FileLayout, dim: str) -> tuple[str, str] | None:
    """Return what differs, as what a file has and what is due; None if nothing does.

    Variables that do not grow along `dim` may be missing in a file.

    Examples
    --------
    >>> t = VariableFacts(("time",), "f4", (("units", "K"),))
    >>> u = VariableFacts(("time",), "f4", (("units", "degC"),))
    >>> difference(FileLayout((), (("t", u),)), FileLayout((), (("t", t),)), "time")
    ("'t' has units 'degC'", "'K'")
    """
    return next(_differences(given, due, dim), None)


def _differences(given: FileLayout, due: FileLayout, dim: str) -> Iterator[tuple[str, str]]:
    have, want = dict(given.sizes), dict(due.sizes)
    mine, theirs = dict(given.variables), dict(due.variables)
    for name in sorted(mine.keys() - theirs.keys()):
        yield f"there is a variable {name!r}", "none"
    for name in sorted(theirs.keys() - mine.keys()):
        if dim in theirs[name].dims:
            yield f"there is no variable {name!r}", "one"
    both = [(name, mine[name], theirs[name]) for name in sorted(mine.keys() & theirs.keys())]
    for each in both:
        yield from _variable_differences(*each)
    for name in sorted(have.keys() & want.keys()):
        if have[name] != want[name]:
            yield f"the dimension {name!r} has length {have[name]}", str(want[name])
    for name, one, other in both:
        if one.digest != other.digest and not _alike(one.values, other.values):
            yield f"the values of {name!r} differ", "other ones"


def _variable_differences(
    name: str, one: VariableFacts, other: VariableFacts
) -> Iterator[tuple[str, str]]:
    if one.dims != other.dims:
        yield f"{name!r} has the dimensions {_tuple(one.dims)}", _tuple(other.dims)
    if one.dtype != other.dtype:
        yield f"{name!r} is of type {one.dtype}", other.dtype
    has, due = dict(one.meaning), dict(other.meaning)
    for key in sorted(has.keys() | due.keys()):
        if has.get(key) != due.get(key):
            told = f"{key} {has[key]!r}" if key in has else f"no {key}"
            yield f"{name!r} has {told}", repr(due[key]) if key in due else f"no such {key}"


def _alike(one: bytes, other: bytes) -> bool:
    """Whether values are known, and differ by rounding only."""
    a, b = (np.frombuffer(each, np.float64) for each in (one, other))
    return 0 < len(a) == len(b) and np.allclose(a, b, rtol=_CLOSE, atol=0.0, equal_nan=True)


def _tuple(dims: Sequence[str]) -> str:
    return f"({', '.join(dims)})"


# --- where rows go ---------------------------------------------------------------------------


def place(
    files: Iterable[FileFacts],
    before: Mapping[str, tuple[int, int]],
    length: int,
    labels: npt.NDArray[Any] | None,
    dim: str,
) -> tuple[list[FileRows], list[tuple[FileFacts, str]]]:
    """Give each file its rows; those that have none are told apart, with the reason.

    New files go behind what is there, sorted by their labels. These ascend or descend as those that
    are there do, else as those of the files. Without labels, the order stays.

    Parameters
    ----------
    files : iterable of FileFacts
        The files; either all have labels or none has.
    before : mapping of str to (int, int)
        First row and number of rows of files that have changed, by URL. They keep their place,
        which must be that of their labels if they have any.
    length : int
        The number of rows that are there.
    labels : ndarray, optional
        The labels of these.
    dim : str
        The dimension.
    """
    new, placed, refused = [], [], []
    for file in files:
        if file.url not in before:
            new.append(file)
            continue
        start: int | None = before[file.url][0]
        wanted = file.labels(dim)
        if labels is not None and wanted is not None:
            start = rows_of_labels(labels, wanted)
        if start is None or (start, file.rows) != before[file.url] or start + file.rows > length:
            why = f"it has changed, and its rows along {dim!r} are not where they were"
            refused.append((file, why))
        else:
            placed.append(FileRows(file, start, start + file.rows))
    new, unfit = _in_order(new, dim, labels)
    for file in new:
        placed.append(FileRows(file, length, length + file.rows))
        length += file.rows
    return placed, refused + unfit


def _in_order(
    files: Sequence[FileFacts], dim: str, there: npt.NDArray[Any] | None
) -> tuple[list[FileFacts], list[tuple[FileFacts, str]]]:
    """Sort files by their labels; those that do not fit are told apart, with the reason."""
    known = [(file, labels) for file in files if (labels := file.labels(dim)) is not None]
    if len(known) < len(files):
        return list(files), []
    filled = [(file, labels) for file, labels in known if len(labels)]
    descends = _descends([labels for _, labels in filled] if there is None else [there])
    step: Callable[[Any, Any], bool] = (lambda a, b: a > b) if descends else (lambda a, b: a < b)
    sound, bad = [], []
    last, whose = None, "what is there"
    if there is not None and len(there):  # a label that came late may be the last one
        last = functools.reduce(lambda one, other: other if step(one, other) else one, there)
    for file, labels in sorted(filled, key=lambda each: each[1][0], reverse=descends):
        inside = next((i for i in range(1, len(labels)) if not step(*labels[i - 1 : i + 1])), None)
        if inside is not None:
            first, second = label_text(labels[inside - 1]), label_text(labels[inside])
            bad.append((file, f"its labels of {dim!r} are not in order: {second} after {first}"))
        elif last is not None and not step(last, labels[0]):
            text = f"its labels of {dim!r} begin at {label_text(labels[0])}"
            at = None if there is None else rows_of_labels(there, labels)
            also = "" if at is None else ". All of them are there already: leave the file out"
            bad.append((file, f"{text}, and {whose} ends at {label_text(last)}{also}"))
        else:
            sound.append(file)
            last, whose = labels[-1], file.url
    empty = [file for file, labels in known if not len(labels)]
    return sound + empty, bad


def _descends(found: Iterable[npt.NDArray[Any]]) -> bool:
    """Whether most steps go down, in the first of these where as many do not go up."""
    for labels in found:
        steps = [np.count_nonzero(how(labels[1:], labels[:-1])) for how in (np.less, np.greater)]
        if steps[0] != steps[1]:
            return bool(steps[0] > steps[1])
    return False


def rows_of_labels(there: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> int | None:
    """Return where the wanted labels are, in this order and in a row; None if they are not.

    Labels are equal or, if there are no such ones, the same but for rounding.
    """
    for same in (np.equal, _near):
        starts = np.flatnonzero(same(there, wanted[0])) if len(wanted) else ()
        for start in map(int, starts):
            found = there[start : start + len(wanted)]
            if len(found) == len(wanted) and bool(np.all(same(found, wanted))):
                return start
    return None


def _near(one: npt.NDArray[Any], other: Any) -> npt.NDArray[np.bool_]:
    """Which labels differ by rounding only: times by less than a second, floats by a millionth."""
    if one.dtype.kind == "f":
        return np.asarray(np.isclose(one, other, rtol=_CLOSE, atol=0.0, equal_nan=True))
    if one.dtype.kind in "mMO":
        return ~times_differ(one, np.broadcast_to(other, one.shape))
    return np.asarray(one == other)


# --- who writes them -------------------------------------------------------------------------


def write_groups(
    placed: Sequence[FileRows], unit: int, most: int, least_bytes: int
) -> list[list[FileRows]]:
    """Group rows for tasks, so that no stored chunk has rows of two groups.

    A file with rows in two groups is read by two tasks. The groups leave out the labels of files.

    Parameters
    ----------
    placed : sequence of FileRows
        The files, no two of them in the same rows.
    unit : int
        Chunks of all arrays end at multiples of so many rows.
    most : int
        A group has at least this fraction of all bytes, if its chunks allow it.
    least_bytes : int
        A group has at least so many bytes, if there are as many.

    Examples
    --------
    >>> files = [FileFacts(f"{n}", (10, "", ""), FileLayout((), ()), 2) for n in range(4)]
    >>> placed = [FileRows(file, 3 + 2 * n, 5 + 2 * n) for n, file in enumerate(files)]
    >>> for group in write_groups(placed, 4, 9, 0):
    ...     print([(rows.file.url, rows.start, rows.stop) for rows in group])
    [('0', 3, 4)]
    [('0', 4, 5), ('1', 5, 7), ('2', 7, 8)]
    [('2', 8, 9), ('3', 9, 11)]
    """
    nbytes = sum(each.file.stamps[0] for each in placed)
    rows = sum(each.stop - each.start for each in placed)
    due = max(-(-rows // most), least_bytes * rows // max(nbytes, 1))  # rows of a group
    groups: list[list[FileRows]] = []
    held = due
    light = [replace(each, file=replace(each.file, axis={})) for each in placed]
    for block in blocks(light, max(-(-due // unit), 1) * unit):
        count = sum(each.stop - each.start for each in block)
        if held + count > due:  # else few rows of the blocks are due
            groups.append([])
            held = 0
        groups[-1] += block
        held += count
    return groups


def blocks(placed: Iterable[FileRows], rows: int) -> list[list[FileRows]]:
    """Cut files at all multiples of so many rows, and put together what lies between two of these.

    Examples
    --------
    >>> file = FileFacts("a", (10, "", ""), FileLayout((), ()), 5)
    >>> [[(each.start, each.stop, each.first)] for [each] in blocks([FileRows(file, 3, 8)], 4)]
    [[(3, 4, 0)], [(4, 8, 1)]]
    """
    found: dict[int, list[FileRows]] = {}
    for each in sorted(placed, key=lambda one: one.start):
        start = each.start
        while start < each.stop:
            stop = min((start // rows + 1) * rows, each.stop)
            first = each.first + start - each.start
            found.setdefault(start // rows, []).append(FileRows(each.file, start, stop, first))
            start = stop
    return [*found.values()]


def runs(placed: Iterable[FileRows]) -> list[list[FileRows]]:
    """Put rows together that follow on each other."""
    found: list[list[FileRows]] = []
    for each in sorted((one for one in placed if one.stop > one.start), key=lambda one: one.start):
        if not found or found[-1][-1].stop != each.start:
            found.append([])
        found[-1].append(each)
    return found
