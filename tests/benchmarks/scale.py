"""What a repository of many chunks costs: `python tests/benchmarks/scale.py [chunks ...]`.

Not collected by pytest. It makes a repository with one array of that many chunks (10^6 and 10^7, if
not said otherwise), counts the requests and bytes of each operation, and prints them with what an
object store charges. Then it plans 10^8 and 10^10 chunks: the planner says which leaves, manifests
and pages there are, and they are encoded, all but the chunk refs; what does not depend on the
number of chunks is taken from a measurement.

The operations are those of `OPERATIONS`. An object store's prices are those of `Prices`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
from folds import AT_ONCE, TILES, document, refs_of
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm
from storages import CountingStorage, Record
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.upkeep.write_leaves import encoded_base
from zarr_manifests.format.manifest import Base, Count, ManifestRef, Part
from zarr_manifests.format.records import HEADER_BYTES, BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.leaves import ArrayFacts, layout_of
from zarr_manifests.planning.packing import plan_manifests
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

SIZES: Final = (1_000_000, 10_000_000)
PLANNED: Final = (100_000_000, 10_000_000_000)
OPERATIONS: Final = {
    "open": "open the repository, and read the array's metadata",
    "lookup": "find where one chunk is, in a process that has just opened it",
    "append": f"append {TILES} chunks and commit, in a session that is open",
    "compact": "merge that append into the base",
    "rewrite": "a full compaction, which writes all chunk refs anew",
    "collect": "expire all but the last snapshot, and collect",
}
_READS: Final = ("get", "get_tagged", "head")
_FREE: Final = ("sync", "delete", "delete_many")
_LISTED: Final = 1_000
_MANIFEST_REFS: Final = 1_000_000
"""Keys in an answer to a listing."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What an object store charges, in dollars; deletions and traffic in its region are free."""

    thousand_writes: float = 0.005
    thousand_reads: float = 0.0004
    gigabyte_month: float = 0.023


@dataclass(frozen=True, slots=True)
class Cost:
    """The requests and bytes of an operation. Listings count as writes: they are charged alike."""

    reads: int
    writes: int
    bytes_read: int
    bytes_written: int

    @classmethod
    def of(cls, log: Sequence[Record]) -> Cost:
        """The cost of these calls."""
        paid = [record for record in log if record.op not in _FREE]
        reads = [record.nbytes for record in paid if record.op in _READS]
        writes = [record.nbytes for record in paid if record.op not in _READS]
        return cls(len(reads), len(writes), sum(reads), sum(writes))

    def plus(self, reads: int = 0, writes: int = 0, read: int = 0, written: int = 0) -> Cost:
        """The cost with that many more requests and bytes."""
        return Cost(
            self.reads + reads,
            self.writes + writes,
            self.bytes_read + read,
            self.bytes_written + written,
        )

    def dollars(self, prices: Prices) -> float:
        """What the requests cost."""
        return (self.reads * prices.thousand_reads + self.writes * prices.thousand_writes) / 1000


@dataclass(frozen=True, slots=True)
class Layout:
    """The objects of a compacted repository, by their sizes.

    Parameters
    ----------
    chunks : int
        Chunks of the array.
    manifests : tuple of int
        Bytes of each manifest.
    base : int
        Bytes of the base: metadata, and the directory of leaves or of pages of it.
    pages : tuple of int
        Bytes of each page of the directory of leaves.
    """

    chunks: int
    manifests: tuple[int, ...]
    base: int
    pages: tuple[int, ...]

    @property
    def passes(self) -> int:
        """How often a full compaction reads the import: twice if the cache has no room for it."""
        return 1 if sum(self.manifests) <= CacheOptions().max_size else 2

    @property
    def imported(self) -> int:
        """Manifests that a full compaction reads."""
        return self.passes * math.ceil(self.chunks / AT_ONCE)

    @property
    def nbytes(self) -> int:
        """Bytes of all these objects."""
        return sum(self.manifests) + self.base + sum(self.pages)


@dataclass(frozen=True, slots=True)
class Scale:
    """What each operation costs in a repository."""

    layout: Layout
    costs: dict[str, Cost]


def _config(manifest_refs: int) -> dict[str, Any]:
    sets = [{"default": {"max-manifest-size": manifest_refs}}]
    return {"compaction": {"mode": "manual"}, "chunk-manifests": {"sets": sets}}


