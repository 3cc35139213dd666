"""A 2-d slice of an array as float32, of bounded size however large the array is.

Invariant: at most 512 by 512 values are sent, and at most 1,024 chunks are read for them, one at a
time. A slice with more cells is strided; the answer says by how much.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, product
from typing import Any, Final

import anyio
import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from anyio import from_thread
from starlette.requests import Request
from starlette.responses import Response
from xarray.backends.zarr import FillValueCoder
from xarray.conventions import decode_cf_variable

from zarr_manifests.bulk import use_bulk
from zarr_manifests.bulk.bounded import index_bytes, unbounded
from zarr_manifests.decoding import readable
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import absolute, directory, split
from zarr_manifests.repository import containers_of
from zarr_manifests.runtime import quiet
from zarr_manifests.selecting import chosen_axes
from zarr_manifests.serving.answers import OpenSnapshot, Served, caching, etag_of
from zarr_manifests.texts import plain_text

MOST_VALUES: Final = 512
MOST_CHUNKS: Final = 1024
MOST_CHUNK_BYTES: Final = 128 * 1024**2
_AT_ONCE: Final = 4


class SliceAnswers:
    """Answers with slices of arrays, a few at a time.

    Parameters
    ----------
    served : Served
        The repository.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._few = anyio.CapacityLimiter(_AT_ONCE)

    async def get(self, request: Request) -> Response:
        """A slice: a header as JSON, then float32."""
        version, path = request.path_params["version"], request.path_params["path"]
        index = request.query_params.get("index")
        opened = await self._served.run(partial(self._served.opened, version))
        etag: str | None = etag_of(repr((opened.snapshot_id, path, index)).encode())
        if containers_of(self._served.repo):
            etag = None  # files elsewhere may change, and not all references say which are meant
        headers = caching(request, etag, fixed=opened.fixed)
        read = partial(opened.contents.guarded, partial(read_slice, opened, path, index))
        async with self._few:
            data = await self._served.run(read)
        return Response(data, headers=headers, media_type="application/octet-stream")


