"""Exporting as references of kerchunk, in JSON: where the bytes of chunks are.

Chunks in objects of the repository are referred to, and so are those in files elsewhere. Inline
chunks and documents are in the JSON file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.exporting.export_request import ExportCount, ExportRequest
from zarr_manifests.exporting.placed_chunks import Placed, keep, native_root, placed_chunks
from zarr_manifests.exporting.places import check_apart, file_path, new_file
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.reports import ExportReport
from zarr_manifests.storage.local_errors import translated
from zarr_manifests.virtual.locations import WEB, VirtualLocation

__all__ = ["export_kerchunk"]


def export_kerchunk(source: SnapshotSource, dest: Any, request: ExportRequest) -> ExportReport:
    """Write a JSON file of references.

    Raises
    ------
    AlreadyExistsError
        If there is a file of that name that is not to be replaced, or a tag of another snapshot.
    InvalidArgumentError
        If the destination is not the path of a file, or chunks are to be copied.
    UnsupportedStorageError
        If nothing outside of this process can read where chunks are.
    """
    if request.copy:
        raise InvalidArgumentError(
            "format='kerchunk' holds references: pass copy=False. A tag then keeps what they refer "
            "to"
        )
    path = file_path(dest, request.storage_options, overwrite=request.overwrite)
    check_apart(source.contents.context.storage, path)
    native_root(source)
    tag, count = keep(source, request.tag), ExportCount(request)
    with new_file(path, overwrite=request.overwrite) as file:

        def add(entries: Mapping[str, object], between: bytes = b",\n") -> None:
            text = json.dumps(entries)[1:-1].encode()
            with translated(path):
                file.write(between + text if text else b"")

        documents = {key: _document(data) for key, data in source.documents().items()}
        with translated(path):
            file.write(b'{"version": 1, "refs": {')
        add(documents, b"")
        for batch in placed_chunks(source):
            add({source.key(one.node, one.coords): _reference(one) for one in batch})
            there = [one.length for one in batch if one.data is None]
            count.add_references(len(there), sum(there))
            count.add([("", one.data) for one in batch if one.data is not None])
        with translated(path):
            file.write(b"}}\n")
    return count.report(source, path, tag)


def _document(data: bytes) -> str:
    with suppress(UnicodeDecodeError):
        text = data.decode()
        if not text.startswith("base64:"):  # which fsspec would decode
            return text
    return _encoded(data)


def _encoded(data: bytes) -> str:
    return "base64:" + base64.b64encode(data).decode("ascii")


def _reference(chunk: Placed) -> object:
    if chunk.place is None or not chunk.length:
        return _encoded(chunk.data or b"")
    return [_fsspec_url(chunk.place), chunk.offset, chunk.length]


def _fsspec_url(place: VirtualLocation) -> str:
    """The URL as fsspec takes it: only those of web servers have escapes."""
    if place.scheme in WEB:
        return place.url
    return f"{place.scheme}://{place.root}" + (f"/{place.path}" if place.path else "")
