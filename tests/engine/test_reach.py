"""What collection and verification reach is all there is to reach.

Told twice: by the engine, which knows each kind of object, and here by walking through the fields
of whatever the format's decoders give, without knowing what they are. So a new kind of pointer that
the engine does not follow is found, and one that is not in the repository here is missed, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
import zarr_manifests.format
from inside import change_root, context_of, root_of, short_pages
from zarr_manifests import Repository
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.engine.history.leases import take
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.engine.upkeep.collect import _mark
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.envelope import ObjectKind
from zarr_manifests.format.history_pages import History, HistoryPage, HistoryPageRef
from zarr_manifests.format.index import Bitmaps, IndexDirectory
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.marks import MarksPage
from zarr_manifests.format.nodes import Base
from zarr_manifests.format.pages import Page
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.format.zone_maps import ZonePages, Zones
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.planning.layout import node_pages
from zarr_manifests.planning.layout.node_pages import PageLimits
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.measure import measure
from zarr_manifests.repository import build_index
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, in_order

NOW = timedelta(0)
KINDS = {
    ObjectKind.ROOT: Root,
    ObjectKind.SNAPSHOT: Snapshot,
    ObjectKind.BASE: Base,
    ObjectKind.DELTA: Delta,
    ObjectKind.MANIFEST: Manifest,
    ObjectKind.PAGE: Page,
    ObjectKind.DIGEST: Digest,
    ObjectKind.MARKS: MarksPage,
    ObjectKind.HISTORY: HistoryPage,
}
INDEXES = IndexDirectory, Bitmaps, Zones, ZonePages
KIND_AT = 13
"""Where an object's kind is in its first bytes."""
# Nothing of what has expired need be there; an object of an unknown kind of index is not opened.
NOT_FOLLOWED = {
    ("PendingDeletion", "newest"),
    ("IndexDirectory", "others"),
    ("HistoryPage", "newest"),
    ("HistoryPageRef", "newest"),
}


# --- a repository with every kind of pointer -----------------------------------------------------


def numbers(seed: int, count: int) -> str:
    return "".join(sha256(f"{seed} {i}".encode()).hexdigest() for i in range(count))


