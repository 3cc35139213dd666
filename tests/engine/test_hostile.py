"""Whole repositories forged by somebody who can compute checksums: errors of the project, or reads.

A payload is changed and put back in a sound envelope, and every pointer on the way to the root is
mended, so that no checksum is in the way. Whatever is then opened, listed, read and committed
raises the project's errors alone, with bounded memory, work and requests; and where two objects
contradict each other, what they say is not taken for data.
"""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from inside import context_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.history.by_id import snapshot_ref
from zarr_manifests.engine.history.commit_logs import deltas_between
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.chunk_table import ChunkTable, InlineRef
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.format.root import LogEntry
from zarr_manifests.ids import snapshot_key
from zarr_manifests.planning.tables.merge import Overlay, fold
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

MEMORY_BYTES = 64 << 20
STEPS_MOST = 400_000
REQUESTS_MOST = 400
WAYS = 14
KINDS = ("current", "snapshots", "nodes", "deltas", "manifests", "digests", "pages")
FILES = MemoryStorage("hostile-files")
CONTAINERS = {"files": "memory://hostile-files/in"}


# --- objects, opened and sealed ----------------------------------------------------------------


def sealed(kind: int, fields: Any) -> bytes:
    payload = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    covered = struct.pack("<BBBBQ", 1, kind, 0, 0, len(payload)) + payload
    return b"\x89ZMF\r\n\x1a\n" + struct.pack("<I", google_crc32c.value(covered)) + covered


def unsealed(data: bytes) -> tuple[int, Any]:
    """Number of the kind, and fields; packed tables are unpacked."""
    payload = zstandard.ZstdDecompressor().decompress(data[24:]) if data[14] else data[24:]
    fields = msgpack.unpackb(payload, strict_map_key=False)
    if isinstance(fields.get("tables"), list):
        fields["tables"] = [[part, msgpack.unpackb(table)] for part, table in fields["tables"]]
    return data[13], fields


def closed(fields: Any) -> Any:
    """The same with its tables packed again, as far as they still are tables."""
    if isinstance(fields, dict) and isinstance(fields.get("tables"), list):
        tables = [
            [t[0], msgpack.packb(t[1])] if isinstance(t, list) and len(t) == 2 else t
            for t in fields["tables"]
        ]
        return fields | {"tables": tables}
    return fields


def pointers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if {"k", "n", "c"} <= value.keys():
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from pointers(inner)


def with_pointers_mended(objects: dict[str, bytes], changed: str) -> dict[str, bytes]:
    """All that leads to the changed object points to it as it is now, and carries no copies."""
    found = dict(objects)
    moved: dict[str, bool] = {changed: True}

    def mend(key: str) -> bool:
        if key not in moved:
            moved[key] = False
            kind, fields = unsealed(found[key])
            for pointer in pointers(fields):
                if found.get(pointer["k"]) and mend(pointer["k"]):
                    data = found[pointer["k"]]
                    pointer["n"], pointer["c"] = len(data), int.from_bytes(data[8:12], "little")
                    moved[key] = True
            if moved[key]:
                for pointer in pointers(fields):
                    pointer.pop("b", None)
                found[key] = sealed(kind, closed(fields))
        return moved[key]

    mend("current")
    return found


