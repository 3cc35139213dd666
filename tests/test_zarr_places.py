"""Every kind of array, wherever its chunks lie, through moves, resizes, folds and a revert.

The same arrays are written to a plain Zarr store, which is the judge: inline, in packs and in
objects of their own in a repository, and virtual, by taking the plain store in. What is done next
is done to both.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.storage import LocalStore

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.store import contents_of

ENCODINGS: dict[str, dict[str, Any]] = {
    "v2-dots": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v2-slashes": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v3-slashes": {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "/"}},
    "v3-dots": {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "."}},
}
NUMBERS = np.random.default_rng(0).integers(1, 2**60, (7, 9))
RECORDS = np.array([(i, i / 2) for i in range(1, 8)], [("n", "<i4"), ("x", "<f8")])
WORDS = np.array(["", "sea", "Ærøskøbing", "wind" * 9, "a", "b", "c"], np.dtypes.StringDType())
KINDS: dict[str, dict[str, Any]] = {
    "numbers": {"data": NUMBERS, "chunks": (2, 3)},
    "big-endian": {"data": NUMBERS.astype(">i8"), "chunks": (2, 9)},
    "records": {"data": RECORDS, "chunks": (2,)},
    "text": {"data": WORDS, "chunks": (3,)},
    "bytes": {"data": np.array([b"a", b"bcd", b"", b"e\xff"], "S3"), "chunks": (2,)},
    "no-axes": {"data": np.array(2.5), "chunks": ()},
    "no-chunks": {"data": np.zeros((0, 4)), "chunks": (1, 4)},
    "absent": {"data": np.zeros(9, "i2"), "chunks": (2,)},
}
PLACES: dict[str, dict[str, int]] = {
    "inline": {"inline-chunk-bytes": 4096},
    "packs": {"inline-chunk-bytes": 0},
    "objects": {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0},
    "virtual": {},
}


@pytest.fixture(autouse=True)
def _data_types_without_a_v3_specification() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=zarr.errors.UnstableSpecificationWarning)
        yield


def fill(store: Any, encoding: dict[str, Any]) -> None:
    group = zarr.create_group(store, path="g", zarr_format=encoding["zarr_format"])
    keys = {"chunk_key_encoding": encoding["chunk_key_encoding"]}
    for name, kind in KINDS.items():
        group.create_array(name, **kind, **keys)
    if encoding["zarr_format"] == 3:
        for at in ("start", "end"):
            shards = {"shape": (4, 6), "index_location": at}
            group.create_array(f"shards-{at}", data=NUMBERS, chunks=(2, 3), shards=shards, **keys)


def names(encoding: dict[str, Any]) -> list[str]:
    return [*KINDS, *(["shards-start", "shards-end"] if encoding["zarr_format"] == 3 else [])]


def same(store: Any, judge: Path, name: str, path: str) -> None:
    found = zarr.open_array(store, path=path, mode="r")
    due = zarr.open_array(LocalStore(judge), path=f"g/{name}", mode="r")
    assert (found.dtype, found.shape, found.chunks) == (due.dtype, due.shape, due.chunks)
    np.testing.assert_array_equal(found[...], due[...])
    if found.ndim == 2 and found.size:
        np.testing.assert_array_equal(found[1:4, 2:5], due[1:4, 2:5])


def write_unless_virtual(repository: Repository, place: str, encoding: str, judge: Path) -> None:
    if place == "virtual":
        zm.virtual.import_zarr(repository, judge)
        return
    with repository.transaction(message="fill") as store:
        fill(store, ENCODINGS[encoding])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_array_is_itself_wherever_its_chunks_lie(
    tmp_path: Path, encoding: str, place: str
) -> None:
    judge = tmp_path / "plain"
    fill(LocalStore(judge), ENCODINGS[encoding])
    repository = zm.create(
        tmp_path / "repository", PLACES[place], virtual_containers={"plain": judge}
    )
    write_unless_virtual(repository, place, encoding, judge)
    filled = repository.list_branches()["main"]
    expected = {"inline": RefKind.INLINE, "virtual": RefKind.VIRTUAL}.get(place, RefKind.NATIVE)
    contents = contents_of(repository.readonly_session().store)
    tables = [contents.chunks(node) for node in contents.nodes().values()]
    assert {int(kind) for table in tables if table for kind in table.kind} == {expected}

    session = repository.writable_session()
    session.move("g", "moved")
    session.move("moved/numbers", "moved/renamed")
    paths = {name: f"moved/{name}" for name in names(ENCODINGS[encoding])}
    paths["numbers"] = "moved/renamed"

    def check() -> None:
        for name, path in paths.items():
            same(session.store, judge, name, path)
        assert NodeKind.OPAQUE not in {n.kind for n in contents_of(session.store).nodes().values()}

    check()
    session.commit("move")
    check()
    # The same to the repository and the judge: a part of a chunk, a shrink, a growth.
    copies = [(session.store, paths), (LocalStore(judge), {name: f"g/{name}" for name in paths})]
    virtual = place == "virtual"  # the judge's files are its chunks, and are left alone
    for store, places in copies[: 1 if virtual else 2]:
        zarr.open_array(store, path=places["numbers"])[0, 0] = 5
        for name in ("numbers", "shards-end", "text"):
            if name in places:
                array = zarr.open_array(store, path=places[name])
                array.resize((4, *array.shape[1:]))
                array.resize((10, *array.shape[1:]))
    if virtual:
        again = zarr.open_array(session.store, path=paths["numbers"])
        due = np.zeros((10, 9), NUMBERS.dtype)
        due[:4] = NUMBERS[:4]
        due[0, 0] = 5
        np.testing.assert_array_equal(again[...], due)
    else:
        check()
    session.commit("write, shrink and grow")
    repository.compact("main", "full")
    session = repository.writable_session()
    if not virtual:
        check()
    for info in list(repository.ancestry())[1:3]:  # back to what was filled in
        repository.revert(info.snapshot_id)
    if virtual:
        now = repository.readonly_session().store
        for name in paths:
            same(now, judge, name, f"g/{name}")
    # A moved array that is deleted and made again has none of its chunks.
    session = repository.writable_session()
    session.move("g", "last")
    del zarr.open_group(session.store, path="last")["absent"]
    del zarr.open_group(session.store, path="last")["records"]
    made = zarr.create_array(
        session.store, name="last/records", shape=(7,), chunks=(2,), dtype=RECORDS.dtype
    )
    assert made[...].tolist() == [(0, 0.0)] * 7
    session.commit("delete and make again")
    read = zarr.open_array(repository.readonly_session().store, path="last/records", mode="r")
    assert read[...].tolist() == [(0, 0.0)] * 7
    old = zarr.open_array(repository.readonly_session(filled).store, path="g/records")
    np.testing.assert_array_equal(old[...], RECORDS)


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def test_opaque_keys_beside_arrays_move_along_and_stay_what_they_are(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "repository", {"inline-chunk-bytes": 0})
    session = repository.writable_session()
    group = zarr.create_group(session.store, path="g")
    group.create_array("a", data=np.arange(6), chunks=(2,))
    odd = {
        "g/a/c/9": b"off the grid",
        "g/a/c/01": b"not canonical",
        "g/a/.zattrs": b"of the other format",
        "g/notes/readme.txt": b"x" * 5000,
        "g/bad/zarr.json": b"not JSON",
    }
    for key, value in odd.items():
        put(session, key, value)
    session.commit("odd keys")
    session.move("g", "deep")
    session.shift_array("deep/a", (1,))
    session.commit("move and shift")
    repository.compact("main", "full")
    store = repository.readonly_session().store
    for key, value in odd.items():
        found = store.get_sync(key.replace("g/", "deep/", 1))
        assert found is not None
        assert found.to_bytes() == value
    assert zarr.open_array(store, path="deep/a", mode="r")[:].tolist() == [0, 0, 0, 1, 2, 3]
    assert json.loads((store.get_sync("deep/a/zarr.json") or b"{}").to_bytes())["shape"] == [6]
