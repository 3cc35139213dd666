"""Every kind of object: written and read back, damaged, and forged.

A forged object has a right checksum and a wrong payload: nothing but the project's own errors may
come out of reading it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import google_crc32c
import msgpack
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples, some_or_all
from zarr_manifests.config import Config
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
)
from zarr_manifests.format.counts import Count
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.digest import Digest
from zarr_manifests.format.envelope import MAX_MS
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.marks import MarksPage
from zarr_manifests.format.nodes import Base, LeafPage, Node, NodeKind, NodePage, path_order
from zarr_manifests.format.pages import Page
from zarr_manifests.format.root import (
    FEATURES,
    Branch,
    Lease,
    LogEntry,
    PageRef,
    PendingDeletion,
    Root,
)
from zarr_manifests.format.snapshot import DeltaEntry, DigestEntry, Snapshot
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.keys import is_inside
from zarr_manifests.planning.tables.merge import Layer, fold, merge_layers

_FUZZ = settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

GROUP = b'{"zarr_format": 3, "node_type": "group"}'
V2_GROUP = b'{"zarr_format": 2}'
V2_ARRAY = b'{"zarr_format": 2, "shape": [4], "chunks": [2]}'
ARRAY = (
    b'{"zarr_format": 3, "node_type": "array", "shape": [7, 9], "chunk_grid": {"name": "regular",'
    b' "configuration": {"chunk_shape": [2, 3]}}, "chunk_key_encoding": {"name": "default"}}'
)

WHERE = "deltas/000000000001-000000000000000000000000/0"

# --- valid values ----------------------------------------------------------------------------

node_ids = st.binary(min_size=12, max_size=12)
ids16 = st.binary(min_size=16, max_size=16)
sessions = st.builds(
    lambda start, tail: f"{start:012d}-{tail.hex()}", st.integers(0, 10**12 - 1), node_ids
)
texts = st.text(max_size=12)
keys = texts.filter(is_inside)
paths = st.just("") | keys
ref_names = st.from_regex(r"[A-Za-z0-9_]{1,6}(/[a-z.-]*[a-z-])?", fullmatch=True)
repository_ids = ids16.map(bytes.hex)
numbers = st.integers(0, 2**63 - 1)
times = st.integers(0, 253_402_300_799_999)  # to the end of the year 9999


@st.composite
def blob_refs(draw: st.DrawFn, kind: str = "deltas") -> BlobRef:
    key = f"{kind}/{draw(sessions)}/{draw(st.integers(0, 10**6))}"
    copy = draw(st.none() | st.binary(max_size=20))
    length = len(copy) if copy is not None else draw(st.integers(0, 2**40))
    return BlobRef(key, length, draw(st.integers(0, 2**32 - 1)), copy)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    lo = draw(st.lists(st.integers(0, 1000), max_size=4))
    return Box(tuple(lo), tuple(x + draw(st.integers(0, 50)) for x in lo))


parts = st.builds(Part, node_ids, boxes(), st.integers(0, 10**7))


@st.composite
def leaf_refs(draw: st.DrawFn) -> ManifestRef:
    held = tuple(draw(st.lists(parts, max_size=3)))
    merged = st.lists(numbers, min_size=len(held), max_size=len(held)).map(tuple)
    return ManifestRef(draw(blob_refs("manifests")), held, draw(st.just(()) | merged), draw(texts))


manifest_refs = leaf_refs()


def counts_from(least: int) -> st.SearchStrategy[tuple[Count, ...] | None]:
    number = st.integers(least, 2**62)
    count = st.builds(Count, node_ids, number, number, st.integers(0, 7))
    several = st.lists(count, max_size=3, unique_by=lambda count: count.node_id).map(tuple)
    return st.none() | several


stored_refs: st.SearchStrategy[StoredRef] = st.one_of(
    st.just(UNSET),
    st.builds(InlineRef, st.binary(max_size=20)),
    st.builds(
        NativeRef,
        sessions,
        st.integers(0, 10**9 - 1),
        st.integers(0, 2**45),
        st.integers(0, 2**45),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(
        VirtualRef,
        st.builds(
            VirtualSource,
            st.sampled_from(("", "era5")),
            st.sampled_from(("a.nc", "b/c.nc")),
            st.none() | st.just("etag"),
            st.none() | st.integers(0, 2**40),
            st.none() | st.integers(0, 2**40),
        ),
        st.integers(0, 2**45),
        st.integers(0, 2**45),
        st.none() | st.integers(0, 2**32 - 1),
    ),
)


@st.composite
def chunk_refs(draw: st.DrawFn, most: int = 12) -> dict[tuple[int, ...], StoredRef]:
    ndim = draw(st.integers(0, 4))
    axis = st.integers(0, 3) | st.integers(0, 2**14)
    coords = st.lists(axis, min_size=ndim, max_size=ndim).map(tuple)
    return draw(st.dictionaries(coords, stored_refs, min_size=1, max_size=most))


tables = st.builds(ChunkTable.of, chunk_refs())
manifests = st.builds(Manifest.of, st.lists(st.tuples(node_ids, tables), max_size=3))
nodes = st.one_of(
    st.builds(Node, paths, node_ids, st.just(NodeKind.GROUP), st.just({"zarr.json": GROUP})),
    st.builds(Node, paths, node_ids, st.just(NodeKind.ARRAY), st.just({"zarr.json": ARRAY})),
    st.builds(Node, keys.map("/{}".format), node_ids, st.just(NodeKind.OPAQUE), st.just({})),
    st.builds(Node, paths, node_ids, st.just(NodeKind.GROUP), st.just({".zgroup": V2_GROUP})),
    st.builds(
        Node,
        paths,
        node_ids,
        st.just(NodeKind.ARRAY),
        st.binary(max_size=20).map(lambda data: {".zarray": V2_ARRAY, ".zattrs": data}),
    ),
)
node_tuples = st.lists(nodes, max_size=4, unique_by=lambda node: node.path).map(tuple)
bases = st.builds(
    Base,
    node_tuples,
    st.lists(manifest_refs, max_size=3).map(tuple),
    st.just(2**63 - 1),
    counts_from(0),
)


@st.composite
def paged_bases(draw: st.DrawFn) -> Base:
    some = draw(st.lists(paths, min_size=2, max_size=6, unique=True).filter(lambda x: len(x) > 1))
    some = sorted(some, key=path_order)
    ends = list(zip(some[::2], some[1::2], strict=False))
    keys = draw(st.lists(blob_refs("nodes"), min_size=9, max_size=9, unique_by=lambda b: b.key))
    few, flag = st.integers(1, 1000), st.booleans()
    node_pages = tuple(
        NodePage(keys[i], first, last, draw(few), draw(numbers), draw(flag))
        for i, (first, last) in enumerate(ends)
    )
    leaf_pages = tuple(
        LeafPage(keys[8 - i], draw(node_ids), draw(few), draw(boxes()), (draw(few), 1000 + i))
        for i in range(draw(st.integers(0, 3)))
    )
    return Base((), (), 2**63 - 1, draw(st.none() | st.just(())), node_pages, leaf_pages)


deltas = st.builds(
    Delta,
    ids16,
    node_tuples,
    st.dictionaries(texts, node_ids, max_size=3),
    st.dictionaries(node_ids, st.lists(numbers, max_size=3).map(tuple), max_size=3),
    manifests,
    st.lists(manifest_refs, max_size=2).map(tuple),
)


@st.composite
def read_lists(draw: st.DrawFn) -> tuple[DeltaEntry, ...]:
    entry = st.builds(
        DeltaEntry,
        blob_refs(),
        st.just(1),
        st.just(1),
        st.booleans(),
        st.lists(parts, max_size=2).map(tuple),
        st.lists(manifest_refs, max_size=2).map(tuple),
        st.booleans(),
        counts_from(-(2**62)),
    )
    entries, last = [], 0
    for one in draw(st.lists(entry, max_size=3)):
        first = last + draw(st.integers(1, 3))
        last = first + draw(st.integers(0, 2**40))
        entries.append(replace(one, first=first, last=last))
    return tuple(entries)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
snapshot_ids = st.builds("{}-{}".format, sessions, st.integers(0, 10**6))
marks = st.dictionaries(st.text(min_size=1, max_size=12), numbers, max_size=3)
snapshots = st.builds(
    Snapshot,
    st.just(snapshot_id_of(WHERE)),
    texts,
    st.none() | blob_refs("snapshots").map(BlobRef.bare),
    ids16,
    st.sampled_from(CommitKind),
    texts,
    st.dictionaries(texts, plain, max_size=3),
    times,
    st.none() | blob_refs("nodes").map(BlobRef.bare),
    read_lists(),
    blob_refs().map(BlobRef.bare),
    st.dictionaries(texts, numbers, max_size=2),
    marks,
    st.just(()),
    st.integers(2**42, 2**63 - 1),
    st.dictionaries(texts, numbers, max_size=2),
    st.none() | blob_refs("pages").map(BlobRef.bare),
    st.none() | st.tuples(snapshot_ids, snapshot_ids),
)
configs = st.builds(Config, st.integers(0, 65_536), st.integers(1, 1_000), st.integers(1, 10_000))
branches = st.builds(
    Branch,
    blob_refs("snapshots"),
    st.none() | blob_refs("nodes"),
    numbers,
    st.none() | snapshot_ids,
    st.lists(blob_refs(), max_size=2).map(tuple),
    st.none() | blob_refs("indexes").map(BlobRef.bare),
)
log_entries = st.builds(LogEntry, numbers, times, texts, texts, texts, ids16)
leases = st.builds(Lease, ids16, sessions, sessions.map("{}-7".format), numbers, texts)
pending = st.builds(
    PendingDeletion, blob_refs("snapshots").map(BlobRef.bare), st.integers(1, 2**63 - 1)
)
page_refs = st.lists(
    st.builds(PageRef, texts, blob_refs("pages").map(BlobRef.bare), numbers),
    min_size=1,
    max_size=3,
    unique_by=lambda page: page.first,
).map(lambda pages: tuple(sorted(pages, key=lambda page: page.first)))
pages = st.builds(
    Page,
    st.dictionaries(ref_names, branches, max_size=3),
    st.dictionaries(ref_names, st.none() | blob_refs("snapshots").map(BlobRef.bare), max_size=3),
    st.lists(leases, max_size=2).map(lambda found: {lease.name: lease for lease in found}),
    st.lists(pending, max_size=2).map(tuple),
)
shapes = st.lists(numbers, max_size=3).map(tuple)


@st.composite
def digest_values(draw: st.DrawFn) -> Digest:
    held = draw(st.lists(st.tuples(node_ids, tables), max_size=3, unique_by=lambda one: one[0]))
    covered = draw(st.dictionaries(node_ids, st.none() | shapes, max_size=2))
    covered |= {node: draw(st.none() | shapes) for node, _ in held}
    cuts = draw(st.lists(st.dictionaries(node_ids, shapes, max_size=2), max_size=3))
    deleted = draw(st.dictionaries(texts, node_ids, max_size=3))
    of = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(cuts), max_size=len(cuts)))
    return Digest(draw(node_tuples), deleted, tuple(cuts), covered, Manifest.of(held), tuple(of))


roots = st.builds(
    Root,
    repository_ids,
    st.integers(1, 2**63 - 1),
    ids16,
    times,
    configs,
    st.dictionaries(ref_names, branches, max_size=3),
    st.dictionaries(ref_names, blob_refs("snapshots").map(BlobRef.bare), max_size=3),
    st.lists(texts, max_size=3).map(tuple),
    st.lists(log_entries, max_size=3).map(tuple),
    st.lists(leases, max_size=2).map(tuple),
    numbers,
    numbers,
    st.dictionaries(texts, numbers, max_size=2),
    st.dictionaries(
        st.sampled_from(("branches", "tags", "leases", "pending")), page_refs, max_size=2
    ),
    st.lists(texts, max_size=2).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
    st.lists(pending, max_size=2).map(tuple),
    numbers,
    st.dictionaries(texts, numbers, max_size=2),
    st.lists(st.sampled_from(FEATURES), unique=True).map(tuple),
    st.dictionaries(texts, plain, max_size=3),
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "root": roots,
    "snapshot": snapshots,
    "base": bases,
    "paged base": paged_bases(),
    "delta": deltas,
    "manifest": manifests,
    "page": pages,
    "digest": digest_values(),
    "marks": st.builds(MarksPage, marks),
}
KINDS = {
    "root": 1,
    "snapshot": 2,
    "base": 3,
    "paged base": 3,
    "delta": 4,
    "manifest": 5,
    "page": 7,
    "digest": 8,
    "marks": 9,
}
TYPES: dict[str, Any] = {
    "root": Root,
    "snapshot": Snapshot,
    "base": Base,
    "paged base": Base,
    "delta": Delta,
    "manifest": Manifest,
    "page": Page,
    "digest": Digest,
    "marks": MarksPage,
}

each_kind = pytest.mark.parametrize("kind", VALUES)


def read(kind: str, data: bytes, ref: BlobRef | None = None) -> Any:
    """Decode, and look at everything that is decoded later."""
    if kind == "root":
        return Root.from_object(data)
    value = TYPES[kind].from_object(data, ref or BlobRef.to(WHERE, data))
    manifest = {
        "delta": lambda: value.embedded,
        "manifest": lambda: value,
        "digest": lambda: value.tables,
    }.get(kind)
    for part, table in manifest().parts if manifest else ():
        decoded = Manifest.decode(part, table)
        dict(decoded.refs())
        decoded.row_of(part.box.lo)
        fold([decoded], merge_layers([Layer(None, (decoded, decoded))]))
    return value


# --- there and back --------------------------------------------------------------------------


@each_kind
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_round_trip(kind: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[kind])
    encoded = value.encode()
    assert read(kind, encoded) == value
    assert read(kind, encoded).encode() == encoded


EXTREMES: dict[type, tuple[Any, ...]] = {
    int: (
        *(-(2**64), -(2**62) - 1, -1, 0, 1, 2**31, 2**31 + 1, 2**32, 2**40, 2**40 + 1, MAX_MS),
        *(MAX_MS + 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    ),
    str: ("", "x", "\udc80", "\0", "\N{SNOWMAN}" * 300, WHERE, "main", "../up", "/x"),
    bytes: (b"", *(b"x" * n for n in (1, 11, 12, 16, 17))),
}


def inside(value: Any) -> dict[Any, Any]:
    """What the value is made of, by name."""
    if isinstance(value, Manifest | str | bytes):
        return {}  # chunk tables are encoded, and checked, when they are made
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return dict(value) if isinstance(value, Mapping) else {}


def places(value: Any) -> list[tuple[Any, ...]]:
    """The way to all that it is made of, however deep."""
    below = inside(value).items()
    return [(name, *way) for name, one in below for way in [(), *places(one)]]


def at(value: Any, way: tuple[Any, ...]) -> Any:
    """What is at the end of the way."""
    for name in way:
        value = inside(value)[name]
    return value


def replaced(value: Any, way: tuple[Any, ...], by: Any) -> Any:
    """The value, built anew with something else at the end of the way."""
    if not way:
        return by
    name, held = way[0], inside(value)
    new = replaced(held[name], way[1:], by)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: new})
    held[name] = new
    return tuple(held.values()) if isinstance(value, tuple) else held


@each_kind
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_what_can_be_built_and_written_can_be_read(kind: str, data: st.DataObject) -> None:
    """Whatever is wrong with it; else it would be acknowledged, and nobody could open it."""
    value = data.draw(VALUES[kind])
    ways = [way for way in places(value) if type(at(value, way)) in EXTREMES]
    if ways:
        way = data.draw(st.sampled_from(ways))
        by = data.draw(st.sampled_from(EXTREMES[type(at(value, way))]))
    try:
        changed = replaced(value, way, by) if ways else value
        encoded = changed.encode()
    except ManifestsError:
        return  # it cannot be built, or not be written
    ref = BlobRef.to(WHERE, encoded)
    if kind == "snapshot":  # its key follows from what it says
        ref = replace(ref, key=snapshot_key(changed.snapshot_id))
    assert read(kind, encoded, ref).encode() == encoded


def test_the_same_root_is_the_same_bytes_whatever_the_order() -> None:
    """Two writers that archive the same version write the same bytes."""
    tags = {name: BlobRef(WHERE.replace("deltas", "snapshots"), 3, 4) for name in "cab"}
    branches = {name: Branch(ref, None) for name, ref in tags.items()}
    root = Root("0" * 32, 1, b"w" * 16, 5, Config(), branches, tags)
    again = replace(
        root,
        branches={name: branches[name] for name in sorted(branches)},
        tags={name: tags[name] for name in sorted(tags)},
    )
    assert root.encode() == again.encode()


@pytest.mark.parametrize(
    ("kind", "documents"),
    [
        (NodeKind.GROUP, {}),
        (NodeKind.GROUP, {"zarr.json": ARRAY}),
        (NodeKind.GROUP, {".zattrs": b"{}"}),
        (NodeKind.GROUP, {".zarray": V2_ARRAY}),
        (NodeKind.GROUP, {"zarr.json": GROUP, ".zgroup": V2_GROUP}),
        (NodeKind.ARRAY, {"zarr.json": ARRAY, ".zattrs": b"{}"}),
        (NodeKind.ARRAY, {".zarray": V2_ARRAY, ".zgroup": V2_GROUP}),
        (NodeKind.ARRAY, {".zarray": ARRAY}),
        (NodeKind.OPAQUE, {".zattrs": b"{}"}),
    ],
)
def test_a_node_has_the_documents_of_one_format(
    kind: NodeKind, documents: dict[str, bytes]
) -> None:
    with pytest.raises(CorruptObjectError, match="not a node of kind"):
        Node("a", b"n" * 12, kind, documents)


# --- damaged ---------------------------------------------------------------------------------


def page_refs_of(*paths: str) -> tuple[NodePage, ...]:
    """Pointers to pages that end with these paths, two by two."""
    key = WHERE[:-1].replace("deltas", "nodes")
    refs = [BlobRef(f"{key}{i}", 30, 4) for i in range(len(paths))]
    return tuple(NodePage(refs[i], paths[i], paths[i + 1], 2, 0) for i in range(0, len(paths), 2))


def test_nodes_in_pages_are_ordered_by_parent_path() -> None:
    given_paths = ["/a", "//x", "a/x/y", "a0", "", "a/x", "a-b", "a", "/a/x", "a-b/z"]
    due = ["", "a", "a-b", "a0", "a/x", "a-b/z", "a/x/y", "/a", "//x", "/a/x"]
    assert sorted(given_paths, key=path_order) == due
    assert len(set(map(path_order, given_paths))) == len(given_paths)


@pytest.mark.parametrize(
    "paths",
    [("a", "b", "b", "c"), ("b", "a"), ("c", "d", "a", "b"), ("a", "c", "b", "d"), ("/a", "b")],
)
def test_pages_out_of_order_are_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(CorruptObjectError, match="out of order"):
        Base((), (), 4, (), page_refs_of(*paths))
    Base((), (), 4, (), page_refs_of("", "a", "a-b", "a-b", "a/x", "/a"))


def test_a_base_with_nodes_inline_and_in_pages_is_refused() -> None:
    node = Node("a", b"n" * 12, NodeKind.ARRAY, {"zarr.json": ARRAY})
    pages = page_refs_of("b", "c")
    for kind in ({"nodes": (node,)}, {"counts": (Count(b"n" * 12, 1, 2),)}):
        with pytest.raises(CorruptObjectError, match="both inline and in pages"):
            replace(Base((), (), 4, (), pages), **kind)
    with pytest.raises(CorruptObjectError, match="listed twice"):
        Base((), (), 4, (), (pages[0], replace(pages[0], first="d", last="e")))


def test_a_page_is_compared_with_its_pointer() -> None:
    def node(path: str) -> Node:
        return Node(path, path.encode().ljust(12, b"n"), NodeKind.ARRAY, {"zarr.json": ARRAY})

    page = Base((node("a"), node("a-b"), node("a/x")), (), 3, ())
    link = NodePage.to(BlobRef(WHERE, 30, 4), page, orphans=False)
    link.check(page, 3)
    wrong = [
        replace(page, nodes=page.nodes[:2]),
        replace(page, nodes=page.nodes[1:]),
        replace(page, nodes=(page.nodes[0], page.nodes[2], page.nodes[1])),
        replace(page, nodes=(page.nodes[0], node("a/y"), page.nodes[2])),
        replace(page, nodes=(), counts=None),
        replace(page, nodes=(), pages=page_refs_of("a", "a/x")),
        replace(page, sequence=4),
    ]
    for other in wrong:
        with pytest.raises(CorruptObjectError, match="not the page of nodes"):
            link.check(other, 3)

    part = Part(b"n" * 12, Box((0, 2), (3, 4)), 5)
    blob = BlobRef(WHERE.replace("deltas", "manifests"), 30, 4)
    page = Base((), (ManifestRef(blob, (part, replace(part, box=Box((3, 2), (9, 3)))), (2, 3)),), 3)
    leaves = LeafPage.to(BlobRef(WHERE, 30, 4), page)
    assert (leaves.leaves, leaves.box, leaves.merged) == (2, Box((0, 2), (9, 4)), (2, 3))
    leaves.check(page, 3)
    other_node = replace(part, node_id=b"o" * 12, box=Box((3, 2), (9, 3)))
    wrong = [
        replace(page, manifests=(ManifestRef(blob, (part,), (2,)),)),
        replace(page, manifests=(ManifestRef(blob, (part, other_node), (2, 3)),)),
        replace(page, manifests=(replace(page.manifests[0], merged=(2, 2)),)),
        replace(page, nodes=(node("a"),)),
        replace(page, manifests=()),
    ]
    for other in wrong:
        with pytest.raises(CorruptObjectError, match="not the page of leaves"):
            leaves.check(other, 3)
    with pytest.raises(CorruptObjectError, match="not the page of leaves"):
        leaves.check(page, 2)


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    """One object of each kind, with something in every field."""
    ref = BlobRef(WHERE, 30, 4, b"c" * 30)
    snapshot, nodes = (replace(ref, key=WHERE.replace("deltas", k)) for k in ("snapshots", "nodes"))
    in_pages = [replace(nodes.bare(), key=f"{nodes.key[:-1]}{i}") for i in range(3)]
    node = Node("a", b"n" * 12, NodeKind.ARRAY, {"zarr.json": ARRAY})
    refs: dict[tuple[int, ...], StoredRef] = {
        (0, 1): InlineRef(b"inline"),
        (2, 2): NativeRef("000000000001-" + "ab" * 12, 7, 100, 50, 12345),
        (3, 0): UNSET,
        (3, 1): NativeRef("000000000002-" + "cd" * 12, 8, 90, 10, 12),
        (3, 2): VirtualRef(VirtualSource("era5", "a/b.nc", '"etag"', 9, 99), 10, 20, 30),
        (4, 0): VirtualRef(VirtualSource("", "file:///c.nc"), 10, 20),
    }
    manifest = Manifest.of([(node.node_id, ChunkTable.of(refs))])
    manifest_ref = ManifestRef(ref, manifest.directory())
    delta = Delta(
        b"c" * 16, (node,), {"gone": b"g" * 12}, {b"t" * 12: (3,)}, manifest, (manifest_ref,)
    )
    entry = LogEntry(2, 3, "commit append", "main", "snapshot", b"c" * 16)
    lease = Lease(b"l" * 16, "000000000001-" + "ab" * 12, snapshot_id_of(WHERE), 99, "owner")
    values: dict[str, Any] = {
        "root": Root(
            "a" * 32,
            9,
            b"w" * 16,
            5,
            Config(),
            {
                "main": Branch(
                    snapshot,
                    nodes,
                    1,
                    f"{5:012d}-{'ab' * 12}-3",
                    (ref,),
                    replace(ref.bare(), key=WHERE.replace("deltas", "indexes")),
                )
            },
            {"tag": snapshot.bare()},
            ("gone",),
            (entry,),
            (lease,),
            4,
            2,
            {"collector": 3},
            {"branches": (PageRef("a", replace(ref.bare(), key=WHERE), 7),)},
            ("hidden",),
            ("given-up",),
            (PendingDeletion(snapshot.bare(), 3),),
            6,
            {"collections": 2},
            FEATURES,
            {"title": ["a", {"b": 1.5}]},
        ),
        "snapshot": Snapshot(
            snapshot_id_of(WHERE),
            "5e" * 16,
            snapshot,
            b"c" * 16,
            CommitKind.APPEND,
            "why it is",
            {"by": ["me", 1.5]},
            6,
            nodes,
            (replace(DeltaEntry.of(ref, delta, 5, first=2), counts=(Count(b"n" * 12, -1, 4),)),),
            ref,
            {"refs-set": 4},
            {"query": 7},
            (DigestEntry(ref, 0, 1),),
            5,
            {"chunks": 4},
            replace(ref.bare(), key=WHERE.replace("deltas", "pages")),
            (snapshot_id_of(WHERE), f"{5:012d}-{'ab' * 12}-3"),
        ),
        "base": Base((node,), (replace(manifest_ref, merged=(3,)),), 4, (Count(b"n" * 12, 1, 2),)),
        "paged base": Base(
            (),
            (),
            4,
            (),
            (
                NodePage(in_pages[0], "", "g-x", 3, 2),
                NodePage(in_pages[1], "g/x", "/o", 2, 0, orphans=True),
            ),
            (LeafPage(in_pages[2], b"n" * 12, 300, Box((0, 2), (9, 3)), (2, 4)),),
        ),
        "delta": delta,
        "manifest": manifest,
        "page": Page(
            {"dev": Branch(snapshot, nodes, ahead=(ref,))},
            {"v1": snapshot, "v0": None},
            {lease.name: lease},
            (PendingDeletion(snapshot.bare(), 3),),
        ),
        "digest": Digest(
            (node,),
            {"g": b"g" * 12},
            ({b"t" * 12: (3,)},),
            {node.node_id: (2, 2)},
            manifest,
            (12345,),
        ),
        "marks": MarksPage({"why it is": 7, **{f"app {i}": i for i in range(7)}}),
    }
    return {kind: value.encode() for kind, value in values.items()}


@each_kind
def test_every_flipped_byte_is_found(kind: str, samples: dict[str, bytes]) -> None:
    data = samples[kind]
    ref = BlobRef.to(WHERE, data)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            with pytest.raises((CorruptObjectError, UnsupportedFormatError)) as caught:
                read(kind, damaged, ref)
            assert str(caught.value).startswith("current: " if kind == "root" else f"{WHERE}: ")


@each_kind
def test_every_truncation_is_found(kind: str, samples: dict[str, bytes]) -> None:
    data = samples[kind]
    ref = BlobRef.to(WHERE, data)
    for length in range(len(data)):
        with pytest.raises(CorruptObjectError):
            read(kind, data[:length], ref)
    for longer in (data + b"\0", data + data):
        with pytest.raises(CorruptObjectError):
            read(kind, longer, ref)


@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind != "root"])
def test_the_pointer_tells_objects_of_one_kind_apart(kind: str, samples: dict[str, bytes]) -> None:
    """Even if they are of the same length."""
    payload = _payload_of(samples[kind])
    other = envelope(KINDS[kind], _same_length(payload))
    mine = envelope(KINDS[kind], payload)
    assert len(mine) == len(other)
    read(kind, other)
    with pytest.raises(CorruptObjectError, match="not the object its pointer names"):
        read(kind, other, BlobRef.to(WHERE, mine))


@each_kind
def test_an_object_of_another_kind_is_refused(kind: str, samples: dict[str, bytes]) -> None:
    for other in KINDS:
        if KINDS[other] != KINDS[kind]:
            with pytest.raises(CorruptObjectError, match=r"expected kind \w+, found kind \d"):
                read(kind, samples[other])


# --- forged ----------------------------------------------------------------------------------


def envelope(
    kind: int,
    payload: bytes,
    *,
    version: int = 1,
    codec: int = 0,
    flags: int = 0,
    nbytes: int | None = None,
) -> bytes:
    """An object with a right checksum, as the format is written down."""
    covered = struct.pack(
        "<BBBBQ", version, kind, codec, flags, len(payload) if nbytes is None else nbytes
    )
    covered += payload
    return b"\x89ZMF\r\n\x1a\n" + struct.pack("<I", google_crc32c.value(covered)) + covered


def _stored(data: bytes) -> bool:
    return data[14] == 0


def _payload_of(data: bytes) -> bytes:
    return data[24:] if _stored(data) else zstandard.ZstdDecompressor().decompress(data[24:])


def _same_length(payload: bytes) -> bytes:
    """Another valid payload of the same length."""
    swaps = ((b"why it is", b"why it be"), (b"n" * 12, b"m" * 12), (b"dev", b"dew"))
    for old, new in swaps:
        if old in payload:
            return payload.replace(old, new)
    raise AssertionError("nothing to change")


@each_kind
def test_envelopes_that_are_refused(kind: str, samples: dict[str, bytes]) -> None:
    number, payload = KINDS[kind], _payload_of(samples[kind])
    assert read(kind, envelope(number, payload)) == read(kind, samples[kind])
    packed = zstandard.ZstdCompressor().compress(payload)
    assert read(kind, envelope(number, packed, codec=1, nbytes=len(payload)))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(payload)
    for newer in (
        envelope(number, payload, version=2),
        envelope(number, b"anything", version=255, flags=3),
        envelope(number, payload, version=0),
        envelope(number, payload, flags=1),
        envelope(number, payload, flags=0x80),
        envelope(number, payload, codec=3),
        *([] if kind == "manifest" else [envelope(number, payload, codec=2)]),
    ):
        with pytest.raises(UnsupportedFormatError, match="upgrade the package"):
            read(kind, newer)
    for wrong in (
        envelope(number, payload, nbytes=len(payload) - 1),
        envelope(number, payload, nbytes=len(payload) + 1),
        envelope(number, payload, nbytes=2**63),
        envelope(number, payload[:-1]),
        envelope(number, payload + b"\0"),
        envelope(number, b""),
        envelope(number, packed, codec=1, nbytes=len(payload) + 1),
        envelope(number, packed, codec=1, nbytes=2**40),
        envelope(number, packed[:-3], codec=1, nbytes=len(payload)),
        envelope(number, payload, codec=1),
        envelope(number, unsized, codec=1, nbytes=len(payload)),
        envelope(number, bomb, codec=1, nbytes=len(payload)),
        envelope(number, b"\xdd\xff\xff\xff\xff"),  # a list of four billion
        envelope(number, b"\xc6\xff\xff\xff\xff"),
        envelope(number, b"\x91" * 100_000),
    ):
        with pytest.raises(CorruptObjectError):
            read(kind, wrong)


def test_what_only_a_newer_version_knows_is_refused(samples: dict[str, bytes]) -> None:
    fields = msgpack.unpackb(_payload_of(samples["root"]))
    for unknown in ("time-travel", "", 7, [], b"merge", None):
        listed = [*FEATURES, unknown]
        with pytest.raises(UnsupportedFormatError, match=r"needs the features \[[^,]+\],.*upgrade"):
            read("root", envelope(1, msgpack.packb(fields | {"features": listed})))
    for config in (
        fields["config"] | {"compression": 3},
        fields["config"] | {"compaction": {"max-delta-count": 0}},
        fields["config"] | {"commits": [1]},
        fields["config"] | {"commits": {"attempts": 0}},
        fields["config"] | {"compaction": None},
        fields["config"] | {"chunk-manifests": {"sets": [{"a": 5}]}},
        fields["config"] | {"chunk-manifests": {"sets": [{}] * 10_000}},
        fields["config"] | {"chunk-manifests": {"rules": [{"path": ".*"}]}},
        fields["config"] | {"chunk-manifests": {"rules": [{"target": "default", "path": "("}]}},
        fields["config"] | {"chunk-manifests": {"splitting": None}},
    ):
        with pytest.raises(UnsupportedFormatError, match="configuration is not understood"):
            read("root", envelope(1, msgpack.packb(fields | {"config": config})))


def test_features_are_looked_at_before_all_else(samples: dict[str, bytes]) -> None:
    """They may change what the rest means."""
    fields = msgpack.unpackb(_payload_of(samples["root"])) | {"features": ["time-travel"]}
    for name in fields.keys() - {"features"}:
        with pytest.raises(UnsupportedFormatError, match="time-travel"):
            read("root", envelope(1, msgpack.packb(fields | {name: -1.5})))


def test_a_kind_of_object_that_only_a_newer_version_knows_is_refused(
    samples: dict[str, bytes],
) -> None:
    for kind in VALUES:
        with pytest.raises(UnsupportedFormatError, match=r"kind 200.*upgrade the package"):
            read(kind, envelope(200, _payload_of(samples[kind])))


@each_kind
def test_a_field_that_only_a_newer_version_knows_is_passed_over(
    kind: str, samples: dict[str, bytes]
) -> None:
    """Only features may say that it matters."""
    fields = msgpack.unpackb(_payload_of(samples[kind]), strict_map_key=False)
    fields["of another time"] = [{"k": 1}, None]
    assert read(kind, envelope(KINDS[kind], msgpack.packb(fields))) == read(kind, samples[kind])


NAME = "ä" * 127  # 254 bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"marks": {NAME + "ab": 1}},
        {"marks": {"": 1}},
        {"marks": {"a": -1}},
        {"marks": {"a": 2**63}},
        {"marks": {"a": True}},
        {"marks": {"a": "1"}},
        {"marks": {7: 1}},
        {"marks": {f"app {i}": i for i in range(257)}},
        {"marks": [["a", 1]]},
        {"marks_page": {}},
        {"marks_page": {"k": "../../x", "n": 1, "c": 1}},
        {"marks_page": [WHERE, 1, 1]},
        {"merged": []},
        {"merged": [snapshot_id_of(WHERE)]},
        {"merged": [snapshot_id_of(WHERE)] * 3},
        {"merged": [snapshot_id_of(WHERE), None]},
        {"merged": [snapshot_id_of(WHERE), WHERE]},
        {"merged": {}},
    ],
    ids=lambda wrong: f"{wrong!r:.60}",
)
def test_marks_and_merges_that_are_refused(wrong: Any, samples: dict[str, bytes]) -> None:
    fields = msgpack.unpackb(_payload_of(samples["snapshot"]))
    right = {"marks": {NAME + "a": 2**63 - 1} | {f"app {i}": i for i in range(255)}}
    assert len(read("snapshot", envelope(2, msgpack.packb(fields | right))).marks) == 256
    with pytest.raises(CorruptObjectError):
        read("snapshot", envelope(2, msgpack.packb(fields | wrong)))
    if isinstance(wrong.get("marks"), dict) and len(wrong["marks"]) == 1:
        with pytest.raises(CorruptObjectError):
            read("marks", envelope(9, msgpack.packb(wrong)))


@pytest.mark.parametrize("absent", [{}, {"history": None}])
def test_a_snapshot_may_say_nothing_of_its_ancestors(
    absent: dict[str, Any], samples: dict[str, bytes]
) -> None:
    fields = msgpack.unpackb(_payload_of(samples["snapshot"]))
    fields.pop("history")
    assert read("snapshot", envelope(2, msgpack.packb(fields | absent))).history.count == 0
    with pytest.raises(CorruptObjectError, match="history: expected a map"):
        read("snapshot", envelope(2, msgpack.packb(fields | {"history": 0})))


@pytest.mark.parametrize("wrong", [1, 0, None, "yes", []])
@pytest.mark.parametrize("name", ["nodes", "coordinates"])
def test_whether_a_delta_changes_nodes_is_true_or_false(
    name: str, wrong: Any, samples: dict[str, bytes]
) -> None:
    """Taken for false, it would hide nodes."""
    fields = msgpack.unpackb(_payload_of(samples["snapshot"]))
    fields["deltas"][0][name] = wrong
    with pytest.raises(CorruptObjectError, match="expected true or false"):
        read("snapshot", envelope(2, msgpack.packb(fields)))


CLIMBING = ["..", ".", "../x", "/x", "a/../b", "a/./b", "a//b", "a/", "a/..", "a\0b"]


@pytest.mark.parametrize("name", CLIMBING)
@pytest.mark.parametrize("kind", ["base", "delta", "digest"])
@pytest.mark.parametrize("opaque", [False, True])
def test_a_path_that_leads_elsewhere_is_refused(
    samples: dict[str, bytes], kind: str, name: str, opaque: bool
) -> None:
    fields = msgpack.unpackb(_payload_of(samples[kind]))
    node = ["/new", b"o" * 12, 2, {}] if opaque else ["new", b"o" * 12, 0, {"zarr.json": GROUP}]
    fields["nodes"].append(node)
    read(kind, envelope(KINDS[kind], msgpack.packb(fields)))
    node[0] = f"/{name}" if opaque else name
    with pytest.raises(CorruptObjectError):
        read(kind, envelope(KINDS[kind], msgpack.packb(fields)))


@pytest.mark.parametrize("name", [*CLIMBING, "\x1b[2J", "$(x)", "a b", "-x", ""])
@pytest.mark.parametrize("kind", ["root", "page"])
@pytest.mark.parametrize("section", ["branches", "tags"])
def test_a_ref_that_leads_elsewhere_is_refused(
    samples: dict[str, bytes], kind: str, section: str, name: str
) -> None:
    fields = msgpack.unpackb(_payload_of(samples[kind]))
    held = fields[section]
    held["a/b"] = next(value for value in held.values() if value is not None)
    read(kind, envelope(KINDS[kind], msgpack.packb(fields)))
    held[name] = held["a/b"]
    with pytest.raises(CorruptObjectError, match="not a valid branch or tag name"):
        read(kind, envelope(KINDS[kind], msgpack.packb(fields)))


@pytest.mark.parametrize("name", ["../x", "/x", "", "a" * 31, "A" * 32, "a" * 32 + "\n"])
def test_a_repository_id_that_leads_elsewhere_is_refused(
    samples: dict[str, bytes], name: str
) -> None:
    fields = msgpack.unpackb(_payload_of(samples["root"])) | {"repository": name}
    with pytest.raises(CorruptObjectError, match="repository id"):
        read("root", envelope(KINDS["root"], msgpack.packb(fields)))


def test_a_page_with_more_marks_than_are_read_is_not_written(
    samples: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zarr_manifests.format.marks.MOST_IN_PAGE", 1)
    with pytest.raises(CorruptObjectError, match="8 marks, and at most 1 fit"):
        read("marks", samples["marks"])
    with pytest.raises(InvalidArgumentError, match="at most 1 fit"):
        MarksPage({"a": 1, "b": 2})


def test_virtual_refs_without_files_are_refused_and_not_read_as_absent(
    samples: dict[str, bytes],
) -> None:
    fields = msgpack.unpackb(_payload_of(samples["manifest"]))
    ((part, table),) = fields["tables"]
    rows = msgpack.unpackb(table)
    rows["col"]["kind"] = [0, 3]
    fields["tables"] = [[part, msgpack.packb(rows)]]
    with pytest.raises(CorruptObjectError, match="contradict"):
        read("manifest", envelope(5, msgpack.packb(fields)))


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, 2, 3, 255, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=16)
    | st.binary(min_size=12, max_size=12)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@each_kind
@_FUZZ
@given(payload=st.binary(max_size=60) | wild.map(msgpack.packb))
def test_any_payload(kind: str, payload: bytes) -> None:
    with contextlib.suppress(ManifestsError):
        read(kind, envelope(KINDS[kind], payload))


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside; packed tables are gone into as well."""
    found = [at]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += _places(inner, (*at, i))
    return found