class Seeded:
    """A small repository with every kind of object."""

    def __init__(self) -> None:
        for name in ("one", "two"):
            FILES.put(f"in/{name}", bytes(range(64)))
        storage = MemoryStorage()
        self._build(storage)
        self.objects = {i.key: storage.get(i.key) for i in storage.list()}
        self.snapshot_ids = [i.snapshot_id for i in zm.open(storage).ancestry()]
        self.contents = contents(open_(storage).readonly_session())

    def _build(self, storage: MemoryStorage) -> None:
        repository = zm.create(
            storage, {"compaction": {"max-delta-count": 3}}, virtual_containers=CONTAINERS
        )
        session = repository.writable_session("main")
        group = zarr.create_group(session.store)
        a = group.create_array("a", shape=(90,), chunks=(1,), dtype="u1", compressors=None)
        group.create_array("x", data=np.arange(27), chunks=(9,), dimension_names=("x",))
        group.create_array("v", shape=(64,), chunks=(4,), dtype="u1", compressors=None)
        rows = np.arange(16)
        urls = [f"memory://hostile-files/in/{name}" for name in ("one", "two")]
        crcs = [google_crc32c.value(bytes(range(4 * i, 4 * i + 4))) for i in rows]
        session.store.set_virtual_refs(
            "v", rows[:, None], urls, rows % 2, 4 * rows, rows * 0 + 4, checksums=crcs
        )
        put(session, "note.txt", b"a note")
        a[:40] = 1
        for i in range(3):
            big(session, i)
            session.commit(f"commit {i}")
        session = open_(storage).writable_session("main")
        for i in range(12):
            put(session, f"x/c/{1 + i % 2}", b"%08d" % i)
            put(session, f"extra-{i}/zarr.json", b'{"zarr_format":3,"node_type":"group"}')
            put(session, f"a/c/{i}", bytes([i]))
            if i == 5:
                big(session, i)
            session.commit(f"delta {i}")
        roots = Roots(storage, SYSTEM)
        at = roots.read()
        head = at.root.branches["main"].bare()
        roots.archive(at)
        tags = {f"t{i}-{np.random.default_rng(i).bytes(50).hex()}": head.head for i in range(120)}
        entry = LogEntry(at.root.version + 1, 1, "create tag", "main", "", b"o" * 16)
        assert roots.swap(at, replace(at.root, tags=tags).with_log(entry), b"o" * 16)

    def forged(self, key: str, change: Callable[[Any], Any]) -> MemoryStorage:
        """The repository where the payload of the object at `key` is changed."""
        kind, fields = unsealed(self.objects[key])
        fields = change(fields)
        return self.with_object(key, sealed(kind, closed(fields)))

    def with_object(self, key: str, data: bytes) -> MemoryStorage:
        storage = MemoryStorage()
        for name, held in with_pointers_mended(self.objects | {key: data}, key).items():
            storage.put(name, held)
        return storage

    def keys(self, kind: str) -> list[str]:
        """Those that the root reaches, heads first."""
        reached: dict[str, None] = {"current": None}
        due = ["current"]
        while due:
            for pointer in pointers(unsealed(self.objects[due.pop(0)])[1]):
                if pointer["k"] not in reached:
                    reached[pointer["k"]] = None
                    due.append(pointer["k"])
        return [key for key in reached if key.split("/")[0] == kind]

    def read_list(self) -> list[str]:
        """Keys of the deltas and manifests that a reader of the head reads."""
        head = self.fields(self.keys("snapshots")[0])
        base = self.fields(head["base"]["k"])
        return [
            pointer["k"]
            for part in (head["deltas"], base["manifests"])
            for pointer in pointers(part)
        ]

    def fields(self, key: str) -> Any:
        return unsealed(self.objects[key])[1]


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def big(session: Session, seed: int) -> None:
    """More small chunks than a delta embeds."""
    rng = np.random.default_rng(seed)
    for i in range(40, 80):
        put(session, f"a/c/{i}", rng.bytes(300))


def open_(storage: Any) -> Repository:
    return zm.open(storage, {"compaction": {"max-delta-count": 100}}, virtual_containers=CONTAINERS)


def contents(session: Session) -> dict[str, bytes]:
    found = {}
    for key in sorted(contents_of(session.store).keys_below("")):
        value = session.store.get_sync(key)
        assert value is not None, f"{key} is listed and reads as absent"
        found[key] = value.to_bytes()
    return found


@pytest.fixture(scope="module")
def seeded() -> Seeded:
    return Seeded()


def test_the_repository_has_every_kind_of_object(seeded: Seeded) -> None:
    assert all(seeded.keys(kind) for kind in KINDS)
    head = seeded.fields(seeded.keys("snapshots")[0])
    assert len(head["digests"]) > 0
    assert head["base"] is not None
    assert any(entry["embedded"] for entry in head["deltas"])
    assert any(entry["manifests"] for entry in head["deltas"])
    manifests = [
        table for key in seeded.keys("manifests") for _, table in seeded.fields(key)["tables"]
    ]
    assert any("virt" in table for table in manifests)
    assert seeded.with_object("current", seeded.objects["current"]).get("current")
    untouched = seeded.forged(seeded.keys("nodes")[0], lambda fields: fields)
    assert contents(open_(untouched).readonly_session()) == seeded.contents


# --- anything, anywhere ------------------------------------------------------------------------


