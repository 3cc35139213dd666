"""A 2-d slice of an array as float32, of bounded size however large the array is.

Invariant: at most 512 by 512 values are sent, and at most 1,024 chunks are read for them, one at a
time. A slice with more cells is strided; the answer says by how much.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from anyio import from_thread

from zarr_manifests.bulk import use_bulk
from zarr_manifests.bulk.bounded import index_bytes, unbounded
from zarr_manifests.decoding import readable
from zarr_manifests.display import fields_of
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import V2_ARRAY, absolute, directory, split
from zarr_manifests.plain import plain_text
from zarr_manifests.serving.served import OpenSnapshot

__all__ = ["Slice", "SliceAxis", "axes_of", "fill_values", "read_slice"]

MOST_VALUES: Final = 512
MOST_CHUNKS: Final = 1024
MOST_CHUNK_BYTES: Final = 128 * 1024**2
_PART: Final = re.compile(
    r"(-?[0-9]{1,18})|(-?[0-9]{1,18})?:(-?[0-9]{1,18})?(?::([0-9]{1,18}))?", re.ASCII
)
_SINCE: Final = re.compile(
    r"(day|hour|minute|second|millisecond|microsecond)s? since ([0-9].*)", re.ASCII
)
_MICROSECONDS: Final = {
    "day": 86_400_000_000, "hour": 3_600_000_000, "minute": 60_000_000, "second": 1_000_000,
    "millisecond": 1000, "microsecond": 1,
}  # fmt: skip
_CALENDARS: Final = ("standard", "gregorian", "proleptic_gregorian")
_GREGORIAN: Final = np.datetime64("1582-10-15", "us")
"""NumPy counts days before it otherwise than the standard calendar, which was Julian then."""
_MOST_FILLS: Final = 16


@dataclass(frozen=True, slots=True)
class SliceAxis:
    """The cells of one axis that are read.

    Parameters
    ----------
    start, step, count : int
        Which cells.
    size : int
        Cells of the whole axis.
    single : bool
        Whether it was given as a number, so that the slice does not have the axis.
    """

    start: int
    step: int
    count: int
    size: int
    single: bool = False

    def within(self, most: int) -> SliceAxis:
        """The axis with so large a step that it has at most so many cells."""
        more = -(-self.count // most)
        return self if more <= 1 else self.by(more)

    def by(self, more: int) -> SliceAxis:
        """Every so many cells of it."""
        return SliceAxis(self.start, self.step * more, -(-self.count // more), self.size)

    def chunks(self, chunk: int) -> int:
        """How many chunks hold its cells."""
        if not self.count:
            return 0
        last = self.start + (self.count - 1) * self.step
        return min(self.count, last // chunk - self.start // chunk + 1)

    def parts(self, chunk: int) -> Iterator[tuple[slice, slice]]:
        """For each chunk that holds cells: where they go, and where they are."""
        at = 0
        while at < self.count:
            first = self.start + at * self.step
            end = (first // chunk + 1) * chunk
            count = min(-(-(end - first) // self.step), self.count - at)
            yield (
                slice(at, at + count),
                slice(first, first + (count - 1) * self.step + 1, self.step),
            )
            at += count


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice, ready to be sent.

    Parameters
    ----------
    header : mapping
        What it is: snapshot, path, shape, axes with coordinates, units, bounds of the values.
    values : float32[h, w]
        The values; NaN where they are missing.
    """

    header: Mapping[str, Any]
    values: npt.NDArray[np.float32]

    def encoded(self) -> bytes:
        """Four bytes with the header's length, the header as JSON, the values; little endian."""
        header = json.dumps(self.header, allow_nan=False).encode()
        header += b" " * (-len(header) % 4)
        return struct.pack("<I", len(header)) + header + self.values.astype("<f4").tobytes()


def axes_of(index: str | None, shape: Sequence[int]) -> list[SliceAxis]:
    """The cells that an index such as `0,100:200,:` selects, strided so that they are not too many.

    Without an index, these are the last two axes at the first position of the others.

    Raises
    ------
    InvalidArgumentError
        If the index does not fit, or leaves more than two axes.
    """
    if index is None:
        texts = ["0"] * max(len(shape) - 2, 0) + [":"] * min(len(shape), 2)
    else:
        texts = [text.strip() for text in index.split(",")] if index else []
    if len(texts) != len(shape):
        raise InvalidArgumentError(
            f"index={str(index)[:80]!r} has {len(texts)} parts, and the array {len(shape)} axes"
        )
    axes = [_axis(text, size) for text, size in zip(texts, shape, strict=True)]
    if sum(not axis.single for axis in axes) > 2:
        raise InvalidArgumentError("a slice has at most two axes: give numbers for the others")
    return axes