def _changed(value: Any, at: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not at:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = _changed(copy[at[0]], at[1:], change)
    return copy


class _Tables:
    """Payloads with their packed tables unpacked, and back."""

    @staticmethod
    def open(fields: Any) -> Any:
        if isinstance(fields.get("tables"), list):
            tables = [[part, msgpack.unpackb(data)] for part, data in fields["tables"]]
            return fields | {"tables": tables}
        return fields

    @staticmethod
    def close(fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("tables"), list):
            tables = [
                [entry[0], msgpack.packb(entry[1])]
                if isinstance(entry, list) and len(entry) == 2
                else entry
                for entry in fields["tables"]
            ]
            return fields | {"tables": tables}
        return fields


@each_kind
@_FUZZ
@given(data=st.data())
def test_one_or_two_things_replaced(
    kind: str, data: st.DataObject, samples: dict[str, bytes]
) -> None:
    fields = _Tables.open(msgpack.unpackb(_payload_of(samples[kind])))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(_places(fields)))
        new = data.draw(wild)
        fields = _changed(fields, at, lambda _, new=new: new)
        if not isinstance(fields, dict):
            break
    with contextlib.suppress(ManifestsError):
        read(kind, envelope(KINDS[kind], msgpack.packb(_Tables.close(fields))))


