"""Bounds and counts of the chunks of a block of values.

A block is measured slab by slab, whole chunks each, so that a slab is read from the processor's
cache after the first pass. Most slabs take two passes, for the smallest and the largest value. Only
where these show that values may be missing, further passes count them and leave them out.

Numbers and booleans are compared as they are, times as the integers they are stored as, and texts
by their positions among the texts of the block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import grid_shape

__all__ = ["measure"]

type _Values = npt.NDArray[Any]

_SLAB: Final = 2**17
"""Number of values measured together, unless a chunk has more."""
_FEW: Final = 32
"""Chunks with at most so many values in a row are reduced column by column, which is faster."""


def measure(values: _Values, chunk_shape: Sequence[int], fill: object, missing: _Values) -> Bounds:
    """Measure the chunks of a block; one row for each, in C order.

    Missing cells include those with NaN or NaT. Padding is within the bounds unless it is missing,
    and in none of the counts.

    Parameters
    ----------
    values : array
        The block, as `Meaning.compared` returns it. It starts where a chunk starts. Chunks that it
        cuts off are at the array's edge, and the rest of them is padding.
    chunk_shape : sequence of int
        Shape of a chunk.
    fill : scalar
        The value of padding, as `Meaning.fill`.
    missing : array
        The values that are missing, besides NaN and NaT, as `Meaning.missing`.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.planning.zones.measure import measure
    >>> values = np.array([3, 1, -9, 7, -9], "i2")
    >>> found = measure(values, (2,), np.int16(-9), np.array([-9], "i2"))
    >>> found.low.tolist()[:2], found.high.tolist()[:2], found.bounded.tolist()
    ([1, 7], [3, 7], [True, True, False])
    >>> found.missing.tolist(), found.cells.tolist()
    ([0, 1, 1], [2, 2, 1])
    """
    if values.dtype.kind in "SU":
        return _measured_texts(values, chunk_shape, fill, missing)
    if not values.ndim:
        values, chunk_shape = values.reshape(1), (1,)
    axes = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    values, chunk_shape = values.transpose(axes), [chunk_shape[axis] for axis in axes]
    dtype = values.dtype.newbyteorder("=")
    number = np.dtype({"b": "u1", "M": "i8", "m": "i8"}.get(dtype.kind, dtype))
    marks = missing.astype(dtype).view(number)
    padding: _Values = np.asarray(fill).astype(dtype).view(number)
    if dtype.kind in "mM":
        marks = np.append(marks, np.iinfo(np.int64).min)  # NaT
    grid = grid_shape(values.shape, chunk_shape)
    columns = [np.empty(grid, of) for of in (number, number, "?", "i8", "i8", "i8")]
    low, high, bounded, gone, nan, cells = columns
    for place, sizes in _alike(values.shape, chunk_shape):
        cells[place] = math.prod(sizes)
        for at in _slabs(place, sizes):
            starts = [part.start * n for part, n in zip(at, chunk_shape, strict=True)]
            block = values[_inside(starts, at, sizes)].astype(dtype, copy=False).view(number)
            _measure_slab(block, sizes, marks, [column[at] for column in columns])
        if tuple(sizes) != tuple(chunk_shape) and padding == padding and padding not in marks:
            none = ~bounded[place]
            low[place] = np.where(none, padding, np.minimum(low[place], padding))
            high[place] = np.where(none, padding, np.maximum(high[place], padding))
            bounded[place] = True
    back = [axes.index(axis) for axis in range(len(axes))]
    low, high, bounded, gone, nan, cells = (column.transpose(back).ravel() for column in columns)
    return Bounds(low.view(dtype), high.view(dtype), bounded, gone, nan, cells)


def _measured_texts(
    values: _Values, chunk_shape: Sequence[int], fill: object, missing: _Values
) -> Bounds:
    padding = np.asarray([fill], values.dtype)
    every = np.concatenate([values.ravel(), padding, missing.astype(values.dtype)])
    texts, positions = np.unique(every, return_inverse=True)
    inside, padding, marks = np.split(positions.astype(np.int64), [values.size, values.size + 1])
    found = measure(inside.reshape(values.shape), chunk_shape, padding[0], np.unique(marks))
    ends = [texts[np.where(found.bounded, at, 0)] for at in (found.low, found.high)]
    if values.dtype.kind == "U":
        ends = [np.strings.encode(end, "utf-8", "surrogatepass") for end in ends]
    low, high = (end.astype(f"S{values.dtype.itemsize}") for end in ends)
    return Bounds(low, high, found.bounded, found.missing, found.nan, found.cells)


def _alike(
    shape: Sequence[int], chunk_shape: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The parts of a grid in which chunks have the same shape, and that shape without padding."""
    axes = []
    for size, chunk in zip(shape, chunk_shape, strict=True):
        whole, rest = divmod(size, chunk) if chunk else (0, 0)
        parts = [(slice(0, whole), chunk), (slice(whole, whole + 1), rest)]
        axes.append([(at, n) for at, n in parts if n and at.stop > at.start])
    for one in product(*axes):
        yield tuple(at for at, _ in one), tuple(n for _, n in one)


