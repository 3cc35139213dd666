"""The specification is enough to read a repository: `reader.py` does, and gives what Zarr gets."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pytest
import zarr
import zstandard
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from inside import root_of
from zarr_manifests.format import envelope
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.columns import decode_column
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.envelope import Fields
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, workspace_of

HERE = Path(__file__).parent
SPEC = (HERE.parents[1] / "docs" / "spec" / "v1.md").read_text(encoding="utf-8")


def load_reader() -> Any:
    spec = importlib.util.spec_from_file_location("spec_reader", HERE / "reader.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reader = load_reader()


def contents(store: ManifestStore) -> dict[str, bytes]:
    """All keys and values, as Zarr sees them."""

    async def read() -> dict[str, bytes]:
        prototype = default_buffer_prototype()
        keys = [key async for key in store.list()]
        assert len(keys) == len(set(keys))
        values = [await store.get(key, prototype) for key in keys]
        return {key: value.to_bytes() for key, value in zip(keys, values, strict=True)}

    return asyncio.run(read())


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, default_buffer_prototype().buffer.from_bytes(value))


def commit(repo: zm.Repository, message: str, branch: str = "main") -> Any:
    return repo.transaction(branch, message=message)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, shape, dtype=np.int64)


def make(location: object) -> zm.Repository:
    """A repository with something of everything the format can say."""
    repo = zm.create(location, {"inline-chunk-bytes": 200, "compaction": {"max-delta-count": 3}})
    with commit(repo, "arrays of every kind of chunk key") as store:
        root = zarr.create_group(store, attributes={"title": "spec"})
        air = root.create_array("air/t", shape=(20, 20), chunks=(5, 9), dtype="i8")
        air[:] = noise(20, 20)
        root.create_array("air/x", data=np.arange(20.0), chunks=(7,), dimension_names=["x"])
        root.create_array("scalar", data=np.float64(3.5))
        dots = {"name": "default", "separator": "."}
        root.create_array("dots", data=noise(4, 4), chunks=(2, 2), chunk_key_encoding=dots)
        v2 = {"name": "v2", "separator": "/"}
        root.create_array("v2", data=noise(4, 4), chunks=(2, 3), chunk_key_encoding=v2)
        v2["separator"] = "."
        root.create_array("v2-scalar", data=np.int32(7), chunk_key_encoding=v2)
        root.create_array("none", shape=(0, 3), chunks=(2, 3), dtype="f4")
        old = zarr.create_group(store, path="old", zarr_format=2, attributes={"format": 2})
        old.create_array("dots", data=noise(4, 4, seed=7), chunks=(2, 2), attributes={"n": 1})
        slashes = {"name": "v2", "separator": "/"}
        old.create_array(
            "slashes", data=noise(40, 40, seed=8), chunks=(2, 20), chunk_key_encoding=slashes
        )
        old.create_array("scalar", data=np.int32(7))
        for name in (".zgroup", ".zattrs"):  # Zarr makes groups above; the root is one of v3
            asyncio.run(store.delete(name))
    with commit(repo, "append") as store:
        grown = zarr.open_array(store, path="air/t")
        grown.append(noise(7, 20, seed=1))
    with commit(repo, "opaque entries") as store:
        put(store, "notes.txt", b"short")
        put(store, "air/t/c/99/0", b"off the grid" * 50)
        put(store, "bad/zarr.json", b"{")
        put(store, "air/empty", b"")
    repo.create_tag("v1")
    with commit(repo, "absent chunks and a shrink") as store:
        zarr.open_array(store, path="air/t")[:5] = 0
        zarr.open_array(store, path="dots").resize((2, 4))
        asyncio.run(store.delete("notes.txt"))
    repo.create_branch("other", repo.list_tags()["v1"])
    with commit(repo, "grown again, with new chunks", "other") as store:
        dots_array = zarr.open_array(store, path="dots")
        dots_array.resize((2, 2))
        dots_array.resize((6, 4))
        dots_array[4:] = noise(2, 4, seed=2)
    with commit(repo, "deleted and made again") as store:
        group = zarr.open_group(store)
        del group["v2"]
        del group["air/x"]
        group.create_array("v2", data=noise(3, seed=3), chunks=(2,))
    with commit(repo, "tables too large to embed") as store:
        group = zarr.open_group(store)
        group.create_array("long", shape=(12_000,), chunks=(1,), dtype="i8")
        for i in [*range(3_000), *range(3_500, 9_000, 7)]:
            put(store, f"long/c/{i}", bytes([i % 251]) * (201 if i % 3 else 9))
    with commit(repo, "overwritten and removed") as store:
        for i in range(0, 3_000, 2):
            put(store, f"long/c/{i}", b"again" * (i % 97))
        for i in range(1, 3_000, 4):
            asyncio.run(store.delete(f"long/c/{i}"))
    for seed in (4, 5, 6):  # more than one of them live at once
        with commit(repo, "overwritten") as store:
            zarr.open_array(store, path="air/t")[7:12] = noise(5, 20, seed=seed)
    return repo


@pytest.fixture(scope="module")
def repository() -> zm.Repository:
    return make(MemoryStorage())


@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False])
def test_every_snapshot_reads_as_zarr_reads_it(repository: zm.Repository, copies: bool) -> None:
    found = reader.Reader(repository.storage.get, copies=copies)
    heads = found.heads()
    assert heads.keys() == {"main", "other", "v1"}
    seen = {}
    for name, head in heads.items():
        infos = [*repository.ancestry(name)]
        history = [*found.history(head)]
        assert [(i.snapshot_id, i.message, i.kind) for i in infos] == [
            (snapshot_id, s["message"], s["kind"]) for snapshot_id, s in history
        ]
        seen |= dict(history)
    assert len(seen) >= 10
    for snapshot_id in seen:
        store = repository.readonly_session(snapshot_id).store
        assert found.read(snapshot_id) == contents(store)
    values = found.read(repository.list_branches()["main"])
    assert values["long/c/0"] == b""
    assert values["long/c/2"] == b"again" * 2
    assert "long/c/1" not in values
    assert values["bad/zarr.json"] == b"{"
    assert {"old/.zgroup", "old/.zattrs", "old/dots/.zattrs", "old/scalar/0"} <= values.keys()
    assert {"old/dots/1.1", "old/slashes/19/1"} <= values.keys()
    assert not [key for key in values if key.startswith(("air/x", "air/t/c/0", "notes"))]


def test_the_repository_has_something_of_everything(repository: zm.Repository) -> None:
    """Else the comparison above would say less than it seems to."""
    found = reader.Reader(repository.storage.get)
    seen = set()
    for info in repository.storage.list():
        kind = info.key.partition("/")[0]
        if kind in ("manifests", "deltas"):
            number = reader.MANIFEST if kind == "manifests" else reader.DELTA
            fields = reader.open_object(repository.storage.get(info.key), number)
            seen |= {name for name in fields if fields[name] and name != "commit"}
            for _, data in fields["tables"]:
                seen |= set(shapes_of(reader.unpack(data)))
    head = found.follow(found.root["branches"]["main"]["head"], reader.SNAPSHOT)
    assert head["base"] is not None
    assert head["deltas"]
    kinds = {snapshot["kind"] for _, snapshot in found.history(found.heads()["main"])}
    assert kinds == {"append", "overwrite", "delete", "metadata", "rewrite"}
    assert seen == {
        *("nodes", "deleted", "truncated", "tables", "manifests"),
        *("constant", "differences", "plain", "blosc", "width 1", "width 2", "width 4"),
        *("dense", "sparse", "no axes", "unset", "inline", "native", "several sources"),
    }


def shapes_of(table: dict[str, Any]) -> list[str]:
    """Which of the format's ways of saying something a chunk table uses."""
    columns = table["col"].values()
    kinds = set(reader.column(table["col"]["kind"], table["n"]))
    return [
        *(("constant", "differences", "plain")[column[0]] for column in columns),
        *(f"width {column[2]}" for column in columns if column[0]),
        *("blosc" for column in columns if column[0] and column[3]),
        *(("unset", "inline", "native")[kind] for kind in kinds),
        *(["several sources"] if len(table["src"]) > 1 else []),
        "sparse" if "index" in table["col"] else "dense",
        *([] if table["lo"] else ["no axes"]),
    ]