@each_kind
def test_each_field_left_out_or_of_another_type(kind: str, samples: dict[str, bytes]) -> None:
    """Systematically, where the other test draws at random."""
    fields = _Tables.open(msgpack.unpackb(_payload_of(samples[kind])))
    found: list[tuple[Any, ManifestsError]] = []
    for at in _places(fields)[1:]:
        for new in (None, True, -1, 2**64 - 1, 1.5, "x", b"x", [], {}, [None], {"x": None}):
            changed = _Tables.close(_changed(fields, at, lambda _, new=new: new))
            try:
                read(kind, envelope(KINDS[kind], msgpack.packb(changed)))
            except ManifestsError as error:
                found.append(((at, new), error))
    assert len(found) > 50
    for what, error in found:
        assert isinstance(error, CorruptObjectError | UnsupportedFormatError), what


@each_kind
@some_or_all
def test_flips_and_truncations_with_a_right_checksum(
    kind: str, samples: dict[str, bytes], every: int
) -> None:
    """So that the decoders meet them, and not the checksum."""
    payload = _payload_of(samples[kind])
    forged = [payload[:length] for length in range(len(payload))]
    forged += [
        payload[:at] + bytes([payload[at] ^ flip]) + payload[at + 1 :]
        for at in range(len(payload))
        for flip in (0x01, 0x40, 0x80, 0xFF)
    ]
    refused = 0
    for damaged in forged[::every]:
        try:
            read(kind, envelope(KINDS[kind], damaged))
        except (CorruptObjectError, UnsupportedFormatError):
            refused += 1
    assert refused > len(payload) // every  # all that are cut short, and more


@pytest.mark.parametrize("place", ["root", "log", "snapshot"])
@pytest.mark.parametrize(
    ("ms", "sound"), [(253_402_300_799_999, True), (253_402_300_800_000, False)]
)
def test_times_beyond_the_year_9999(
    place: str, ms: int, sound: bool, samples: dict[str, bytes]
) -> None:
    kind = "snapshot" if place == "snapshot" else "root"
    fields = msgpack.unpackb(_payload_of(samples[kind]))
    if place == "log":
        fields["log"] = [[1, ms, "create", "main", "", b""]]
    else:
        fields["at_ms"] = ms
    data = envelope(KINDS[kind], msgpack.packb(fields))
    if sound:
        read(kind, data)
    else:
        with pytest.raises(CorruptObjectError, match=r"at_ms|root\.log"):
            read(kind, data)
