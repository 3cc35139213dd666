"""Repositories with names that no writer of the package takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.engine import overlay, workspace
from zarr_manifests.format import manifest

NAMES = ["../../x", "a/../../x", "a/../b", "..", ".", "./a", "a/./b", "/abs", "//abs", "a//b", "a/"]
NAMES += ["a\0b"]
_GROUP = {"zarr_format": 3, "node_type": "group"}
_ARRAY = _GROUP | {
    "node_type": "array",
    "shape": [2],
    "data_type": "int8",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes"}],
}


@contextmanager
def unchecked() -> Iterator[None]:
    """A block in which nodes may have any path and keys are not checked, as somebody else's."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, workspace):
            patch.setattr(module, "check_inside", lambda key: key, raising=False)
        for module in (overlay, workspace):
            patch.setattr(module, "check_key", lambda key: None)
        yield


def hostile_repository(location: Any, *keys: str) -> zm.Repository:
    """A repository with a group at its root and these keys, as it is found on disk.

    Keys of documents make arrays.
    """
    with unchecked():
        session = zm.create(location).writable_session()
        values = dict.fromkeys(keys, b"of somebody else")
        values |= {key: json.dumps(_ARRAY).encode() for key in keys if key.endswith("/zarr.json")}
        for key, data in {"zarr.json": json.dumps(_GROUP).encode(), **values}.items():
            session.store.set_sync(key, cpu.Buffer.from_bytes(data))
        session.commit("hostile")
    return zm.open(location)
