"""A reader of repositories, written from docs/spec/v1.md alone.

It shares no code with the package: whatever it needs and the specification does not say is a
fault of the specification.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from math import prod
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import zstandard
from numcodecs import blosc

ROOT, SNAPSHOT, BASE, DELTA, MANIFEST, INDEX, PAGE, BUNDLE = 1, 2, 3, 4, 5, 6, 7, 8
MARKS, HISTORY = 9, 10
UNSET, INLINE, NATIVE, VIRTUAL = 0, 1, 2, 3
GROUP, ARRAY, OPAQUE = 0, 1, 2
LAST_MS = 253402300799999
MOST_BYTES = {ROOT: 2**24, SNAPSHOT: 2**28}
SESSION = re.compile(r"[0-9]{12}-[0-9a-f]{24}", re.ASCII)
SNAPSHOT_ID = re.compile(SESSION.pattern + r"-(0|[1-9][0-9]{0,8})", re.ASCII)
KEY = re.compile(rf"[a-z]+/{SESSION.pattern}/(0|[1-9][0-9]{{0,8}})", re.ASCII)

type Get = Callable[[str], bytes]
type Coords = tuple[int, ...]


class FormatError(Exception):
    """What was read is not what the specification says."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise FormatError(what)


def open_object(data: bytes, kind: int) -> dict[str, Any]:
    """The payload of an object, its envelope checked."""
    demand(len(data) <= MOST_BYTES.get(kind, len(data)), "size of an object")
    demand(len(data) >= 24 and data[:8] == bytes.fromhex("895A4D460D0A1A0A"), "magic")
    crc, version, found, codec, flags, length = struct.unpack_from("<IBBBBQ", data, 8)
    demand(version == 4, "version")
    demand(google_crc32c.value(data[12:]) == crc, "crc")
    demand(flags == 0, "flags")
    demand(found == kind, "kind")
    demand(codec in (0, 1) and length <= 2**30, "codec")
    body = data[24:]
    if codec == 1:
        body = unframed(body)
    demand(len(body) == length, "length")
    return unpack(body)


def unframed(body: bytes) -> bytes:
    length = zstandard.frame_content_size(body)
    demand(0 <= length <= max(2**20, 64 * len(body)), "expansion")
    found = zstandard.ZstdDecompressor().decompress(body, max_output_size=length)
    demand(len(found) == length, "size of the frame")
    return found


def block_of(data: bytes) -> list[bytes]:
    """The tables of a block."""
    demand(data[:1] in (b"\0", b"\1"), "codec of a block")
    tables = msgpack.unpackb(unframed(data[1:]) if data[0] else data[1:])
    demand(isinstance(tables, list) and all(isinstance(t, bytes) for t in tables), "a block")
    return list(tables)


def unpack(data: bytes) -> dict[str, Any]:
    value = msgpack.unpackb(data, raw=False, strict_map_key=False, object_hook=Map)
    demand(isinstance(value, dict), "a map")
    return value


class Map(dict[Any, Any]):
    """A map, in which a field that is absent is zero or empty."""

    def __missing__(self, name: str) -> Any:
        if name in ("collected", "epoch", "fence", "sequence", "version"):
            return 0
        return (
            {}
            if name in ("epochs", "sums", "totals")
            else None
            if name in ("base", "parent")
            else []
        )


def timed(fields: dict[str, Any]) -> dict[str, Any]:
    demand(0 <= fields["at_ms"] <= LAST_MS, "time")
    return fields


def place_in_pages(path: str) -> tuple[bool, str, str]:
    """Where a node is in the order of pages."""
    above, _, name = path.rpartition("/")
    return path[:1] == "/", above, name


def merged_to(ref: dict[str, Any]) -> list[int]:
    """The sequences that the parts of a manifest are merged to."""
    merged: list[int] = ref.get("merged") or [0] * len(ref["parts"])
    demand(len(merged) == len(ref["parts"]), "a sequence for each part")
    return merged


def column(packed: list[Any], n: int) -> list[int]:
    """The n values of a column."""
    match packed:
        case [0, first]:
            return [first] * n
        case [1, first, width, blosced, data]:
            return list(accumulate(numbers(data, width, blosced, n - 1), initial=first))
        case [2, 0, width, blosced, data]:
            return numbers(data, width, blosced, n)
    raise FormatError("column")


