"""The independent reader of the specification, and what is compared with what it finds."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from zarr.core.buffer import default_buffer_prototype

from zarr_manifests.store import ManifestStore

SPEC = Path(__file__).parents[1] / "spec"


def load(name: str) -> ModuleType:
    """A module of `tests/spec`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"spec_{name}", SPEC / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def contents(store: ManifestStore) -> dict[str, bytes]:
    """All keys and values, as Zarr sees them."""

    async def read() -> dict[str, bytes]:
        found = {}
        async for key in store.list():
            assert key not in found
            value = await store.get(key, default_buffer_prototype())
            assert value is not None
            found[key] = value.to_bytes()
        return found

    return asyncio.run(read())


reader = load("reader")