def axes_of(index: str | None, shape: Sequence[int]) -> list[int | range]:
    """The positions that an index such as `0,100:200,:` selects, with steps that leave at most 512.

    Without an index, these are the last two axes at the first position of the others.

    Raises
    ------
    InvalidArgumentError
        If the index does not fit, or leaves more than two axes.

    Examples
    --------
    >>> from zarr_manifests.serving.slices import axes_of
    >>> axes_of("-1,:,2:8:3", (10, 600, 20))
    [9, range(0, 600, 2), range(2, 8, 3)]
    """
    if index is None:
        index = ",".join([*["0"] * (len(shape) - 2), "..."])
    axes = [
        axis if isinstance(axis, int) else axis[:: max(-(-len(axis) // MOST_VALUES), 1)]
        for axis in chosen_axes(index, shape)
    ]
    if sum(isinstance(axis, range) for axis in axes) > 2:
        raise InvalidArgumentError("a slice has at most two axes: give numbers for the others")
    return axes


def read_slice(opened: OpenSnapshot, path: str, index: str | None) -> bytes:
    """A slice of the array at the path, as xarray decodes it by its CF attributes.

    It is read in a thread of anyio, and ends between two chunks when its caller is cancelled.

    Returns
    -------
    bytes
        Four bytes with the header's length, the header as JSON (snapshot, path, shape, axes with
        coordinates, units, bounds of the values), then the values as float32, NaN where they are
        missing; little endian.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If the index does not fit it, it holds no numbers, its chunks are too large, or its
        attributes mean nothing to xarray.
    MissingChunkError, CorruptObjectError
        If a chunk is missing or damaged.
    """
    contents = opened.contents
    node = contents.array_at(path)
    array = _opened(opened, node)
    if array.dtype.kind not in "biufmM":
        raise InvalidArgumentError(
            f"{absolute(node.path)} holds {array.dtype}, which are no numbers"
        )
    wanted = axes_of(index, array.shape)
    axes = [range(axis, axis + 1) if isinstance(axis, int) else axis for axis in wanted]
    axes = _sparse(axes, array.chunks)
    found = _decoded(node, array, _read(node, array, axes), decode_times=False)
    values = found.values
    if values.dtype.kind in "mM":
        values = np.where(np.isnat(values), np.nan, values.astype("i8"))
    with np.errstate(over="ignore"):
        values = values.astype("<f4")
    names = (node.array and node.array.dimension_names) or (None,) * len(axes)
    told = [
        {
            "axis": at,
            "name": name,
            "size": size,
            "start": axis.start,
            "step": axis.step,
            "count": len(axis),
            **_coordinate(opened, _beside(contents, node, name), axis, size),
        }
        for at, (name, size, axis) in enumerate(zip(names, array.shape, axes, strict=True))
    ]
    shown = [one for one, axis in zip(told, wanted, strict=True) if isinstance(axis, range)]
    finite = values[np.isfinite(values)]
    header = {
        "snapshot": opened.snapshot_id,
        "path": absolute(node.path),
        "shape": [one["count"] for one in shown],
        "at": [axis if isinstance(axis, int) else None for axis in wanted],
        "axes": shown,
        "fixed": [one for one in told if one not in shown],
        "minimum": float(finite.min()) if finite.size else None,
        "maximum": float(finite.max()) if finite.size else None,
        "missing": values.size - finite.size,
        **_texts(found, "units", "long_name"),
    }
    data = json.dumps(header, allow_nan=False).encode()
    data += b" " * (-len(data) % 4)
    return struct.pack("<I", len(data)) + data + values.tobytes()


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


def _sparse(axes: list[range], chunks: Sequence[int]) -> list[range]:
    """The axes with so large steps that not too many chunks are read."""
    while True:
        counts = [len({at // size for at in axis}) for axis, size in zip(axes, chunks, strict=True)]
        if math.prod(counts) <= MOST_CHUNKS:
            return axes
        widest = counts.index(max(counts))
        axes = [axis[::2] if at == widest else axis for at, axis in enumerate(axes)]


def _read(node: Node, array: Any, axes: Sequence[range]) -> npt.NDArray[Any]:
    """The stored values, read chunk by chunk."""
    out = np.empty([len(axis) for axis in axes], array.dtype)
    with readable(node.path):
        for part in product(*map(_parts, axes, array.chunks)):
            from_thread.check_cancelled()  # the client is gone
            out[tuple(to for to, _ in part)] = array[tuple(where for _, where in part)]
    return out


def _parts(axis: range, chunk: int) -> Iterator[tuple[slice, slice]]:
    """For each chunk that holds cells: where they go, and where they are."""
    for _, group in groupby(range(len(axis)), lambda at: axis[at] // chunk):
        at = [*group]
        yield slice(at[0], at[-1] + 1), slice(axis[at[0]], axis[at[-1]] + 1, axis.step)


def _decoded(node: Node, array: Any, stored: npt.NDArray[Any], **how: Any) -> xr.Variable:
    """Stored values as xarray decodes them, with the attributes that remain."""
    attributes = dict(array.attrs)
    fill = attributes.get("_FillValue")
    if array.metadata.zarr_format == 2 and array.fill_value is not None:
        attributes["_FillValue"] = array.fill_value
    elif isinstance(fill, str):
        with readable(node.path):
            attributes["_FillValue"] = FillValueCoder.decode(fill, array.dtype)
    raw = xr.Variable([f"axis {at}" for at in range(stored.ndim)], stored, attributes)
    with readable(node.path), quiet():
        return decode_cf_variable(node.path, raw, decode_timedelta=False, **how).load()


def _texts(variable: xr.Variable, *names: str) -> dict[str, str | None]:
    found = {name: variable.attrs.get(name) for name in names}
    return {name: text[:200] if isinstance(text, str) else None for name, text in found.items()}


def _beside(contents: SessionView, node: Node, name: str | None) -> Node | None:
    """The array of that name in the group of the node, or in one above."""
    path = node.path
    while name and path:
        path = split(path)[0]
        if (found := contents.node(directory(path) + name)) is not None:
            return found
    return None


def _coordinate(opened: OpenSnapshot, node: Node | None, axis: range, size: int) -> dict[str, Any]:
    """The values of the coordinate along an axis, as far as it has one that can be read."""
    if node is not None and node.array is not None and node.array.shape == (size,):
        with suppress(InvalidArgumentError):
            array = _opened(opened, node)
            if array.dtype.kind in "iufM":
                stored = _read(node, array, [axis])
                try:
                    found = _decoded(node, array, stored)
                except InvalidArgumentError:  # times that neither NumPy nor cftime has
                    found = _decoded(node, array, stored, decode_times=False)
                values = found.values.astype("M8[s]") if found.dtype.kind == "M" else found.values
                told = _texts(found, "units", "long_name", "positive")
                return {"values": [_plain(value) for value in values.tolist()], **told}
    return {"values": None, "units": None}


def _plain(value: Any) -> str | float | None:
    """A number or a time for JSON; None if it is missing."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return value if isinstance(value, int | float) and math.isfinite(value) else None