def uses(storage: Any, seeded: Seeded) -> list[Callable[[], object]]:
    """All that people do with a repository; each on its own, for one to fail and others not."""

    def session() -> Session:
        return open_(storage).readonly_session()

    def read_all() -> None:
        held = session()
        for key in [*seeded.contents, "a/c/85", "v/c/15", "zarr.json", "absent/c/0"]:
            try:
                held.store.get_sync(key)
            except ManifestsError:
                continue

    def commit() -> None:
        held = open_(storage).writable_session("main")
        put(held, "a/c/3", b"!")
        held.store.delete_sync("a/c/4")
        held.commit("mine")
        contents(held)

    def fold() -> None:
        repository = zm.open(storage, {"compaction": {"max-delta-count": 1}})
        held = repository.writable_session("main")
        put(held, "note.txt", b"fold")
        held.commit("and fold")

    oldest, newest = seeded.snapshot_ids[-1], seeded.snapshot_ids[0]
    return [
        lambda: contents(session()),
        read_all,
        lambda: list(islice(open_(storage).ancestry(), 100)),
        lambda: contents(open_(storage).readonly_session(seeded.snapshot_ids[2])),
        lambda: open_(storage).diff(oldest, newest),
        lambda: open_(storage).du(),
        lambda: open_(storage).list_tags(),
        lambda: open_(storage).list_branches(),
        lambda: session().store.get_virtual_refs("v"),
        commit,
        lambda: open_(storage).create_branch("dev", seeded.snapshot_ids[5]),
        lambda: open_(storage).create_tag("t5-new"),
        lambda: open_(storage).revert(newest),
        fold,
    ]


class Work:
    """Counts Python calls and loops, of all threads, while it is entered."""

    def __enter__(self) -> Work:
        self.steps = self.refused = 0
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "work")
        for event in (events.PY_START, events.JUMP):
            sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, event, self._step)
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, events.PY_START | events.JUMP)
        return self

    def _step(self, *_: object) -> None:
        self.steps += 1

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)


def endure(storage: MemoryStorage, seeded: Seeded, ways: Iterable[int]) -> None:
    """Use the repository in these ways; only the project's errors may come out."""
    every = uses(counting := CountingStorage(storage), seeded)
    for use in [every[way] for way in ways]:
        counting.reset()
        tracemalloc.start()
        try:
            with Work() as work:
                try:
                    use()
                except ManifestsError:
                    work.refused += 1
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_BYTES
        assert work.steps < STEPS_MOST
        assert counting.requests < REQUESTS_MOST


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


wild = st.one_of(
    st.sampled_from(
        [None, True, 0, 1, 2, 3, 7, 40, 2**24, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -1, 1.5]
    ),
    st.sampled_from(["", "a", "main", "../../x", "a/b", "\0", "/"]),
    st.sampled_from([b"", b"n" * 12, b"{}", bytes(40), b'{"zarr_format": 3}']),
    st.sampled_from([[], {}, [None], {"x": None}, [0], [0, 2**40], [1, 1, 1], [[], []]]),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_something_replaced(kind: str, data: st.DataObject, seeded: Seeded) -> None:
    """A value by another one, or by one that lies elsewhere in an object of the same kind."""
    keys = seeded.keys(kind)
    key, other = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))
    fields, there = seeded.fields(key), seeded.fields(other)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(places(fields)[1:]))
        from_there = st.sampled_from(places(there)).map(lambda place: _at(there, place))
        fields = changed(fields, at, data.draw(wild | from_there))
        if len(places(fields)) == 1:
            break
    others = st.lists(st.integers(1, WAYS - 1), min_size=2, max_size=2, unique=True)
    endure(seeded.forged(key, lambda _: fields), seeded, [0, *data.draw(others)])


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        value = value[step]
    return value


# --- contradictions ----------------------------------------------------------------------------


def entry_with(head: Any, what: str) -> Any:
    return next(entry for entry in reversed(head["deltas"]) if entry[what])


def no_digests(seeded: Seeded) -> Seeded:
    """The same, read from its deltas alone."""
    head = seeded.keys("snapshots")[0]
    plain = Seeded.__new__(Seeded)
    storage = seeded.forged(head, lambda fields: fields | {"digests": []})
    plain.objects = {info.key: storage.get(info.key) for info in storage.list()}
    plain.snapshot_ids, plain.contents = seeded.snapshot_ids, seeded.contents
    return plain