def commit(repository: Repository, seed: int, branch: str = "main") -> None:
    """Attributes, native chunks with zone maps, a coordinate, and many virtual refs."""
    with repository.transaction(branch, message=f"change {seed}") as store:
        zarr.open_group(store).attrs[f"long {seed % 3}"] = numbers(seed, 60)
        zarr.open_array(store, path="a")[:] = seed
        meaning = Meaning.of(contents_of(store).array_at("a").documents)
        bounds = measure(np.full(8, seed), (4,), meaning.fill, meaning.missing)
        record_zones(workspace_of(store), "a", Box((0,), (2,)), meaning.digest, bounds)
        zarr.open_array(store, path="x")[:] = np.arange(8) + seed
        lengths = np.random.default_rng(seed).integers(1, 2**40, 2_000)
        store.set_virtual_refs(
            "v", np.arange(2_000)[:, None], ["memory://elsewhere/v"], np.zeros(2_000, int),
            lengths, lengths % 97 + 1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def everything() -> MemoryStorage:
    with short_pages():
        return make_everything()


def make_everything() -> MemoryStorage:
    storage = MemoryStorage()
    config = {
        "inline-chunk-bytes": 0,
        "pack-chunk-bytes": 16,
        "compaction": {"mode": "manual", "fan-in": 2},
    }
    repository = zm.create(storage, config, runtime=in_order())
    with repository.transaction(message="make") as store:
        root = zarr.create_group(store)
        root.create_array("a", shape=(8,), chunks=(4,), dtype="i8", compressors=None)
        root.create_array("x", data=np.arange(8), chunks=(2,), dimension_names=["x"])
        root.create_array("v", shape=(2_000,), chunks=(1,), dtype="i1", compressors=None)
    for seed in range(3):
        commit(repository, seed)
    add_marks(repository, storage)
    repository.compact()
    build_index(repository)
    for seed in range(3, 6):
        commit(repository, seed)
    repository.compact(mode="minor")
    for seed in range(6, 15):
        commit(repository, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_pages, "LIMITS", PageLimits(inline=0, nodes=2))
        repository.compact()  # no read list names the log of this one
    commit(repository, 15)
    repository.create_branch("side", [info.snapshot_id for info in repository.ancestry()][3])
    for seed in range(3):
        commit(repository, 20 + seed, "side")
    repository.expire_snapshots(keep_last=9)
    head = repository.list_branches()["main"]
    take(context_of(repository), head, 60_000, "a lease on what a branch has")
    take(context_of(repository), repository.list_branches()["side"], 60_000, "on what none has")
    repository.delete_branch("side")
    add_pages(repository, storage)
    add_index(repository, storage)
    repository.garbage_collect(NOW)
    repository.expire_snapshots(keep_last=3)
    repository.create_tag("in-the-root", head)
    return storage


def add_marks(repository: Repository, storage: MemoryStorage) -> None:
    """A page of marks, which later commits inherit."""
    head = root_of(storage).branches["main"].head
    snapshot = Snapshot.from_object(storage.get(head.key), head)
    keys = workspace_of(repository.writable_session().store).keys
    data = MarksPage({"app": 1}).encode()
    page = BlobRef.to(keys.next("pages"), data)
    storage.put(page.key, data)
    key = keys.next("snapshots")
    marked = replace(snapshot, snapshot_id=snapshot_id_of(key), marks_page=page).encode()
    storage.put(key, marked)
    moved = BlobRef.to(key, marked)
    change_root(
        repository,
        "commit append",
        lambda now: replace(
            now, branches=now.branches | {"main": replace(now.branches["main"], head=moved)}
        ),
        snapshot_id_of(key),
    )


def add_pages(repository: Repository, storage: MemoryStorage) -> None:
    """Branches, tags and leases that lie in pages, one of each with a snapshot of its own."""
    fifth = [info.snapshot_id for info in repository.ancestry()][5]
    for name in ("own-branch", "tagged"):
        repository.create_branch(name, fifth)
        with repository.transaction(name, message="what a page alone leads to") as store:
            zarr.open_array(store, path="a")[:] = len(name)
    repository.create_tag("own-tag", repository.list_branches()["tagged"])
    repository.delete_branch("tagged")
    root = root_of(storage)
    main, lease = root.branches["main"].bare(), root.leases[0]
    names = [sha256(bytes([i % 256, i // 256])) for i in range(700)]
    change_root(
        repository,
        "create tag",
        lambda now: replace(
            now,
            branches=now.branches | {f"b-{name.hexdigest()}": main for name in names[:350]},
            tags=now.tags | {f"t-{name.hexdigest()}": main.head for name in names[:350]},
            leases=(
                *now.leases,
                *(replace(lease, lease_id=name.digest()[:16]) for name in names),
            ),
        ),
    )
    assert root_of(storage).pages.keys() == {"branches", "tags", "leases"}


def add_index(repository: Repository, storage: MemoryStorage) -> None:
    """An index of a kind that is not known here."""
    branch = root_of(storage).branches["main"]
    assert branch.index is not None
    directory = IndexDirectory.from_object(storage.get(branch.index.key), branch.index)
    session = workspace_of(repository.writable_session().store).keys
    other = Bitmaps(()).encode()
    unknown = BlobRef.to(session.next("indexes"), other)
    storage.put(unknown.key, other)
    data = replace(directory, others={"zones": unknown}).encode()
    pointer = BlobRef.to(session.next("indexes"), data)
    storage.put(pointer.key, data)
    change_root(
        repository,
        "build index",
        lambda now: replace(
            now, branches=now.branches | {"main": replace(now.branches["main"], index=pointer)}
        ),
    )


# --- the walk ------------------------------------------------------------------------------------


@dataclass
class Walk:
    """All that a root leads to."""

    storage: MemoryStorage
    keys: set[str] = field(default_factory=set)
    pointers: set[tuple[str, str]] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    """Keys of the snapshots in history: a page of history is needed for the newest it covers."""

    def root(self) -> set[str]:
        root = Root.from_object(self.storage.get("current"))
        whole = Roots(self.storage, SYSTEM).whole(root)
        assert root.branches["main"].floor is not None  # so that tags have no history
        for branch in whole.branches.values():
            self.line(branch.head.key, branch.floor)
        for lease in whole.leases:
            self.line(snapshot_key(lease.snapshot), lease.snapshot)
        for ref in whole.tags.values():
            self.line(ref.key, snapshot_id_of(ref.key))
        self.look(root, frozenset())
        for key in self.live:
            self.follow(BlobRef.to(key, self.storage.get(key)))
        return self.keys

    def line(self, key: str, floor: str | None) -> None:
        """A snapshot and its parents."""
        parent: BlobRef | None = BlobRef.to(key, self.storage.get(key))
        while parent is not None:
            self.live.add(parent.key)
            snapshot = Snapshot.from_object(self.storage.get(parent.key), parent)
            parent = None if snapshot_id_of(parent.key) == floor else snapshot.parent

    def follow(self, ref: BlobRef) -> None:
        if ref.key in self.keys:
            return
        self.keys.add(ref.key)
        data = self.storage.get(ref.key)
        self.look(decoded(data, ref), frozenset({("Snapshot", "parent")}))

    def look(self, value: Any, passed: frozenset[tuple[str, str]]) -> None:
        past = {page.blob.key for page in pages_of(value) if page.newest.key not in self.live}
        for where, found in named(value):
            if isinstance(found, NativeRef):
                self.keys.add(found.key)
                continue
            self.pointers.add(where)
            if where in NOT_FOLLOWED:
                if where == ("IndexDirectory", "others"):
                    self.keys.add(found.key)
            elif where not in passed and found.key not in past:
                self.follow(found)


def pages_of(value: Any) -> tuple[HistoryPageRef, ...]:
    """The pages of history that an object names."""
    held = value.history if isinstance(value, Snapshot) else value
    return held.pages if isinstance(held, History | HistoryPage) else ()


def decoded(data: bytes, ref: BlobRef) -> Any:
    kind = ObjectKind(data[KIND_AT])
    if kind is not ObjectKind.INDEX:
        return KINDS[kind].from_object(data, ref)  # type: ignore[attr-defined]
    for cls in INDEXES:
        with suppress(CorruptObjectError):  # of another type
            return cls.from_object(data, ref)
    raise AssertionError(f"{ref.key} is of no known type")


def named(value: Any, where: tuple[str, str] = ("", "")) -> Iterator[tuple[tuple[str, str], Any]]:
    """The pointers in a value, with the class and the field that each is in, however deep."""
    if isinstance(value, BlobRef | NativeRef):
        yield where, value
    elif isinstance(value, Manifest):
        for part, data in value.parts:
            for _, ref in Manifest.decode(part, data).refs():
                yield from named(ref, where)
    elif is_dataclass(value):
        for one in fields(value):
            yield from named(getattr(value, one.name), (type(value).__name__, one.name))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from named(one, where)
    elif isinstance(value, tuple | list | set | frozenset):
        for one in value:
            yield from named(one, where)


def declared() -> set[tuple[str, str]]:
    """All fields of the format's classes that are said to hold pointers."""
    found = set()
    for module in pkgutil.iter_modules(zarr_manifests.format.__path__):
        source = importlib.import_module(f"zarr_manifests.format.{module.name}")
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            if isinstance(node, ast.ClassDef):
                found |= {
                    (node.name, one.target.id)
                    for one in node.body
                    if isinstance(one, ast.AnnAssign)
                    and isinstance(one.target, ast.Name)
                    and "BlobRef" in ast.unparse(one.annotation)
                }
    return found


# --- the same set ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_repository_has_every_pointer_that_the_format_has(everything: MemoryStorage) -> None:
    walk = Walk(everything)
    walk.root()
    in_part = {("Ancestor", "parent")}  # of a snapshot, which is said whole by another class
    assert walk.pointers == declared() - in_part
    assert {key.partition("/")[0] for key in walk.keys} == {
        *("snapshots", "nodes", "deltas", "manifests", "indexes", "pages", "chunks", "digests",
          "history"),
    }  # fmt: skip


def test_collection_marks_what_can_be_reached(everything: MemoryStorage) -> None:
    due = Walk(everything).root()
    repository = zm.open(everything, runtime=in_order())
    root = root_of(repository)
    marked = _mark(context_of(repository), root, lambda stage, done: None).marked
    assert due - marked == set()
    assert {key for key in marked - due if not key.startswith("indexes/")} == set()


def test_a_collection_leaves_what_can_be_reached_and_no_more(everything: MemoryStorage) -> None:
    storage = MemoryStorage()
    for info in everything.list():
        storage.put(info.key, everything.get(info.key))
    due = Walk(storage).root()
    report = zm.open(storage, runtime=in_order()).garbage_collect(NOW)
    assert report.objects["snapshots"] == 4
    left = {info.key for info in storage.list()}
    assert due - left == set()
    archives = [key for key in left if key.startswith("root/")]
    for key in archives:  # they have pages of their own
        pages = Root.from_object(storage.get(key)).pages.values()
        due |= {page.blob.key for refs in pages for page in refs}
    assert left - due - {"current", *archives} == {
        key
        for key in left - due
        if key.startswith("indexes/")  # an unknown kind keeps them all
    }
    assert zm.open(storage, runtime=in_order()).verify().problems == ()


@pytest.mark.slow
def test_verification_reads_all_that_can_be_reached(everything: MemoryStorage) -> None:
    due = Walk(everything).root()
    counting = CountingStorage(everything)
    assert zm.open(counting, runtime=in_order()).verify().problems == ()
    read = {record.key for record in counting.log}
    assert due - read == set()


def has_pages(storage: MemoryStorage, key: str) -> bool:
    data = storage.get(key)
    return bool(Base.from_object(data, BlobRef.to(key, data)).pages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunks", "manifests", "digests", "deltas", "nodes", "bases"])
@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped", "swapped"])
def test_verification_finds_each_of_many_damaged_objects(
    everything: MemoryStorage, kind: str, damage: str
) -> None:
    """All of a kind at once, and each is told; one by one is tried where recovery is."""
    storage = MemoryStorage()
    for info in everything.list():
        storage.put(info.key, everything.get(info.key))
    keys = Walk(storage).root()
    # Bases with pages lead to objects of the same kind, so they are damaged separately.
    bases = {key for key in keys if key.startswith("nodes/") and has_pages(storage, key)}
    assert bases
    due = sorted(key for key in keys - bases if key.startswith(f"{kind}/"))
    due = sorted(bases) if kind == "bases" else due
    held = {key: storage.get(key) for key in due}
    for key, following in zip(due, [*due[1:], due[0]], strict=True):
        data = held[key]
        storage.delete_many([key])
        damaged = {
            "truncated": data[:-1],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "swapped": held[following],
        }
        if damage != "deleted":
            storage.put(key, damaged[damage])
    changed = {key for key in due if damage != "swapped" or storage.get(key) != held[key]}
    report = zm.open(storage, runtime=in_order()).verify()
    assert len(changed) > 1 or kind == "bases"
    assert changed - {problem.key for problem in report.problems} == set()


@pytest.mark.slow
def test_verification_finds_damage_of_an_index_of_a_kind_to_come(everything: MemoryStorage) -> None:
    for key in (key for key in Walk(everything).root() if key.startswith("indexes/")):
        storage = MemoryStorage()
        for info in everything.list():
            storage.put(info.key, everything.get(info.key))
        storage.put(key, storage.get(key)[:-1])
        problems = zm.open(storage, runtime=in_order()).verify().problems
        assert [problem.key for problem in problems] == [key]
