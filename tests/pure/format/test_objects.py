"""Every kind of object: written and read back, damaged, and forged.

A forged object has a right checksum and a wrong payload: nothing but the project's own errors may
come out of reading it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import google_crc32c
import msgpack
import pytest
import zstandard
from msgspec import Struct
from msgspec.structs import asdict, replace

from zarr_manifests.config import Config
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    VirtualRef,
    VirtualSource,
)
from zarr_manifests.format.manifest import (
    Base,
    Bundle,
    Count,
    Delta,
    LeafPage,
    Manifest,
    ManifestRef,
    Node,
    NodeKind,
    NodePage,
    decode_table,
)
from zarr_manifests.format.records import MAX_MS, BlobRef
from zarr_manifests.format.root import (
    FEATURES,
    Branch,
    Lease,
    LogEntry,
    Page,
    PageRef,
    Root,
)
from zarr_manifests.format.snapshot import CommitKind, DeltaEntry, MarksPage, Snapshot
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.planning.merge import Layer, fold, merge_layers

GROUP = b'{"zarr_format": 3, "node_type": "group"}'
ARRAY = (
    b'{"zarr_format": 3, "node_type": "array", "shape": [7, 9], "chunk_grid": {"name": "regular",'
    b' "configuration": {"chunk_shape": [2, 3]}}, "chunk_key_encoding": {"name": "default"}}'
)
WHERE = "deltas/000000000001-000000000000000000000000/0"
OTHER_SNAPSHOT = f"{5:012d}-{'ab' * 12}-3"
NUMBERS: dict[type, int] = {
    Root: 1,
    Snapshot: 2,
    Base: 3,
    Delta: 4,
    Manifest: 5,
    Page: 7,
    Bundle: 8,
    MarksPage: 9,
}


def placed(kind: str, data: bytes | None = b"c" * 30, number: int = 0) -> BlobRef:
    """A pointer to an object of that kind, with a copy of it if there are data."""
    return BlobRef(f"{WHERE[:-1].replace('deltas', kind)}{number}", 30, 4, data)


def node_of(path: str) -> Node:
    return Node(path, path.encode().ljust(12, b"n"), NodeKind.ARRAY, {"zarr.json": ARRAY})


def page_refs_of(*paths: str) -> tuple[NodePage, ...]:
    """Pointers to pages that end with these paths, two by two."""
    return tuple(
        NodePage(placed("nodes", None, i), paths[i], paths[i + 1], 2, 0)
        for i in range(0, len(paths), 2)
    )


def samples() -> dict[str, Any]:
    """One value of each kind, with something in every field."""
    ref, snapshot, nodes = placed("deltas"), placed("snapshots"), placed("nodes")
    node = node_of("a")
    refs: dict[tuple[int, ...], StoredRef] = {
        (0, 1): InlineRef(b"inline"),
        (2, 2): NativeRef("000000000001-" + "ab" * 12, 7, 100, 50, 12345),
        (3, 0): UNSET,
        (3, 1): NativeRef("000000000002-" + "cd" * 12, 8, 90, 10, 12),
        (3, 2): VirtualRef(VirtualSource("era5", "a/b.nc", '"etag"', 9, 99), 10, 20, 30),
        (4, 0): VirtualRef(VirtualSource("", "file:///c.nc"), 10, 20),
    }
    manifest = Manifest.of([(node.node_id, ChunkTable.of(refs))])
    held = ManifestRef(ref, manifest.directory())
    gone, cut = {"gone": b"g" * 12}, {b"t" * 12: (3,)}
    delta = Delta(b"c" * 16, (node,), gone, cut, manifest, (held,))
    lease = Lease(b"l" * 16, "000000000001-" + "ab" * 12, snapshot_id_of(WHERE), 99, "owner")
    index = placed("indexes", None)
    branch = Branch(snapshot, nodes, 1, OTHER_SNAPSHOT, (ref,), index)
    entry = DeltaEntry.of(ref, delta, 5, first=2)
    entry = replace(entry, counts=(Count(b"n" * 12, -1, 4),), bundle=placed("bundles", None))
    leaves = LeafPage(placed("nodes", None, 5), b"n" * 12, 300, Box((0, 2), (9, 3)), (2, 4))
    in_pages = page_refs_of("", "g-x", "g/x", "/o")
    in_pages = (replace(in_pages[0], leaves=2), replace(in_pages[1], orphans=True))
    return {
        "root": Root(
            "a" * 32,
            9,
            b"w" * 16,
            5,
            Config(),
            {"main": branch},
            {"tag": snapshot.bare()},
            ("refs/tags/gone", "refs/heads/hidden", "leases/given-up"),
            (LogEntry(2, 3, "commit append", "main", "snapshot", b"c" * 16),),
            (lease,),
            4,
            {"collector": 3},
            (PageRef("refs/heads/a", placed("deltas", None), 7),),
            6,
            FEATURES,
            {"title": ["a", {"b": 1.5}]},
        ),
        "snapshot": Snapshot(
            snapshot_id_of(WHERE),
            "5e" * 16,
            snapshot.bare(),
            b"c" * 16,
            CommitKind.APPEND,
            "why it is",
            {"by": ["me", 1.5]},
            6,
            nodes.bare(),
            (entry,),
            ref.bare(),
            {"refs-set": 4},
            {"query": 7},
            5,
            {"chunks": 4},
            placed("pages", None),
            (snapshot_id_of(WHERE), OTHER_SNAPSHOT),
        ),
        "base": Base((node,), (replace(held, merged=(3,)),), 4, (Count(b"n" * 12, 1, 2),)),
        "paged base": Base((), (), 4, (), in_pages, (leaves,)),
        "delta": delta,
        "bundle": Bundle({ref.key: delta}),
        "manifest": manifest,
        "page": Page(
            {"dev": Branch(snapshot, nodes, ahead=(ref,))},
            {"v1": snapshot},
            (lease,),
            ("refs/tags/v0",),
        ),
        "marks": MarksPage({"why it is": 7, **{f"app {i}": i for i in range(7)}}),
    }


VALUES = samples()


def encoded(value: Any) -> bytes:
    found = value.encode()
    return found[0] if isinstance(found, tuple) else found  # of a manifest: and its places


ENCODED: dict[str, bytes] = {kind: encoded(value) for kind, value in VALUES.items()}
each_kind = pytest.mark.parametrize(
    "kind", ["root", "snapshot", "base", "paged base", "delta", "bundle"]
)


def read(kind: str, data: bytes, ref: BlobRef | None = None) -> Any:
    """Decode, and look at everything that is decoded later."""
    if kind == "root":
        return Root.from_object(data)
    value = type(VALUES[kind]).from_object(data, ref or BlobRef.to(WHERE, data))
    manifest = {
        "delta": lambda: value.embedded,
        "manifest": lambda: value,
        "bundle": lambda: Manifest(
            tuple(part for delta in value.deltas.values() for part in delta.embedded.parts)
        ),
    }.get(kind)
    for part, table in manifest().parts if manifest else ():
        decoded = decode_table(part, table)
        dict(decoded.refs())
        decoded.get(part.box.lo)
        fold([decoded], merge_layers([Layer(None, (decoded, decoded))]))
    return value


# --- there and back --------------------------------------------------------------------------

EXTREMES: dict[type, tuple[Any, ...]] = {
    int: (-(2**62) - 1, -1, 0, 2**31 + 1, 2**40 + 1, MAX_MS + 1, 2**63 - 1, 2**64 - 1, 2**64),
    str: ("", "x", "\udc80", "\0", "\N{SNOWMAN}" * 300, WHERE, "main", "../up", "/x"),
    bytes: (b"", *(b"x" * n for n in (1, 11, 12, 16, 17))),
    dict: ({},),
}


DERIVED = ("grid",)
"""What arrays find out by themselves."""


def inside(value: Any) -> dict[Any, Any]:
    """What the value is made of, by name."""
    if isinstance(value, Manifest | str | bytes):
        return {}  # chunk tables are encoded, and checked, when they are made
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if isinstance(value, Struct):
        return {name: held for name, held in asdict(value).items() if name not in DERIVED}
    return dict(value) if isinstance(value, Mapping) else {}


def changed_once(value: Any) -> list[Callable[[], Any]]:
    """The value with something else at one of the places in it, however deep, built when called."""
    found: list[Callable[[], Any]] = []
    for name, held in inside(value).items():
        others = [lambda by=by: by for by in EXTREMES.get(type(held), ())]
        found += [
            lambda name=name, other=other: replaced(value, name, other())
            for other in [*others, *changed_once(held)]
        ]
    return found


def replaced(value: Any, name: Any, by: Any) -> Any:
    """The value, built anew with something else under that name."""
    if isinstance(value, Struct):
        return replace(value, **{name: by})
    held = inside(value) | {name: by}
    return tuple(held.values()) if isinstance(value, tuple) else held


@each_kind
def test_what_can_be_built_and_written_can_be_read(kind: str) -> None:
    """Whatever is wrong with it; else it would be acknowledged, and nobody could open it."""
    assert read(kind, ENCODED[kind]) == VALUES[kind]
    written = 0
    for build in changed_once(VALUES[kind]):
        try:
            changed = build()
            data = encoded(changed)
        except ManifestsError:
            continue  # it cannot be built, or not be written
        ref = BlobRef.to(WHERE, data)
        if kind == "snapshot":  # its key follows from what it says
            ref = replace(ref, key=snapshot_key(changed.snapshot_id))
        assert encoded(read(kind, data, ref)) == data
        written += 1
    assert written > 10


def test_a_page_with_more_marks_than_are_read_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read("marks", ENCODED["marks"]) == VALUES["marks"]
    monkeypatch.setattr("zarr_manifests.format.snapshot.MOST_IN_PAGE", 1)
    with pytest.raises(CorruptObjectError, match="8 marks"):
        read("marks", ENCODED["marks"])
    with pytest.raises(InvalidArgumentError, match="at most 1"):
        MarksPage({"a": 1, "b": 2})


# --- damaged ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["root", "manifest"])
def test_every_flipped_byte_is_found(kind: str) -> None:
    data = ENCODED[kind]
    ref = BlobRef.to(WHERE, data)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            with pytest.raises((CorruptObjectError, UnsupportedFormatError)) as caught:
                read(kind, damaged, ref)
            assert str(caught.value).startswith("current: " if kind == "root" else f"{WHERE}: ")


# --- forged ----------------------------------------------------------------------------------


def envelope(
    kind: str,
    payload: bytes,
    *,
    version: int = 4,
    codec: int = 0,
    flags: int = 0,
    nbytes: int | None = None,
) -> bytes:
    """An object with a right checksum, as the format is written down."""
    number, nbytes = NUMBERS[type(VALUES[kind])], len(payload) if nbytes is None else nbytes
    covered = struct.pack("<BBBBQ", version, number, codec, flags, nbytes) + payload
    return b"\x89ZMF\r\n\x1a\n" + struct.pack("<I", google_crc32c.value(covered)) + covered


def payload_of(kind: str) -> bytes:
    data = ENCODED[kind]
    return data[24:] if data[14] == 0 else zstandard.ZstdDecompressor().decompress(data[24:])


def fields_of(kind: str) -> Any:
    return msgpack.unpackb(payload_of(kind))


def forged(kind: str, fields: Any) -> Any:
    return read(kind, envelope(kind, msgpack.packb(fields)))


@pytest.mark.parametrize("kind", ["root", "delta"])
def test_envelopes_of_a_newer_version_are_refused(kind: str) -> None:
    payload = payload_of(kind)
    for newer in (
        envelope(kind, payload, version=5),
        envelope(kind, b"anything", version=255, flags=3),
        envelope(kind, payload, flags=1),
        envelope(kind, payload, codec=2),
    ):
        with pytest.raises(UnsupportedFormatError, match="upgrade"):
            read(kind, newer)


def test_an_object_of_an_earlier_draft_is_told_so() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"earlier draft.* export"):
        read("root", envelope("root", payload_of("root"), version=3))


@pytest.mark.parametrize("kind", ["root", "delta", "manifest"])
def test_envelopes_that_lie_are_refused(kind: str) -> None:
    payload = payload_of(kind)
    packed = zstandard.ZstdCompressor().compress(payload)
    assert read(kind, envelope(kind, payload)) == VALUES[kind]
    assert read(kind, envelope(kind, packed, codec=1, nbytes=len(payload)))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(payload)
    for wrong in (
        envelope(kind, payload, nbytes=len(payload) + 1),
        envelope(kind, payload, nbytes=2**63),
        envelope(kind, payload + b"\0"),
        envelope(kind, b""),
        envelope(kind, packed, codec=1, nbytes=2**40),
        envelope(kind, packed[:-3], codec=1, nbytes=len(payload)),
        envelope(kind, payload, codec=1),
        envelope(kind, unsized, codec=1, nbytes=len(payload)),
        envelope(kind, bomb, codec=1, nbytes=len(payload)),
        envelope(kind, b"\xdd\xff\xff\xff\xff"),  # a list of four billion
        envelope(kind, b"\x91" * 100_000),
    ):
        with pytest.raises(CorruptObjectError):
            read(kind, wrong)


def test_what_only_a_newer_version_knows_is_refused() -> None:
    fields = fields_of("root")
    for unknown in ("time-travel", "", 7, None):
        with pytest.raises(UnsupportedFormatError, match="needs the features"):
            forged("root", fields | {"features": [*FEATURES, unknown]})
    for config in (
        {"compression": 3},
        {"compaction": {"max-delta-count": 0}},
        {"commits": [1]},
        {"chunk-manifests": {"rules": [{"target": "default", "path": "("}]}},
    ):
        with pytest.raises(UnsupportedFormatError, match="configuration is not understood"):
            forged("root", fields | {"config": fields["config"] | config})


@pytest.mark.parametrize("name", ["..", "/x", "a/./b", "a/", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused(name: str) -> None:
    for good, bad, rest in (
        ("new", name, [b"o" * 12, 0, {"zarr.json": GROUP}]),
        ("/new", f"/{name}", [b"o" * 12, 2, {}]),
    ):
        fields = fields_of("delta")
        fields["nodes"].append([good, *rest])
        forged("delta", fields)
        fields["nodes"][-1][0] = bad
        with pytest.raises(CorruptObjectError):
            forged("delta", fields)


@pytest.mark.parametrize("name", ["a/../b", "/x", "\x1b[2J", "-x", ""])
def test_a_ref_that_leads_elsewhere_is_refused(name: str) -> None:
    for kind, section in (("root", "branches"), ("page", "tags")):
        fields = fields_of(kind)
        held = next(value for value in fields[section].values() if value is not None)
        fields[section]["a/b"] = held
        forged(kind, fields)
        fields[section][name] = held
        with pytest.raises(CorruptObjectError, match="not a valid branch or tag name"):
            forged(kind, fields)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside."""
    held = value.items() if isinstance(value, dict) else enumerate(value)
    below = [places(one, (*at, key)) for key, one in held if isinstance(one, dict | list)]
    keys = [*value] if isinstance(value, dict) else range(len(value))
    return [*((*at, key) for key in keys), *(place for found in below for place in found)]


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = new if len(at) == 1 else put(copy[at[0]], at[1:], new)
    return copy


