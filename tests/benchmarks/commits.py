"""What commits cost on a large base: `python tests/benchmarks/commits.py [commits] [--scattered]`.

Not collected by pytest. Commits of 100 chunk refs each (10,000 if not said otherwise) go onto an
array of a million, under the default configuration and with the compactions that it makes due. It
prints the bytes written by kind of object, beside what the encoded chunk refs themselves take;
the most runs and deltas there ever were; and times of the first and the last tenth of the commits,
by the clock and by CPU time of all threads: the last's p95 is to be at most twice the first's. It
takes minutes; a thousand commits show the same curve. Tests use the same functions for fewer
commits, and look at counts and bytes only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from zarr.core.buffer import cpu

import zarr_manifests as zm
from storages import CountingStorage
from zarr_manifests import Session
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Delta, Manifest
from zarr_manifests.grid import Box
from zarr_manifests.ids import crc32c
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

BASE_REFS = 1_000_000
_CHUNK = b"\x05" * 8
_CONFIG = {"inline-chunk-bytes": 0}


def document(chunks: int) -> bytes:
    """The metadata of an array of that many chunks."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [1]}}
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [chunks],
        "data_type": "int64",
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["time"],
    }
    return json.dumps(fields).encode()


def put(session: Session, key: str, value: bytes) -> None:
    """Set a key of the store."""
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def put_base(storage: Storage, refs: int = BASE_REFS, room: int = 0) -> None:
    """A repository with an array `huge` of that many chunks in the base, and room for more."""
    repository = zm.create(storage, _CONFIG)
    session = repository.writable_session("main")
    put(session, "huge/zarr.json", document(refs + room))
    put(session, "huge/c/0", _CHUNK)  # a chunk for all others to refer to
    session.commit("array")
    view = contents_of(session.store).view
    found = view.chunks(view.nodes["huge"].node_id)
    assert found is not None
    zeros = np.zeros(refs, np.int64)
    table = ChunkTable(
        Box((0,), (refs,)),
        None,
        kind=np.full(refs, RefKind.NATIVE, np.int64),
        source=zeros,
        number=zeros + found.number[0],
        # As in packs, each begins where the one before it ends. (Nobody reads them.)
        offset=np.arange(refs, dtype=np.int64) * len(_CHUNK),
        length=zeros + len(_CHUNK),
        crc32c=(np.arange(refs, dtype=np.int64) * 2_654_435_761 + crc32c(_CHUNK)) % 2**32,
        sources=found.sources,
        inline=b"",
    )
    workspace_of(session.store).put_table("huge", Box((0,), (refs + room,)), table)
    session.commit("a million chunks")
    report = repository.compact("main", "full")
    assert report.refs_merged == refs


@dataclass
class Costs:
    """What some commits have cost, with the compactions that followed them."""

    commits: int = 0
    written: Counter[str] = field(default_factory=Counter)
    """Bytes by the first part of the key."""
    refs_bytes: int = 0
    """What the commits' own chunk refs take, encoded."""
    rounds: list[int] = field(default_factory=list)
    largest_read: int = 0
    most_runs: int = 0
    most_deltas: int = 0
    compacted: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def metadata_bytes(self) -> int:
        """All but the chunks."""
        return sum(n for kind, n in self.written.items() if kind != "chunks")

    @property
    def refs_written(self) -> int:
        """Bytes of manifests, deltas and runs."""
        return self.written["manifests"] + self.written["deltas"]

    @property
    def other_bytes(self) -> int:
        """Bytes of all else but chunks."""
        return self.metadata_bytes - self.refs_written


def commit_all(
    storage: Storage, change: Callable[[Session, int], None], numbers: Sequence[int]
) -> Costs:
    """One commit for each number, by one session, of what `change` does."""
    counting, costs = CountingStorage(storage), Costs()
    session = zm.open(counting).writable_session("main")
    for number in numbers:
        change(session, number)
        before = contents_of(session.store).view.ref
        counting.reset()
        start, used = time.perf_counter(), time.process_time()
        session.commit(f"{number}")
        costs.seconds.append(time.perf_counter() - start)
        costs.cpu_seconds.append(time.process_time() - used)
        _count(costs, counting, session, before)
    return costs


