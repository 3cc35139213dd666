"""The columns that a where names: coordinates of an array, and arrays beside it.

Stored values are decoded by xarray, as data is when it is read.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.display import fields_of
from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V2_ARRAY, V3_DOCUMENT, ArrayMeta
from zarr_manifests.planning.tables.merge import rows_at
from zarr_manifests.planning.zones.skipping import Ranges, comparable
from zarr_manifests.runtime import quiet
from zarr_manifests.store import ManifestStore, contents_of

__all__ = ["WhereArray", "attributes_of", "meta_of"]

type _Mask = npt.NDArray[np.bool_]
type _Values = npt.NDArray[Any]

_CF: Final = frozenset(
    ["scale_factor", "add_offset", "_FillValue", "missing_value", "units", "_Unsigned", "dtype"]
)
_MOST_CELLS: Final = 2**27
"""Most values of a coordinate that are read."""


class WhereArray:
    """An array, the coordinates of its dimensions, and the arrays beside it.

    Parameters
    ----------
    store : ManifestStore
        The session's contents.
    path : str
        Path of the array.
    decode_times : bool
        Whether CF times become times.
    """

    def __init__(self, store: ManifestStore, path: str, *, decode_times: bool) -> None:
        self._store, self._decode_times = store, decode_times
        self.contents: SessionView = contents_of(store)
        self.node: Node = self.contents.array_at(path)
        self.meta = meta_of(self.node)
        self._group, _, self.name = self.node.path.rpartition("/")
        self.dims = _dims(self.node)

    def chunks(self, node: Node, region: Box) -> ChunkTable | None:
        """The stored chunks of an array in the region."""
        if not region.size:
            return None
        return find_chunks(self.contents, node.path, region, None)[1]

    def lengths_at(self, coords: IndexArray) -> IndexArray:
        """The stored lengths of the array's chunks at these coordinates."""
        table = find_chunks(self.contents, self.node.path, None, None, coords)[1]
        if table is None:
            return np.zeros(len(coords), np.int64)
        rows = rows_at(table, coords)
        return np.where(rows >= 0, table.length[rows], 0)

    def axis_of(self, column: str) -> int | None:
        """The axis that a column is a coordinate of; None for data.

        Raises
        ------
        NotFoundError
            If there is no such column.
        """
        if column == self.name and self.dims != (self.name,):
            return None
        node = self._at(column)
        if node is None or node.array is None:
            if column in self.dims:
                return self.dims.index(column)  # its positions
            raise NotFoundError(f"there is no column {column!r}; {self._columns()}")
        dims = _dims(node)
        if len(dims) == 1 and dims[0] in self.dims:
            axis = self.dims.index(dims[0])
            if node.array.shape == (self.meta.shape[axis],):
                return axis
        alike = (dims, node.array.shape, node.array.chunk_shape)
        if alike != (self.dims, self.meta.shape, self.meta.chunk_shape):
            raise InvalidArgumentError(
                f"{column!r} has other dimensions or chunks than {self.name!r}; {self._columns()}"
            )
        return None

    def _columns(self) -> str:
        dims = ", ".join(str(dim) for dim in self.dims if dim is not None) or "none"
        return (
            f"a where names /{self.node.path} itself, arrays beside it with the same dimensions "
            f"and chunks, and coordinates along one of its dimensions ({dims})"
        )

    def _at(self, name: str) -> Node | None:
        return self.contents.node(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._group}/{name}".lstrip("/")

    def beside(self, name: str) -> Node:
        """The array of that name in the same group."""
        return self.contents.array_at(self._path(name))

    def coordinate(self, name: str, axis: int) -> Ranges:
        """The decoded values of a coordinate; positions from 0 on where there is none."""
        node, size = self._at(name), self.meta.shape[axis]
        if size > _MOST_CELLS:
            raise InvalidArgumentError(
                f"{name!r} has {size} values, and at most {_MOST_CELLS} can be compared"
            )
        if node is None or node.array is None:
            return Ranges.of_cells(np.arange(size), np.zeros(size, np.bool_))
        stored = np.asarray(zarr.open_array(self._store, path=node.path, mode="r")[...])
        return Ranges.of_cells(*comparable(self.decoded(node, stored)))

    def decoded(self, node: Node, stored: _Values) -> _Values:
        """Stored values as xarray decodes them.

        Raises
        ------
        ModuleNotFoundError
            If xarray is needed and not installed.
        InvalidArgumentError
            If xarray cannot decode them.
        """
        attributes = attributes_of(node)
        is_v2 = V3_DOCUMENT not in node.documents and V2_ARRAY in node.documents
        if stored.dtype.kind not in "biuf" or not (is_v2 or _CF & attributes.keys()):
            return stored
        try:
            import xarray as xr
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"/{node.path} has CF attributes, which xarray decodes: "
                "pip install 'zarr-manifests[xarray]'"
            ) from error
        name = node.path.rpartition("/")[2]
        encoded = xr.Variable(("n",), stored, self._opened.open_store_variable(name).attrs)
        times: Any = xr.coders.CFDatetimeCoder(time_unit="us") if self._decode_times else False
        spans = xr.coders.CFTimedeltaCoder(
            time_unit="us", decode_via_units=False, decode_via_dtype=True
        )
        with quiet():  # reading the data gives the same warnings
            try:
                found = xr.conventions.decode_cf_variable(
                    node.path, encoded, decode_times=times, decode_timedelta=spans
                )
                return np.asarray(found.values)
            except (ValueError, OverflowError, TypeError) as error:
                raise InvalidArgumentError(
                    f"/{node.path} cannot be decoded: {error}. With decode_times=False, times "
                    "are compared as the numbers that are stored"
                ) from error

    @cached_property
    def _opened(self) -> Any:
        import xarray as xr

        return xr.backends.ZarrStore.open_group(
            self._store, mode="r", group=self._group, consolidated=False
        )


def meta_of(node: Node) -> ArrayMeta:
    """What the documents of an array say."""
    assert node.array is not None
    return node.array


def attributes_of(node: Node) -> dict[str, Any]:
    """The attributes of an array."""
    found = fields_of(node).get("attributes")
    return found if isinstance(found, dict) else {}


def _dims(node: Node) -> tuple[str | None, ...]:
    meta = meta_of(node)
    names = meta.dimension_names
    if names is None:
        given = attributes_of(node).get("_ARRAY_DIMENSIONS")
        names = tuple(given) if isinstance(given, list) else ()
    return names if len(names) == len(meta.shape) else (None,) * len(meta.shape)