def unpacked(kind: str) -> Any:
    """The fields, with what is packed in them unpacked as well."""
    fields = fields_of(kind)
    if kind == "delta":
        parts = [[part, msgpack.unpackb(data)] for part, data in fields["tables"]["parts"]]
        fields["tables"] = {"parts": parts}
    return fields


def repacked(fields: Any) -> Any:
    tables = fields.get("tables")
    if not isinstance(tables, dict) or not isinstance(tables.get("parts"), list):
        return fields
    parts = [
        [one[0], msgpack.packb(one[1])] if isinstance(one, list) and len(one) == 2 else one
        for one in tables["parts"]
    ]
    return fields | {"tables": {"parts": parts}}


@each_kind
def test_each_field_of_another_type_is_refused_or_read(kind: str) -> None:
    fields, found = unpacked(kind), list[tuple[Any, ManifestsError]]()
    for at in places(fields):
        for new in (None, True, -1, 2**64 - 1, 1.5, "x", b"x", [], {}, [None], {"x": None}):
            try:
                forged(kind, repacked(put(fields, at, new)))
            except ManifestsError as error:
                found.append(((at, new), error))
    assert len(found) > 50
    for what, error in found:
        assert isinstance(error, CorruptObjectError | UnsupportedFormatError), what


EMPTY = {
    **dict.fromkeys(("collected", "epoch", "fence", "sequence"), 0),
    **dict.fromkeys(("base", "marks_page", "merged", "parent")),
}
"""What fields that may be absent are then, if they are no lists and maps."""


