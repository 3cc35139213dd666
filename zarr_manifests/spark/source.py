"""A group of a snapshot as named, decoded variables, which are read lazily.

Values are those of `xarray.open_zarr` (packing, missing values, CF times, text): it is xarray that
decodes them. A group is opened by Zarr's metadata alone. Invariant: opening a source reads only
metadata; each method documents what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.bulk import StoredArrays
from zarr_manifests.decoding import BulkDecoder, decoded
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box, IndexArray, corners
from zarr_manifests.keys import absolute
from zarr_manifests.session import Session
from zarr_manifests.store import contents_of

# Of larger shards, tasks read parts, since they hold what they read in memory.
_LARGEST_SHARD_CELLS: Final = 4 * 1024**2


class Source(StoredArrays):
    """The variables of one group.

    Parameters
    ----------
    session : Session
        The snapshot.
    group : str
        Path of the group.
    decode_times : bool, default True
        Whether CF times are decoded, or stay numbers.

    Raises
    ------
    NotFoundError
        If there is no such group.

    Attributes
    ----------
    group : str
        Its absolute path.
    dims : mapping of str to tuple of str
        The variables' dimensions, by name.
    """

    def __init__(self, session: Session, group: str, *, decode_times: bool = True) -> None:
        contents, path = contents_of(session.store), group.strip("/")
        super().__init__(contents, path)
        self._session, self._decode_times, self.group = session, decode_times, f"/{path}"
        if self._group is None or self._group.array is not None:
            nodes = contents.nodes().items()
            found = ", ".join(sorted(absolute(at) for at, node in nodes if node.array is None))
            raise NotFoundError(
                f"there is no group /{path} in this snapshot; there are: {found or 'none'}"
            )
        self.dims: dict[str, tuple[str, ...]] = {}
        self._refused: dict[str, str] = {}
        for name in self.nodes:
            dims: Any = self.meta(name).dimension_names or ()
            if len(dims) != len(self.meta(name).shape) or None in dims:
                self._refused[name] = "no names"
            elif len(set(dims)) != len(dims):
                self._refused[name] = f"a name twice ({', '.join(dims)})"
            else:
                self.dims[name] = dims
        self._coordinates: dict[str, npt.NDArray[Any] | None] = {}
        self._decoders: dict[str, BulkDecoder | None] = {}

    @cached_property
    def data_variables(self) -> tuple[str, ...]:
        """Names of the variables that are not coordinates, sorted."""
        told = [self.own_attributes, *(self.attributes[name] for name in self.dims)]
        coordinates = {name for each in told for name in str(each.get("coordinates", "")).split()}
        dimensions = {dim for dims in self.dims.values() for dim in dims}
        return tuple(sorted(self.dims.keys() - coordinates - dimensions))

    def array(self, name: str) -> zarr.Array[Any]:
        """Return the array of a variable.

        Raises
        ------
        NotFoundError
            If there is no such variable.
        InvalidArgumentError
            If its dimensions are unnamed, or a name occurs twice.
        """
        if name in self.dims:
            return super().array(name)
        if name in self._refused:
            raise InvalidArgumentError(
                f"the dimensions of {name!r} in group {self.group} have {self._refused[name]}, so "
                "columns cannot be named after them; give the array other dimension_names"
            )
        data = ", ".join(sorted(self.data_variables)) or "none"
        coordinates = ", ".join(sorted(self.dims.keys() - {*self.data_variables})) or "none"
        raise NotFoundError(
            f"there is no variable {name!r} in group {self.group}; there are: {data} "
            f"(and coordinates: {coordinates})"
        )

    def coordinate(self, dimension: str) -> npt.NDArray[Any] | None:
        """The decoded coordinate of a dimension, read once; None if it has none."""
        if dimension not in self._coordinates:
            found = None
            if self.dims.get(dimension) == (dimension,):
                whole = Box((0,), self.meta(dimension).shape)
                found = self.decode(dimension, self.stored(dimension, whole))
            self._coordinates[dimension] = found
        return self._coordinates[dimension]

    def stored(self, name: str, block: Box, parts: Sequence[Box] | None = None) -> npt.NDArray[Any]:
        """Return the values of a block of cells as they are stored, to be decoded by `decode`.

        The chunks are fetched and decoded many at a time. If parts of the block are given, only
        their chunks are read, and the other values of the block mean nothing.
        """
        array = self.array(name)
        if name not in self._decoders:
            self._decoders[name] = BulkDecoder.of(array.metadata.to_dict(), array.dtype)
        decoder = self._decoders[name]
        due = [block] if parts is None else parts
        if decoder is not None and all(self._in_whole_shards(name, part) for part in due):
            fill = array.metadata.fill_value
            fill = array.metadata.dtype.default_scalar() if fill is None else fill
            out = np.full(block.shape, fill, array.dtype)
            where: dict[str, Any] = {"cells": tuple(zip(block.lo, block.hi, strict=True))}
            if list(due) != [block]:
                lo, hi = corners(due, block.ndim)
                chunk_shape = np.array(self.meta(name).chunk_shape, np.int64)
                region, at = listed_in(lo // chunk_shape, -(-hi // chunk_shape))
                where = {"coords": region.unravel(at)}
            chunks = self._session.read_chunks(array.path, **where)
            if decoder.decode(chunks, out, block.lo):
                return out
        # Zarr reads the rest by itself, and says what is wrong with a chunk.
        array = zarr.open_array(self._store, path=array.path, mode="r")
        out = np.zeros(block.shape, array.dtype)
        for part in due:
            cells = tuple(slice(lo, hi) for lo, hi in zip(part.lo, part.hi, strict=True))
            out[place_in(block, part)] = array[cells]
        return out

    def _in_whole_shards(self, name: str, part: Box) -> bool:
        """Whether it is best to read whole shards; else Zarr reads only what is due of them."""
        array = self.array(name)
        if array.shards is None:
            return True
        sides = zip(part.lo, part.hi, array.shards, array.shape, strict=True)
        cells = math.prod(min(-(-hi // n) * n, size) - lo // n * n for lo, hi, n, size in sides)
        return cells <= 2 * part.size

    def reading_shape(self, name: str, *, in_shards: bool) -> tuple[int, ...]:
        """The shape of what a task should read whole, which is the largest chunk.

        With `in_shards` it is a shard of a sharded variable, unless a shard is large.
        """
        array = self.array(name)
        whole = in_shards and math.prod(array.shards or ()) <= _LARGEST_SHARD_CELLS
        return self.meta(name).chunk_shape if whole else tuple(array.chunks)

    def is_time(self, name: str) -> bool:
        """Whether a variable's numbers are decoded as times."""
        units = str(self.decoded_by(name).get("units", ""))
        return self._decode_times and "since" in units and self.array(name).dtype.kind in "iuf"

    def decoded_dtype(self, name: str) -> np.dtype[Any]:
        """The type of a variable's decoded values, without reading any; `object` for text.

        For times it is `datetime64`, although reading may return `cftime` objects, depending on the
        values.
        """
        return self.decode(name, np.empty(0, self.array(name).dtype)).dtype

    def decode(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Decode stored values of a variable, which may be of any shape.

        Raises
        ------
        InvalidArgumentError
            If its attributes are invalid, such as time units without a date.
        """
        if not values.size and self.is_time(name):
            return np.empty(values.shape, "M8[us]")  # xarray needs values to choose the type
        what, how = f"variable {name!r} in group {self.group}", self.decoded_by(name)
        found = decoded(what, values, how, decode_times=self._decode_times)
        plain = found.dtype.kind in "TUV" and found.dtype.names is None
        return found.astype(object) if plain else found


def place_in(block: Box, part: Box) -> tuple[Any, ...]:
    """Where the cells of a part are in an array of those of a block; a view even without axes."""
    sides = zip(part.lo, part.hi, block.lo, strict=True)
    return (*(slice(lo - at, hi - at) for lo, hi, at in sides), ...)


def listed_in(lo: IndexArray, hi: IndexArray) -> tuple[Box, IndexArray]:
    """The box around boxes of chunks, and in it the indexes of all their chunks, each once."""
    region = Box.around_coords(np.concatenate([lo, hi - 1]))
    boxes = (Box(tuple(a), tuple(b)) for a, b in zip(lo.tolist(), hi.tolist(), strict=True))
    # Box by box: there may be millions of chunks, whose coordinates take more memory.
    numbers = [box.carried(np.arange(box.size), region) for box in boxes]
    return region, np.unique(np.concatenate(numbers))