@pytest.fixture(scope="module")
def plain(seeded: Seeded) -> Seeded:
    return no_digests(seeded)


def test_without_digests_it_reads_the_same(plain: Seeded) -> None:
    session = open_(plain.with_object("x", b"")).readonly_session()
    assert not contents_of(session.store).view.snapshot.digests
    assert contents(session) == plain.contents


def refuses(storage: MemoryStorage, use: Callable[[Repository], object] | None = None) -> None:
    repository = open_(storage)
    with pytest.raises(CorruptObjectError):
        (use or (lambda repository: contents(repository.readonly_session())))(repository)


def reads(*keys: str) -> Callable[[Repository], object]:
    return lambda repository: [repository.readonly_session().store.get_sync(key) for key in keys]


def test_a_delta_without_a_table_that_the_snapshot_says_it_has(plain: Seeded) -> None:
    """It would read as what is older, or as fill value."""
    tried = [key for key in plain.read_list() if plain.fields(key).get("tables")]
    for key in tried:
        refuses(plain.forged(key, lambda fields: fields | {"tables": []}))
    assert {key.split("/")[0] for key in tried} == {"deltas", "manifests"}


def test_tables_of_another_node(plain: Seeded) -> None:
    ids = {node[0]: node[1] for node in plain.fields(plain.keys("nodes")[0])["nodes"]}
    tried = [key for key in plain.read_list() if plain.fields(key).get("tables")]
    for key in tried:
        tables = plain.fields(key)["tables"]
        tables[0][0][0] = next(i for i in ids.values() if i != tables[0][0][0])
        refuses(plain.forged(key, lambda f, tables=tables: f | {"tables": tables}))


def test_a_snapshot_that_says_less_of_a_delta_than_is_in_it(plain: Seeded) -> None:
    head = plain.keys("snapshots")[0]
    for what, empty in (("embedded", []), ("nodes", False), ("manifests", [])):
        fields = plain.fields(head)
        entry = entry_with(fields, what)
        entry[what] = empty
        # What is not due at opening is not opened for a check.
        if what == "nodes":
            entry["coordinates"] = True
        elif not (entry["nodes"] or entry["coordinates"]):
            entry["nodes"] = True
        refuses(plain.forged(head, lambda _, fields=fields: fields))


def test_a_digest_of_other_deltas(seeded: Seeded) -> None:
    """Of as many, but others: what it says of nodes and cuts does not fit their entries."""
    head = seeded.keys("snapshots")[0]
    fields = seeded.fields(head)
    (entry,) = fields["digests"]
    entry["first"] += 1
    refuses(seeded.forged(head, lambda _: fields))
    digest = entry["blob"]["k"]
    held = seeded.fields(digest)
    ids = {node[0]: node[1] for node in seeded.fields(seeded.keys("nodes")[0])["nodes"]}
    n, covered = len(held["of"]), held["covered"]
    assert [node for node, _ in covered] == [ids["x"]]
    for change in (
        {"of": held["of"][::-1]},
        {"of": held["of"][1:], "truncated": held["truncated"][1:]},
        {"covered": [*covered, [ids["a"], None]]},  # as if no delta spoke of its chunks
        {"covered": [*covered, [ids["v"], None]], "tables": _of_node(held["tables"], ids["v"])},
        {"tables": []},
        {"tables": [[[*part[:3], 99], table] for part, table in held["tables"]]},
    ):
        storage = seeded.forged(digest, lambda fields, change=change: fields | change)
        refuses(storage, reads("zarr.json"))  # at opening
    fields = seeded.fields(head)
    first = fields["digests"][0]["first"]
    for entry in fields["deltas"][
        first : first + n
    ]:  # it tells of nodes that none of them is said to change
        entry["nodes"] = False
    refuses(seeded.forged(head, lambda _: fields))


def _of_node(tables: Any, node_id: bytes) -> Any:
    return [*tables, [[node_id, *tables[0][0][1:]], tables[0][1]]]


def test_a_delta_at_the_start_of_a_digest_is_checked_as_well(seeded: Seeded) -> None:
    """The digest is opened instead of it; a table that is not a coordinate's is still its own."""
    head = seeded.keys("snapshots")[0]
    fields = seeded.fields(head)
    entry = fields["deltas"][fields["digests"][0]["first"]]
    ids = {node[0]: node[1] for node in seeded.fields(seeded.keys("nodes")[0])["nodes"]}
    entry["embedded"] = [[*part[:3], part[3] + (part[0] == ids["a"])] for part in entry["embedded"]]
    (at,) = (part[1][0] for part in entry["embedded"] if part[0] == ids["a"])
    refuses(seeded.forged(head, lambda _: fields), reads(f"a/c/{at}"))


