"""Every Zarr: formats 2 and 3, every kind of chunk and data type, through commits and folds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage

FORMATS = [2, 3]
KEYS: list[dict[str, Any]] = [
    {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "/"}},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "."}},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
]


@pytest.fixture(autouse=True)
def _data_types_without_a_v3_specification() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=zarr.errors.UnstableSpecificationWarning)
        yield


@pytest.fixture(params=["memory", "local", "remote", "folding"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    config = {
        "inline-chunk-bytes": 16,
        "compaction": {"max-delta-count": 1 if request.param == "folding" else 50},
    }
    storage: Storage = MemoryStorage()
    if request.param == "local":
        storage = LocalStorage(tmp_path / "repository")
    if request.param == "remote":
        storage = LatencyStorage(storage, latency_s=0.0)
    return zm.create(storage, config)


def kinds(store: ManifestStore) -> dict[str, NodeKind]:
    return {path: node.kind for path, node in contents_of(store).nodes().items()}


def keys(store: ManifestStore, prefix: str = "") -> list[str]:
    return sorted(contents_of(store).keys_below(prefix))


def read(repository: Repository) -> ManifestStore:
    return repository.readonly_session("main").store


def check(session: Session, repository: Repository, name: str, due: Any) -> None:
    """The array reads the same before and after a commit, and no key of it is opaque."""
    for store in (session.store, None):
        if store is None:
            session.commit("check")
            store = read(repository)
        found = zarr.open_array(store, path=name, mode="r")[...]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(due))
        assert np.asarray(found).dtype == np.asarray(due).dtype
        assert NodeKind.OPAQUE not in kinds(store).values()


# --- chunk keys, sizes and shapes ------------------------------------------------------------


@pytest.mark.parametrize("encoding", KEYS, ids=str)
def test_resize_both_ways_and_delete(repository: Repository, encoding: dict[str, Any]) -> None:
    session = repository.writable_session("main")
    values = np.random.default_rng(0).integers(1, 2**60, (7, 9))
    array = zarr.create_array(
        session.store, name="g/a", shape=(7, 9), chunks=(2, 3), dtype="i8", **encoding
    )
    array[:] = values
    check(session, repository, "g/a", values)
    chunks = {tuple(array.metadata.encode_chunk_key((i, j)) for j in range(3)) for i in range(4)}
    found = [key for key in keys(session.store, "g/a/") if key.split("/")[-1][0] not in ".z"]
    assert found == sorted(f"g/a/{key}" for row in chunks for key in row)

    array = zarr.open_array(session.store, path="g/a", mode="r+")
    array.resize((3, 4))
    check(session, repository, "g/a", values[:3, :4])
    array = zarr.open_array(session.store, path="g/a", mode="r+")
    array.resize((7, 9))
    due = np.zeros_like(values)
    due[:4, :6] = np.pad(values[:3, :4], ((0, 1), (0, 2)))
    edge = zarr.open_array(session.store, path="g/a", mode="r")[:4, :6]
    due[:4, :6] = edge  # what the partial chunks kept is up to Zarr
    np.testing.assert_array_equal(edge[:3, :4], values[:3, :4])
    check(session, repository, "g/a", due)  # whole chunks that were cut off stay gone
    del zarr.open_group(session.store, path="g", mode="r+")["a"]
    assert keys(session.store, "g/a") == []
    again = zarr.create_array(
        session.store, name="g/a", shape=(7, 9), chunks=(2, 3), dtype="i8", **encoding
    )
    assert again[...].sum() == 0
    session.commit("deleted and made again")
    assert zarr.open_array(read(repository), path="g/a", mode="r")[...].sum() == 0


@pytest.mark.parametrize("encoding", KEYS, ids=str)
def test_no_axes(repository: Repository, encoding: dict[str, Any]) -> None:
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(), dtype="f8", **encoding)
    assert array[()] == 0.0
    array[()] = 2.5
    check(session, repository, "a", np.float64(2.5))


@pytest.mark.parametrize("encoding", KEYS, ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0)])
def test_no_chunks(
    repository: Repository, encoding: dict[str, Any], shape: tuple[int, ...]
) -> None:
    session = repository.writable_session("main")
    options = {"shape": shape, "chunks": (2,) * len(shape), "dtype": "i4", **encoding}
    zarr.create_array(session.store, name="a", **options)
    check(session, repository, "a", np.zeros(shape, "i4"))
    grown = tuple(n or 3 for n in shape)
    array = zarr.open_array(session.store, path="a", mode="r+")
    array.resize(grown)
    array[...] = 7
    check(session, repository, "a", np.full(grown, 7, "i4"))


# --- data types ------------------------------------------------------------------------------

_RECORD = np.dtype([("x", "<i4"), ("y", "<f8"), ("name", "S5")])
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "record": np.array([(1, 2.5, b"one"), (2, -1.0, b"two"), (3, 0.0, b"")] * 9, _RECORD),
    "fixed text": np.array(["a", "bcd", "", "äö€"] * 9, "<U4"),
    "fixed bytes": np.array([b"a", b"bcd", b""] * 9, "S4"),
    "time": np.arange("2020-01-01", "2020-02-01", dtype="M8[D]").astype("M8[ns]"),
    "bool": np.array([True, False, True] * 9),
    "complex": np.arange(30) * (1 + 2j),
    "big-endian": np.arange(30, dtype=">u2"),
    "half": np.linspace(0, 1, 30).astype("f2"),
}


@pytest.mark.parametrize("zarr_format", FORMATS)
@pytest.mark.parametrize("name", VALUES)
def test_data_types(repository: Repository, name: str, zarr_format: Any) -> None:
    session = repository.writable_session("main")
    values = VALUES[name]
    array = zarr.create_array(
        session.store,
        name="a",
        shape=values.shape,
        chunks=(10,),
        dtype=values.dtype,
        zarr_format=zarr_format,
    )
    array[:] = values
    array[3:12] = values[:9]
    due = values.copy()
    due[3:12] = values[:9]
    found = zarr.open_array(session.store, path="a", mode="r")[...]
    check(session, repository, "a", due.astype(np.asarray(found).dtype))


@pytest.mark.parametrize("zarr_format", FORMATS)
def test_text_of_any_length(repository: Repository, zarr_format: Any) -> None:
    session = repository.writable_session("main")
    values = np.array(["", "a", "ä" * 50, "line\nbreak"] * 5, dtype=object)
    array = zarr.create_array(
        session.store, name="a", shape=(20,), chunks=(6,), dtype=str, zarr_format=zarr_format
    )
    array[:] = values
    session.commit("text")
    found = zarr.open_array(read(repository), path="a", mode="r")[:]
    assert list(found) == list(values)


def test_bytes_of_any_length(repository: Repository) -> None:
    session = repository.writable_session("main")
    values = [b"", b"a", b"\0\xff" * 30] * 4
    array = zarr.create_array(
        session.store, name="a", shape=(12,), chunks=(5,), dtype="variable_length_bytes"
    )
    array[:] = np.array(values, dtype=object)
    session.commit("bytes")
    assert list(zarr.open_array(read(repository), path="a", mode="r")[:]) == values


# --- shards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["start", "end"])
def test_shards_are_read_in_part(location: Any) -> None:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    values = np.random.default_rng(0).normal(size=(256, 256))
    array = zarr.create_array(
        session.store,
        name="a",
        shape=values.shape,
        chunks=(16, 16),
        shards={"shape": (128, 128), "index_location": location},
        dtype="f8",
        compressors=None,
    )
    array[:] = values
    array[3:5, 250:] = -1.0
    values[3:5, 250:] = -1.0
    session.commit("shards")
    assert len(keys(session.store, "a/c/")) == 4
    counting = CountingStorage(storage)
    found = zarr.open_array(zm.open(counting).readonly_session().store, path="a", mode="r")
    counting.reset()
    np.testing.assert_array_equal(found[20:30, 130:140], values[20:30, 130:140])
    # The index (16 bytes a chunk and a checksum) and one inner chunk, not the shard's 128 KiB.
    assert counting.requests == 2
    assert counting.bytes_read == 64 * 16 + 4 + 16 * 16 * 8
    np.testing.assert_array_equal(found[:], values)


def test_shards_of_every_kind(repository: Repository) -> None:
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(50,), chunks=(2,), shards=(10,), dtype="i8"
    )
    array[11:37] = np.arange(26)
    due = np.zeros(50, "i8")
    due[11:37] = np.arange(26)
    check(session, repository, "a", due)
    array = zarr.open_array(session.store, path="a", mode="r+")
    array.resize((25,))
    array.resize((50,))
    assert zarr.open_array(session.store, path="a", mode="r")[30:].sum() == 0


# --- groups and attributes -------------------------------------------------------------------


@pytest.mark.parametrize("zarr_format", FORMATS)
def test_groups_and_attributes(repository: Repository, zarr_format: Any) -> None:
    session = repository.writable_session("main")
    root = zarr.create_group(session.store, zarr_format=zarr_format, attributes={"title": "x"})
    inner = root.create_group("b/c", attributes={"n": 1})
    inner.create_array("d", shape=(4,), dtype="i4", attributes={"units": "m"})[:] = 5
    session.commit("first")
    group = zarr.open_group(session.store, mode="r+", zarr_format=zarr_format)
    group.attrs["title"] = "y"
    group["b/c"].attrs.update({"n": 2, "m": [1, {"deep": None}]})
    group["b/c/d"].attrs["units"] = "km"
    assert session.status().created == ()
    session.commit("attributes")
    store = read(repository)
    group = zarr.open_group(store, mode="r")
    assert group.metadata.zarr_format == zarr_format
    assert dict(group.attrs) == {"title": "y"}
    assert dict(group["b/c"].attrs) == {"n": 2, "m": [1, {"deep": None}]}
    assert dict(group["b/c/d"].attrs) == {"units": "km"}
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["b", "b/c", "b/c/d"]
    expected = {"": NodeKind.GROUP, "b": NodeKind.GROUP, "b/c": NodeKind.GROUP}
    assert kinds(store) == {**expected, "b/c/d": NodeKind.ARRAY}
    del zarr.open_group(session.store, mode="r+")["b"]
    assert kinds(session.store) == {"": NodeKind.GROUP}


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_xarray_writes_and_reads_format_2(repository: Repository, consolidated: bool) -> None:
    ds = xr.Dataset(
        {"t": (("time", "x"), np.random.default_rng(0).normal(size=(6, 40)), {"units": "K"})},
        coords={"time": np.arange(6), "x": np.linspace(0, 1, 40), "place": "here"},
        attrs={"title": "winds"},
    )
    session = repository.writable_session("main")
    ds.isel(time=slice(0, 4)).to_zarr(session.store, zarr_format=2, consolidated=False)
    session.commit("four")
    ds.isel(time=slice(4, 6)).drop_vars("place").to_zarr(
        session.store, zarr_format=2, consolidated=False, append_dim="time"
    )
    if consolidated:  # as a copy of an older store has it: kept, and not believed
        stale = json.dumps({"zarr_consolidated_format": 1, "metadata": {}}).encode()
        session.store.set_sync(".zmetadata", cpu.Buffer.from_bytes(stale))
    session.commit("six")
    store = read(repository)
    xr.testing.assert_identical(xr.open_zarr(store, consolidated=False).load(), ds)
    xr.testing.assert_identical(xr.open_zarr(store).load(), ds)
    assert zarr.open_group(store, mode="r", zarr_format=2)["t"].shape == (6, 40)
    opaque = [path for path, kind in kinds(store).items() if kind is NodeKind.OPAQUE]
    assert opaque == (["/.zmetadata"] if consolidated else [])
    arrays = {path: node.array for path, node in contents_of(store).nodes().items()}
    assert arrays["t"] is not None
    assert arrays["t"].dimension_names == ("time", "x")
    coordinates = {p for p, a in arrays.items() if a is not None and a.is_coordinate(p)}
    assert coordinates == {"time", "x"}


# --- two formats at one place ----------------------------------------------------------------


def set_key(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get_key(store: ManifestStore, key: str) -> bytes | None:
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def _both() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The keys of one array in either format, with the same chunk keys."""
    contents = []
    for zarr_format in FORMATS:
        session = zm.create(MemoryStorage()).writable_session("main")
        array: Any = zarr.create_array(
            session.store,
            name="a",
            shape=(6,),
            chunks=(2,),
            dtype="i4",
            zarr_format=zarr_format,  # type: ignore[arg-type]
            chunk_key_encoding={"name": "v2", "separator": "."},
            attributes={"format": zarr_format},
            compressors=None,
        )
        array[:] = np.arange(6)
        found = {key: get_key(session.store, key) for key in keys(session.store, "a/")}
        contents.append({key: value for key, value in found.items() if value is not None})
    return contents[0], contents[1]