def _slabs(place: Sequence[slice], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Boxes of chunks that have about `_SLAB` values each, or are one chunk."""
    counts = [part.stop - part.start for part in place]
    steps, room = [1] * len(counts), _SLAB // math.prod(sizes)
    for axis in reversed(range(len(counts))):
        steps[axis] = max(1, min(room, counts[axis]))
        room = room // steps[axis] if steps[axis] == counts[axis] else 0
    ranges = [range(p.start, p.stop, step) for p, step in zip(place, steps, strict=True)]
    for starts in product(*ranges):
        parts = zip(starts, steps, place, strict=True)
        yield tuple(slice(first, min(first + step, p.stop)) for first, step, p in parts)


def _inside(starts: Sequence[int], at: Sequence[slice], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The cells of a slab that starts there."""
    parts = zip(starts, at, sizes, strict=True)
    return tuple(slice(first, first + (part.stop - part.start) * n) for first, part, n in parts)


def _measure_slab(
    block: _Values, sizes: Sequence[int], marks: _Values, columns: Sequence[_Values]
) -> None:
    """Fill the columns of a slab, all but `cells`."""
    low, high, bounded, gone, nan, _ = columns
    chunks, axes = _split(block, sizes)

    def put(column: _Values, found: _Values) -> None:
        column[...] = found.reshape(column.shape)

    least: np.ufunc = np.minimum
    most: np.ufunc = np.maximum
    put(low, _reduced(least, chunks, axes))
    has_nan = bool(np.any(low != low))
    if has_nan:
        least, most = np.fmin, np.fmax
        put(low, _reduced(least, chunks, axes))
    put(high, _reduced(most, chunks, axes))
    bounded[...], gone[...], nan[...] = True, 0, 0
    seen = [mark for mark in marks if np.any((low <= mark) & (mark <= high))]
    if not seen and not has_nan:
        return
    is_mark = functools.reduce(np.logical_or, [chunks == mark for mark in seen] or [np.False_])
    absent = is_mark
    if has_nan:
        is_nan = np.isnan(chunks)
        put(nan, _counted(is_nan, axes))
        absent = is_nan | is_mark
    put(gone, _counted(absent, axes))
    bounded[...] = gone < math.prod(sizes)
    for column, how, end in zip((low, high), (least, most), _ends(block.dtype), strict=True):
        if np.isin(column, seen).any():
            others = chunks.copy(order="K")
            np.putmask(others, is_mark, end)
            put(column, _reduced(how, others, axes))


def _split(block: _Values, sizes: Sequence[int]) -> tuple[_Values, list[int]]:
    """A block with axes for chunks and for cells apart, and which axes are of cells.

    Neighbouring axes of one kind are joined. This copies a single chunk that is not contiguous,
    which is faster than to reduce it as it lies.
    """
    parts: list[tuple[int, bool]] = []
    for size, chunk in zip(block.shape, sizes, strict=True):
        for length, inside in ((size // chunk, False), (chunk, True)):
            if length > 1 and parts and parts[-1][1] == inside:
                parts[-1] = parts[-1][0] * length, inside
            elif length > 1:
                parts.append((length, inside))
    view = block.reshape([length for length, _ in parts])
    return view, [axis for axis, (_, inside) in enumerate(parts) if inside]


def _reduced(how: np.ufunc, values: _Values, axes: Sequence[int]) -> _Values:
    """Reduce the axes, the last one at the end, when the fewest values are left of it."""
    for done, axis in enumerate(axes):
        at = axis - done
        few = at == values.ndim - 1 and values.ndim > 1 and values.shape[at] <= _FEW
        if few:
            out = values[..., 0].copy()
            for column in range(1, values.shape[at]):
                how(out, values[..., column], out=out)
            values = out
        else:
            values = how.reduce(values, axis=at)
    return np.asarray(values)


def _counted(where: npt.NDArray[np.bool_], axes: Sequence[int]) -> _Values:
    """How many are true; sums are as narrow as they can be, which is faster."""
    if where.ndim == len(axes):
        return np.asarray(np.count_nonzero(where))
    counts, most = where.view(np.uint8), 1
    for done, axis in enumerate(axes):
        most *= counts.shape[axis - done]
        counts = np.add.reduce(counts, axis=axis - done, dtype=np.min_scalar_type(most))
    return counts


def _ends(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The greatest and the smallest value of a type, which leave others the least, the most."""
    if dtype.kind == "f":
        return dtype.type(np.inf), dtype.type(-np.inf)
    info = np.iinfo(dtype)
    return dtype.type(info.max), dtype.type(info.min)