def test_a_digest_of_nothing(seeded: Seeded) -> None:
    head = seeded.keys("snapshots")[0]
    fields = seeded.fields(head)
    fields["digests"][0].update(first=len(fields["deltas"]), count=0)
    refuses(seeded.forged(head, lambda _: fields), reads("zarr.json"))


def test_two_leaves_for_one_chunk(plain: Seeded) -> None:
    base = plain.keys("nodes")[0]
    fields = plain.fields(base)
    fields["manifests"] = [*fields["manifests"], *fields["manifests"]]
    storage = plain.forged(base, lambda _: fields)
    refuses(storage)
    refuses(storage, reads("a/c/20"))
    table = ChunkTable.of({(1,): InlineRef(b"x")})
    with pytest.raises(CorruptObjectError, match="same chunk"):
        fold([table, table], Overlay(None, None))


def test_an_unset_row_in_a_leaf(plain: Seeded) -> None:
    base = plain.fields(plain.keys("nodes")[0])
    for key in (ref["blob"]["k"] for ref in base["manifests"]):
        fields = plain.fields(key)
        for _, table in fields["tables"]:
            index = {n: c for n, c in table["col"].items() if n == "index"}
            table["col"] = {name: [0, 0] for name in table["col"]} | index
            table.pop("inl", None)
        refuses(plain.forged(key, lambda _, fields=fields: fields), reads("a/c/20", "v/c/15"))


def test_opaque_entries_alone_begin_with_a_slash() -> None:
    for path, kind in (("x", NodeKind.OPAQUE), ("", NodeKind.OPAQUE), ("/x", NodeKind.GROUP)):
        document = {"zarr.json": b'{"zarr_format":3,"node_type":"group"}'}
        with pytest.raises(CorruptObjectError):
            Node(path, b"n" * 12, kind, document if kind is NodeKind.GROUP else {})


def test_a_delta_that_is_opened_late_is_checked_late(plain: Seeded) -> None:
    head = plain.keys("snapshots")[0]
    fields = plain.fields(head)
    entry_with(fields, "embedded").update(nodes=False, coordinates=False)
    refuses(plain.forged(head, lambda _: fields), reads("a/c/11", "x/c/2", "x/c/1"))


def test_two_nodes_of_one_id(plain: Seeded) -> None:
    base = plain.keys("nodes")[0]
    fields = plain.fields(base)
    fields["nodes"].append(["twin", *fields["nodes"][-1][1:]])
    refuses(plain.forged(base, lambda _: fields))


def test_a_log_delta_of_another_commit(plain: Seeded) -> None:
    """Or conflicts would be looked for in what another commit did."""
    head = plain.keys("snapshots")[0]
    fields = plain.fields(head)
    fields["log"] = {n: v for n, v in fields["deltas"][0]["log"].items() if n != "b"}
    storage = plain.forged(head, lambda _: fields)
    refuses(storage, lambda r: r.diff(plain.snapshot_ids[3], plain.snapshot_ids[0]))


def test_a_read_list_that_says_something_else_than_a_log(plain: Seeded) -> None:
    """As it is believed without the logs being read where boxes lie apart."""
    head = plain.keys("snapshots")[0]
    fields = plain.fields(head)
    entry_with(fields, "embedded")["embedded"][0][3] += 1
    context = context_of(open_(plain.forged(head, lambda _: fields)))
    older = context.open_view(snapshot_ref(context, plain.snapshot_ids[3]))
    newest = context.roots.read().root.branches["main"].head
    with pytest.raises(CorruptObjectError, match="does not match its entry in the snapshot"):
        deltas_between(context, older, newest)