def _count(costs: Costs, counting: CountingStorage, session: Session, before: Any) -> None:
    costs.commits += 1
    costs.rounds.append(counting.rounds())
    snapshot = contents_of(session.store).view.snapshot
    costs.compacted.append(snapshot.parent is not None and snapshot.parent.key != before.key)
    for record in counting.log:
        kind = record.key.split("/")[0]
        if record.op in ("create", "create_after", "cas", "put"):
            costs.written[kind] += record.nbytes
        elif kind != "chunks":
            costs.largest_read = max(costs.largest_read, record.nbytes)
    context = contents_of(session.store).context
    own = snapshot
    if costs.compacted[-1]:
        own = context.open_view(snapshot.parent).snapshot
    delta = context.objects.load(own.log, Delta)
    held = [delta.embedded, *(context.objects.load(m.blob, Manifest) for m in delta.manifests)]
    costs.refs_bytes += sum(len(data) for manifest in held for _, data in manifest.parts)
    for deltas in (own.deltas, snapshot.deltas):
        runs = sum(entry.first < entry.last for entry in deltas)
        costs.most_runs = max(costs.most_runs, runs)
        costs.most_deltas = max(costs.most_deltas, len(deltas) - runs)


def append(first: int) -> Callable[[Session, int], None]:
    """Ten more chunks, by a resize, as a writer of a time series would."""

    def change(session: Session, number: int) -> None:
        at = first + 10 * number
        put(session, "huge/zarr.json", document(at + 10))
        for i in range(at, at + 10):
            put(session, f"huge/c/{i}", i.to_bytes(8, "little"))

    return change


def write_next(first: int, each: int = 100) -> Callable[[Session, int], None]:
    """A hundred more chunks, in an array that has room for them."""

    def change(session: Session, number: int) -> None:
        for i in range(first + each * number, first + each * (number + 1)):
            put(session, f"huge/c/{i}", i.to_bytes(8, "little"))

    return change


def scatter(among: int, each: int = 100) -> Callable[[Session, int], None]:
    """A hundred chunks anywhere, most of which there are already."""
    rng = np.random.default_rng(5)

    def change(session: Session, number: int) -> None:
        for i in rng.choice(among, each, replace=False).tolist():
            put(session, f"huge/c/{i}", number.to_bytes(8, "little"))

    return change


def _show(costs: Costs) -> None:
    print(f"{costs.commits:,} commits, {sum(costs.compacted):,} of them with a compaction")
    for kind, nbytes in costs.written.most_common():
        print(f"  {kind:10} {nbytes:14,} B   {nbytes / costs.commits:10,.0f} B a commit")
    factor = costs.refs_written / costs.refs_bytes
    print(f"chunk refs, encoded: {costs.refs_bytes:,} B; manifests, deltas, runs: {factor:.1f} x")
    print(f"all else: {costs.other_bytes / costs.commits:,.0f} B a commit")
    print(f"at most {costs.most_runs} runs and {costs.most_deltas} deltas")
    print(f"rounds: {statistics.mean(costs.rounds):.2f} a commit, {max(costs.rounds)} at most")
    print(f"largest object read: {costs.largest_read:,} B")
    tenth = max(1, costs.commits // 10)
    for what, taken in (("clock", costs.seconds), ("CPU", costs.cpu_seconds)):
        p95s = []
        for name, some in (("first", taken[:tenth]), ("last", taken[-tenth:])):
            p95s.append(sorted(some)[int(0.95 * (len(some) - 1))])
            middle = 1e3 * statistics.median(some)
            print(f"{what}, {name} {tenth:,}: median {middle:.1f} ms, p95 {1e3 * p95s[-1]:.1f} ms")
        print(f"{what}, p95 of the last against the first: {p95s[1] / p95s[0]:.2f}")


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    counts = [int(one) for one in arguments if one.isdigit()]
    commits = counts[0] if counts else 10_000
    storage = MemoryStorage()
    scattered = "--scattered" in arguments
    put_base(storage, room=0 if scattered else 100 * commits)
    change = scatter(BASE_REFS) if scattered else write_next(BASE_REFS)
    _show(commit_all(storage, change, range(commits)))


if __name__ == "__main__":
    main(sys.argv[1:])
