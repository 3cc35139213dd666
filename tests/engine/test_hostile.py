"""Whole repositories forged by somebody who can compute checksums: errors of the project, or reads.

A payload is changed and put back in a sound envelope, and every pointer on the way to the root is
mended, so that no checksum is in the way. Whatever is then opened, listed, read and committed
raises the project's errors alone, with bounded memory and requests; and where two objects
contradict each other, what they say is not taken for data.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import zarr_manifests as zm
from effort import examples
from inside import change_root
from storages import CountingStorage
from stored import contents, put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.storage.memory import MemoryStorage

MEMORY_BYTES = 64 << 20
REQUESTS_MOST = 400
KINDS = ("current", "snapshots", "nodes", "deltas", "manifests", "bundles", "pages")
FILES = MemoryStorage("hostile-files")
CONTAINERS = {"files": "memory://hostile-files/in"}


def sealed(kind: int, fields: Any) -> bytes:
    payload = msgpack.packb(fields)
    covered = struct.pack("<BBBBQ", 4, kind, 0, 0, len(payload)) + payload
    return b"\x89ZMF\r\n\x1a\n" + struct.pack("<I", google_crc32c.value(covered)) + covered


def unsealed(data: bytes) -> tuple[int, Any]:
    """Number of the kind, and fields; packed tables are unpacked."""
    payload = zstandard.ZstdDecompressor().decompress(data[24:]) if data[14] else data[24:]
    fields = msgpack.unpackb(payload, strict_map_key=False)
    if isinstance(tables := fields.get("tables"), dict) and tables:
        tables["parts"] = [[part, msgpack.unpackb(table)] for part, table in tables["parts"]]
    return data[13], fields


def closed(fields: Any) -> Any:
    """The same with its tables packed again, as far as they still are tables."""
    tables = fields.get("tables") if isinstance(fields, dict) else None
    if not isinstance(tables, dict) or not isinstance(tables.get("parts"), list):
        return fields
    parts = [
        [t[0], msgpack.packb(t[1])] if isinstance(t, list) and len(t) == 2 else t
        for t in tables["parts"]
    ]
    return fields | {"tables": tables | {"parts": parts}}


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
        FILES.put("in/one", bytes(range(64)))
        rows, urls = np.arange(16), ["memory://hostile-files/in/one"]
        crcs = [google_crc32c.value(bytes(range(4 * i, 4 * i + 4))) for i in rows]
        session.store.set_virtual_refs(
            "v", rows[:, None], urls, rows * 0, 4 * rows, rows * 0 + 4, checksums=crcs
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
        rng = np.random.default_rng(1)
        names = [f"t{i}-{rng.bytes(50).hex()}" for i in range(120)]

        def tag(root: Any) -> Any:
            return replace(root, tags=dict.fromkeys(names, root.branches["main"].bare().head))

        change_root(open_(storage), "create tag", tag)

    def forged(self, key: str, change: Callable[[Any], Any]) -> MemoryStorage:
        """The repository where the payload of the object at `key` is changed."""
        kind, fields = unsealed(self.objects[key])
        objects = self.objects | {key: sealed(kind, closed(change(fields)))}
        storage = MemoryStorage()
        for name, held in with_pointers_mended(objects, key).items():
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

    def fields(self, key: str) -> Any:
        return unsealed(self.objects[key])[1]


def big(session: Session, seed: int) -> None:
    """More small chunks than a delta embeds."""
    rng = np.random.default_rng(seed)
    for i in range(40, 80):
        put(session, f"a/c/{i}", rng.bytes(300))


def open_(storage: Any) -> Repository:
    return zm.open(storage, {"compaction": {"max-delta-count": 100}}, virtual_containers=CONTAINERS)


@pytest.fixture(scope="module")
def seeded() -> Seeded:
    return Seeded()


# --- anything, anywhere ------------------------------------------------------------------------


def uses(storage: Any, seeded: Seeded) -> list[Callable[[], object]]:
    """All that people do with a repository; each on its own, for one to fail and others not."""

    def session() -> Session:
        return open_(storage).readonly_session()

    def read_all() -> None:
        held = session()
        for key in [*seeded.contents, "a/c/85", "v/c/15", "zarr.json", "absent/c/0"]:
            with suppress(ManifestsError):
                held.store.get_sync(key)

    def commit() -> None:
        held = open_(storage).writable_session("main")
        put(held, "a/c/3", b"!")
        held.store.delete_sync("a/c/4")
        held.commit("mine")
        contents(held)

    oldest, newest = seeded.snapshot_ids[-1], seeded.snapshot_ids[0]
    return [
        lambda: contents(session()),
        read_all,
        lambda: list(islice(open_(storage).ancestry(), 100)),
        lambda: contents(open_(storage).readonly_session(seeded.snapshot_ids[2])),
        lambda: open_(storage).diff(oldest, newest),
        lambda: open_(storage).du(),
        lambda: open_(storage).list_tags(),
        lambda: session().store.get_virtual_refs("v"),
        commit,
        lambda: open_(storage).create_branch("dev", seeded.snapshot_ids[5]),
        lambda: open_(storage).revert(newest),
        lambda: open_(storage).compact(),
    ]


def endure(storage: MemoryStorage, seeded: Seeded, data: st.DataObject) -> None:
    """Use the repository in some ways; only the project's errors may come out."""
    read_all, *others = uses(counting := CountingStorage(storage), seeded)
    drawn = st.lists(st.sampled_from(others), min_size=2, max_size=2, unique=True)
    for use in [read_all, *data.draw(drawn)]:
        counting.reset()
        tracemalloc.start()
        try:
            with suppress(ManifestsError):
                use()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_BYTES
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


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_something_replaced(kind: str, data: st.DataObject, seeded: Seeded) -> None:
    """A value by another one, or by one that lies elsewhere in an object of the same kind."""
    keys = seeded.keys(kind)
    key, other = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))
    fields, there = seeded.fields(key), seeded.fields(other)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(places(fields)[1:]))
        from_there = st.sampled_from(places(there)).map(lambda place: reduce(getitem, place, there))
        fields = changed(fields, at, data.draw(wild | from_there))
        if len(places(fields)) == 1:
            break
    endure(seeded.forged(key, lambda _: fields), seeded, data)