def numbers(data: bytes, width: int, packed: int, n: int) -> list[int]:
    demand(width in (1, 2, 4, 8) and packed in (0, 1), "column")
    if packed:
        (length,) = struct.unpack_from("<I", data, 4)
        (size,) = struct.unpack_from("<I", data, 12)
        demand(length == n * width and size == len(data), "size of a Blosc chunk")
        data = blosc.decompress(data)
    demand(len(data) == n * width, "length of a column")
    return np.frombuffer(data, f"<u{width}").tolist()


class Document(bytes):
    """A metadata document, to tell it from a chunk that is inline."""


type File = tuple[str, str, str | None, int | None, int | None]
"""Container (empty: the path is a URL), path, etag, time of modification (ms), size."""
type Place = bytes | tuple[str | File, int, int, int | None] | None
"""Inline bytes; or key or file, offset, length, crc32c if known; or None: unset."""


def is_url(place: Place) -> bool:
    """Whether the chunk is in a file of no container."""
    return isinstance(place, tuple) and isinstance(place[0], tuple) and not place[0][0]


def virtual_files(packed: dict[str, Any] | None) -> list[File]:
    """The files that virtual refs point into."""
    if packed is None:
        return []
    n = packed["n"]
    demand(0 < n <= 2**24, "number of files")
    paths = packed["paths"].decode().split("\0")
    etags = [""] * n if packed.get("etags") is None else packed["etags"].decode().split("\0")
    demand(len(paths) == len(etags) == n, "a path and an etag for every file")
    names = packed["names"]
    files: list[File] = []
    known = [column(packed[name], n) for name in ("container", "modified", "size")]
    for path, etag, container, modified, size in zip(paths, etags, *known, strict=True):
        name = names[container]
        demand(re.fullmatch(r"[A-Za-z0-9._-]{0,64}", name, re.ASCII), "name of a container")
        demand(path and not (name and {"", ".", ".."} & set(path.split("/"))), "path of a file")
        times = (modified - 1 if modified else None, size - 1 if size else None)
        files.append((name, path, etag or None, *times))
    return files


def table_rows(packed: dict[str, Any]) -> dict[Coords, Place]:
    """The rows of a chunk table."""
    n, lo, hi = packed["n"], packed["lo"], packed["hi"]
    demand(n <= 2**24 and len(lo) == len(hi), "size of a chunk table")
    if not n:
        return {}
    sources, inline = packed["src"], packed.get("inl") or b""
    demand(all(SESSION.fullmatch(source) for source in sources), "sources")
    shape = [b - a for a, b in zip(lo, hi, strict=True)]
    columns = {name: column(packed["col"][name], n) for name in packed["col"]}
    demand("index" in columns or n == prod(shape), "a row for every coordinate")
    index = columns.get("index", range(n))
    demand(all(a < b for a, b in pairwise(index)), "index")
    rows: dict[Coords, Place] = {}
    files = virtual_files(packed.get("virt"))
    ends: dict[tuple[int, int, int], int] = {}
    for i in range(n):
        stored, length = columns["offset"][i], columns["length"][i]
        where = (columns["kind"][i], columns["source"][i], columns["number"][i])
        offset = ends.get(where, 0) + (-(stored >> 1) - 1 if stored % 2 else stored >> 1)
        ends[where] = end = offset + length
        demand(offset >= 0, "offset")
        kind = columns["kind"][i]
        coords = place_of(index[i], lo, shape)
        if kind == UNSET:
            rows[coords] = None
        elif kind == INLINE:
            demand(end <= len(inline), "inline chunk")
            rows[coords] = inline[offset:end]
        elif kind == NATIVE:
            key = f"chunks/{sources[columns['source'][i]]}/{columns['number'][i]}"
            rows[coords] = (key, offset, length, columns["crc32c"][i])
        elif kind == VIRTUAL:
            demand(columns["number"][i] in (0, 1), "whether a checksum is known")
            crc = columns["crc32c"][i] if columns["number"][i] else None
            rows[coords] = (files[columns["source"][i]], offset, length, crc)
        else:
            raise FormatError("kind of a row")
    return rows


def address(place: Place) -> Any:
    """What identifies the chunk there in zone maps; None if nothing does."""
    if isinstance(place, bytes):
        return hashlib.blake2b(place, digest_size=16).digest()
    if place is None or isinstance(place[0], str):
        return None if place is None else place[:3]
    (_, _, etag, modified, _), *_, crc = place
    return None if etag is modified is crc is None else place


