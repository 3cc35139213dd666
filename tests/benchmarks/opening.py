"""What finding one chunk among a million takes: `python tests/benchmarks/opening.py [refs]`.

Not collected by pytest. An array of a million chunks (if not said otherwise) is one manifest of a
base, in a repository on disk. In a fresh process that manifest is read and decoded and one chunk
looked up: due are at most 60 ms and 60 MB. Printed are the best and the median of seven processes,
by the clock and by CPU time of all threads, and the peak of what is allocated (by `tracemalloc`,
in another process since that slows it down; numpy's arrays are in it). Below, the same for a
repository that is opened and asked for one chunk. Kinds of chunks:

- `packed`: one after another in packs, as the store writes them;
- `virtual`: byte ranges of files, each of another length;
- `sparse`: as `virtual`, but only one chunk in two exists.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from folds import TILES, apart, document, refs_of
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef, RefKind
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.storage import from_url
from zarr_manifests.store import contents_of, workspace_of

REFS, TIMES = 1_000_000, 7
KINDS = ("packed", "virtual", "sparse")
_CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}


def make(url: str, refs: int, kind: str) -> dict[str, Any]:
    """A repository with such an array; where its manifest is."""
    repository = zm.create(url, _CONFIG)
    session = repository.writable_session("main")
    every = 2 if kind == "sparse" else 1
    session.store.set_sync("v/zarr.json", cpu.Buffer.from_bytes(document(every * refs // TILES)))
    session.store.set_sync("v/c/0/0/0", cpu.Buffer.from_bytes(b"\1" * 300_000))
    session.commit("array")
    if kind == "packed":
        _put_packed(session, refs)
    else:
        session.store.set_virtual_refs("v", **refs_of(every * np.arange(refs), 0))
    session.commit("refs")
    repository.compact("main", "full")
    (held,) = contents_of(repository.readonly_session("main").store).view.pages.manifests()
    return {"blob": held.blob.bare()}


def _put_packed(session: Any, refs: int) -> None:
    view = contents_of(session.store).view
    one = view.lookup(view.nodes["v"].node_id, (0, 0, 0))
    assert isinstance(one, NativeRef)
    length = np.random.default_rng(0).integers(30_000, 60_000, refs)
    end = np.cumsum(length)
    number = end // (8 << 20)
    start = end - length
    first = start[np.searchsorted(number, np.arange(int(number[-1]) + 1))]
    grid = Box((0, 0, 0), (refs // TILES, 10, 10))
    crc = np.random.default_rng(1).integers(0, 2**32, refs)
    kind = np.full(refs, RefKind.NATIVE, np.int64)
    columns = (kind, np.zeros(refs, np.int64), number, start - first[number], length, crc)
    table = ChunkTable(grid, None, *columns, (one.source,), b"")
    workspace_of(session.store).put_table("v", grid, table)


def look_up(url: str, blob: BlobRef) -> dict[str, Any]:
    """Read the manifest, decode its table, find a chunk."""
    manifest = Manifest.from_object(from_url(url).get(blob.key), blob)
    ((part, data),) = manifest.parts
    table = manifest.decode(part, data)
    assert table.get(table.box.lo) is not None
    return {"refs": len(table)}


def open_and_look_up(url: str, blob: BlobRef) -> dict[str, Any]:
    """The same, by the front door."""
    contents = contents_of(zm.open(url).readonly_session("main").store)
    node = contents.node("v")
    assert node is not None
    assert contents.ref(node, (0, 0, 0)) is not None
    return {}


def traced(call: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The most that is allocated meanwhile, beyond what there is before."""
    tracemalloc.start()
    call(*args)
    return {"allocated": tracemalloc.get_traced_memory()[1]}


def show(kind: str, refs: int) -> None:
    """Print the figures of one kind of chunks."""
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "repository")
        blob = apart(make, url, refs, kind)["blob"]
        print(f"{kind}: {refs:,} refs in {blob.length:,} bytes")
        for name, call in (("manifest", look_up), ("repository", open_and_look_up)):
            runs = [apart(call, url, blob) for _ in range(TIMES)]
            peak = apart(traced, call, url, blob)["allocated"]
            times = []
            for what, field in (("clock", "wall_s"), ("CPU", "cpu_s")):
                taken = [1e3 * run[field] for run in runs]
                times.append(f"{what} {min(taken):.1f} / {statistics.median(taken):.1f} ms")
            print(f"  {name:10} {', '.join(times)}, peak {peak / 1e6:.1f} MB")


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    start = time.perf_counter()
    counts = [int(one) for one in arguments if one.isdigit()]
    for kind in KINDS:
        show(kind, counts[0] if counts else REFS)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
