"""One snapshot, ready for queries: its nodes, and where each chunk is.

A lookup consults the live deltas, then the leaf whose box has the coordinate. A leaf has all
changes up to its merged-to sequence, so only newer deltas apply inside its box; the same holds for
the base's nodes. Everything needed is fetched in one parallel round. For the first chunk of a node
these are the deltas whose boxes contain it. With the second chunk that needs another delta, what is
left of the node comes along. So one chunk costs only the tables that concern it, and a scan two
rounds, not one per delta. A lookup of many chunks costs the tables that concern any of them. Each
table is narrowed to the chunks that are asked for before it is merged with others.

Invariants: a view never changes. What it fetches is compared once with what the snapshot says about
it, before it is used; it is kept in the objects' cache while there is room, and is the same for all
views of the snapshot.

What every part of the engine works with: one repository's storage, root, objects and runtime
---------------------------------------------------------------------------------------------

A reader takes a `ReadContext`, whose parts cannot write. A writer takes a `Context`, which is also
a `ReadContext`. Contexts are only made here, when a repository is opened or made: its storage, its
root, its configuration, its metadata.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.base_pages import BasePages, NodeIds, PagedIndex, PagedNodes, PagedPaths
from zarr_manifests.engine.create import create_repository
from zarr_manifests.engine.heartbeat import Heart
from zarr_manifests.engine.objects import (
    AtHand,
    ChunkCache,
    NotAtHandError,
    ObjectReader,
    Objects,
    Passing,
    Wanted,
)
from zarr_manifests.engine.roots import RootAt, RootReader, Roots
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkRef, ChunkTable, NativeRef, Unset, VirtualRef
from zarr_manifests.format.manifest import Base, Bundle, Count, Delta, ManifestRef, Node, Part
from zarr_manifests.format.records import BlobRef, pack
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.metrics import Meter, MeteredStorage, meter_of, metered
from zarr_manifests.planning.merge import Layer, Overlay, cut_off, fold, owned, pick, select, within
from zarr_manifests.planning.tables import (
    BaseIndex,
    LiveTable,
    LiveTables,
    PlacedLeaf,
    Stack,
    Truncation,
    rows_in,
)
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import ReadableStorage
from zarr_manifests.virtual.containers import Authorized, Containers

BUNDLES: Final = "bundles"
"""The first part of the keys of bundles."""


class Asked(NamedTuple):
    """Chunks of a node that are asked for.

    Attributes
    ----------
    narrow : callable
        Leaves only the rows of these chunks in a table.
    box : Box or None
        A box around them; None for all chunks.
    leaves : sequence of PlacedLeaf
        The leaves with any of them.
    """

    narrow: Callable[[ChunkTable], ChunkTable]
    box: Box | None
    leaves: Sequence[PlacedLeaf] = ()


class SnapshotView:
    """One snapshot, ready for queries. Thread-safe; made by `open`.

    Attributes
    ----------
    ref : BlobRef
        The pointer to the snapshot.
    snapshot : Snapshot
        The snapshot itself.
    pages : BasePages
        The base; the attributes below load the pages they need.
    nodes : PagedNodes
        All nodes by path.
    by_id : NodeIds
        All nodes by id.
    paths : PagedPaths
        The paths of all nodes by directory.
    base_sequence : int
        The sequence up to which the base has all node changes.
    opening : mapping of int to Delta
        The deltas that opening needed, by position in the read list.
    """

    def __init__(
        self,
        objects: ObjectReader,
        ref: BlobRef,
        snapshot: Snapshot,
        base: Base,
        opening: Mapping[int, Delta],
    ) -> None:
        self.ref = ref
        self.snapshot = snapshot
        self.pages = BasePages(objects, base, snapshot.base)
        self.opening = opening
        self.base_sequence = base.sequence
        self._objects = objects
        self._index: BaseIndex | None = None
        self._listed: dict[bytes, list[LiveTable]] | None = None
        self._live: dict[bytes, LiveTables] = {}  # by node, made when first asked for
        # Positions of deltas that are known to hold what this snapshot says they do.
        self._checked: set[int] = set()
        self.nodes = PagedNodes(self.pages, [delta for _, delta in self._newer()])
        ids = [node.node_id for node in self.nodes.here()] if self.nodes.changed else ()
        if len(set(ids)) != len(ids):
            raise CorruptObjectError(f"two nodes of snapshot {self.snapshot_id} have the same id")
        self.by_id = NodeIds(self.nodes)
        self.paths = PagedPaths(self.nodes)
        if not self.pages.is_inline:  # else the one index of the base, which is faster to ask
            self._index = PagedIndex(self.pages, self.by_id)
        self._fetched: set[bytes] = set()  # nodes of which tables were fetched for a chunk

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.ref.key)

    @property
    def index(self) -> BaseIndex:
        """An index of the base's leaves; made on first use, and once for each base."""
        if self._index is None:
            self._index = self.pages.page(0).index
        return self._index

    def counts_among(self, node_ids: Iterable[bytes]) -> tuple[Count, ...]:
        """The base's counts of at least these nodes; loads only their pages."""
        wanted = dict.fromkeys(node_ids)
        numbers = dict.fromkeys(map(self.by_id.page_of, wanted))
        counts = (
            count for n in numbers if n is not None for count in self.pages.page(n).base.counts
        )
        return tuple(count for count in counts if count.node_id in wanted)

    def among(self, node_ids: Iterable[bytes]) -> Iterable[Node]:
        """The nodes with these ids, as far as there are any."""
        found = (self.by_id.get(node_id) for node_id in sorted(node_ids))
        return [node for node in found if node is not None]

    def node_changes(self) -> tuple[int, int, int]:
        """How many nodes live deltas newer than the base change; their bytes and chunk tables.

        The bytes are those of their bundles, as far as they are in any.
        """
        entries = [entry for entry, delta in self._newer() if delta.nodes or delta.deleted]
        nbytes = sum({entry.at.key: entry.at.length for entry in entries}.values())
        return len(self.nodes.changed), nbytes, sum(len(entry.parts()) for entry in entries)

    def _newer(self) -> list[tuple[DeltaEntry, Delta]]:
        """The deltas that opening needed and that are newer than the base's nodes, in order."""
        deltas, base = self.snapshot.deltas, self.base_sequence
        return [(deltas[at], found) for at, found in self.opening.items() if deltas[at].last > base]

    @classmethod
    def open(
        cls,
        objects: ObjectReader,
        ref: BlobRef,
        base: BlobRef | None = None,
        ahead: Sequence[BlobRef] = (),
    ) -> SnapshotView:
        """Open the snapshot at `ref`.

        `base` is the base it is expected to read, and `ahead` other objects, if known: everything
        is fetched in one round.
        """
        first: list[Any] = [(ref, Snapshot)]
        first += [(base, Base)] if base is not None else []
        first += [(other, opening_kind(other)) for other in ahead]
        snapshot: Snapshot = objects.load_all(first)[ref.key]
        due = base if base and snapshot.base and base.key == snapshot.base.key else snapshot.base
        rest: list[Any] = [(other, opening_kind(other)) for other in snapshot.opening()]
        rest += [(due, Base)] if due is not None else []
        loaded = objects.load_all(rest)
        found = loaded[due.key] if due is not None else Base((), ())
        listed = enumerate(snapshot.deltas)
        opening = {at: entry.opened(loaded) for at, entry in listed if entry.at_open}
        return cls(objects, ref, snapshot, found, opening)

    def at_hand(self) -> SnapshotView:
        """The same view, but a fetch raises `NotAtHandError` instead."""
        return self._through(AtHand(self._objects))

    def passing(self, max_size: int, *, refs: bool = True) -> SnapshotView:
        """The same view, but of tables it decodes it keeps only the last, up to so many bytes.

        Without `refs`, it knows which chunks exist, and not where they are.
        """
        return self._through(Passing(self._objects, max_size, refs=refs))

    def _through(self, objects: ObjectReader) -> SnapshotView:
        view = copy.copy(self)
        view._objects = objects
        if isinstance(self._index, PagedIndex):
            view._index = self._index.through(objects)
        return view

    def lookup(self, node_id: bytes, coords: Coords) -> ChunkRef | None:
        """Where the chunk is; None if it is absent."""
        tables, loaded = self._reach(node_id, coords), None
        for table in tables:
            rows = self._here(table)
            if rows is None:
                if loaded is None:
                    loaded = self._fetched_for(node_id, self._due(tables))
                rows = self._table(table, loaded)
            ref = rows.get(coords)
            if isinstance(ref, Unset):
                if isinstance(table, PlacedLeaf):
                    raise CorruptObjectError(f"{table.key} is a leaf and has an unset row")
                return None
            if ref is not None:
                return ref
        return None

    def _fetched_for(self, node_id: bytes, wanted: Sequence[Wanted]) -> dict[Any, Any]:
        """What is wanted for one chunk of the node; empty if it is in memory.

        If something was fetched for another chunk before, all that live deltas have of the node
        comes along, without manifests that are read in blocks.
        """
        if all(self._objects.has(of, kind) for of, kind in wanted):
            return {}
        more: list[Wanted] = []
        if node_id in self._fetched:
            near = self._live_of(node_id).tables
            more = self._due(t for t in near if t.manifest is None or not t.manifest.places)
        self._fetched.add(node_id)
        try:
            return self._objects.load_all([*wanted, *more])
        except CorruptObjectError:  # perhaps of what this chunk does not need
            return self._objects.load_all(wanted)

    def following(
        self, node_id: bytes, coords: Coords, most: int, grid: Box, *, fetch: bool = False
    ) -> list[tuple[Coords, NativeRef | VirtualRef]] | None:
        """The refs among the next `most` chunks of the grid after this one, in C order.

        Absent and inline chunks are left out, and all of them where a table is damaged. None if it
        would take a request, unless `fetch` is set.
        """
        first = grid.ravel_one(coords) + 1
        index = np.arange(first, min(first + most, grid.size))
        if not len(index):
            return []
        view = self if fetch else self.at_hand()
        try:
            found = view.chunks_at(node_id, grid.unravel(index))
        except NotAtHandError:
            return None
        except CorruptObjectError:  # who reads a chunk that needs the table gets the error
            return []
        refs = () if found is None else found.refs()
        return [(at, ref) for at, ref in refs if isinstance(ref, NativeRef | VirtualRef)]

    def knows(self, node_id: bytes, coords: Coords) -> bool:
        """Whether `lookup` of the chunk finds everything in memory and decoded."""
        if self._index is None or node_id not in self._live:
            return False
        return all(self._here(table) is not None for table in self._reach(node_id, coords))

    def _here(self, table: LiveTable | PlacedLeaf) -> ChunkTable | None:
        """The table, if it is in memory, and compared with what the snapshot says of it."""
        if table.manifest is not None:
            return self._objects.table_here(table.manifest.blob, table.part)
        known = table.position in self.opening or table.position in self._checked
        return self._objects.table_here(table.blob, table.part) if known else None

    def _reach(self, node_id: bytes, coords: Coords) -> list[LiveTable | PlacedLeaf]:
        """What has to be searched for a chunk, in this order."""
        found = self.index.holding(node_id, coords)
        if len(found) > 1:
            one, two = (leaf.manifest.blob.key for leaf in found[:2])
            raise CorruptObjectError(
                f"{one} and {two} both say where chunk {coords} is: leaves of a base must not "
                "overlap"
            )
        return self._live_of(node_id).reach(coords, found)

    def overlay(self, node_id: bytes, after: int = 0, region: Box | None = None) -> Overlay:
        """The node's overlay of live deltas newer than `after`.

        With a region, rows outside it may be missing.
        """
        live, asked = self._live_of(node_id), Asked(lambda table: table, None)
        tables: Sequence[LiveTable] = live.tables
        if region is not None:
            asked = Asked(partial(_inside, region), region)
            tables = live.deciding(region)
        newer = [table for table in tables if table.last > after]
        loaded = self._load(newer)
        return self._overlays(node_id, newer, [asked], loaded, after=after)[0]

    def leaf(self, leaf: PlacedLeaf) -> ChunkTable:
        """The table of a leaf of the base, without overlays."""
        return self._table(leaf, {})

    def chunks(self, node_id: bytes) -> ChunkTable | None:
        """All chunks of the node that exist; None if there are none."""
        asked = Asked(lambda table: table, None, self.index.placed(node_id))
        return self._resolved(node_id, self._live_of(node_id).tables, [asked])[0]

    def chunks_at(self, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
        """Those of these chunks of the node (int64[n, ndim], n >= 1) that exist.

        Leaves without any of them are not read.
        """
        box = Box.around_coords(coords)
        near = [(leaf, leaf.part.box.holds(coords)) for leaf in self.index.placed_in(node_id, box)]
        due = [leaf for leaf, here in near if here.any()]
        covered = sum(int(here.sum()) for _, here in near) == len(coords)
        since = min(leaf.merged for leaf in due) if covered else 0
        tables = self._live_of(node_id).holding(coords, since)
        asked = Asked(lambda table: pick(table, coords), box, due)
        return self._resolved(node_id, tables, [asked])[0]

    def chunks_in(
        self, node_id: bytes, box: Box, without: Collection[Box] = ()
    ) -> ChunkTable | None:
        """The node's chunks in the box that exist, except those of leaves with a box in `without`.

        Leaves and deltas without chunks in the box are not read.
        """
        (found,) = self.chunks_in_each(node_id, [box], without)
        return rows_in(found, without, outside=True) if without else found

    def chunks_in_each(
        self, node_id: bytes, boxes: Sequence[Box], unread: Collection[Box] = ()
    ) -> list[ChunkTable | None]:
        """The node's chunks that exist in each of the boxes, fetched in one round.

        Leaves with a box in `unread` are not read; what live deltas have there may be missing.
        """
        live, asked, tables = self._live_of(node_id), list[Asked](), dict[LiveTable, None]()
        for box in boxes:
            placed = self.index.placed_in(node_id, box)
            due = [leaf for leaf in placed if leaf.part.box not in unread]
            covered = sum(leaf.part.box.shared_size(box) for leaf in placed) >= box.size
            asked.append(Asked(partial(_inside, box), box, due))
            if due or not covered:
                since = min((leaf.merged for leaf in due), default=0) if covered else 0
                new = (table for table in live.deciding(box) if table.last > since)
                tables.update(dict.fromkeys(new))
        return self._resolved(node_id, tables, asked)

    def truncations(self, position: int) -> Mapping[bytes, Coords]:
        """The truncations of the entry at that position of the read list, by node id."""
        delta = self.opening.get(position)
        return {} if delta is None else delta.truncated

    def touched(self) -> set[bytes]:
        """Ids of all nodes with chunk tables or truncations in live deltas."""
        ids = {part.node_id for entry in self.snapshot.deltas for part in entry.parts()}
        return ids.union(*(delta.truncated for delta in self.opening.values()))

    # --- tables ------------------------------------------------------------------------------

    def _overlays(
        self,
        node_id: bytes,
        tables: Collection[LiveTable],
        asked: Sequence[Asked],
        loaded: Mapping[Any, Any],
        *,
        after: int = 0,
        merged: int = 0,
    ) -> list[Overlay]:
        """What these tables say of each that is asked for, in what was loaded.

        Truncations up to the sequence `after` are left out, and rows that a leaf of the base has;
        `merged` is the greatest sequence that one of these is merged to.
        """
        wanted, stacks = set(tables), [Stack() for _ in asked]
        for step in self._live_of(node_id).in_order():
            if isinstance(step, Truncation):
                for stack in stacks if step.last > after else ():
                    stack.add(Layer(step.shape, ()))
            elif step in wanted:
                table = self._table(step, loaded)
                for one, stack in zip(asked, stacks, strict=True):
                    if one.box is None or one.box.overlaps(table.box):
                        rows = one.narrow(table)
                        if step.last <= merged:
                            old = self.index.merged_at(node_id, rows.coords())
                            rows = select(rows, old < step.last)
                        stack.add(Layer(None, (rows,)))
        self._objects.meter.add("refs_merged", sum(stack.rows for stack in stacks))
        return [stacks.pop(0).overlay() for _ in asked]  # they take memory

    def _resolved(
        self, node_id: bytes, tables: Collection[LiveTable], asked: Sequence[Asked]
    ) -> list[ChunkTable | None]:
        """The chunks that exist, of each that are asked for; `tables` may have changed them.

        Of the rows for a chunk the newest counts. A leaf is as new as what is merged into it, and
        newer truncations apply to it.
        """
        leaves = [*{id(leaf): leaf for one in asked for leaf in one.leaves}.values()]
        loaded = self._load([*tables, *leaves])
        merged = max((leaf.merged for leaf in leaves), default=0)
        overlays = self._overlays(node_id, tables, asked, loaded, merged=merged)
        cuts = self._live_of(node_id).cuts

        def rows(leaf: PlacedLeaf, one: Asked) -> ChunkTable:
            table = one.narrow(self._table(leaf, loaded))
            for cut in cuts:
                table = cut_off(table, cut.shape) if cut.last > leaf.merged else table
            return table

        return [
            fold([rows(leaf, one) for leaf in one.leaves], Overlay(None, over.table))
            for one, over in zip(asked, overlays, strict=True)
        ]

    def _load(self, tables: Iterable[LiveTable | PlacedLeaf]) -> dict[Any, Any]:
        """What has these tables; what is missing is fetched in one round."""
        return self._objects.load_all(self._due(tables))

    def _due(self, tables: Iterable[LiveTable | PlacedLeaf]) -> list[Wanted]:
        """What to load for these tables."""
        due: list[Wanted] = []
        for table in tables:
            if table.manifest is not None:
                due.append((table.manifest, table.part))
            elif table.position not in self.opening:
                due.append((table.blob, Delta))
        return due

    def live_parts(self, node_id: bytes) -> list[Part]:
        """The node's tables in live deltas."""
        return [table.part for table in self._live_of(node_id).tables]

    def _table(self, table: LiveTable | PlacedLeaf, loaded: Mapping[Any, Any]) -> ChunkTable:
        """The table itself, from what was loaded, as far as that has it."""
        if table.manifest is not None:
            return self._objects.table(table.manifest, table.part, loaded)
        found: Delta | None = self.opening.get(table.position)
        if found is None:
            found = loaded.get(table.blob.key) or self._objects.load(table.blob, Delta)
            if table.position not in self._checked:
                self.snapshot.deltas[table.position].check(found)
                self._checked.add(table.position)
        return self._objects.table_in(
            table.blob, table.part, lambda: (found.embedded.data(table.part), ())
        )

    def _live_of(self, node_id: bytes) -> LiveTables:
        """The node's tables in the read list."""
        found = self._live.get(node_id)
        if found is None:
            if self._listed is None:
                self._listed = self._list()
            deltas, opened = self.snapshot.deltas, self.opening.items()
            cuts = {
                at: Truncation(deltas[at].last, delta.truncated[node_id])
                for at, delta in opened
                if node_id in delta.truncated
            }
            new = LiveTables(self._listed.get(node_id, ()), cuts)
            found = self._live.setdefault(node_id, new)
        return found

    def _list(self) -> dict[bytes, list[LiveTable]]:
        """The tables in entries of the read list, by node."""
        found: dict[bytes, list[LiveTable]] = {}
        for position, entry in enumerate(self.snapshot.deltas):
            objects: list[tuple[BlobRef, Sequence[Part], ManifestRef | None]] = [
                (entry.log, entry.embedded, None),
                *((ref.blob, ref.parts, ref) for ref in entry.manifests),
            ]
            for blob, parts, manifest in objects:
                for part in parts:
                    table = LiveTable(position, entry.last, blob, part, manifest)
                    found.setdefault(part.node_id, []).append(table)
        return found


def _inside(box: Box, table: ChunkTable) -> ChunkTable:
    """The table's rows in the box, which do not keep the other rows in memory."""
    return owned(within(table, box))


def opening_kind(ref: BlobRef) -> type[Delta | Bundle]:
    """The type of an object that opening a snapshot needs."""
    return Bundle if ref.key.startswith(BUNDLES) else Delta


# --- context --------------------------------------------------------------------------------------


class ReadContext(Struct, frozen=True):
    """One repository, to read.

    Parameters
    ----------
    repository_id : str
        Its id.
    storage : ReadableStorage
        Its storage.
    runtime : Runtime
        Clock, randomness, threads.
    objects : ObjectReader
        Its immutable objects, cached.
    roots : RootReader
        Its root.
    config : Config
        The saved configuration, overlaid with what was given to `open`.
    containers : Containers
        The places outside the repository that virtual chunks may be read from.
    cache : CacheOptions
        What may be cached.
    chunks : ChunkCache or None
        The cache of chunks, if there is one.
    """

    repository_id: str
    storage: ReadableStorage
    runtime: Runtime
    objects: ObjectReader
    roots: RootReader
    config: Config
    containers: Containers = field(default_factory=Containers)
    cache: CacheOptions = field(default_factory=CacheOptions)
    chunks: ChunkCache | None = None

    @classmethod
    def unshared(
        cls, repository_id: str, storage: ReadableStorage, runtime: Runtime, config: Config
    ) -> ReadContext:
        """The same repository with empty caches of its own."""
        objects, roots = ObjectReader(storage, runtime), RootReader(storage, runtime)
        roots.share(objects, repository_id)
        return ReadContext(repository_id, storage, runtime, objects, roots, config)

    @property
    def meter(self) -> Meter:
        """The meter of everything this process does with the repository."""
        return self.objects.meter

    def open_view(self, head: BlobRef, base: BlobRef | None = None) -> SnapshotView:
        """Open a snapshot; `base` is the base it is expected to read, if known."""
        return SnapshotView.open(self.objects, head, base)

    def open_branch(self, tip: Branch) -> SnapshotView:
        """Open a branch's head, fetching everything that the branch names in one round."""
        return SnapshotView.open(self.objects, tip.head, tip.base, tip.ahead)


class Context(ReadContext, frozen=True):
    """One repository, to read and write.

    Parameters
    ----------
    storage : Storage
        Its storage.
    objects : Objects
        Its immutable objects, cached; it also writes new ones.
    roots : Roots
        Its root, to read and swap.
    heart : Heart
        The leases that this process holds.
    """

    storage: Storage
    objects: Objects
    roots: Roots
    heart: Heart = field(default_factory=Heart)

    @classmethod
    def of(
        cls,
        repository_id: str,
        storage: Storage,
        runtime: Runtime,
        roots: Roots,
        config: Config,
        containers: Containers,
        cache: CacheOptions,
    ) -> Context:
        """The repository, with one cache for all that is read of it."""
        objects = Objects(storage, runtime, cache)
        roots.share(objects, repository_id)
        chunks = ChunkCache(cache, runtime, meter_of(storage)) if cache.chunk_bytes else None
        where = repository_id, storage, runtime, objects, roots
        return cls(*where, config, containers, cache, chunks=chunks)

    def unshared_by(self, runtime: Runtime, options: CacheOptions) -> Context:
        """The same repository, sharing neither threads nor caches with others."""
        objects, roots = Objects(self.storage, runtime, options), Roots(self.storage, runtime)
        return replace(self, runtime=runtime, objects=objects, roots=roots, cache=options)


# --- opening and making ------------------------------------------------------------------------

type GivenConfig = Config | Mapping[str, Any] | None
type Cache = CacheOptions | Mapping[str, Any] | None

_ATTEMPTS: Final = 100
_MOST_BYTES: Final = 16 * 1024
"""What the metadata of a repository take at most."""


def create_at(
    storage: Storage,
    config: GivenConfig,
    containers: Containers,
    cache: Cache,
    runtime: Runtime,
    branch: str,
    authorize: Authorized = (),
) -> tuple[Context, RootAt]:
    """Make a repository with one empty snapshot on `branch`; it is open then."""
    storage = _counted(storage)
    saved = _overlaid(None, config)
    options = CacheOptions.of(cache, saved.cache)
    containers = containers.with_saved(saved.virtual_containers, authorize)
    at = create_repository(storage, runtime, Objects(storage, runtime), saved, branch)
    roots = Roots(storage, runtime)
    where = at.root.repository_id, storage, runtime, roots, saved, containers, options
    return Context.of(*where), at


def open_at(
    storage: Storage,
    config: GivenConfig,
    containers: Containers,
    cache: Cache,
    runtime: Runtime,
    *,
    authorize: Authorized = (),
) -> tuple[Context, RootAt]:
    """The repository in that storage, and its root as it is now.

    `authorize` names the saved containers whose files may be read.
    """
    CacheOptions.of(cache)  # faults of an argument are said before anything is read
    storage = _counted(storage)
    roots = Roots(storage, runtime)
    at = roots.read()
    used = _overlaid(at.root.config, config)
    options = CacheOptions.of(cache, used.cache)
    containers = containers.with_saved(used.virtual_containers, authorize)
    where = at.root.repository_id, storage, runtime, roots, used, containers, options
    return Context.of(*where), at


def save_config(context: Context, config: GivenConfig) -> tuple[Context, Config]:
    """The context with that configuration, and what is saved in the repository now.

    What is in use may differ from what is saved: both get the change, or none.
    """
    given = context.config if config is None else config
    used = _overlaid(context.config, given)

    def change(root: Root) -> Root:
        return replace(root, config=_overlaid(root.config, given))

    at = context.roots.update(change, "save config", "", "", _ATTEMPTS)
    return replace(context, config=used), at.root.config


def _overlaid(saved: Config | None, overlay: GivenConfig) -> Config:
    if isinstance(overlay, Config):
        return overlay
    if overlay is None:
        return Config() if saved is None else saved
    return Config.from_dict(overlay) if saved is None else saved.overlaid(overlay)


def _counted(storage: Storage) -> MeteredStorage:
    return storage if isinstance(storage, MeteredStorage) else metered(storage, Meter())


def metadata_of(root: Root) -> dict[str, Any]:
    """The metadata; changing what is returned changes nothing else."""
    return copy.deepcopy(dict(root.metadata))


def set_metadata(roots: Roots, metadata: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Swap in a root with that metadata, over what there is if it is to be kept; all of it.

    Raises
    ------
    InvalidArgumentError
        If it becomes too large; every commit writes it.
    """

    def change(root: Root) -> Root:
        new = {**root.metadata, **metadata} if keep else {**metadata}
        size = len(pack(new))
        if size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"the metadata of the repository would take {size:,} bytes, and {_MOST_BYTES:,} "
                "are allowed, since every commit writes it; store the rest as attributes of the "
                "root group"
            )
        return replace(root, metadata=new)

    return metadata_of(roots.update(change, "set metadata", "", "", _ATTEMPTS).root)