def test_a_page_of_other_names(seeded: Seeded) -> None:
    root = seeded.fields("current")
    (page, *_) = root["pages"]["tags"]
    assert page[1]["k"] in seeded.objects
    for forged in (
        {"branches": {}, "tags": {}},
        {"branches": {"main": root["branches"]["main"]}, "tags": {}},
    ):
        storage = seeded.forged(page[1]["k"], lambda _, forged=forged: forged)
        refuses(storage, lambda r: r.list_tags())
    for blob in (root["branches"]["main"]["head"], page[1] | {"k": "pages/" + "x" * 9}):
        pages = {"tags": [[page[0], {n: blob[n] for n in "knc"}, page[2]]]}
        data = sealed(1, root | {"pages": pages})
        with pytest.raises(ManifestsError):
            open_(seeded.with_object("current", data)).list_tags()


# --- circles -----------------------------------------------------------------------------------


def naming_itself(kind: int, make: Callable[[int, int], Any]) -> bytes:
    """An object that holds a pointer to itself, checksum and all.

    `make` gets the checksum, and a number to try others with. A crc is an affine function of the
    bytes, so which checksum an object must hold to have it is a matter of linear equations.
    """
    mark = 0xFEDCBA98
    for salt in range(64):
        template = sealed(kind, make(mark, salt))
        at = template.index(struct.pack(">I", mark))

        def crc(value: int, template: bytes = template, at: int = at) -> int:
            covered = template[12:at] + struct.pack(">I", value) + template[at + 4 :]
            return int(google_crc32c.value(covered))

        constant = crc(0)
        rows = []  # one equation a bit: which bits of the value make it, and what is due
        columns = [crc(1 << i) ^ constant ^ (1 << i) for i in range(32)]
        for bit in range(32):
            left = sum(((columns[i] >> bit) & 1) << i for i in range(32))
            rows.append(left | (((constant >> bit) & 1) << 32))
        solved = _solve(rows)
        if solved is not None:
            found = template[:8] + struct.pack("<I", solved) + template[12:at]
            return found + struct.pack(">I", solved) + template[at + 4 :]
    raise AssertionError("no checksum repeats itself")


def _solve(rows: list[int]) -> int | None:
    """The 32 bits that the equations ask for, by Gauss' elimination; None if they contradict."""
    pivots: list[int] = []
    for bit in range(32):
        done = len(pivots)
        pivot = next((i for i in range(done, 32) if rows[i] >> bit & 1), None)
        if pivot is None:
            continue  # any value will do
        rows[done], rows[pivot] = rows[pivot], rows[done]
        for i in range(32):
            if i != done and rows[i] >> bit & 1:
                rows[i] ^= rows[done]
        pivots.append(bit)
    if any(rows[len(pivots) :]):
        return None
    return sum((rows[i] >> 32 & 1) << bit for i, bit in enumerate(pivots))


def test_a_snapshot_that_is_its_own_parent(seeded: Seeded) -> None:
    """With a right checksum, so that every read of it succeeds."""
    head = seeded.keys("snapshots")[0]
    fields = seeded.fields(head)
    fields["metadata"]["salt"] = 1 << 40

    def make(crc: int, salt: int) -> Any:
        length = 0
        while True:  # its own length is in it as well
            parent = {"k": head, "n": length, "c": crc}
            made = fields | {"parent": parent, "metadata": {"salt": (1 << 40) + salt}}
            if length == len(sealed(2, made)):
                return made
            length = len(sealed(2, made))

    data = naming_itself(2, make)
    storage = seeded.with_object(head, data)
    assert storage.get(head) == data
    looping = open_(storage)
    assert contents(looping.readonly_session()) == seeded.contents  # reading needs no parent
    for use in (
        lambda: list(islice(looping.ancestry(), 100)),
        lambda: looping.create_branch("dev", seeded.snapshot_ids[3]),
    ):
        with pytest.raises(CorruptObjectError, match="is its own ancestor"):
            use()


def test_a_dangling_pointer_is_named(seeded: Seeded) -> None:
    def use(storage: Any) -> None:
        open_(storage).list_tags()
        list(open_(storage).ancestry())
        contents(open_(storage).readonly_session())

    without_copies = seeded.forged(snapshot_key(seeded.snapshot_ids[-1]), lambda fields: fields)
    use(counting := CountingStorage(without_copies))
    needed = {record.key for record in counting.log} - {"current"}
    assert {key.split("/")[0] for key in needed} == {*KINDS[1:]}
    for key in needed:
        data = without_copies.get(key)
        without_copies.delete_many([key])
        with pytest.raises(CorruptObjectError, match=key):
            use(without_copies)
        without_copies.put(key, data)
