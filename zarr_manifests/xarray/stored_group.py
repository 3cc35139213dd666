"""A group that a dataset is written to, opened once for all that looks at it.

Where Zarr opens a group, it fetches and parses the documents of all its arrays, in several turns of
its event loop. Here a document is parsed where its array is first asked for, without the loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.backends import ZarrStore
from xarray.conventions import decode_cf_variable
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import StorePath

from zarr_manifests.bulk import use_bulk
from zarr_manifests.bulk.here import read_here
from zarr_manifests.display import fields_of
from zarr_manifests.engine.edit.overlay import SessionView, unrecorded
from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V2_GROUP, V3_DOCUMENT, join, split
from zarr_manifests.runtime import quiet
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.xarray.fit import TIMED_BY

__all__ = ["StoredGroup", "arrays_below", "meaning_of_bounds", "open_array"]

_FINE: Final = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


class StoredGroup:
    """A group of a snapshot or a session, as Zarr and xarray see it.

    Parameters
    ----------
    contents : SessionView
        What to read.
    path : str
        Path of the group.

    Attributes
    ----------
    nodes : dict of str to Node
        The group's arrays by name.
    """

    def __init__(self, contents: SessionView, path: str) -> None:
        self.nodes = arrays_below(contents, path)
        self._path, self._group = path, contents.node(path)
        self._store = ManifestStore(contents, read_only=True)
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._variables: dict[str, xr.Variable] = {}
        self._likes: dict[str, xr.Variable] = {}

    @classmethod
    def of(cls, store: ManifestStore, path: str) -> StoredGroup:
        """A group of a session's store, uncommitted changes included.

        What is read here is no read of the session, so its commit can still be rebased.
        """
        return cls(unrecorded(contents_of(store)), path)

    @property
    def exists(self) -> bool:
        """Whether there is a document of the group."""
        return self._group is not None

    def array(self, name: str) -> zarr.Array[Any]:
        """One of its arrays, which is read in bulk."""
        if name not in self._arrays:
            found = open_array(self._store, self.nodes[name].path, self._zarr_format)
            use_bulk(found)
            self._arrays[name] = found
        return self._arrays[name]

    def values(self, name: str) -> npt.NDArray[Any]:
        """All stored values of one of its arrays."""
        return read_here(self.array(name))

    def variable(self, name: str) -> xr.Variable:
        """One of its arrays as xarray's variable, not decoded, and not read yet."""
        if name not in self._variables:
            self._opened.members[name] = self.array(name)
            opened: Any = self._opened.open_store_variable
            self._variables[name] = opened(name)
        return self._variables[name]

    @cached_property
    def attributes(self) -> dict[str, Mapping[str, Any]]:
        """The attributes of each of its arrays."""
        return {name: fields_of(node).get("attributes") or {} for name, node in self.nodes.items()}

    def like(self, name: str) -> xr.Variable:
        """One of its arrays as xarray decodes it, with the encoding for more of its values.

        Its own values mean nothing.
        """
        if name not in self._likes:
            stored = self.variable(name)
            attributes = {**meaning_of_bounds(name, self.attributes.values()), **stored.attrs}
            some: Any = stored._data  # of texts, whose length may be that of an axis; not read
            if stored.dtype.kind not in "SOT":
                some = np.zeros((1,) * stored.ndim, stored.dtype)
            with quiet():  # xarray itself warns when it reads
                own = xr.Variable(stored.dims, some, attributes, stored.encoding)
                # Of single bytes, xarray would join those along the last axis.
                self._likes[name] = decode_cf_variable(name, own, stack_char_dim=False)
        return self._likes[name]

    def as_fine(self, name: str, variable: xr.Variable) -> xr.Variable:
        """Times in memory, as fine as the array has them: of coarser ones xarray makes NaT."""
        units = str(self.attributes[name].get("units")).partition(" since ")[0]
        dtype = variable.dtype
        if units not in _FINE or dtype.kind not in "mM" or variable.chunks is not None:
            return variable
        finer = np.dtype(f"{dtype.kind}8[{_FINE[units]}]")
        if dtype == finer or np.promote_types(dtype, finer) != finer:
            return variable
        found = variable.copy(data=variable.values.astype(finer))
        # Beyond the dates that it has, numpy makes others; xarray is left to refuse them.
        same = (found.values.astype(dtype) == variable.values) | np.isnat(variable.values)
        return found if same.all() else variable

    def encoded(self, name: str, variable: xr.Variable) -> xr.Variable:
        """Decoded values in memory as xarray would store them in the array of that name."""
        encode: Any = self._opened.encode_variable
        own = xr.Variable(variable.dims, self.as_fine(name, variable).values)
        own.encoding = dict(self.like(name).encoding)
        with quiet():  # what they warn of is checked
            found: xr.Variable = encode(own, name=name)
        return found

    @property
    def is_v2(self) -> bool:
        """Whether the group is of Zarr format 2."""
        return self._zarr_format == 2

    @property
    def _zarr_format(self) -> int:
        return 2 if self._group is not None and V3_DOCUMENT not in self._group.documents else 3

    def open_in(self, store: ManifestStore) -> zarr.Group:
        """The group, which exists, in another store of the same contents."""
        assert self._group is not None
        documents = self._group.documents
        if self._zarr_format == 3:
            document = json.loads(documents[V3_DOCUMENT])
        else:
            attributes = json.loads(documents.get(V2_ATTRIBUTES, b"{}"))
            document = {**json.loads(documents[V2_GROUP]), "attributes": attributes}
        document.pop("consolidated_metadata", None)
        opened: Any = zarr.AsyncGroup.from_dict(StorePath(store, self._path), document)
        return zarr.Group(opened)

    def open_array_in(
        self, store: ManifestStore, name: str, shape: Sequence[int] | None = None
    ) -> zarr.Array[Any]:
        """One of its arrays in another store of the same contents, made longer to that shape.

        A session notes its documents as read.
        """
        held = self.array(name).async_array
        metadata: Any = held.metadata
        for document in [V3_DOCUMENT] if self._zarr_format == 3 else [V2_ARRAY, V2_ATTRIBUTES]:
            contents_of(store).find(join(held.path, document))
        if shape is not None:
            metadata = metadata.update_shape(tuple(shape))
            for key, value in metadata.to_buffer_dict(default_buffer_prototype()).items():
                store.set_sync(join(held.path, key), value)
                if key == V3_DOCUMENT:
                    _keep(value.to_bytes(), metadata)  # for the next append
        path = StorePath(store, held.path)
        return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=path, config=held.config))

    @cached_property
    def _opened(self) -> ZarrStore:
        store: Any = _Unlisted
        found: ZarrStore = store(
            self.open_in(self._store), "r", use_zarr_fill_value_as_mask=self.is_v2
        )
        return found