def _axis(text: str, size: int) -> SliceAxis:
    found = _PART.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(f"{text[:80]!r} is no index: write 3, 10:20 or 10:200:5")
    number, *bounds = (None if one is None else int(one) for one in found.groups())
    if number is not None:
        at = number + size if number < 0 else number
        if not 0 <= at < size:
            raise InvalidArgumentError(f"position {number} is outside of an axis of {size} cells")
        return SliceAxis(at, 1, 1, size, single=True)
    if bounds[2] == 0:
        raise InvalidArgumentError("a step of 0 leads nowhere")
    start, stop, step = slice(*bounds).indices(size)
    return SliceAxis(start, step, len(range(start, stop, step)), size).within(MOST_VALUES)


def read_slice(opened: OpenSnapshot, path: str, index: str | None) -> Slice:
    """A slice of the array at the path, decoded by its CF attributes.

    It is read in a thread of anyio, and ends between two chunks when its caller is cancelled.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If the index does not fit it, it holds no numbers, or its chunks are too large.
    MissingChunkError, CorruptObjectError
        If a chunk is missing or damaged.
    """
    contents = opened.contents
    node = contents.guarded(lambda: contents.array_at(path))
    array = _opened(opened, node)
    if array.dtype.kind not in "biufmM":
        raise InvalidArgumentError(
            f"{absolute(node.path)} holds {array.dtype}, which are no numbers"
        )
    axes = _sparse(axes_of(index, array.shape), array.chunks)
    with readable(node.path):
        stored = _read(array, axes)
    values = _decoded(stored, node)
    names = (node.array and node.array.dimension_names) or (None,) * len(axes)
    told = [
        {
            "axis": at,
            "name": names[at],
            "size": axis.size,
            "start": axis.start,
            "step": axis.step,
            "count": axis.count,
            **_coordinate(opened, contents, node, names[at], axis),
        }
        for at, axis in enumerate(axes)
    ]
    finite = values[np.isfinite(values)]
    attributes = _attributes(node)
    header = {
        "snapshot": opened.snapshot_id,
        "path": absolute(node.path),
        "shape": list(values.shape),
        "at": [axis.start if axis.single else None for axis in axes],
        "axes": [one for one, axis in zip(told, axes, strict=True) if not axis.single],
        "fixed": [one for one, axis in zip(told, axes, strict=True) if axis.single],
        "minimum": float(finite.min()) if finite.size else None,
        "maximum": float(finite.max()) if finite.size else None,
        "missing": int(values.size - finite.size),
        "units": _text(attributes.get("units")),
        "long_name": _text(attributes.get("long_name")),
    }
    return Slice(header, values)


def _opened(opened: OpenSnapshot, node: Node) -> Any:
    """An array of chunks that are not too large, and not decompressed to more than it has."""
    with readable(node.path):
        array = zarr.open_array(opened.session.store, path=node.path, mode="r")
        codecs: Any = tuple(array.async_array.codec_pipeline)  # type: ignore[arg-type]
        names = unbounded(codecs)
        index = index_bytes(codecs, math.prod(array.shards or array.chunks))
    if names:
        raise InvalidArgumentError(
            f"{absolute(node.path)} is not shown: a few bytes of its codec {plain_text(names[0])} "
            "may become any number, and the memory of a server is bounded. Read it with Zarr"
        )
    size = math.prod(array.chunks) * array.dtype.itemsize + index
    if size > MOST_CHUNK_BYTES:
        what = "a chunk and the index of its shard have" if index else "a chunk has"
        raise InvalidArgumentError(
            f"{what} up to {size:,} bytes in {absolute(node.path)}, and slices are made of at "
            f"most {MOST_CHUNK_BYTES:,} at a time"
        )
    use_bulk(array)
    return array


def _sparse(axes: Sequence[SliceAxis], chunks: Sequence[int]) -> list[SliceAxis]:
    """The axes with so large steps that not too many chunks are read."""
    axes = list(axes)
    while True:
        counts = [axis.chunks(chunk) for axis, chunk in zip(axes, chunks, strict=True)]
        if int(np.prod(counts, dtype=np.float64)) <= MOST_CHUNKS:
            return axes
        widest = counts.index(max(counts))
        axes[widest] = axes[widest].by(2)


def _read(array: Any, axes: Sequence[SliceAxis]) -> npt.NDArray[Any]:
    """The stored values, read chunk by chunk."""
    out = np.empty([axis.count for axis in axes], array.dtype)
    parts = [axis.parts(chunk) for axis, chunk in zip(axes, array.chunks, strict=True)]
    for part in product(*parts):
        from_thread.check_cancelled()  # the client is gone
        to, where = (tuple(one[side] for one in part) for side in (0, 1))
        out[to] = array[where]
    return out.reshape([axis.count for axis in axes if not axis.single])


# --- CF attributes -----------------------------------------------------------------------------


def _attributes(node: Node) -> Mapping[str, Any]:
    given = fields_of(node).get("attributes")
    found: dict[str, Any] = given if isinstance(given, dict) else {}
    if V2_ARRAY in node.documents:  # there, xarray keeps it beside the attributes
        found = {"_FillValue": json.loads(node.documents[V2_ARRAY]).get("fill_value"), **found}
    return found


