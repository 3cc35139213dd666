"""Bytes at the keys of a store, put and read as Zarr does; and a commit that others overtake."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from zarr.core.buffer import cpu

from zarr_manifests import Fork, Repository, Session
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.store import ManifestStore, contents_of

type Place = Repository | Session | Fork | ManifestStore


def _store(place: Place) -> ManifestStore:
    """Of a repository, that of its branch `main` now."""
    if isinstance(place, Repository):
        return place.readonly_session().store
    return place if isinstance(place, ManifestStore) else place.store


def put(place: Place, key: str, value: bytes = b"12345678") -> None:
    _store(place).set_sync(key, cpu.Buffer.from_bytes(value))


def get(place: Place, key: str) -> bytes | None:
    found = _store(place).get_sync(key)
    return None if found is None else found.to_bytes()


def contents(place: Place) -> dict[str, bytes]:
    """All that is there, by key: what is listed once, and read."""
    store = _store(place)
    keys = sorted(contents_of(store).keys_below(""))
    found = {key: value for key in keys if (value := get(store, key)) is not None}
    assert [*found] == keys
    return found


def array_document(shape: tuple[int, ...], **changes: Any) -> bytes:
    """The `zarr.json` of an array whose chunks hold one byte each."""
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * len(shape)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
    }
    return json.dumps(fields | changes).encode()


def overtaking(*others: Callable[[], object]) -> Runtime:
    """Others come first, one before each swap of the root."""
    due = list(others)

    def checkpoint(point: str) -> None:
        if point == "root.swap" and due:
            due.pop(0)()

    return replace(SYSTEM, checkpoint=checkpoint, sleep=lambda _: None)