@each_kind
def test_a_field_that_is_absent_is_as_if_it_was_empty(kind: str) -> None:
    fields, tried = fields_of(kind), 0
    for name, held in fields.items():
        if name in EMPTY or (isinstance(held, list | dict) and name != "log"):
            empty = EMPTY[name] if name in EMPTY else type(held)()
            without = {other: one for other, one in fields.items() if other != name}
            assert outcome(kind, fields | {name: empty}) == outcome(kind, without), name
            tried += 1
    assert tried


def outcome(kind: str, fields: Any) -> Any:
    """What is read; or why nothing is."""
    try:
        return forged(kind, fields)
    except ManifestsError as error:
        return str(error)


@pytest.mark.parametrize("place", ["root", "log", "snapshot"])
def test_times_beyond_the_year_9999_are_refused(place: str) -> None:
    kind = "snapshot" if place == "snapshot" else "root"
    fields = fields_of(kind)
    for ms in (253_402_300_799_999, 253_402_300_800_000):
        late = {"log": [[1, ms, "create", "main", "", b""]]} if place == "log" else {"at_ms": ms}
        if ms == 253_402_300_799_999:
            forged(kind, fields | late)
        else:
            with pytest.raises(CorruptObjectError, match=r"at_ms|root\.log"):
                forged(kind, fields | late)


def test_a_snapshot_of_another_repository_is_refused() -> None:
    snapshot = VALUES["snapshot"]
    assert isinstance(snapshot, Snapshot)
    snapshot.check_repository("snapshots/here", "5e" * 16)
    with pytest.raises(CorruptObjectError, match="found a snapshot of repository 5e5e"):
        snapshot.check_repository("snapshots/here", "6f" * 16)