def test_a_repository_is_a_folder_of_files(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    with commit(repo, "values") as store:
        zarr.create_array(store, name="a", data=noise(30, 30), chunks=(10, 30))
    found = reader.Reader(lambda key: (tmp_path / "repo" / key).read_bytes())
    values = found.read(repo.list_branches()["main"])
    assert values.keys() == {*("zarr.json", "a/zarr.json", "a/c/0/0", "a/c/1/0", "a/c/2/0")}
    assert values == contents(repo.readonly_session("main").store)


def test_archives_are_the_root_without_copies(repository: zm.Repository) -> None:
    storage = repository.storage
    current = reader.open_object(storage.get("current"), reader.ROOT)
    versions = range(1, current["version"] + 1)
    archives = [reader.Reader(storage.get).archive(version) for version in versions]
    assert [archive["version"] for archive in archives] == [*versions]
    for branch in current["branches"].values():
        branch["head"].pop("b", None)
        if branch["base"] is not None:
            branch["base"].pop("b", None)
    assert archives[-1] == current
    assert len(current["log"]) == min(32, len(archives))


def copies_in(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every pointer with a copy in an object, and the fields that lead to it."""
    if isinstance(value, dict):
        if "b" in value and "k" in value:
            yield place, value
        for name, item in value.items():
            yield from copies_in(item, (*place, str(name)))
    elif isinstance(value, list):
        for item in value:
            yield from copies_in(item, place)


def test_copies_lie_where_the_specification_says(repository: zm.Repository) -> None:
    kinds = {"current": 1, "root": 1, "snapshots": 2, "nodes": 3, "deltas": 4, "manifests": 5}
    kinds["indexes"] = 6
    limits = {"current": 16_384, "snapshots": 8_192, "nodes": 262_144}
    found: dict[str, set[str]] = {}
    for info in repository.storage.list():
        top = info.key.partition("/")[0]
        if top == "chunks":
            continue
        fields = reader.open_object(repository.storage.get(info.key), kinds[top])
        nbytes = 0
        for place, pointer in copies_in(fields):
            assert repository.storage.get(pointer["k"]) == pointer["b"]
            found.setdefault(top, set()).add(place[-1])
            nbytes += pointer["n"]
        assert nbytes <= limits.get(top, 0)
    assert found == {"current": {"head", "base"}, "snapshots": {"log"}, "nodes": {"blob"}}


@pytest.mark.parametrize(
    ("at", "bit", "fault"),
    [(0, 1, "magic"), (8, 1, "crc"), (12, 2, "version"), (30, 4, "crc"), (-1, 1, "crc")],
)
def test_a_flipped_bit_is_noticed(repository: zm.Repository, at: int, bit: int, fault: str) -> None:
    data = bytearray(repository.storage.get("current"))
    data[at] ^= bit
    with pytest.raises(reader.FormatError, match=fault):
        reader.Reader(lambda _: bytes(data))


def test_bounds_of_what_is_read_are_those_of_the_package(repository: zm.Repository) -> None:
    for nbytes in (2**20 - 8, 2**20):
        data = envelope.encode(envelope.ObjectKind.DELTA, {"a": bytes(nbytes)})
        assert reader.open_object(data, reader.DELTA) == {"a": bytes(nbytes)}
    packed = zstandard.ZstdCompressor().compress(data[24:])
    covered = data[12:14] + b"\1\0" + data[16:24] + packed
    bomb = data[:8] + google_crc32c.value(covered).to_bytes(4, "little") + covered
    with pytest.raises(reader.FormatError, match="expansion"):
        reader.open_object(bomb, reader.DELTA)
    fields = reader.open_object(repository.storage.get("current"), reader.ROOT)
    fields["at_ms"] = envelope.MAX_MS + 1
    late = envelope.encode(envelope.ObjectKind.ROOT, fields)
    with pytest.raises(reader.FormatError, match="time"):
        reader.Reader(lambda _: late)


def test_what_lies_in_anothers_place_is_noticed(repository: zm.Repository) -> None:
    storage, ids = repository.storage, [info.snapshot_id for info in repository.ancestry()][:2]
    first, second = (f"snapshots/{'/'.join(i.rsplit('-', 1))}" for i in ids)
    there = {first: second, second: first, f"root/{2:020d}": f"root/{3:020d}"}
    found = reader.Reader(lambda key: storage.get(there.get(key, key)))
    for snapshot_id in ids:
        with pytest.raises(reader.FormatError, match="id of the snapshot"):
            found.snapshot(snapshot_id)
    with pytest.raises(reader.FormatError, match="version of the archive"):
        found.archive(2)
    found = reader.Reader(storage.get)
    found.root["repository"] = "of another one"
    with pytest.raises(reader.FormatError, match="repository of the snapshot"):
        found.snapshot(ids[0])
    with pytest.raises(reader.FormatError, match="repository of the archive"):
        found.archive(2)


def test_the_reader_knows_nothing_of_the_package() -> None:
    tree = ast.parse((HERE / "reader.py").read_text(encoding="utf-8"))
    names = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign == {"google_crc32c", "msgpack", "numcodecs", "numpy", "zstandard"}


def vectors(name: str) -> Any:
    return json.loads(re.search(rf"```json {name}\n(.*?)```", SPEC, re.DOTALL)[1])


@pytest.mark.parametrize(("packed", "n", "values"), vectors("vectors"))
def test_columns_of_the_specification(packed: str, n: int, values: list[int]) -> None:
    column = msgpack.unpackb(bytes.fromhex(packed))
    assert reader.column(column, n) == values
    assert decode_column(column, n).tolist() == values


def test_the_chunk_table_of_the_specification() -> None:
    table = vectors("table")
    packed = reader.unpack(bytes.fromhex(table["hex"]))

    def plain(place: Any) -> Any:
        return place.hex() if isinstance(place, bytes) else json.loads(json.dumps(place))

    rows = {c: plain(place) for c, place in reader.table_rows(packed).items()}
    assert rows == {tuple(coords): value for coords, _, value in table["rows"]}
    own = ChunkTable.parse(Fields(packed, "table"))
    assert [list(coords) for coords, _ in own.refs()] == [row[0] for row in table["rows"]]
    kinds = [("unset", "inline", "native", "virtual")[kind] for kind in own.kind]
    assert kinds == [row[1] for row in table["rows"]]


def test_the_object_of_the_specification() -> None:
    data = bytes.fromhex(vectors("object")["hex"])
    assert reader.open_object(data, reader.DELTA)["commit"] == bytes(range(16))
    assert Delta(bytes(range(16))).encode() == data


# --- digests and pages -------------------------------------------------------------------------


def document(name: str, shape: int, note: str) -> bytes:
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shape],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes"}],
        "fill_value": 0,
        "dimension_names": [name[0]],
        "attributes": {"note": note},
    }
    return json.dumps(fields).encode()


def step(store: ManifestStore, rng: np.random.Generator) -> None:
    """Something at random: coordinates `x`, `y`, `z` and data `x1`, ..., longer and shorter."""
    for _ in range(rng.integers(1, 4)):
        name = rng.choice(["x", "y", "z", "x1", "y1"])
        match rng.integers(0, 6):
            case 0 | 1:
                note = rng.bytes(rng.choice([10, 600])).hex()
                put(store, f"{name}/zarr.json", document(name, int(rng.integers(1, 20)), note))
            case 2:
                asyncio.run(store.delete_dir(str(name)))
            case 3:
                asyncio.run(store.delete(f"{name}/c/{rng.integers(0, 10)}"))
            case _:
                value = rng.bytes(rng.choice([2, 900]))
                put(store, f"{name}/c/{rng.integers(0, 10)}", value)


@pytest.mark.parametrize("seed", range(6))
def test_every_snapshot_reads_the_same_with_and_without_digests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    storage = MemoryStorage()
    config = {"compaction": {"max-delta-count": 15 if seed % 2 else 60}}
    repository = zm.create(storage, config)
    for i in range(45):
        session = repository.writable_session("main")
        step(session.store, rng)
        if session.status():
            session.commit(f"step {i}")
    found = reader.Reader(storage.get)
    digests, cold = 0, zm.open(storage)
    for snapshot_id, fields in found.history(found.heads()["main"]):
        digests += len(fields["digests"])
        store = cold.readonly_session(snapshot_id).store
        assert found.read(snapshot_id) == contents(store)
    assert digests
    tip = root_of(storage).branches["main"]
    head = Snapshot.from_object(storage.get(tip.head.key), tip.head)
    assert tip.ahead == head.ahead
    assert len(tip.ahead) <= 4
    assert len(head.opening()) <= 8


def test_pages_hold_the_refs_that_the_root_does_not() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    head = repository.list_branches()["main"]
    rng = np.random.default_rng(0)
    for i in range(150):
        repository.create_tag(f"t{i}-{rng.bytes(60).hex()}", head)
        if i % 3 == 0:
            repository.create_branch(f"b{i}-{rng.bytes(60).hex()}", head)
    for i, name in enumerate([*repository.list_tags()]):
        if i % 4 == 0:
            repository.delete_tag(name)
    for i, name in enumerate([*repository.list_branches()]):
        if i % 4 == 0 and name != "main":
            repository.delete_branch(name)
    found = reader.Reader(storage.get)
    assert found.root["pages"].keys() == {"branches", "tags"}
    assert found.heads().keys() == {*repository.list_branches(), *repository.list_tags()}


@pytest.mark.sweep
def test_what_was_moved_shifted_and_brought_back_reads_the_same() -> None:
    storage = MemoryStorage()
    make(storage)
    repo = zm.open(storage, {"compaction": {"max-delta-count": 50}})

    def change(message: str, call: Any) -> str:
        session = repo.writable_session("main")
        call(session)
        return session.commit(message)

    change("move", lambda session: session.move("air", "moved"))
    change("shift", lambda session: session.shift_array("moved/t", (1, 0)))
    change("rename", lambda session: session.move("scalar", "number"))
    gone = change("delete", lambda session: workspace_of(session.store).delete_below(""))
    repo.revert(gone)
    session = repo.writable_session("main")
    session.move("moved/t", "t")
    session.amend("bring back and move")
    own = reader.Reader(storage.get)
    seen = [snapshot_id for snapshot_id, _ in own.history(own.heads()["main"])]
    assert seen == [info.snapshot_id for info in repo.ancestry()]
    for snapshot_id in seen:
        store = repo.readonly_session(snapshot_id).store
        assert own.read(snapshot_id) == contents(store)
    assert "t/zarr.json" in own.read(seen[0])


def test_virtual_refs_are_found_by_the_specification(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.bin").write_bytes(bytes(range(100)))
    repo = zm.create(tmp_path / "repo", virtual_containers={"raw": tmp_path / "raw"})
    with commit(repo, "refer") as store:
        zarr.create_array(store, name="a", shape=(90,), chunks=(10,), dtype="u1", compressors=None)
        store.set_virtual_refs(
            "a",
            np.arange(8)[:, None],
            ["virtual://raw/a.bin", "virtual://raw/gone.bin"],
            [0, 0, 0, 0, 0, 0, 0, 1],
            [90, 0, 10, 20, 30, 40, 50, 3],
            np.full(8, 10),
            etags=["e", None],
            modified=[-1, 5],
            sizes=[100, -1],
        )
    seen = []

    def get_file(file: Any) -> bytes:
        seen.append(file)
        name, path, *_ = file
        return (tmp_path / name / path).read_bytes() if path == "a.bin" else bytes(100)

    found = reader.Reader(
        lambda key: (tmp_path / "repo" / key).read_bytes(), get_file=get_file
    ).read(repo.list_branches()["main"])
    assert found["a/c/0"] == bytes(range(90, 100))
    assert found["a/c/6"] == bytes(range(50, 60))
    assert found["a/c/7"] == bytes(10)
    assert "a/c/8" not in found
    assert set(seen) == {("raw", "a.bin", "e", None, 100), ("raw", "gone.bin", None, 5, None)}
