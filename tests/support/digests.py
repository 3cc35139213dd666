"""What a store of Zarr holds, as digests that can be written down."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from zarr.core.buffer import default_buffer_prototype


def digests(store: Any, but: str) -> dict[str, str]:
    """A digest of what a store holds at each key that it lists, but for those that start so."""

    async def read() -> dict[str, str]:
        found = {}
        async for key in store.list():
            if key.startswith(but):
                continue
            value = await store.get(key, default_buffer_prototype())
            if value is not None:
                found[key] = hashlib.sha256(value.to_bytes()).hexdigest()[:16]
        return found

    return asyncio.run(read())