class _Unlisted(ZarrStore):
    """Xarray's store of a group whose members are added one by one."""

    __slots__ = ()

    def _fetch_members(self) -> dict[str, Any]:
        return {}


def meaning_of_bounds(name: str, there: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return units and calendar that a bounds array takes over from its times.

    Parameters
    ----------
    name : str
        Name of the array.
    there : iterable of mapping
        The attributes of the arrays in its group.
    """
    for attributes in there:
        if attributes.get("bounds") == name and " since " in str(attributes.get("units")):
            return {key: attributes[key] for key in TIMED_BY if key in attributes}
    return {}


def arrays_below(contents: SessionView, path: str) -> dict[str, Node]:
    """The arrays right below the group at the path, by name; only those of its format, as in Zarr.

    All of them if there is no document of the group.
    """
    group = contents.node(path)
    return {
        split(at)[1]: node
        for at, node in contents.members(path).items()
        if node.array is not None
        and (group is None or (V3_DOCUMENT in node.documents) == (V3_DOCUMENT in group.documents))
    }


def open_array(store: ManifestStore, path: str, zarr_format: int) -> zarr.Array[Any]:
    """The array at the path, which is there, opened without Zarr's event loop.

    Its documents are read like by Zarr, so a session notes them as read.
    """

    def document(name: str) -> bytes:
        found = store.get_sync(join(path, name), prototype=default_buffer_prototype())
        return b"{}" if found is None else found.to_bytes()

    place = StorePath(store, path)
    if zarr_format != 3:
        fields = {
            **json.loads(document(V2_ARRAY)),
            "attributes": json.loads(document(V2_ATTRIBUTES)),
        }
        return zarr.Array.from_dict(place, fields)
    stored = document(V3_DOCUMENT)
    known = _PARSED.get(stored)
    if known is not None:
        return zarr.Array(zarr.AsyncArray(metadata=known, store_path=place))
    found = zarr.Array.from_dict(place, json.loads(stored))
    _keep(stored, found.metadata)
    return found


_MOST_PARSED: Final = 1024
_PARSED: dict[bytes, Any] = {}
"""What Zarr makes of v3 documents. Nobody changes it: arrays are made longer by a copy."""


def _keep(document: bytes, metadata: Any) -> None:
    if getattr(metadata, "_stored_document", None) is not None:  # which Zarr has yet to repair
        return
    if len(_PARSED) >= _MOST_PARSED:
        _PARSED.clear()
    _PARSED[document] = metadata