def test_one_format_beside_the_other_and_instead_of_it() -> None:
    v2, v3 = _both()
    assert sorted(v2) == ["a/.zarray", "a/.zattrs", "a/0", "a/1", "a/2"]
    assert sorted(v3) == ["a/0", "a/1", "a/2", "a/zarr.json"]
    repository = zm.create(MemoryStorage(), {"inline-chunk-bytes": 0})
    session = repository.writable_session("main")
    for key, value in v2.items():
        set_key(session, key, value)
    session.commit("v2")
    node_id = contents_of(session.store).nodes()["a"].node_id
    set_key(session, "a/zarr.json", v3["a/zarr.json"])
    session.commit("v3 beside it")
    store = read(repository)
    both = {**v2, **v3}
    assert {key: get_key(store, key) for key in keys(store)} == both
    # The array is that of v3, with the chunks where they are.
    array = zarr.open_array(store, path="a", mode="r", zarr_format=3)
    assert (array.attrs["format"], array[:].tolist()) == (3, [0, 1, 2, 3, 4, 5])
    assert zarr.open_array(store, path="a", mode="r", zarr_format=2)[:].tolist() == [*range(6)]
    assert contents_of(store).nodes()["a"].node_id == node_id
    assert sorted(kinds(store)) == ["/a/.zarray", "/a/.zattrs", "a"]
    # Back again: what is left is the array.
    session.store.delete_sync("a/zarr.json")
    session.commit("v3 given up")
    store = read(repository)
    assert {key: get_key(store, key) for key in keys(store)} == v2
    assert kinds(store) == {"a": NodeKind.ARRAY}
    array = zarr.open_array(store, path="a", mode="r")
    assert (array.metadata.zarr_format, array.attrs["format"]) == (2, 2)


