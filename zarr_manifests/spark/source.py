"""A group of a snapshot as named, decoded variables, which are read lazily.

Values are decoded by xarray (packing, fill values, CF times, text), so that Spark and
`xarray.open_zarr` agree. Invariant: opening a source reads only metadata; each method documents
what it reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
import zarr

from zarr_manifests.decoding import BulkDecoder
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.session import Session
from zarr_manifests.spark.fetched import FetchedStore

__all__ = ["Source"]

# Of larger shards, tasks read parts, since they hold what they read in memory.
_LARGEST_SHARD_CELLS: Final = 4 * 1024**2
# A Spark timestamp counts microseconds, which reach from year -290,000 to 290,000.
_TIMES: Final = xr.coders.CFDatetimeCoder(time_unit="us")
_DURATIONS: Final = xr.coders.CFTimedeltaCoder(
    time_unit="us", decode_via_units=False, decode_via_dtype=True
)


class Source:
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
    data_variables : tuple of str
        Names of the variables that are not coordinates, sorted.
    """

    def __init__(self, session: Session, group: str, *, decode_times: bool = True) -> None:
        self._decode_times = decode_times
        path = group.strip("/")
        self.group = f"/{path}"
        self._session, self._store = session, FetchedStore(session)
        store = self._store
        self._arrays, self._refused = _arrays(store, path)
        opened = xr.backends.ZarrStore.open_group(store, mode="r", group=path, consolidated=False)
        # Only determines which variables are coordinates; values are decoded when they are read.
        self._encoded, _, coordinates = xr.conventions.decode_cf_variables(
            {name: opened.open_store_variable(name) for name in self._arrays},
            opened.get_attrs(),
            concat_characters=False,
            mask_and_scale=False,
            decode_times=False,
            decode_timedelta=False,
        )
        dimensions = {dim for variable in self._encoded.values() for dim in variable.dims}
        self.data_variables = tuple(sorted(self._encoded.keys() - coordinates - dimensions))
        self._coordinates: dict[str, npt.NDArray[Any] | None] = {}
        self._decoders: dict[str, BulkDecoder | None] = {}

    def encoded(self, name: str) -> xr.Variable:
        """Return a variable as it is stored, without loading it.

        Raises
        ------
        NotFoundError
            If there is no such variable.
        InvalidArgumentError
            If its dimensions are unnamed, or a name occurs twice.
        """
        found = self._encoded.get(name)
        if found is not None:
            return found
        if name in self._refused:
            raise InvalidArgumentError(
                f"the dimensions of {name!r} in group {self.group} have {self._refused[name]}, so "
                "columns cannot be named after them; give the array other dimension_names"
            )
        data = ", ".join(sorted(self.data_variables)) or "none"
        rest = self._encoded.keys() - set(self.data_variables)
        coordinates = ", ".join(sorted(map(str, rest))) or "none"
        raise NotFoundError(
            f"there is no variable {name!r} in group {self.group}; there are: {data} "
            f"(and coordinates: {coordinates})"
        )

    def has(self, name: str) -> bool:
        """Whether there is a variable of that name."""
        return name in self._encoded

    def coordinate(self, dimension: str) -> npt.NDArray[Any] | None:
        """The decoded coordinate of a dimension, read once; None if it has none."""
        if dimension not in self._coordinates:
            found = self._encoded.get(dimension)
            one = found is not None and found.dims == (dimension,)
            self._coordinates[dimension] = self.read(dimension) if one else None
        return self._coordinates[dimension]

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return the decoded values of a whole variable.

        Raises
        ------
        InvalidArgumentError
            If its attributes are invalid, such as time units without a date.
        """
        shape = self.encoded(name).shape
        return self.decode(name, self.stored(name, Box((0,) * len(shape), shape)))

    def stored(self, name: str, block: Box, parts: Sequence[Box] | None = None) -> npt.NDArray[Any]:
        """Return the values of a block of cells as they are stored, to be decoded by `decode`.

        The chunks are fetched and decoded many at a time. If parts of the block are given, only
        their chunks are read, and the other values of the block mean nothing.
        """
        array, decoder = self._arrays[name], self._decoder(name)
        due = [block] if parts is None else parts
        if decoder is None or not all(self._in_whole_shards(name, part) for part in due):
            return self._through_zarr(name, block, due)
        fill = array.metadata.fill_value
        fill = array.metadata.dtype.default_scalar() if fill is None else fill
        out = np.full(block.shape, fill, array.dtype)
        sides = zip(block.lo, block.hi, strict=True)
        where: dict[str, Any] = {"cells": tuple(sides)}
        if list(due) != [block]:
            where = {"coords": _chunks_of(block, due, self.stored_chunk_shape(name))}
        chunks = self._session.read_chunks(array.path, **where)
        return (
            out if decoder.decode(chunks, out, block.lo) else self._through_zarr(name, block, due)
        )

    def _through_zarr(self, name: str, block: Box, due: Sequence[Box]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] | None = None
        for part in due:
            sides = zip(part.lo, part.hi, block.lo, strict=True)
            place = tuple(slice(lo - at, hi - at) for lo, hi, at in sides)
            cells = tuple(slice(lo, hi) for lo, hi in zip(part.lo, part.hi, strict=True))
            with self._store.fetched(self._arrays[name], cells):
                values = self.encoded(name)[cells].to_numpy()
            if part == block:
                return values
            found = np.zeros(block.shape, values.dtype) if found is None else found
            found[place] = values
        assert found is not None, "no part of a block"
        return found

    def _decoder(self, name: str) -> BulkDecoder | None:
        if name not in self._decoders:
            array = self._arrays[name]
            self._decoders[name] = BulkDecoder.of(array.metadata.to_dict(), array.dtype)
        return self._decoders[name]

    def _in_whole_shards(self, name: str, part: Box) -> bool:
        """Whether it is best to read whole shards; else Zarr reads only what is due of them."""
        array = self._arrays[name]
        if array.shards is None:
            return True
        sides = zip(part.lo, part.hi, array.shards, array.shape, strict=True)
        cells = math.prod(min(-(-hi // n) * n, size) - lo // n * n for lo, hi, n, size in sides)
        return cells <= 2 * part.size

    def reading_shape(self, name: str, *, in_shards: bool) -> tuple[int, ...]:
        """The shape of what a task should read whole, which is the largest chunk.

        With `in_shards` it is a shard of a sharded variable, unless a shard is large.
        """
        encoding = self.encoded(name).encoding
        shards = encoding.get("shards")
        if in_shards and shards is not None and math.prod(shards) <= _LARGEST_SHARD_CELLS:
            return tuple(shards)
        return tuple(n if isinstance(n, int) else max(n) for n in encoding["chunks"])

    def chunk_cells(self, name: str) -> int:
        """Number of cells in the smallest chunk of a variable, without those at the edges."""
        lengths = self.encoded(name).encoding["chunks"]
        return math.prod(n if isinstance(n, int) else min(n) for n in lengths)

    def stored_chunk_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored chunk, which is a shard if the variable is sharded."""
        array = self._arrays[name]
        return tuple(array.shards or array.chunks)

    def absent_is_missing(self, name: str) -> bool:
        """Whether cells of chunks that were never written have no value; reads no data."""
        array = self._arrays[name]
        if array.dtype.kind not in "fiu":
            return False
        fill = 0 if array.fill_value is None else array.fill_value
        return bool(pd.isnull(self.decode(name, np.full(1, fill, array.dtype))).all())

    def is_time(self, name: str) -> bool:
        """Whether a variable's numbers are decoded as times."""
        units = str(self.attributes(name).get("units", ""))
        return self._decode_times and "since" in units and self.encoded(name).dtype.kind in "iuf"

    def decoded_dtype(self, name: str) -> np.dtype[Any]:
        """The type of a variable's decoded values, without reading any; `object` for text.

        For times it is `datetime64`, although reading may return `cftime` objects, depending on the
        values.
        """
        return self.decode(name, np.empty(0, self.encoded(name).dtype)).dtype

    def attributes(self, name: str) -> Mapping[str, Any]:
        """A variable's attributes, including those that bounds inherit from their times."""
        return dict(self._inherited.get(name, {})) | dict(self.encoded(name).attrs)

    def decode(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Decode stored values of a variable, which may be of any shape.

        Raises
        ------
        InvalidArgumentError
            If its attributes are invalid, such as time units without a date.
        """
        if not values.size and self.is_time(name):
            return np.empty(values.shape, "M8[us]")  # xarray needs values to choose the type
        variable = self.encoded(name)
        attributes = dict(self._inherited.get(name, {})) | variable.attrs
        dims = [f"axis {number}" for number in range(max(values.ndim, 1))]
        given = values.reshape(values.shape or (1,))
        encoded = xr.Variable(dims, given, attributes, variable.encoding)
        try:
            with warnings.catch_warnings():
                # It warns that it uses cftime, as the type of the column shows.
                warnings.filterwarnings("ignore", "Unable to decode time", xr.SerializationWarning)
                found = xr.conventions.decode_cf_variable(
                    name,
                    encoded,
                    stack_char_dim=False,  # a character is a cell here
                    decode_times=_TIMES if self._decode_times else False,
                    decode_timedelta=_DURATIONS,
                ).to_numpy()
        except ValueError as error:
            hint = ". With decode_times=False, times stay numbers" if self.is_time(name) else ""
            raise InvalidArgumentError(
                f"variable {name!r} in group {self.group} cannot be decoded: {error}{hint}"
            ) from error
        plain = found.dtype.kind in "TUV" and found.dtype.names is None
        return (found.astype(object) if plain else found).reshape(values.shape)

    @cached_property
    def _inherited(self) -> Mapping[str, Mapping[str, str]]:
        """Units and calendar that bounds inherit from their times (CF 7.1)."""
        inherited = {}
        for variable in self._encoded.values():
            attributes = variable.attrs
            if "bounds" in attributes and "since" in str(attributes.get("units", "")):
                shared = {k: attributes[k] for k in ("units", "calendar") if k in attributes}
                inherited[attributes["bounds"]] = shared
        return inherited


def _chunks_of(block: Box, parts: Sequence[Box], chunk_shape: Coords) -> IndexArray:
    """The coordinates of the chunks that hold any cell of the parts of a block."""
    first = [lo // length for lo, length in zip(block.lo, chunk_shape, strict=True)]

    def place(box: Box) -> list[slice]:
        sides = zip(box.lo, box.hi, chunk_shape, first, strict=True)
        return [slice(lo // n - at, -(-hi // n) - at) for lo, hi, n, at in sides]

    mask = np.zeros([part.stop for part in place(block)], bool)
    for part in parts:
        mask[tuple(place(part))] = True
    return np.argwhere(mask) + np.array(first, np.int64)


def _arrays(store: FetchedStore, path: str) -> tuple[dict[str, zarr.Array[Any]], dict[str, str]]:
    """A group's arrays by name, and the reasons why others cannot be used."""
    try:
        group = zarr.open_group(store, path=path, mode="r")
    except (FileNotFoundError, ValueError) as error:
        found = ", ".join(_groups(store)) or "none"
        raise NotFoundError(
            f"there is no group /{path} in this snapshot; there are: {found}"
        ) from error
    usable: dict[str, zarr.Array[Any]] = {}
    refused: dict[str, str] = {}
    for name, array in group.arrays():
        dims = getattr(array.metadata, "dimension_names", None) or ()
        if array.metadata.zarr_format == 2:  # where xarray keeps them
            named = array.attrs.get("_ARRAY_DIMENSIONS")
            dims = tuple(map(str, named)) if isinstance(named, list) else ()
        if len(dims) != array.ndim or None in dims:
            refused[name] = "no names"
        elif len(set(dims)) != len(dims):
            refused[name] = f"a name twice ({', '.join(dims)})"
        else:
            usable[name] = array
    return usable, refused


def _groups(store: FetchedStore) -> list[str]:
    try:
        root = zarr.open_group(store, mode="r")
    except (FileNotFoundError, ValueError):
        return []
    below = [path for path, node in root.members(max_depth=None) if isinstance(node, zarr.Group)]
    return ["/", *(f"/{path}" for path in sorted(below))]
