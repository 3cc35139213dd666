"""How often the base is written again: `python tests/benchmarks/scattered.py [commits] [each]`.

Not collected by pytest. Commits that each overwrite 10,000 chunk refs anywhere in an array of a
million (600 commits, so that each is overwritten six times on average) go onto a base under the
default configuration, with the compactions that it makes due. That is the worst case for the base:
each commit touches every leaf. It prints the bytes written by kind for each byte that the encoded
chunk refs of the commits themselves take, how often leaves and how many times the whole base were
written, with the default `size-ratio` and with a larger one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import zarr

import zarr_manifests as zm
from storages import CountingStorage
from zarr_manifests import Session
from zarr_manifests.format.manifest import Delta, Manifest
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

BASE_REFS = 1_000_000
_RATIOS = (0.25, 1.0)


def point(session: Session, chunks: np.ndarray, rng: np.random.Generator) -> None:
    """Set these chunks to places in a file, of which no two are alike."""
    count = len(chunks)
    session.store.set_virtual_refs(
        "huge",
        chunks.reshape(-1, 1),
        ["file:///archive/huge.bin"],
        np.zeros(count, np.int64),
        rng.integers(0, 2**40, count),
        rng.integers(1_000, 100_000, count),
    )


def base() -> MemoryStorage:
    """A repository with an array of a million chunks in the base."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session()
    zarr.create_array(session.store, name="huge", shape=(BASE_REFS,), chunks=(1,), dtype="i8")
    point(session, np.arange(BASE_REFS), np.random.default_rng(1))
    session.commit("a million chunks")
    repository.compact(mode="full")
    return storage


def own_bytes(session: Session) -> int:
    """What the chunk refs of the last commit take, encoded."""
    objects = contents_of(session.store).context.objects
    delta = objects.load(contents_of(session.store).view.snapshot.log, Delta)
    held = [delta.embedded, *(objects.load(m.blob, Manifest) for m in delta.manifests)]
    return sum(len(data) for manifest in held for _, data in manifest.parts)


def overwrite(storage: MemoryStorage, ratio: float, commits: int, each: int) -> None:
    """Make the commits, and print what they cost."""
    rng = np.random.default_rng(2)
    counting = CountingStorage(storage)
    # What is due is compacted by hand, so that both can be counted apart.
    config = {"compaction": {"mode": "manual", "size-ratio": ratio}}
    writer = zm.open(storage, config).writable_session()
    compactor = zm.open(counting, config)
    written: Counter[str] = Counter()
    ingested, merged, start = 0, 0, time.perf_counter()
    for number in range(commits):
        point(writer, rng.choice(BASE_REFS, each, replace=False), rng)
        writer.commit(f"{number}")
        ingested += own_bytes(writer)
        unrolled = [e for e in contents_of(writer.store).view.snapshot.deltas if e.first == e.last]
        if len(unrolled) < compactor.config.compaction.max_delta_count:
            continue
        counting.reset()
        merged += compactor.compact(mode="major").refs_merged
        written += count(counting)
        writer = zm.open(storage, config).writable_session()
    seconds = time.perf_counter() - start
    factors = ", ".join(f"{kind} {n / ingested:.2f}" for kind, n in sorted(written.items()))
    print(f"size-ratio {ratio}: {commits:,} commits of {each:,} refs, {ingested:,} B of them")
    print(f"  written by compactions for each byte: {factors}")
    print(f"  the base was written {merged / BASE_REFS:.1f} times; {seconds:.0f} s")


def count(counting: CountingStorage) -> Counter[str]:
    """Bytes written, by the first part of the key."""
    found: Counter[str] = Counter()
    for record in counting.log:
        if record.op in ("create", "create_after", "cas", "put"):
            found[record.key.split("/")[0]] += record.nbytes
    return found


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    given = [int(one) for one in arguments]
    commits, each = [*given, *(600, 10_000)[len(given) :]]
    made = base()
    for ratio in _RATIOS:
        storage = MemoryStorage()
        for info in made.list():
            storage.put(info.key, made.get(info.key))
        overwrite(storage, ratio, commits, each)


if __name__ == "__main__":
    main(sys.argv[1:])
