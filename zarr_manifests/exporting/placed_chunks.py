"""Where the bytes of a snapshot's chunks are, for exports that refer to them.

A reference is made only to what a reader of the snapshot may read: files below a container.

A tag keeps the snapshot in history, and with it the objects of the repository that are referred to.
Invariant: the tag exists before a reference does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from zarr_manifests.engine.history.refs import Refs
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import AlreadyExistsError, ReadOnlyError, VirtualContainerError
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.format.chunk_table import InlineRef, NativeRef, VirtualRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import check_ref_name
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.grid import Coords
from zarr_manifests.virtual.locations import VirtualLocation, parse_location

__all__ = ["Placed", "keep", "native_root", "placed_chunks", "virtual_places"]

_BATCH: Final = 1 << 16
_SHARED: Final = ("file", "s3", "gs", "az", "http", "https")
"""Schemes that mean the same to other software."""


class Placed(NamedTuple):
    """A chunk, and where its bytes are.

    Attributes
    ----------
    node : Node
        Its array, or an opaque entry.
    coords : tuple of int
        Its coordinates.
    data : bytes or None
        Its bytes, if they are in no file.
    place : VirtualLocation or None
        The file that it is in.
    source : VirtualSource or None
        What is known of a file that is not the repository's own.
    offset, length : int
        The range in the file.
    """

    node: Node
    coords: Coords
    data: bytes | None
    place: VirtualLocation | None
    source: VirtualSource | None
    offset: int
    length: int


def keep(source: SnapshotSource, tag: str | None) -> str:
    """The name of a tag of the snapshot, which is made if there is none.

    Raises
    ------
    AlreadyExistsError
        If the tag is of another snapshot, or was deleted.
    ReadOnlyError
        If the repository cannot be changed.
    """
    context = source.contents.context
    if not isinstance(context, Context):
        raise ReadOnlyError("a tag has to be made, and the repository is only open for reading")
    name = f"export-{source.snapshot_id}" if tag is None else tag
    refs = Refs(context)
    there = refs.tags().get(check_ref_name(name))
    if there is None:
        refs.create_tag(name, source.snapshot_id)
    elif there != source.snapshot_id:
        raise AlreadyExistsError(f"tag {name!r} is of another snapshot, {there}; give another tag=")
    return name


def native_root(source: SnapshotSource) -> VirtualLocation:
    """Where the repository is.

    Raises
    ------
    UnsupportedStorageError
        If nothing outside of this process can read there.
    """
    return _shared(source.contents.context.storage.url)


def placed_chunks(source: SnapshotSource) -> Iterator[Sequence[Placed]]:
    """All chunks, in batches of one array or opaque entry.

    Raises
    ------
    UnsupportedStorageError
        If nothing outside of this process can read a file.
    StorageError
        If an object of a local repository is a link.
    VirtualContainerError
        If a chunk is below no container that the repository was opened with.
    """
    root = native_root(source)
    files: dict[VirtualSource, VirtualLocation] = {}
    objects: dict[str, VirtualLocation] = {}
    storage = source.contents.context.storage

    def found(node: Node, coords: Coords, ref: object) -> Placed:
        match ref:
            case NativeRef():
                if ref.key not in objects:
                    if root.scheme == "file":
                        storage.head(ref.key)  # which refuses links
                    objects[ref.key] = VirtualLocation(root.scheme, root.root, ref.key)
                place = objects[ref.key]
                return Placed(node, coords, None, place, None, ref.offset, ref.length)
            case VirtualRef():
                if ref.source not in files:
                    files[ref.source] = _place_of(source, ref.source)
                place = files[ref.source]
                return Placed(node, coords, None, place, ref.source, ref.offset, ref.length)
            case _:
                assert isinstance(ref, InlineRef)
                return Placed(node, coords, ref.data, None, None, 0, len(ref.data))

    for node, table in source.tables():
        coords = table.coords()
        for first in range(0, len(table), _BATCH):
            rows = range(first, min(first + _BATCH, len(table)))
            batch = coords[rows.start : rows.stop].tolist()
            yield [
                found(node, tuple(at), table.ref(row)) for row, at in zip(rows, batch, strict=True)
            ]


def virtual_places(source: SnapshotSource) -> Iterator[VirtualLocation]:
    """The files elsewhere that chunks are in; errors are those of `placed_chunks`."""
    for _, table in source.tables():
        for at in range(len(table.virtual)):
            yield _place_of(source, table.virtual[at])


def _place_of(source: SnapshotSource, file: VirtualSource) -> VirtualLocation:
    place = source.contents.context.containers.resolve(file)[1]
    if place.scheme == "file":
        inside = os.path.realpath(place.root).rstrip("/") + "/"
        if not os.path.realpath(inside + place.path).startswith(inside):
            raise VirtualContainerError(
                f"{place.url} leads out of its container through a symbolic link, so nothing is "
                "told to read there; export with copy=True, or with a container of the target"
            )
    return _shared(place.url)


def _shared(url: str) -> VirtualLocation:
    if url.partition("://")[0] not in _SHARED:
        raise UnsupportedStorageError(
            f"chunks in {url} cannot be referred to from elsewhere; export with copy=True"
        )
    return VirtualLocation(*parse_location(url))