def test_another_format_with_a_smaller_shape_is_no_shrink() -> None:
    v2, v3 = _both()
    session = zm.create(MemoryStorage()).writable_session("main")
    for key, value in v3.items():
        set_key(session, key, value)
    small = {**json.loads(v2["a/.zarray"]), "shape": [2]}
    set_key(session, "a/.zarray", json.dumps(small).encode())
    session.store.delete_sync("a/zarr.json")
    assert zarr.open_array(session.store, path="a", mode="r")[:].tolist() == [0, 1]
    set_key(session, "a/zarr.json", v3["a/zarr.json"])
    array = zarr.open_array(session.store, path="a", mode="r", zarr_format=3)
    assert array[:].tolist() == [*range(6)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]])
def test_documents_of_a_v2_array_arrive_in_any_order(order: list[int]) -> None:
    v2, _ = _both()
    repository = zm.create(MemoryStorage(), {"inline-chunk-bytes": 0})
    session = repository.writable_session("main")
    names = ["a/.zarray", "a/.zattrs", "a/1"]
    for i in order:
        set_key(session, names[i], v2[names[i]])
        session.commit(names[i])
    assert kinds(read(repository)) == {"a": NodeKind.ARRAY}
    array = zarr.open_array(read(repository), path="a", mode="r")
    assert (array.attrs["format"], array[:].tolist()) == (2, [0, 0, 2, 3, 0, 0])
    session.store.delete_sync("a/.zarray")
    assert keys(session.store) == ["a/.zattrs", "a/1"]
    assert get_key(session.store, "a/.zattrs") == v2["a/.zattrs"]
    set_key(session, "a/.zgroup", b'{"zarr_format": 2}')
    assert zarr.open_group(session.store, path="a", mode="r").attrs["format"] == 2