def values_of(bits: list[int], kind: str, size: int) -> list[Any]:
    """The values with these bits."""
    demand(kind != "b" or {*bits} <= {0, 1}, "truth values")
    raw = b"".join(one.to_bytes(size, "little") for one in bits)
    return np.frombuffer(
        raw, f"<{'i' if kind in 'Mm' else 'u' if kind == 'b' else kind}{size}"
    ).tolist()


def bits_of(packed: list[Any], n: int, size: int) -> list[int]:
    """The bits of the values of bounds."""
    width, blosced, data = packed
    demand(width == size, "width of the values of a type")
    return numbers(data, width, blosced, n)


def bounds_of(packed: dict[str, Any]) -> list[list[Any]]:
    """The rows of bounds: low, high (both None without a value), missing, NaN, sum, clip."""
    n, kind, size = packed["n"], packed["type"][1], int(re.split(r"[\[]", packed["type"][2:])[0])
    demand(n <= 2**24, "number of bounds")
    bits, spans = (bits_of(packed[name], n, size) for name in ("low", "high"))
    tops = [(low + span) % 2 ** (8 * size) for low, span in zip(bits, spans, strict=True)]
    lows, highs = values_of(bits, kind, size), values_of(tops, kind, size)
    bounded, missing, nan, clip = (
        column(packed[name], n) for name in ("bounded", "missing", "nan", "clip")
    )
    sums: list[Any] = [None] * n
    if packed.get("sums"):
        sums = values_of(bits_of(packed["sums"], n, 8), "f" if kind == "f" else "i", 8)
        sums = [None if total != total or total == -(2**63) else total for total in sums]
    rows = []
    for i in range(n):
        demand(not bounded[i] or lows[i] <= highs[i], "order of bounds")
        ends = [lows[i], highs[i]] if bounded[i] else [None, None]
        rows.append([*ends, missing[i], nan[i], sums[i], clip[i]])
    return rows


def place_of(index: int, lo: list[int], shape: list[int]) -> Coords:
    demand(index < prod(shape), "index")
    coords: list[int] = []
    for low, size in zip(reversed(lo), reversed(shape), strict=True):
        index, rest = divmod(index, size)
        coords.insert(0, low + rest)
    return tuple(coords)


def chunk_key(document: dict[str, Any], coords: Coords) -> str:
    """The key of a chunk, below its array."""
    if document["zarr_format"] == 2:
        return document.get("dimension_separator", ".").join(map(str, coords)) or "0"
    encoding = document["chunk_key_encoding"]
    if isinstance(encoding, str):
        encoding = {"name": encoding}
    default = {"default": "/", "v2": "."}[encoding["name"]]
    separator = encoding.get("configuration", {}).get("separator", default)
    if encoding["name"] == "v2":
        return separator.join(map(str, coords)) or "0"
    return separator.join(["c", *map(str, coords)])


def key_below(below: str, document: dict[str, Any], coords: Coords) -> str:
    """The whole key of a chunk."""
    return below + chunk_key(document, coords)


type Leaf = tuple[Coords, Coords, int, dict[Coords, Place]]
"""Its box, the sequence it is merged to, its rows."""


def together(tables: list[dict[Coords, Place]]) -> dict[Coords, Place]:
    """The rows of tables that have none in common."""
    rows: dict[Coords, Place] = {}
    for table in tables:
        demand(not table.keys() & rows.keys(), "two rows for a chunk")
        rows |= table
    return rows


def decided(
    coords: Coords,
    layers: list[tuple[int, dict[Coords, Place], list[int] | None]],
    leaves: list[Leaf],
) -> Place:
    """Where a chunk is, or None."""
    here = [
        (merged, rows)
        for lo, hi, merged, rows in leaves
        if all(a <= c < b for a, c, b in zip(lo, coords, hi, strict=True))
    ]
    demand(len(here) <= 1, "leaves that overlap")
    merged, base = here[0] if here else (0, {})
    for last, rows, shape in layers:
        if last <= merged:
            break
        if coords in rows:
            return rows[coords]
        if shape is not None and any(c >= n for c, n in zip(coords, shape, strict=True)):
            return None
    return base.get(coords)


