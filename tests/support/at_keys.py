"""Stores, key by key."""

from __future__ import annotations

import json
from typing import Any

from zarr.core.buffer import cpu

from zarr_manifests.store import ManifestStore


def put(store: ManifestStore, key: str, data: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(data))


def get(store: ManifestStore, key: str) -> bytes | None:
    """What is at a key; None if there is nothing."""
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


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