@pytest.mark.parametrize("attributes", [b"", b"{", b"[]", b"7", b'{"_ARRAY_DIMENSIONS": [1]}'])
def test_attributes_of_format_2_may_be_anything(attributes: bytes) -> None:
    v2, _ = _both()
    repository = zm.create(MemoryStorage())
    session = repository.writable_session("main")
    set_key(session, "a/.zarray", v2["a/.zarray"])
    set_key(session, "a/.zattrs", attributes)
    session.commit("odd")
    assert get_key(read(repository), "a/.zattrs") == attributes
    node = contents_of(read(repository)).nodes()["a"]
    assert node.array is not None
    assert node.array.dimension_names is None


@pytest.mark.parametrize(
    "changes",
    [
        {"zarr_format": 3},
        {"shape": [6, 1]},
        {"shape": None},
        {"chunks": [0]},
        {"chunks": [2.0]},
        {"dimension_separator": "-"},
        {"dimension_separator": None},
        {"shape": [2**70]},
        {"shape": [2**62], "chunks": [1]},
    ],
    ids=str,
)
def test_malformed_documents_of_format_2_are_opaque(changes: dict[str, Any]) -> None:
    v2, _ = _both()
    session = zm.create(MemoryStorage()).writable_session("main")
    document = json.dumps({**json.loads(v2["a/.zarray"]), **changes}).encode()
    set_key(session, "a/.zarray", document)
    set_key(session, "a/0", v2["a/0"])
    assert set(kinds(session.store)) == {"/a/.zarray", "/a/0"}
    assert get_key(session.store, "a/.zarray") == document
    set_key(session, "a/.zarray", v2["a/.zarray"])
    assert kinds(session.store) == {"a": NodeKind.ARRAY}
    set_key(session, "a/.zarray", document)
    assert get_key(session.store, "a/0") == v2["a/0"]
    assert set(kinds(session.store)) == {"/a/.zarray", "/a/0"}