def _decoded(stored: npt.NDArray[Any], node: Node) -> npt.NDArray[np.float32]:
    """The values that are stored, unpacked; NaN where they are missing."""
    values = _unpacked(stored, _attributes(node))
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _unpacked(stored: npt.NDArray[Any], attributes: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    missing = np.zeros(stored.shape, np.bool_)
    if stored.dtype.kind in "mM":
        missing |= np.isnat(stored)
        stored = stored.astype("i8")
    fills = [
        f for name in ("_FillValue", "missing_value") for f in fill_values(attributes.get(name))
    ]
    # A fill value is of the stored type, or of the one that `_Unsigned` makes of it.
    readings = [stored]
    if stored.dtype.kind in "iu" and attributes.get("_Unsigned") in ("true", "false"):
        kind = "u" if attributes["_Unsigned"] == "true" else "i"
        stored = stored.view(f"{stored.dtype.byteorder}{kind}{stored.dtype.itemsize}")
        readings.append(stored)
    with np.errstate(all="ignore"):
        for reading, value in product(readings, fills[:_MOST_FILLS]):
            missing |= reading == value  # in the type of the array, as 1e20 may have no float32
        values = stored.astype(np.float64)
        values *= _number(attributes.get("scale_factor"), 1.0)
        values += _number(attributes.get("add_offset"), 0.0)
    values[missing] = np.nan
    return values


def fill_values(value: Any) -> list[int | float]:
    """Fill values, one or a list; xarray writes those of floats as the base64 of eight bytes.

    Examples
    --------
    >>> from zarr_manifests.serving.slices import fill_values
    >>> fill_values("AAAAAAAA+H8="), fill_values([-999, -1])
    ([nan], [-999, -1])
    """
    if isinstance(value, str):
        try:
            return list(struct.unpack("<d", base64.b64decode(value, validate=True)))
        except (ValueError, struct.error):
            return []
    return [one for one in _listed(value) if _is_number(one)]


def _number(value: Any, default: float) -> float:
    """A number, or the only one of a list, as other formats have attributes."""
    numbers = _listed(value)
    return float(numbers[0]) if len(numbers) == 1 and _is_number(numbers[0]) else default


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1000


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _coordinate(
    opened: OpenSnapshot, contents: SessionView, node: Node, name: str | None, axis: SliceAxis
) -> dict[str, Any]:
    """The values of the coordinate along an axis, as far as it has one."""
    found = _beside(contents, node, name)
    if found is None or found.array is None or found.array.shape != (axis.size,):
        return {"values": None, "units": None}
    array = _opened(opened, found)
    if array.dtype.kind not in "iufM":
        return {"values": None, "units": None}
    if axis.chunks(array.chunks[0]) > MOST_CHUNKS:
        return {"values": None, "units": None}
    whole = SliceAxis(axis.start, axis.step, axis.count, axis.size)
    with readable(found.path):
        stored = _read(array, [whole])
    attributes = _attributes(found)
    units = attributes.get("units")
    named = {name: _text(attributes.get(name)) for name in ("long_name", "positive")}
    times = stored if stored.dtype.kind == "M" else _times(stored, units, attributes)
    if times is not None:
        texts = np.datetime_as_string(times.astype("datetime64[s]")).tolist()
        return {
            "values": [None if text == "NaT" else text for text in texts],
            "units": None,
            **named,
        }
    values = _unpacked(stored, attributes).tolist()
    return {
        "values": [v if np.isfinite(v) else None for v in values],
        "units": _text(units),
        **named,
    }


def _beside(contents: SessionView, node: Node, name: str | None) -> Node | None:
    """The array of that name in the group of the node, or in one above."""
    group = split(node.path)[0]
    while name:
        found = contents.node(directory(group) + name)
        if found is not None or not group:
            return found
        group = split(group)[0]
    return None


def _times(
    stored: npt.NDArray[Any], units: Any, attributes: Mapping[str, Any]
) -> npt.NDArray[np.datetime64] | None:
    """CF times of the usual calendar; None if they are none."""
    found = _SINCE.fullmatch(units) if isinstance(units, str) else None
    if found is None or attributes.get("calendar", "standard") not in _CALENDARS:
        return None
    try:
        start = np.datetime64(found[2].strip().removesuffix("Z").removesuffix("UTC").strip(), "us")
    except ValueError:
        return None
    if start < _GREGORIAN and attributes.get("calendar") != "proleptic_gregorian":
        return None
    offset = _unpacked(stored, attributes) * _MICROSECONDS[found[1]]
    far = ~(np.abs(offset) < 2.0**62)
    times = start + np.where(far, 0, offset).astype("timedelta64[us]")
    return np.where(far, np.datetime64("NaT", "us"), times)
