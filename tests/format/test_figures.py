"""What a reference costs: bytes in the storage, and Python steps at a lookup."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef, RefKind, VirtualRef
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.virtual_sources import VirtualSource, VirtualSources
from zarr_manifests.grid import Box
from zarr_manifests.storage.memory import MemoryStorage

N, FILES = 1_000_000, 1_000
SESSION = "000000000001-" + "ab" * 12
PACK_BYTES = 8 << 20


def stored_bytes(columns: dict[str, Any], paths: list[str], **known: Any) -> int:
    """What a commit of a million virtual refs adds to a repository, all objects together."""
    storage = MemoryStorage()
    repository = zm.create(storage, virtual_containers={"era5": "memory://era5/in"})
    session = repository.writable_session()
    zarr.create_array(session.store, name="t2m", shape=(1_000, 1_000), chunks=(1, 1), dtype="f4")
    session.commit("an array")
    before = sum(info.nbytes for info in storage.list())
    index = np.stack(np.divmod(np.arange(N), 1_000), axis=1)
    locations = [f"memory://era5/in/{path}" for path in paths]
    session.store.set_virtual_refs("t2m", index, locations, **columns, **known)
    session.commit("a million refs")
    refs = repository.readonly_session().store.get_virtual_refs("t2m")
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(refs, name), column)
    return sum(info.nbytes for info in storage.list()) - before


def lengths() -> Any:
    """Of compressed chunks: no two alike."""
    return np.random.default_rng(0).normal(100_000, 12_000, N).astype(np.int64)


def test_a_million_realistic_virtual_refs() -> None:
    """Chunks of any length in a thousand files, one after another behind headers of any length."""
    rng = np.random.default_rng(1)
    length = lengths().reshape(FILES, -1)
    header = rng.integers(20_000, 20_500, FILES)[:, None]
    columns = {
        "source": np.repeat(np.arange(FILES), N // FILES),
        "offset": (np.cumsum(length, axis=1) - length + header).ravel(),
        "length": length.ravel(),
    }
    paths = [f"daily/{1980 + i // 365}/t2m_{i % 365:03d}_era5.nc" for i in range(FILES)]
    known = {
        "etags": [f'"{rng.bytes(16).hex()}"' for _ in range(FILES)],
        "modified": 1_600_000_000_000 + rng.integers(0, 10**9, FILES),
        "sizes": rng.integers(10**8, 10**9, FILES),
    }
    assert stored_bytes(columns, paths, **known) <= 3 * N


def test_a_regular_virtual_array() -> None:
    columns = {
        "source": np.zeros(N, np.int64),
        "offset": 8192 + 65536 * np.arange(N),
        "length": np.full(N, 65536),
    }
    assert stored_bytes(columns, ["t2m.nc"]) <= 0.1 * N


def native(number: Any, offset: Any, length: Any) -> ChunkTable:
    zeros = np.zeros(N, np.int64)
    crc = np.random.default_rng(2).integers(0, 2**32, N)
    kind = np.full(N, RefKind.NATIVE, np.int64)
    box = Box((0,), (N,))
    return ChunkTable(box, None, kind, zeros, number, offset, length, crc, (SESSION,), b"")


def in_packs(length: Any) -> tuple[Any, Any]:
    ends = np.cumsum(length)
    number = (ends - length) // PACK_BYTES
    first = np.searchsorted(number, number)
    return number, ends - length - (ends - length)[first]


@pytest.mark.parametrize("how", ["packs", "objects in order", "objects of 16 threads"])
def test_a_million_native_refs_with_checksums(how: str) -> None:
    """Four bytes are the checksum, two the length; what is left says where."""
    length, zeros = lengths(), np.zeros(N, np.int64)
    match how:
        case "packs":
            number, offset = in_packs(length)
        case "objects in order":
            number, offset = np.arange(N), zeros
        case _:  # each takes the next number, and ends when it ends
            late = np.arange(N) + np.random.default_rng(3).uniform(0, 16, N)
            number, offset = np.argsort(np.argsort(late)), zeros
    encoded = Manifest.of([(b"n" * 12, native(number, offset, length))]).encode()
    assert len(encoded) <= 7 * N


# --- lookups -----------------------------------------------------------------------------------


def steps(call: Callable[[], object]) -> int:
    """Python calls, branches and jumps that the call takes."""
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1

    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
    kinds = events.PY_START | events.JUMP | events.BRANCH | events.CALL
    sys.monitoring.use_tool_id(tool, "steps")
    try:
        for event in (events.PY_START, events.JUMP, events.BRANCH, events.CALL):
            sys.monitoring.register_callback(tool, event, step)
        sys.monitoring.set_events(tool, kinds)
        call()
        sys.monitoring.set_events(tool, 0)
    finally:
        sys.monitoring.free_tool_id(tool)
    return count


def decoded(kind: RefKind, n: int, *, dense: bool) -> ChunkTable:
    rows = np.arange(n, dtype=np.int64)
    zeros = np.zeros(n, np.int64)
    files = VirtualSources.of([VirtualSource("era5", f"{i}.nc") for i in range(n // 1_000)])
    virtual = kind is RefKind.VIRTUAL
    table = ChunkTable(
        Box((0, 0), (n if dense else 3 * n, 1)),
        None if dense else 3 * rows,
        np.full(n, kind, np.int64),
        rows // 1_000 if virtual else zeros,
        zeros if virtual else rows,
        zeros,
        rows + 1,
        zeros,
        () if virtual else (SESSION,),
        b"",
        *([files] if virtual else []),
    )
    ((part, data),) = Manifest.of([(b"n" * 12, table)]).parts
    return Manifest.decode(part, data)


@pytest.mark.parametrize("kind", [RefKind.NATIVE, RefKind.VIRTUAL])
@pytest.mark.parametrize("dense", [True, False])
def test_a_lookup_takes_no_python_loop(kind: RefKind, dense: bool) -> None:
    found = {}
    for n in (1_000, 1_000_000):
        table = decoded(kind, n, dense=dense)
        at = (n - 3 if dense else 3 * (n - 3), 0)
        ref = table.get(at)
        assert isinstance(ref, NativeRef | VirtualRef)
        assert ref.length == n - 2
        found[n] = steps(lambda table=table, at=at: table.get(at))
    assert found[1_000] == found[1_000_000] < 100