class Reader:
    """A repository, given a function that gets an object's bytes by its key.

    With `copies=False` the copies that travel with pointers are not used. `get_file` gets the bytes
    of the file that virtual refs point into, and checks that it is the one that was meant.
    """

    def __init__(
        self, get: Get, *, copies: bool = True, get_file: Callable[[File], bytes] | None = None
    ) -> None:
        self.get = get
        self.get_file = get_file
        self.copies = copies
        self.root = timed(open_object(get("current"), ROOT))
        demand(not self.root.get("features"), "features")
        demand(all(0 <= at <= LAST_MS for _, at, *_ in self.root["log"]), "time of an operation")

    def follow(self, pointer: dict[str, Any], kind: int) -> dict[str, Any]:
        demand(KEY.fullmatch(pointer["k"]), "key")
        demand(0 <= pointer["n"] <= 2**40, "length of a pointer")
        copy = pointer.get("b") if self.copies else None
        data = self.get(pointer["k"]) if copy is None else copy
        demand(len(data) == pointer["n"], "length of the object")
        demand(struct.unpack_from("<I", data, 8)[0] == pointer["c"], "crc of the object")
        fields = open_object(data, kind)
        return self.named(pointer["k"], fields) if kind == SNAPSHOT else fields

    def named(self, key: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a snapshot that says that it is the one that lies at the key."""
        demand(f"snapshots/{'/'.join(fields['id'].rsplit('-', 1))}" == key, "id of the snapshot")
        demand(fields["repository"] == self.root["repository"], "repository of the snapshot")
        merged = fields.get("merged")
        demand(merged is None or len(merged) == 2, "merged")
        demand(all(SNAPSHOT_ID.fullmatch(one) for one in merged or ()), "merged")
        demand(len(self.sound_marks(fields)) <= 256, "number of marks")
        return timed(fields)

    def sound_marks(self, fields: dict[str, Any]) -> dict[str, int]:
        marks = fields.get("marks", {})
        for name, version in marks.items():
            demand(1 <= len(name.encode()) <= 255 and 0 <= version < 2**63, "a mark")
        return marks

    def marks(self, snapshot: dict[str, Any]) -> dict[str, int]:
        """The last version that each application has committed."""
        older = {}
        if snapshot.get("marks_page") is not None:
            older = self.sound_marks(self.follow(snapshot["marks_page"], MARKS))
            demand(len(older) <= 2**20, "number of marks")
        return older | snapshot.get("marks", {})

    def archive(self, version: int) -> dict[str, Any]:
        """The root of an older version."""
        root = timed(open_object(self.get(f"root/{version:020d}"), ROOT))
        demand(root["version"] == version, "version of the archive")
        demand(root["repository"] == self.root["repository"], "repository of the archive")
        return root

    def heads(self) -> dict[str, dict[str, Any]]:
        """The pointer of every branch's head and of every tag."""
        heads = {name: branch["head"] for name, branch in self.branches().items()}
        return heads | self.listed("refs/tags/")

    def branches(self) -> dict[str, dict[str, Any]]:
        return self.listed("refs/heads/")

    def leases(self) -> list[list[Any]]:
        """All leases that are valid, in the order of their names."""
        return [lease for _, lease in sorted(self.listed("leases/").items())]

    def listed(self, section: str) -> dict[str, Any]:
        """What the root and its pages list in that section, by name."""
        found: dict[str, Any] = {}
        for page in [*self.pages(), self.entries_of(self.root)]:
            found |= page
        return {
            name.removeprefix(section): value
            for name, value in found.items()
            if name.startswith(section) and value is not None
        }

    def pages(self) -> list[dict[str, Any]]:
        """The entries of each page of the root, in their order."""
        pages = []
        listed = self.root.get("pages") or []
        firsts = [first for first, *_ in listed]
        demand(all(a < b for a, b in pairwise(firsts)), "order of pages")
        for (first, blob, count), until in zip_longest(listed, firsts[1:]):
            page = self.entries_of(self.follow(blob, PAGE))
            demand(len(page) == count, "number in a page")
            for name in page:
                demand(first <= name and (until is None or name < until), "names of a page")
            pages.append(page)
        return pages

    def entries_of(self, page: dict[str, Any]) -> dict[str, Any]:
        """Entries by full name; None for what is deleted."""
        found = dict.fromkeys(page.get("deleted", []))
        for prefix, section in (("refs/heads/", "branches"), ("refs/tags/", "tags")):
            found |= {prefix + name: one for name, one in page.get(section, {}).items()}
        return found | {self.lease_name(lease): lease for lease in page.get("leases", [])}

    @staticmethod
    def lease_name(lease: list[Any]) -> str:
        return f"leases/{lease[1]}/{lease[0].hex()}"

    def history(
        self, head: dict[str, Any], floor: str | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Id and fields of the snapshot and its ancestors down to `floor`, newest first."""
        pointer = head
        while pointer is not None:
            snapshot = self.follow(pointer, SNAPSHOT)
            snapshot_id = self.id_of(pointer)
            yield snapshot_id, snapshot
            pointer = None if snapshot_id == floor else snapshot.get("parent")

    def told(self, snapshot: dict[str, Any], floor: str | None = None) -> list[dict[str, Any]]:
        """What a snapshot says about its ancestors down to `floor`, newest first."""
        if snapshot["id"] == floor:
            return []
        told, due = [], snapshot["parent"]
        history = snapshot.get("history") or {}
        pages = [*reversed(history.get("pages", []))]
        levels = [level for *_, level in pages]
        demand(levels == sorted(levels), "order of the pages of history")
        while True:
            for entry in map(self.entry, reversed(history.get("recent", []))):
                demand(entry["snapshot"] == [self.id_of(due), due["n"], due["c"]], "an entry")
                told.append(entry)
                if entry["snapshot"][0] == floor:
                    return told
                due = entry["parent"] and self.pointer(entry["parent"])
            if not pages:
                return told
            history = self.history_page(*pages.pop(0))
            pages[:0] = reversed(history.get("pages", []))

    def history_page(
        self, blob: dict[str, Any], newest_ms: int, count: int, level: int
    ) -> dict[str, Any]:
        history = self.follow(blob, HISTORY)["history"]
        pages = history.get("pages", [])
        demand(self.covered(history) == count > 0 and 0 <= newest_ms, "number in a page")
        due = max([one[3] + 1 for one in pages], default=0)
        demand(due == level <= 16, "level of pages")
        return history

    def covered(self, history: dict[str, Any]) -> int:
        return len(history.get("recent", [])) + sum(one[2] for one in history.get("pages", []))

    def entry(self, packed: bytes) -> dict[str, Any]:
        names = (
            "snapshot",
            "parent",
            "at_ms",
            "commit",
            "kind",
            "message",
            "metadata",
            "totals",
            "sums",
        )
        values = msgpack.unpackb(packed, raw=False)
        demand(len(values) == len(names) and len(values[3]) == 16, "an entry")
        return timed(dict(zip(names, values, strict=True)))

    def pointer(self, named: list[Any]) -> dict[str, Any]:
        demand(SNAPSHOT_ID.fullmatch(named[0]), "id in an entry")
        key = f"snapshots/{'/'.join(named[0].rsplit('-', 1))}"
        return {"k": key, "n": named[1], "c": named[2]}

    def id_of(self, pointer: dict[str, Any]) -> str:
        return pointer["k"].removeprefix("snapshots/").replace("/", "-")

    def read(self, snapshot_id: str) -> dict[str, bytes]:
        """All keys and values of a snapshot."""
        return self.contents(self.snapshot(snapshot_id))

    def snapshot(self, snapshot_id: str) -> dict[str, Any]:
        session, _, number = snapshot_id.rpartition("-")
        key = f"snapshots/{session}/{number}"
        return self.named(key, open_object(self.get(key), SNAPSHOT))

    def contents(self, snapshot: dict[str, Any]) -> dict[str, bytes]:
        return {key: self.bytes_at(place) for key, place in self.places(snapshot).items()}

    def places(self, snapshot: dict[str, Any]) -> dict[str, Place]:
        """By key: the document, or where the chunk is."""
        base = self.base(snapshot)
        cuts: list[dict[bytes, list[int]]] = []
        newest = 0
        for entry in snapshot["deltas"]:
            demand(newest < entry["first"] <= entry["last"], "order of sequences")
            newest = entry["last"]
            delta = self.follow(entry["log"], DELTA) if entry["nodes"] else {}
            cuts.append(delta.get("truncated", {}))
        demand(newest <= snapshot["sequence"], "sequence of the snapshot")
        found: dict[str, Place] = {}
        for path, node_id, kind, documents in self.nodes(snapshot):
            if kind == OPAQUE:
                places = self.chunks(snapshot, base, cuts, node_id)
                found.update((path[1:], place) for place in places.values())
                continue
            below = f"{path}/" if path else ""
            found.update((below + name, Document(value)) for name, value in documents.items())
            if kind == ARRAY:
                document = json.loads(documents.get("zarr.json") or documents[".zarray"])
                for coords, place in self.chunks(snapshot, base, cuts, node_id).items():
                    found[below + chunk_key(document, coords)] = place
        return found

    def zones(self, snapshot: dict[str, Any], index: dict[str, Any] | None) -> dict[str, Any]:
        """By key of chunk: what all its entries that count say, without repetitions."""
        packed: list[tuple[bytes, dict[str, Any]]] = []
        for entry in snapshot["deltas"]:
            if entry.get("zones") is not None:
                packed += self.zone_tables(entry["zones"])
        directory: dict[str, Any] = {}
        if index is not None:
            with suppress(FormatError, KeyError):  # a reader may do without it
                directory = self.follow(index, INDEX)
        for node_id, pointer in directory.get("zones", {}).items():
            pages = self.follow(pointer, INDEX)
            demand(pages["type"] == "zone-pages" and pages["pages"], "pages of zone maps")
            summed = bounds_of(pages["bounds"])
            for i, ((lo, hi), _, count, blob, position) in enumerate(pages["pages"]):
                of, table = self.zone_tables(blob)[position]
                demand(of == node_id and table["meaning"] == pages["meaning"], "page of a node")
                demand([table["chunks"]["lo"], table["chunks"]["hi"]] == [lo, hi], "box of a page")
                demand(table["bounds"]["n"] == count <= 2**16, "entries of a page")
                for low, high, *_ in bounds_of(table["bounds"]):
                    inside = low is None or (summed[i][0] <= low and high <= summed[i][1])
                    demand(inside, "bounds of a page")
                packed.append((node_id, table))
        places, keys = self.places(snapshot), self.keys_of(snapshot)
        found: dict[str, Any] = {}
        for node_id, table in packed:
            rows = table_rows(table["chunks"])
            said = bounds_of(table["bounds"])
            demand(len(rows) == len(said), "a row of bounds for each chunk")
            for (coords, place), row in zip(rows.items(), said, strict=True):
                key = keys[node_id](coords) if node_id in keys else ""
                same = isinstance(place, bytes) and place == address(places.get(key))
                same |= not isinstance(place, bytes) and address(place) == address(places.get(key))
                if same and address(places.get(key)) is not None:
                    told = [table["meaning"].hex(), *row]
                    found.setdefault(key, [])
                    found[key] += [told] if told not in found[key] else []
        return found

    def zone_tables(self, pointer: dict[str, Any]) -> list[tuple[bytes, dict[str, Any]]]:
        """The zone tables of an object, by node."""
        fields = self.follow(pointer, INDEX)
        demand(fields["type"] == "zones", "an object of zone maps")
        found = []
        for node_id, data in fields["tables"]:
            table = unpack(data)
            demand(table["bounds"]["n"] == table["chunks"]["n"], "entries of a table")
            found.append((node_id, table))
        return found

    def keys_of(self, snapshot: dict[str, Any]) -> dict[bytes, Callable[[Coords], str]]:
        """By id of an array, what makes the key of a chunk from its coordinates."""
        found: dict[bytes, Callable[[Coords], str]] = {}
        for path, node_id, kind, documents in self.nodes(snapshot):
            if kind == ARRAY:
                document = json.loads(documents.get("zarr.json") or documents[".zarray"])
                below = f"{path}/" if path else ""
                found[node_id] = partial(key_below, below, document)
        return found

    def nodes(self, snapshot: dict[str, Any]) -> list[list[Any]]:
        """The records of all nodes."""
        base = self.base(snapshot)
        nodes = {record[0]: record for record in base["nodes"]}
        for entry in snapshot["deltas"]:
            if entry["nodes"] and entry["last"] > base["sequence"]:
                delta = self.follow(entry["log"], DELTA)
                for path in delta.get("deleted", ()):
                    nodes.pop(path, None)
                nodes.update((record[0], record) for record in delta.get("nodes", ()))
        return [*nodes.values()]

    def base(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """The base of a snapshot with all that is in its pages; an empty one if it has none."""
        if snapshot.get("base") is None:
            return {"nodes": [], "manifests": [], "counts": [], "sequence": 0}
        base = self.follow(snapshot["base"], BASE)
        listed, large = base.get("pages", []), base.get("leaf_pages", [])
        if not listed and not large:
            return base
        if listed:
            demand(not (base["nodes"] or base["manifests"] or base["counts"]), "pages or not")
        whole = Map(base)
        whole |= {name: [*base[name]] for name in ("nodes", "manifests", "counts")}
        own = [part[0] for ref in base["manifests"] for part in ref["parts"]]
        previous = None
        for blob, first, last, nodes, leaves, orphans in listed:
            page = self.page_of_base(blob, base["sequence"])
            order = [place_in_pages(record[0]) for record in page["nodes"]]
            demand(order and all(a < b for a, b in pairwise(order)), "order of nodes")
            demand(previous is None or previous < order[0], "order of pages of nodes")
            previous = order[-1]
            demand([page["nodes"][at][0] for at in (0, -1)] == [first, last], "range of a page")
            demand(len(order) == nodes >= 1 and isinstance(orphans, bool), "nodes of a page")
            held = [part[0] for ref in page["manifests"] for part in ref["parts"]]
            demand(len(held) == leaves, "leaves of a page")
            whole["nodes"] += page["nodes"]
            whole["manifests"] += page["manifests"]
            whole["counts"] += page["counts"]
            own += held
        for blob, node_id, leaves, (lo, hi), (oldest, newest) in large:
            page = self.page_of_base(blob, base["sequence"])
            demand(not page["nodes"] and not page["counts"], "nodes in a page of leaves")
            parts = [part for ref in page["manifests"] for part in ref["parts"]]
            demand(len(parts) == leaves >= 1, "leaves of a page of leaves")
            demand({part[0] for part in parts} == {node_id}, "node of a page of leaves")
            demand(node_id not in own, "leaves of a large array in a page of nodes")
            demand([min(axis) for axis in zip(*(p[1][0] for p in parts), strict=True)] == lo, "box")
            demand([max(axis) for axis in zip(*(p[1][1] for p in parts), strict=True)] == hi, "box")
            merged = [n for ref in page["manifests"] for n in merged_to(ref)]
            demand([min(merged), max(merged)] == [oldest, newest], "sequences of a page of leaves")
            whole["manifests"] += page["manifests"]
        paths = {record[0] for record in whole["nodes"]}
        for blob, *_, orphans in listed:
            page = self.follow(blob, BASE)
            alone = [p for p, *_ in page["nodes"] if p and p[0] != "/"]
            alone = [p for p in alone if p.rpartition("/")[0] not in paths]
            demand(bool(alone) == orphans, "orphans")
        whole["manifests"] = self.joined(whole["manifests"])
        return whole

    def page_of_base(self, blob: dict[str, Any], sequence: int) -> dict[str, Any]:
        page = self.follow(blob, BASE)
        demand(not page.get("pages") and not page.get("leaf_pages"), "pages of a page")
        demand(page["sequence"] <= sequence, "sequence of a page")
        return page

    def joined(self, refs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each manifest once, with all parts that pages list of it, in its own order."""
        by_key: dict[str, list[dict[str, Any]]] = {}
        for ref in refs:
            by_key.setdefault(ref["blob"]["k"], []).append(ref)
        found = []
        for some in by_key.values():
            leaves = [leaf for r in some for leaf in zip(r["parts"], merged_to(r), strict=True)]
            in_order = [part for part, _ in self.tables(some[0]["blob"])]
            demand(len(leaves) == len(in_order), "parts of a manifest in pages")
            leaves.sort(key=lambda leaf: in_order.index(leaf[0]))
            parts, merged = [part for part, _ in leaves], [to for _, to in leaves]
            joined = {**some[0], "parts": parts, "merged": merged}
            for name in ("places", "bytes"):
                at = {str(p): v for r in some for p, v in zip(r["parts"], r.get(name, []))}  # noqa: B905
                joined[name] = [at[str(part)] for part in parts if at]
            found.append(joined)
        return found

    def chunks(
        self,
        snapshot: dict[str, Any],
        base: dict[str, Any],
        cuts: list[dict[bytes, list[int]]],
        node_id: bytes,
    ) -> dict[Coords, Place]:
        """Where the chunks of a node are that are present."""
        layers: list[tuple[int, dict[Coords, Place], list[int] | None]] = []  # newest first
        for entry, truncated in reversed(list(zip(snapshot["deltas"], cuts, strict=True))):
            tables: list[dict[Coords, Place]] = []
            if any(part[0] == node_id for part in entry["embedded"]):
                embedded = self.follow(entry["log"], DELTA)["tables"]["parts"]
                tables += [r for _, r in self.rows(embedded, entry["embedded"], node_id)]
            for ref in entry["manifests"]:
                tables += [rows for _, rows in self.manifest_rows(ref, node_id)]
            layers.append((entry["last"], together(tables), truncated.get(node_id)))
        leaves: list[Leaf] = []
        for ref in base["manifests"]:
            merged = merged_to(ref)
            for at, rows in self.manifest_rows(ref, node_id):
                _, (lo, hi), _ = ref["parts"][at]
                held = [row for row in rows.values() if row is not None]
                sizes = [len(row) if isinstance(row, bytes) else row[2] for row in held]
                demand(ref["bytes"][at] == sum(sizes), "bytes of a leaf")
                leaves.append((tuple(lo), tuple(hi), merged[at], rows))
        found: dict[Coords, Place] = {}
        for coords in {c for _, rows, _ in layers for c in rows} | together(
            [rows for *_, rows in leaves]
        ).keys():
            place = decided(coords, layers, leaves)
            if place is not None:
                found[coords] = place
        return found

    def count(self, snapshot: dict[str, Any], node_id: bytes) -> tuple[int, int]:
        """Chunks of a node and their bytes, without its manifests."""
        base = self.base(snapshot)
        known = [base["counts"]]
        known += [e["counts"] for e in snapshot["deltas"] if e["last"] > base["sequence"]]
        chunks = nbytes = 0
        for _, n, size, flags in [c for counts in known for c in counts if c[0] == node_id]:
            whole = bool(flags & 4)
            chunks, nbytes = (n, size) if whole else (chunks + n, nbytes + size)
        return chunks, nbytes

    def is_exact(self, snapshot: dict[str, Any], node_id: bytes) -> tuple[bool, bool]:
        """Whether `count`'s numbers are exact, or not too small."""
        base = self.base(snapshot)
        known = [*base["counts"]]
        for entry in snapshot["deltas"]:
            known += entry["counts"] if entry["last"] > base["sequence"] else []
        at_most = 0
        for *_, flags in [c for c in known if c[0] == node_id]:
            at_most = flags if flags & 4 else at_most | flags
        return not at_most & 1, not at_most & 2

    def manifest_rows(
        self, ref: dict[str, Any], node_id: bytes
    ) -> list[tuple[int, dict[Coords, Place]]]:
        if not any(part[0] == node_id for part in ref["parts"]):
            return []
        whole = self.tables(ref["blob"])
        for at, (offset, length, crc, number) in enumerate(ref.get("places") or []):
            block = self.get(ref["blob"]["k"])[offset : offset + length]
            demand(len(block) == length and google_crc32c.value(block) == crc, "a block")
            demand(block_of(block)[number] == whole[at][1], "a place")
        demand(len(ref.get("places") or ref["parts"]) == len(ref["parts"]), "places")
        return self.rows(whole, ref["parts"], node_id, self.shared_ids(ref))

    def tables(self, blob: dict[str, Any]) -> list[tuple[list[Any], bytes]]:
        """The parts and tables of a manifest."""
        found = []
        for parts, block in self.follow(blob, MANIFEST)["blocks"]:
            found += zip(parts, block_of(block), strict=True)
        return found

    def shared_ids(self, ref: dict[str, Any]) -> list[str]:
        """The ids of sessions that tables of the manifest share."""
        if not ref.get("ids"):
            return []
        offset, length, crc = ref["ids"]
        block = self.get(ref["blob"]["k"])[offset : offset + length]
        demand(len(block) == length and google_crc32c.value(block) == crc, "a block of ids")
        demand(self.follow(ref["blob"], MANIFEST)["ids"] == block, "the block of ids")
        return [one.decode() for one in block_of(block)]

    def rows(
        self,
        tables: list[tuple[list[Any], bytes]],
        parts: list[Any],
        node_id: bytes,
        ids: Sequence[str] = (),
    ) -> list[tuple[int, dict[Coords, Place]]]:
        """The tables of a node, each with its position among all."""
        demand([part for part, _ in tables] == [*parts], "parts")
        found = []
        for at, ((node, (lo, hi), count), data) in enumerate(tables):
            if node == node_id:
                packed = unpack(data)
                demand([packed["lo"], packed["hi"], packed["n"]] == [lo, hi, count], "part")
                if "shared" in packed:
                    demand("src" not in packed, "sessions in two places")
                    of = column(packed["shared"][1], packed["shared"][0])
                    demand(len({*of}) == len(of), "sessions of a table")
                    packed["src"] = [ids[one] for one in of]
                added = table_rows(packed)
                demand(len(added) == count, "rows of a table")
                found.append((at, added))
        return found

    def bytes_at(self, place: Place) -> bytes:
        if isinstance(place, bytes):
            return bytes(place)
        assert place is not None
        key, offset, length, crc = place
        if isinstance(key, str):
            data = self.get(key)[offset : offset + length]
        else:
            assert self.get_file is not None, "virtual refs need whoever reads files"
            data = self.get_file(key)[offset : offset + length]
        demand(len(data) == length, f"length of a chunk in {key}")
        demand(crc is None or google_crc32c.value(data) == crc, f"chunk in {key}")
        return data