# --- contradictions ----------------------------------------------------------------------------


def unbundled(fields: Any) -> Any:
    deltas = [{n: v for n, v in entry.items() if n != "bundle"} for entry in fields["deltas"]]
    return fields | {"deltas": deltas}


@pytest.fixture(scope="module")
def plain(seeded: Seeded) -> Seeded:
    """The same, read from its deltas alone."""
    head = seeded.keys("snapshots")[0]
    plain = copy(seeded)
    storage = seeded.forged(head, unbundled)
    plain.objects = {info.key: storage.get(info.key) for info in storage.list()}
    return plain


def no_tables(fields: Any) -> Any:
    """What was written would read as what is older, or as fill value."""
    return fields | {"tables": {}, "blocks": []}


def two_leaves(fields: Any) -> Any:
    return fields | {"manifests": [*fields["manifests"], *fields["manifests"]]}


def two_nodes(fields: Any) -> Any:
    nodes = fields.get("nodes", [])
    return fields | {"nodes": [*nodes, *(["twin", *node[1:]] for node in nodes[-1:])]}


def of_others(fields: Any) -> Any:
    """What a bundle says of nodes and cuts does not fit the entries of its deltas."""
    held = fields["deltas"]
    return {"deltas": dict(zip(held, [*held.values()][::-1], strict=True))}


def without_tables(fields: Any) -> Any:
    return {"deltas": {key: no_tables(delta) for key, delta in fields["deltas"].items()}}


def without_deltas(fields: Any) -> Any:
    return fields | {"deltas": {}}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("deltas", no_tables),
        ("deltas", two_nodes),
        ("manifests", no_tables),
        ("bundles", without_tables),
        ("bundles", without_deltas),
        ("bundles", of_others),
        ("nodes", two_leaves),
        ("nodes", two_nodes),
    ],
)
def test_objects_that_contradict_each_other_are_refused(
    kind: str, change: Callable[[Any], Any], seeded: Seeded, plain: Seeded
) -> None:
    whole = seeded if kind == "bundles" else plain
    key = next(key for key in whole.keys(kind) if change(whole.fields(key)) != whole.fields(key))
    repository = open_(whole.forged(key, change))
    with pytest.raises(CorruptObjectError):
        contents(repository.readonly_session())


def test_a_log_delta_of_another_commit_is_refused(plain: Seeded) -> None:
    """Or conflicts would be looked for in what another commit did."""
    head = plain.keys("snapshots")[0]
    first = plain.fields(head)["deltas"][0]["log"]
    other = {name: value for name, value in first.items() if name != "b"}
    repository = open_(plain.forged(head, lambda fields: fields | {"log": other}))
    with pytest.raises(CorruptObjectError):
        repository.diff(plain.snapshot_ids[3], plain.snapshot_ids[0])


def test_a_page_of_other_names_is_refused(seeded: Seeded) -> None:
    root = seeded.fields("current")
    (page, *_) = root["pages"]
    for branches in ({}, {"main": root["branches"]["main"]}):
        names = {"branches": branches, "tags": {}}
        storage = seeded.forged(page[1]["k"], lambda _, names=names: names)
        with pytest.raises(CorruptObjectError):
            open_(storage).list_tags()
