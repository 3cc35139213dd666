"""Makes the golden repositories: `python tests/spec/golden/make.py`, never run by a test.

With names as arguments, only these are made anew.

Each is a folder below `tests/spec/golden/v1`: the repository as files in `repo`, files that virtual
refs point into in `files`, and `expected.json`, which says what is in it. `SHA256SUMS` lists all
files. The clock and all randomness are fixed, so the same versions of the libraries give the same
bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from msgspec.structs import replace
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.engine.chunk_statistics import record_zones
from zarr_manifests.format.records import BlobRef, crc_of
from zarr_manifests.format.root import Lease, LogEntry, Page, PageRef, Root
from zarr_manifests.format.snapshot import MarksPage
from zarr_manifests.grid import Box
from zarr_manifests.planning import packing as node_pages
from zarr_manifests.planning.meaning import Meaning
from zarr_manifests.planning.measure import measure
from zarr_manifests.runtime import Runtime, one_by_one
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, workspace_of

HERE = Path(__file__).parent
V1 = HERE / "v1"
MODIFIED_MS = 1_700_000_000_123


def load(name: str) -> Any:
    path = HERE.parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"golden_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fixed_runtime(seed: int) -> Runtime:
    """A clock that ticks at every look, and randomness that is none."""
    ticks, chance = count(1_700_000_000_000, 1000), random.Random(seed)

    return Runtime(
        now_ms=lambda: next(ticks),
        monotonic_s=lambda: 0.0,
        random_bytes=chance.randbytes,
        jitter=lambda _: 0.0,
        sleep=lambda _: None,
        parallel=one_by_one,
        background=lambda call: call(),
        who=lambda: "",
    )


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, default_buffer_prototype().buffer.from_bytes(value))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, shape, dtype=np.int64)


def create(seed: int, folder: Path, **config: Any) -> zm.Repository:
    options = {name.replace("_", "-"): value for name, value in config.items()}
    containers = {"files": folder / "files"} if (folder / "files").exists() else None
    return zm.create(
        MemoryStorage(), options, virtual_containers=containers, runtime=fixed_runtime(seed)
    )


# --- the repositories ------------------------------------------------------------------------


def tiny(folder: Path) -> MemoryStorage:
    """All of it is in `current`."""
    repo = create(1, folder)
    with repo.transaction("main", message="a few numbers", metadata={"by": "hand"}) as store:
        zarr.create_array(store, name="x", data=np.arange(4.0), dimension_names=["x"])
    return repo.storage


def described(folder: Path) -> MemoryStorage:
    """With metadata of its own, of every kind of value."""
    repo = create(10, folder)
    repo.metadata({"title": "golden", "old": True}, replace=True)
    with repo.transaction("main", message="a group") as store:
        zarr.create_group(store)
    kinds = {"texts": ["a", "ä€𝄞"], "numbers": {"whole": 2**63, "real": -1.5}, "bytes": b"\0\1"}
    repo.metadata({"old": None, "kinds": kinds})
    return repo.storage


def chunks(folder: Path) -> MemoryStorage:
    """Chunks that are inline, native, in packs and virtual; as deltas in `live`, as leaves."""
    files = folder / "files" / "2024"
    files.mkdir(parents=True)
    data = np.random.default_rng(2).bytes(900)
    for name in ("plain.bin", "tagged.bin", "known.bin"):
        (files / name).write_bytes(data)
    repo = create(
        2, folder, inline_chunk_bytes=20, pack_chunk_bytes=400, compaction={"max-delta-count": 1000}
    )

    def fill(store: ManifestStore, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = {"inline": (3, 20), "packed": (30, 200), "native": (500, 600)}
        for path, (least, most) in sizes.items():
            for i in range(6):
                put(store, f"{path}/c/{i}", rng.bytes(rng.integers(least, most)))

    with repo.transaction("main", message="native") as store:
        root = zarr.create_group(store)
        for path in ("inline", "packed", "native", "virtual", "regular"):
            root.create_array(path, shape=(120,), chunks=(10,), dtype="u1", compressors=None)
        fill(store, 3)
    with repo.transaction("main", message="virtual") as store:
        place = [f"virtual://files/2024/{name}.bin" for name in ("plain", "tagged", "known")]
        place.append("memory://golden-elsewhere/a.bin")
        offsets, which = [0, 700, 10, 20, 33, 890, 5], [0, 0, 2, 2, 1, 2, 3]
        crcs = [google_crc32c.value(data[at : at + 10]) for at in offsets]
        store.set_virtual_refs(
            "virtual",
            np.arange(2, 9)[:, None],
            place,
            which,
            offsets,
            np.full(7, 10),
            etags=[None, "33a64df5", None, None],
            modified=[-1, -1, MODIFIED_MS, -1],
            sizes=[-1, 900, 900, 7],
            checksums=[-1, *crcs[1:4], -1, -1, crcs[6]],
        )
        store.set_virtual_refs(
            *("regular", np.arange(12)[:, None], place[:1], np.zeros(12, int)),
            np.arange(12) * 10,
            np.full(12, 10),
        )
    repo.create_tag("live")
    fold(repo)
    with repo.transaction("main", message="some again") as store:
        put(store, "native/c/2", b"now inline")
        put(store, "inline/c/9", b"now native, in an object with others" * 9)
        put(store, "virtual/c/2", b"now stored")
        for key in ("packed/c/1", "regular/c/3"):
            asyncio.run(store.delete(key))
    return repo.storage


def fold(repo: zm.Repository, branch: str = "main") -> None:
    assert repo.compact(branch, "full").snapshot_id is not None


def arrays(folder: Path) -> MemoryStorage:
    """Every kind of array and of key; deltas in `live`, leaves of several arrays in the head."""
    repo = create(3, folder, inline_chunk_bytes=100)
    with repo.transaction("main", message="format 3") as store:
        root = zarr.create_group(store, attributes={"title": "golden"})
        for name in ("default", "v2"):
            for separator in ("/", "."):
                key = {"name": name, "separator": separator}
                root.create_array(
                    f"{name}{'/.'.index(separator)}/a",
                    data=noise(4, 5),
                    chunks=(2, 3),
                    chunk_key_encoding=key,
                )
        key = {"name": "v2", "separator": "."}
        root.create_array("zero", data=np.float64(3.5))
        root.create_array("zero2", data=np.int32(7), chunk_key_encoding=key)
        root.create_array("none", shape=(0, 3), chunks=(2, 3), dtype="f4")
        root.create_array("empty", shape=(8,), chunks=(2,), dtype="f4")
        root.create_array("sharded", data=noise(8, 8), chunks=(2, 2), shards=(4, 8))
        texts = root.create_array("texts", shape=(4,), chunks=(3,), dtype=str)
        texts[:] = np.array(["a", "", "ä€𝄞", "long " * 30], dtype=object)
        root.create_array("fixed", data=np.array([b"ab", b"c"], "S2"))
        root.create_array("raw", data=np.array([b"abcd", b"efgh"], "V4"))
        pairs = np.array([(1, 2.5), (3, 4.5)], dtype=[("n", "i4"), ("v", "f8")])
        root.create_array("pairs", data=pairs)
        root.create_array("x", data=np.arange(5.0), dimension_names=["x"])
    with repo.transaction("main", message="format 2") as store:
        old = zarr.create_group(store, path="old", zarr_format=2, attributes={"format": 2})
        old.create_array("dots", data=noise(4, 4), chunks=(2, 2), attributes={"n": 1})
        key = {"name": "v2", "separator": "/"}
        old.create_array("slashes", data=noise(4, 4), chunks=(2, 3), chunk_key_encoding=key)
        old.create_array("zero", data=np.int32(7))
        old.create_array("bytes", data=np.array([b"ab", b"c"], "S2"), chunks=(1,))
        old.create_array("pairs", data=pairs, chunks=(1,))
        for name in (".zgroup", ".zattrs"):
            asyncio.run(store.delete(name))
    with repo.transaction("main", message="opaque") as store:
        put(store, "notes.txt", b"short")
        put(store, "x/c/99", b"off the grid" * 30)
        put(store, "bad/zarr.json", b"{")
        put(store, "old/.zmetadata", b"{}")
        put(store, "empty-file", b"")
    repo.create_tag("live")
    fold(repo)
    return repo.storage


def history(folder: Path) -> MemoryStorage:
    """What versions can do: bundles, a fold, every kind of commit, moves, resizes, branches."""
    repo = create(4, folder, inline_chunk_bytes=40, compaction={"max-delta-count": 14})
    with repo.transaction("main", message="start") as store:
        root = zarr.create_group(store)
        root.create_array("air/t", data=noise(6, 6), chunks=(2, 3))
        root.create_array("x", data=np.arange(6.0), chunks=(2,), dimension_names=["x"])
        root.create_array("gone", data=noise(4), chunks=(2,))
    for i in range(8):  # so many that a bundle is due
        with repo.transaction("main", message=f"append {i}") as store:
            zarr.open_array(store, path="x").append(np.arange(2.0) + i)
            zarr.open_group(store, path="air").attrs["step"] = i
    repo.create_tag("bundled")
    with repo.transaction("main", message="shrink and overwrite") as store:
        zarr.open_array(store, path="x").resize((7,))
        zarr.open_array(store, path="air/t")[:2] = 0
    repo.create_branch("side")
    with repo.transaction("main", message="grow again") as store:
        zarr.open_array(store, path="x").resize((30,))
        zarr.open_array(store, path="air/t")[2:4] = noise(2, 6, seed=1)
    with repo.transaction("main", message="delete and make again") as store:
        group = zarr.open_group(store)
        del group["gone"]
        group.create_array("gone", data=noise(3, seed=2), chunks=(2,))

    def change(message: str, call: Callable[[zm.Session], Any], branch: str = "main") -> str:
        session = repo.writable_session(branch)
        call(session)
        return session.commit(message)

    change("move", lambda session: session.move("air", "moved"))
    repo.create_tag("unfolded")
    change("shift", lambda session: session.shift_array("moved/t", (1, 0)))
    removed = change("delete", lambda s: workspace_of(s.store).delete_below("moved/"))
    repo.revert(removed)
    with repo.transaction("side", message="on the side") as store:
        put(store, "side.txt", b"side")
    side = repo.list_branches()["side"]
    with repo.transaction("side", message="to be amended") as store:
        zarr.open_array(store, path="x")[:2] = 9
    session = repo.writable_session("side")
    session.move("gone", "renamed")
    session.amend("amended")
    repo.cherry_pick(side)
    repo.create_tag("deleted", side)
    repo.delete_tag("deleted")
    return repo.storage


def pages(folder: Path) -> MemoryStorage:
    """More refs than the root has room for."""
    repo = create(5, folder)
    with repo.transaction("main", message="one") as store:
        zarr.create_array(store, name="x", data=np.arange(4.0))
    head = repo.list_branches()["main"]
    names = [hashlib.sha512(bytes([i])).hexdigest() for i in range(150)]
    for i, name in enumerate(names):
        repo.create_tag(f"tag/{i:03d}-{name}", head)
        if i % 2 == 0:
            repo.create_branch(f"branch/{i:03d}-{name}", head)
    for i in range(0, 150, 12):
        repo.delete_tag(f"tag/{i:03d}-{names[i]}")
        repo.delete_branch(f"branch/{i:03d}-{names[i]}")
    kept = dict.fromkeys(["current", *(info.key for info in repo.storage.list("pages"))])
    others = [i.key for i in repo.storage.list() if not i.key.startswith(("pages/", "root/"))]
    root = Root.from_object(repo.storage.get("current"))
    archives = [f"root/{v:020d}" for v in range(root.version - 3, root.version + 1)]
    named = {page.blob.key for page in root.pages}
    due = {key for key in (*kept, *others, *archives) if not key.startswith("pages/")} | named
    thinned = MemoryStorage()  # old pages and archives go, as maintenance may remove them
    for key in sorted(due):
        thinned.put(key, repo.storage.get(key))
    return thinned


def protocols(folder: Path) -> MemoryStorage:
    """What the package writes rarely or not yet: runs, merged leaves, marks, all of the root."""
    by_hand = load("by_hand")
    storage = MemoryStorage()
    line = by_hand.Line(storage)
    line.write("empty")
    line.commit({c: b"base%d" % c for c in range(10)}, groups={"g": "1", "h": "1"})
    line.merge_leaf(0, 4)
    line.merge_leaf(4, 8)
    line.merge_leaf(8, 12)
    line.drop()
    first = line.write("three leaves in manifests")
    line.commit({1: b"two", 5: b"two", 9: None}, groups={"g": "2"}, apart=True)
    line.commit({1: b"three", 6: None}, cut=7, deleted=["h"])
    line.commit({7: b"four", 11: b"four"})
    line.write("three deltas", bundle_from=0)
    line.roll_up(0, 3)
    line.commit({0: b"five"}, groups={"h": "5"})
    line.write("a run and a delta")
    line.merge_leaf(0, 4)
    line.commit({2: b"six", 10: b"six"}, cut=11)
    line.write("a leaf merged further than the others")
    line.commit({3: None, 4: b"seven"})
    line.write("a bundle behind it", bundle_from=2)
    line.roll_up(0, 2)
    line.write("a run across the leaf's sequence")
    line.marks = {"job": 2**63 - 1, "query ä": 7}
    line.marks_page = line.put("pages", MarksPage({"job": 3, "older": 0}).encode())
    line.write("marks of applications")
    newest = line.write("a merge", merged=(first, first))
    storage_root(storage, line, first, newest)
    return storage


def storage_root(storage: MemoryStorage, line: Any, first: str, newest: str) -> None:
    """A root with something in every field."""
    tagged = storage.get_tagged("current")
    root = Root.from_object(tagged.data)
    branch = root.branches["main"]
    session = f"{3:012d}-{'1e' * 12}"
    leases = tuple(
        Lease(bytes([i]) * 16, f"{i:012d}-{'1e' * 12}", newest, 1_700_000_100_000 + i, f"owner {i}")
        for i in (2, 3)
    )
    in_page = Lease(b"\1" * 16, f"{1:012d}-{'1e' * 12}", first, 2**40, "in a page")
    given_up = replace(in_page, lease_id=b"\2" * 16, owner="given up")
    renewed = replace(leases[0], expires_ms=1, owner="before it was renewed")
    page = Page(leases=(in_page, given_up, renewed), deleted=("refs/tags/long-ago",))
    listed = (PageRef(in_page.name, line.put("pages", page.encode()), 4),)
    index = b"an index is not read"
    claimed = replace(
        branch,
        epoch=4,
        floor=first,
        index=BlobRef(f"indexes/{session}/0", len(index), 1),
    )
    storage.create(f"indexes/{session}/0", index)
    entry = LogEntry(root.version + 1, 9, "reset branch", "main", newest, b"r" * 16)
    root = replace(
        root,
        version=root.version + 1,
        write_id=b"w" * 16,
        branches={"main": claimed},
        log=root.log[2:],
        leases=leases,
        fence=3,
        epochs={"collector": 5, "compactor": 6},
        pages=listed,
        deleted=(given_up.name,),
        collected=2,
    ).with_log(entry)
    storage.create(f"root/{root.version:020d}", root.bare().encode())
    assert storage.cas("current", root.encode(), tagged.token) is not None
    assert crc_of(storage.get("current"))


def blocks(folder: Path) -> MemoryStorage:
    """Manifests so large that they are in blocks: as a delta in `live`, as leaves in the head."""
    repo = create(7, folder, inline_chunk_bytes=4000)
    with repo.transaction("main", message="large tables") as store:
        root = zarr.create_group(store)
        for path in ("inline", "mixed", "far", "small"):
            root.create_array(path, shape=(1600,), chunks=(10,), dtype="u1", compressors=None)
        for i in range(160):
            if i % 50 < 44:
                put(store, f"inline/c/{i}", bytes([i]) * 2900)
            put(store, f"mixed/c/{i}", bytes([i]) * (3000 if i % 3 else 5000))
        put(store, "small/c/3", b"small")
        urls = [f"file:///golden-elsewhere/{'deep/' * 110}{i}.bin" for i in range(150)]
        which = np.arange(150)
        store.set_virtual_refs("far", which[:, None], urls, which, which * 7, which + 10)
    repo.create_tag("live")
    fold(repo)
    return repo.storage


def nodes(folder: Path) -> MemoryStorage:
    """A base in pages, those of its leaves as well, and some of them kept by the next base."""
    splitting = [{"path": "/long", "along": {"x": 4}}]
    repo = create(8, folder, chunk_manifests={"splitting": splitting})
    usual = node_pages.LIMITS
    node_pages.LIMITS = node_pages.PageLimits(inline=4, nodes=3, leaves=3)
    try:
        with repo.transaction("main", message="many nodes") as store:
            root = zarr.create_group(store)
            for path in ("a", "a-b", "a/x", "a/x/deep", "b"):
                root.require_group(path)
                for name in ("t", "u"):
                    root.create_array(f"{path}/{name}", data=noise(4), chunks=(2,))
            root.create_array("long", data=noise(40), chunks=(1,), dimension_names=["x"])
            put(store, "without/parent/notes.txt", b"opaque")
            put(store, "zarr/orphan/zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        fold(repo)
        repo.create_tag("first")
        with repo.transaction("main", message="in few pages") as store:
            zarr.open_array(store, path="long")[5:7] = -1
            zarr.open_group(store).create_array("b/v", data=noise(4, seed=1), chunks=(2,))
            zarr.open_array(store, path="a/x/t")[:] = 0
        fold(repo)
    finally:
        node_pages.LIMITS = usual
    return repo.storage


def zones(folder: Path) -> MemoryStorage:
    """Zone maps of every kind of chunk and of value: in deltas, runs, pages, and of no leaf."""
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "raw.bin").write_bytes(np.arange(8, dtype="<f4").tobytes())
    repo = create(9, folder, inline_chunk_bytes=16, pack_chunk_bytes=40, compaction=MANUAL)
    rng = np.random.default_rng(9)
    floats = rng.normal(0, 100, 12)
    floats[4:6] = np.nan
    values: dict[str, np.ndarray] = {
        "inline": rng.integers(-(2**15), 2**15, 12).astype("i2"),
        "packed": np.where(np.arange(12) == 5, -0.0, floats),
        "native": np.repeat(floats, 8).astype("f4"),
        "flags": np.arange(12) > 6,
        "large": rng.integers(0, 2**63, 12).astype("u8"),
    }
    sizes = {"native": 32}

    def write(store: ManifestStore, name: str, data: np.ndarray) -> None:
        zarr.open_array(store, path=name)[:] = data
        record(store, name, data)

    def record(store: ManifestStore, name: str, data: np.ndarray) -> None:
        array = zarr.open_array(store, path=name)
        contents = workspace_of(store).contents
        meaning = Meaning.of(contents.array_at(name).documents)
        bounds = measure(data, array.chunks, meaning.missing)
        box = Box((0,), (len(data) // array.chunks[0],))
        record_zones(workspace_of(store), name, box, meaning.digest, bounds)

    with repo.transaction("main", message="all arrays, with entries of some") as store:
        root = zarr.create_group(store)
        for name, data in values.items():
            size = sizes.get(name, 4)
            root.create_array(
                name, shape=data.shape, chunks=(size,), dtype=data.dtype, compressors=None
            )
        root.create_array("virtual", shape=(8,), chunks=(4,), dtype="f4", compressors=None)
        write(store, "inline", values["inline"])
        write(store, "packed", values["packed"])
        root["flags"][:], root["large"][:] = values["flags"], values["large"]
        url = ["virtual://files/raw.bin"]
        store.set_virtual_refs(
            *("virtual", np.arange(2)[:, None], url, [0, 0], [0, 16], [16, 16]), etags=["etag"]
        )
        record(store, "virtual", np.arange(8, dtype="f4"))
    with repo.transaction("main", message="native chunks") as store:
        write(store, "native", values["native"])
    with repo.transaction("main", message="some again") as store:
        write(store, "inline", values["inline"][::-1])
    repo.create_branch("deltas")
    fold(repo)
    with repo.transaction("main", message="an overwritten chunk, and one with an entry") as store:
        zarr.open_array(store, path="inline")[:4] = 7
        write(store, "large", values["large"][::-1])
    repo.compute_statistics(["inline", "flags", "large"])
    repo.create_branch("rolled")
    for i in range(4):
        with repo.transaction("rolled", message=f"step {i}") as store:
            write(store, "packed", values["packed"] + i)
    assert repo.compact("rolled", "minor").snapshot_id is not None
    return repo.storage


MANUAL = {"mode": "manual"}
MAKERS = (tiny, chunks, arrays, history, pages, protocols, blocks, nodes, zones, described)


# --- what is expected ------------------------------------------------------------------------


def expected(folder: Path, storage: MemoryStorage) -> dict[str, Any]:
    """What the independent reader finds, in plain terms."""
    reader = load("reader")

    def get_file(file: Any) -> bytes:
        return (folder / "files" / file[1]).read_bytes()

    found = reader.Reader(storage.get, get_file=get_file)
    snapshots: dict[str, Any] = {}
    refs = {}
    for name, head in sorted(found.heads().items()):
        floor = found.branches().get(name, {}).get("floor")
        line = [*found.history(head, floor)]
        refs[name] = [snapshot_id for snapshot_id, _ in line]
        for snapshot_id, fields in line:
            if snapshot_id not in snapshots:
                snapshots[snapshot_id] = snapshot_of(reader, found, fields)
    root = found.root
    fields = ("features", "fence", "epochs", "collected", "deleted")
    told = {name: root[name] for name in fields}
    told |= {"leases": found.leases(), "log": root["log"]}
    told = plain(told)
    told["branches"] = {
        name: {"epoch": b["epoch"]} | {f: plain(b.get(f)) for f in ("floor", "index")}
        for name, b in sorted(found.branches().items())
    }
    zones = {
        name: plain(found.zones(found.snapshot(refs[name][0]), found.branches()[name].get("index")))
        for name in sorted(found.branches())
    }
    more = {"zones": zones} if any(zones.values()) else {}
    more |= {"metadata": plain(root["metadata"])} if "metadata" in root else {}
    return {"refs": refs, "snapshots": snapshots, "root": told, **more}


def snapshot_of(reader: Any, found: Any, fields: dict[str, Any]) -> dict[str, Any]:
    values = {}
    places = found.places(fields)
    for key, place in places.items():
        known = not reader.is_url(place)
        values[key] = hashlib.sha256(found.bytes_at(place)).hexdigest() if known else None
    return {
        "message": fields["message"],
        "kind": fields["kind"],
        "sequence": fields["sequence"],
        "marks": found.marks(fields),
        "merged": fields.get("merged"),
        "values": dict(sorted(values.items())),
        "chunks": {
            key: plain(place)
            for key, place in sorted(places.items())
            if not isinstance(place, reader.Document)
        },
    }


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex() if len(value) < 1000 else hashlib.sha256(value).hexdigest()
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    warnings.simplefilter("ignore")
    for maker in MAKERS:
        if sys.argv[1:] and maker.__name__ not in sys.argv:
            continue
        folder = V1 / maker.__name__
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        storage = maker(folder)
        for info in storage.list():
            path = folder / "repo" / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(storage.get(info.key))
        text = json.dumps(expected(folder, storage), indent=0, ensure_ascii=False)
        (folder / "expected.json").write_text(f"{text}\n", encoding="utf-8")
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(V1).as_posix()}\n"
        for path in sorted(V1.rglob("*"))
        if path.is_file() and path.name != "SHA256SUMS"
    ]
    (V1 / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


if __name__ == "__main__":
    main()