def _set(session: Any, chunks: range) -> None:
    """Set the refs of these chunks, and the metadata of an array that ends with them."""
    session.store.set_sync("v/zarr.json", cpu.Buffer.from_bytes(document(chunks.stop // TILES)))
    for step, first in enumerate(chunks[::AT_ONCE]):
        rows = np.arange(first, min(first + AT_ONCE, chunks.stop))
        session.store.set_virtual_refs("v", **refs_of(rows, step))


def measure(chunks: int, manifest_refs: int = _MANIFEST_REFS) -> Scale:
    """Make a repository of that many chunks, in memory, and count what each operation asks for."""
    storage = CountingStorage(MemoryStorage())
    session = zm.create(storage, _config(manifest_refs)).writable_session()
    _set(session, range(chunks))
    session.commit("refs")
    costs: dict[str, Cost] = {}

    def count(name: str) -> None:
        costs[name] = Cost.of(storage.log)

    repository = zm.open(storage)
    storage.reset()
    repository.compact("main", "full")
    count("rewrite")
    layout = _layout(storage, chunks)

    storage.reset()
    reader = zm.open(storage).readonly_session("main")
    reader.store.get_sync("v/zarr.json", prototype=default_buffer_prototype())
    count("open")
    storage.reset()
    view = contents_of(reader.store).view
    assert view.lookup(view.nodes["v"].node_id, (chunks // TILES // 2, 3, 3)) is not None
    count("lookup")

    session = zm.open(storage).writable_session()
    storage.reset()
    _set(session, range(chunks, chunks + TILES))
    session.commit("more")
    count("append")
    repository = zm.open(storage)
    storage.reset()
    repository.compact("main", "major")
    count("compact")
    repository = zm.open(storage)
    storage.reset()
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(grace=timedelta(0))
    count("collect")
    return Scale(layout, costs)


def _layout(storage: CountingStorage, chunks: int) -> Layout:
    """The objects that the full compaction wrote, as the log has them."""
    made = [record for record in storage.log if record.op == "create"]

    def sizes(kind: str) -> list[int]:
        return [record.nbytes for record in made if record.key.startswith(f"{kind}/")]

    nodes = [record for record in made if record.key.startswith("nodes/")]
    nodes.sort(key=lambda record: int(record.key.rpartition("/")[2]))
    *pages, base = [record.nbytes for record in nodes]  # the base gets the last number
    return Layout(chunks, tuple(sizes("manifests")), base, tuple(pages))


def plan_layout(chunks: int, sample: Layout, manifest_refs: int = _MANIFEST_REFS) -> Layout:
    """Which objects a repository of that many chunks has once it is compacted.

    A chunk ref takes as many bytes as in the sample, and the sizes of manifests differ as they do
    there: that decides how well the directory is compressed.
    """
    storage = MemoryStorage()
    session = zm.create(storage, _config(manifest_refs)).writable_session()
    session.store.set_sync("v/zarr.json", cpu.Buffer.from_bytes(document(chunks // TILES)))
    session.commit("array")
    workspace = workspace_of(session.store)
    view = workspace.contents.view
    node = view.nodes["v"]
    config = workspace.context.config.chunk_manifests
    facts = ArrayFacts(node.node_id, "/v", (chunks // TILES, 10, 10), chunks)
    rows = layout_of(config, facts).cell[0]
    boxes = [
        Box((at, 0, 0), (min(at + rows, chunks // TILES), 10, 10))
        for at in range(0, chunks // TILES, rows)
    ]
    leaves = [Part(node.node_id, box, box.size) for box in boxes]
    keys = SessionKeys(1, SYSTEM)
    rng = np.random.default_rng(1)
    spread = float(np.std(sample.manifests) / np.mean(sample.manifests))
    manifests = []
    for planned in plan_manifests(config, {node.node_id: facts}, leaves):
        mean = planned.refs * sum(sample.manifests) / sample.chunks
        length = HEADER_BYTES + round(mean * rng.lognormal(-(spread**2) / 2, spread))
        blob = BlobRef(keys.next("manifests"), length, int(rng.integers(2**32)))
        n = len(planned.leaves)
        each = (length - HEADER_BYTES) // n
        places = [(HEADER_BYTES + at * each, each, int(rng.integers(2**32)), 0) for at in range(n)]
        nbytes = [int(rng.normal(45_000, 10)) * leaf.count for leaf in planned.leaves]
        manifests.append(
            ManifestRef(blob, planned.leaves, (1,) * n, "default", tuple(places), tuple(nbytes))
        )
    counts = (Count(node.node_id, chunks, chunks * 45_000),)
    whole = Base(tuple(view.nodes.values()), tuple(manifests), 1, counts)
    base, pages = encoded_base(workspace.context.objects, view, whole, keys, {})
    return Layout(
        chunks,
        tuple(ref.blob.length for ref in manifests),
        len(base.data),
        tuple(len(page.data) for page in pages),
    )


def plan(chunks: int, sample: Scale, manifest_refs: int = _MANIFEST_REFS) -> Scale:
    """What each operation costs in a repository of that many chunks, given a measured one.

    The sample has leaves that are as full. What differs from it, with `d` for a difference:

    - `open` reads a copy of the base in the root: `d(base)` bytes.
    - `lookup` reads a page of the directory if there are any, and the manifest of one leaf.
    - `append` writes the root: `d(base)` bytes.
    - `compact` reads the root twice, and all pages; it writes the root twice, the base and a page.
    - `rewrite` reads a manifest for every `AT_ONCE` refs that were imported, `imported` in all; it
      writes all objects, and the base once more in the root.
    - `collect` reads the root ten times, and all objects; it lists a thousand keys at a time.
    """
    old = sample.layout
    new = plan_layout(chunks, old, manifest_refs)
    base = new.base - old.base
    pages, all_pages = len(new.pages) - len(old.pages), sum(new.pages) - sum(old.pages)
    page = max(new.pages, default=0) - max(old.pages, default=0)
    paged = bool(new.pages) - bool(old.pages)
    refs = sum(new.manifests) - sum(old.manifests)
    imported = new.imported - old.imported
    objects = len(new.manifests) - len(old.manifests)
    listings = math.ceil(len(new.manifests) / _LISTED) - math.ceil(len(old.manifests) / _LISTED)
    of = sample.costs
    leaf = 0
    if of["lookup"].bytes_read >= max(old.manifests):  # it reads a manifest as a whole
        leaf = max(new.manifests) - max(old.manifests)
    growth = new.passes * new.chunks / (old.passes * old.chunks)
    more = round(of["rewrite"].bytes_read * (growth - 1))
    costs = {
        "open": of["open"].plus(read=base),
        "lookup": of["lookup"].plus(paged, read=page + leaf),
        "append": of["append"].plus(written=base),
        "compact": of["compact"].plus(pages, paged, 2 * base + all_pages, 3 * base + page),
        "rewrite": of["rewrite"].plus(imported, objects + pages, more, refs + 2 * base + all_pages),
        "collect": of["collect"].plus(
            objects + pages, listings, refs + 11 * base + all_pages, 3 * base
        ),
    }
    return Scale(new, costs)


def table(scales: Sequence[tuple[str, Scale]], prices: Prices) -> str:
    """The costs as a Markdown table."""
    lines = [
        "| chunks | operation | reads | writes | bytes read | bytes written | $ for 1,000 times |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, scale in scales:
        for operation in OPERATIONS:
            cost = scale.costs[operation]
            lines.append(
                f"| {name} | {operation} | {cost.reads:,} | {cost.writes:,} "
                f"| {sized(cost.bytes_read)} | {sized(cost.bytes_written)} "
                f"| {1000 * cost.dollars(prices):,.4g} |"
            )
    return "\n".join(lines)


def sized(nbytes: float) -> str:
    """A number of bytes, in the unit that suits it."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def kept(scales: Sequence[tuple[str, Scale]], prices: Prices) -> str:
    """What is stored, as a Markdown table."""
    lines = ["| chunks | manifests | bytes | base | pages | $ a month |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, scale in scales:
        of = scale.layout
        month = of.nbytes / 1e9 * prices.gigabyte_month
        lines.append(
            f"| {name} | {len(of.manifests):,} | {sized(sum(of.manifests))} | {sized(of.base)} "
            f"| {f'{len(of.pages)} of {sized(max(of.pages))}' if of.pages else '-'} "
            f"| {month:.2g} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, plan and print."""
    sizes = [int(one) for one in arguments] or SIZES
    scales = [(f"{n:,}", measure(n)) for n in sizes]
    sample = max((scale for _, scale in scales), key=lambda scale: scale.layout.chunks)
    scales += [(f"{n:,}, planned", plan(n, sample)) for n in PLANNED if n not in sizes]
    prices = Prices()
    print(table(scales, prices))
    print()
    print(kept(scales, prices))


if __name__ == "__main__":
    main(sys.argv[1:])
