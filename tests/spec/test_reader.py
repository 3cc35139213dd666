"""The specification is enough to read a repository: `reader.py` does, and gives what Zarr gets."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import zarr_manifests as zm
from specified import SPEC, contents, load, reader
from stored import array_document, put
from zarr_manifests.format.chunk_table import ChunkTable, StoredTable, decode_column
from zarr_manifests.format.manifest import Delta
from zarr_manifests.format.records import record
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore

golden = load("golden/make")
TEXT = (SPEC.parents[1] / "docs" / "spec" / "v1.md").read_text(encoding="utf-8")


def commit(repo: zm.Repository, message: str, branch: str = "main") -> Any:
    return repo.transaction(branch, message=message)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, shape, dtype=np.int64)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> zm.Repository:
    return zm.open(golden.history(tmp_path_factory.mktemp("golden")))


def same(found: Any, repository: zm.Repository) -> list[str]:
    """Compare all snapshots of `main`, as the reader and the package have them; their ids."""
    seen = [snapshot_id for snapshot_id, _ in found.history(found.heads()["main"])]
    assert seen == [info.snapshot_id for info in repository.ancestry()]
    for snapshot_id in seen:
        assert found.read(snapshot_id) == contents(repository.readonly_session(snapshot_id).store)
    return seen


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("name", ["arrays", "history", "nodes"])
def test_every_snapshot_reads_as_zarr_reads_it(name: str, tmp_path: Path) -> None:
    """Of golden repositories, made anew by the package as it is now."""
    repository = zm.open(getattr(golden, name)(tmp_path))
    found = reader.Reader(repository.storage.get)
    heads = {**repository.list_branches(), **repository.list_tags()}
    assert found.heads().keys() == heads.keys()
    assert len(same(found, repository)) >= 4
    for snapshot_id in heads.values():
        assert found.read(snapshot_id) == contents(repository.readonly_session(snapshot_id).store)


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


def test_the_reader_knows_nothing_of_the_package() -> None:
    tree = ast.parse((SPEC / "reader.py").read_text(encoding="utf-8"))
    names = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign == {"google_crc32c", "msgpack", "numcodecs", "numpy", "zstandard"}


def vectors(name: str) -> Any:
    return json.loads(re.search(rf"```json {name}\n(.*?)```", TEXT, re.DOTALL)[1])


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
    own = ChunkTable.parse(record(StoredTable, packed, "table"))
    assert [list(coords) for coords, _ in own.refs()] == [row[0] for row in table["rows"]]
    kinds = [("unset", "inline", "native", "virtual")[kind] for kind in own.kind]
    assert kinds == [row[1] for row in table["rows"]]


def test_the_object_of_the_specification() -> None:
    data = bytes.fromhex(vectors("object")["hex"])
    assert reader.open_object(data, reader.DELTA)["commit"] == bytes(range(16))
    assert Delta(bytes(range(16))).encode() == data


# --- bundles and pages -------------------------------------------------------------------------


def document(name: str, shape: int, note: str) -> bytes:
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    more = {"dimension_names": [name[0]], "attributes": {"note": note}}
    return array_document((shape,), chunk_grid=grid, **more)


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


@pytest.mark.parametrize("max_delta_count", [15, 60])
def test_every_snapshot_reads_the_same_with_and_without_bundles(max_delta_count: int) -> None:
    rng, storage = np.random.default_rng(max_delta_count), MemoryStorage()
    repository = zm.create(storage, {"compaction": {"max-delta-count": max_delta_count}})
    for i in range(45):
        session = repository.writable_session("main")
        step(session.store, rng)
        if session.status():
            session.commit(f"step {i}")
    found = reader.Reader(storage.get)
    seen = same(found, zm.open(storage))
    entries = [entry for at in seen for entry in found.snapshot(at)["deltas"]]
    assert any("bundle" in entry for entry in entries)
