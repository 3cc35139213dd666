"""A group that a dataset is written to, opened once for all that looks at it.

Where Zarr opens a group, it fetches and parses the documents of all its arrays, in several turns of
its event loop. Here a document is parsed where its array is first asked for, without the loop.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import xarray as xr
import zarr
from xarray.backends import ZarrStore
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import StorePath

from zarr_manifests.bulk import use_bulk
from zarr_manifests.engine.edit.overlay import SessionView, unrecorded
from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V2_GROUP, V3_DOCUMENT, join, split
from zarr_manifests.store import ManifestStore, contents_of

__all__ = ["StoredGroup", "arrays_below", "open_array"]


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

    def variable(self, name: str) -> xr.Variable:
        """One of its arrays as xarray's variable, not decoded, and not read yet."""
        self._opened.members[name] = self.array(name)
        opened: Any = self._opened.open_store_variable
        variable: xr.Variable = opened(name)
        return variable

    def encoded(self, name: str, variable: xr.Variable) -> xr.Variable:
        """A decoded variable as xarray would store it under that name."""
        encode: Any = self._opened.encode_variable
        found: xr.Variable = encode(variable, name=name)
        return found

    @property
    def _zarr_format(self) -> int:
        return 2 if self._group is not None and V3_DOCUMENT not in self._group.documents else 3

    @cached_property
    def _opened(self) -> ZarrStore:
        assert self._group is not None
        documents = self._group.documents
        if self._zarr_format == 3:
            document = json.loads(documents[V3_DOCUMENT])
        else:
            document = {**json.loads(documents[V2_GROUP]), "attributes": {}}
        document.pop("consolidated_metadata", None)
        opened: Any = zarr.AsyncGroup.from_dict(StorePath(self._store, self._path), document)
        store: Any = _Unlisted
        found: ZarrStore = store(
            zarr.Group(opened), "r", use_zarr_fill_value_as_mask=self._zarr_format == 2
        )
        return found


class _Unlisted(ZarrStore):
    """Xarray's store of a group whose members are added one by one."""

    __slots__ = ()

    def _fetch_members(self) -> dict[str, Any]:
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

    def fields(name: str) -> dict[str, Any]:
        found = store.get_sync(join(path, name), prototype=default_buffer_prototype())
        document: dict[str, Any] = {} if found is None else json.loads(found.to_bytes())
        return document

    if zarr_format == 3:
        document = fields(V3_DOCUMENT)
    else:
        document = {**fields(V2_ARRAY), "attributes": fields(V2_ATTRIBUTES)}
    return zarr.Array.from_dict(StorePath(store, path), document)
