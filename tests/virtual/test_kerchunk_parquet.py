"""kerchunk references in parquet files, as fsspec writes them."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr
from fsspec.implementations.reference import LazyReferenceMapper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from hearing import Hearing
from zarr_manifests.error_cases import VirtualSourceChangedError
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.store import contents_of
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk import read_kerchunk

THERE = {"g/t/1.0", "g/t/2.4", "scalar/0", *(f"g/row/{row}.0" for row in (0, 2, 4, 5))}
DATA = np.arange(60, dtype="<f4").reshape(6, 10)


def zarray(shape: list[int], chunks: list[int], dtype: str = "<f4") -> bytes:
    fields = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "order": "C"}
    return json.dumps(fields | {"compressor": None, "filters": None, "fill_value": 0}).encode()


def dims(*names: str) -> bytes:
    return json.dumps({"_ARRAY_DIMENSIONS": names}).encode()


def written(folder: Path, *, threshold: float = 10, record_size: int = 4) -> LazyReferenceMapper:
    """An empty set of references; set its items, then flush it."""
    mapper = LazyReferenceMapper.create(
        str(folder),
        fs=fsspec.filesystem("file"),
        record_size=record_size,
        engine="pyarrow",
        categorical_threshold=threshold,
    )
    mapper[".zgroup"] = b'{"zarr_format": 2}'
    return mapper


@pytest.fixture(params=[1, 1e9], ids=["categories", "texts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One array of 15 chunks in two files and inline, a whole file, absent ones, a scalar."""
    (tmp_path / "head.bin").write_bytes(b"head" + DATA.tobytes())
    (tmp_path / "whole.bin").write_bytes(DATA[2:4, :2].tobytes())
    mapper = written(tmp_path / "refs", threshold=request.param)
    mapper["g/.zgroup"] = b'{"zarr_format": 2}'
    mapper["g/t/.zarray"] = zarray([6, 10], [2, 2])
    mapper["g/t/.zattrs"] = dims("y", "x")
    mapper["g/t/1.0"] = [(tmp_path / "whole.bin").as_uri()]
    mapper["g/t/2.4"] = DATA[4:, 8:].tobytes()
    mapper["g/row/.zarray"] = zarray([6, 10], [1, 10])
    mapper["g/row/.zattrs"] = dims("y", "x")
    for row in (0, 1, 2, 4, 5):
        mapper[f"g/row/{row}.0"] = [str(tmp_path / "head.bin"), 4 + 40 * row, 40]
    del mapper["g/row/1.0"]
    mapper["scalar/.zarray"] = zarray([], [])
    mapper["scalar/.zattrs"] = dims()
    mapper["scalar/0"] = b"base64:AACAPw=="
    mapper["empty/.zarray"] = zarray([0], [1])
    mapper["empty/.zattrs"] = dims("none")
    mapper.flush()
    return tmp_path / "refs"


def test_an_import_tells_of_files_and_chunks(repo: zm.Repository, folder: Path) -> None:
    hearing = Hearing()
    zm.virtual.import_kerchunk(repo, folder, progress=hearing)
    files = len([*folder.rglob("*.parq")])
    chunks = len(THERE) - 2  # those in the references themselves are no references
    assert hearing.done == hearing.totals
    assert hearing.done == {"reading files of references": files, "chunks": chunks}


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"here": tmp_path})


def test_what_fsspec_wrote_reads_as_fsspec_reads_it(
    repo: zm.Repository, folder: Path, tmp_path: Path
) -> None:
    zm.virtual.import_kerchunk(repo, folder, "in", message="take it in")
    store = repo.readonly_session().store
    mapper = LazyReferenceMapper(str(folder), engine="pyarrow")
    fs = fsspec.filesystem("reference", fo=mapper, remote_protocol="file", skip_instance_cache=True)
    for name in ("g/t", "g/row", "scalar", "empty"):
        meta = json.loads((folder / ".zmetadata").read_text())["metadata"][f"{name}/.zarray"]
        shape = [-(-n // c) for n, c in zip(meta["shape"], meta["chunks"], strict=True)]
        for coords in np.ndindex(*shape):
            key = f"{name}/{'.'.join(map(str, coords)) or '0'}"
            found = contents_of(store).find(f"in/{key}")
            if key in THERE:
                assert found is not None
                assert store.get_sync(f"in/{key}").to_bytes() == fs.cat_file(key), key
            else:
                assert found is None, key
    root = zarr.open_group(store, mode="r", path="in")
    expected_t = np.zeros_like(DATA)
    expected_t[2:4, :2], expected_t[4:, 8:] = DATA[2:4, :2], DATA[4:, 8:]
    np.testing.assert_array_equal(root["g/t"][:], expected_t)
    assert root["scalar"][()] == 1
    refs = store.get_virtual_refs("in/g/row")
    assert refs.index[:, 0].tolist() == [0, 2, 4, 5]
    assert refs.sizes.tolist() == [4 + DATA.nbytes]
    (tmp_path / "head.bin").write_bytes(bytes(244))
    with pytest.raises(VirtualSourceChangedError):
        root["g/row"][:]


def test_xarray_reads_the_same(repo: zm.Repository, folder: Path) -> None:
    zm.virtual.import_kerchunk(repo, folder)
    found = xr.open_zarr(
        repo.readonly_session().store,
        group="g",
        zarr_format=2,
        consolidated=False,
        mask_and_scale=False,
    )
    rows = DATA.copy()
    rows[[1, 3]] = 0
    np.testing.assert_array_equal(found["row"], rows)
    assert contents_of(repo.readonly_session().store).find(".zmetadata") is None


def test_a_million_references_take_no_work_for_each(tmp_path: Path) -> None:
    """Three arrays, categorical paths: in bounded memory, and few function calls."""
    root = tmp_path / "refs"
    n, record = 350_000, 100_000
    documents: dict[str, Any] = {".zgroup": {"zarr_format": 2}}
    for name in "abc":
        documents[f"{name}/.zarray"] = json.loads(zarray([n // 10, 10], [1, 1], "|u1"))
        (root / name).mkdir(parents=True)
        for number in range(-(-n // record)):
            row = np.arange(record) + number * record
            there = row < n
            urls = [f"file:///data/{name}-{i:03d}.nc" for i in range(200)]
            paths = pa.DictionaryArray.from_arrays(
                pa.array(np.where(there, row // 2000, 0), pa.int32(), mask=~there), urls
            )
            offset = np.where(there, row % 2000 * 1000, 0)
            size = np.where(there, 900 + row % 100, 0)
            table = pa.table({"path": paths, "offset": offset, "size": size})
            pq.write_table(table, root / name / f"refs.{number}.parq")
    (root / ".zmetadata").write_text(json.dumps({"metadata": documents, "record_size": record}))
    repo = zm.create(tmp_path / "repo")
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        zm.virtual.import_kerchunk(repo, root)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert calls < n // 5
    assert peak < 256 * 1024**2
    refs = repo.readonly_session().store.get_virtual_refs("b")
    assert len(refs) == n
    assert refs.offset[:3].tolist() == [0, 1000, 2000]
    assert refs.locations[int(refs.source[-1])] == "file:///data/b-174.nc"
    stored = sum(info.nbytes for info in repo.storage.list(""))
    assert stored < 3 * 3 * n


# --- what is refused -------------------------------------------------------------------------

TWO: dict[str, Any] = json.loads(zarray([2], [1]))
GOOD: dict[str, Any] = {"path": ["/a", None], "offset": [1, 0], "size": [5, 0]}


def plain(folder: Path, columns: dict[str, Any] | pa.Table, **fields: Any) -> Path:
    (folder / "a").mkdir(parents=True, exist_ok=True)
    documents = {"a/.zarray": json.loads(zarray([2], [1])), ".zgroup": {"zarr_format": 2}}
    known = {"metadata": documents, "record_size": 2}
    (folder / ".zmetadata").write_text(json.dumps(known | fields))
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, folder / "a" / "refs.0.parq")
    return folder


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"where": ["/a", "/b"]}, "columns"),
        (GOOD | {"offset": [-1, 0]}, "negative"),
        (GOOD | {"size": [-1, 0]}, "negative"),
        (GOOD | {"offset": [0.5, 0]}, "whole numbers"),
        (GOOD | {"size": ["5", "0"]}, "whole numbers"),
        (GOOD | {"path": [1, 2]}, "it must be text"),
        (GOOD | {"raw": [1.5, 2.5]}, "it must be text"),
        (GOOD | {"path": ["a.nc", None]}, "relative path"),
        (GOOD | {"path": [b"\xff", None]}, "not text"),
        (GOOD | {"offset": pa.array([2**64 - 1, 0], pa.uint64())}, "offset"),
        (GOOD | {"offset": [2**62, 0]}, "offset"),
        ({name: column[:1] for name, column in GOOD.items()}, "1 rows"),
        ({name: column * 2 for name, column in GOOD.items()}, "record_size"),
    ],
)
def test_columns_that_are_refused(
    repo: zm.Repository, tmp_path: Path, columns: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        zm.virtual.import_kerchunk(repo, plain(tmp_path / "refs", columns))
    assert len(list(repo.ancestry())) == 1


@pytest.mark.parametrize("size", [0, -1, 1, 3, 2**22 + 1, 2**63, True, "2", 2.0, None, [2]])
def test_record_sizes_that_are_refused(repo: zm.Repository, tmp_path: Path, size: object) -> None:
    folder = plain(tmp_path / "refs", GOOD, record_size=size)
    if size == 3:  # as large as the array is what counts
        zm.virtual.import_kerchunk(repo, folder)
        return
    with pytest.raises(InvalidArgumentError, match="record_size"):
        zm.virtual.import_kerchunk(repo, folder)


def test_a_wrong_record_size_is_noticed_by_what_does_not_fit(
    repo: zm.Repository, tmp_path: Path
) -> None:
    documents = {"a/.zarray": json.loads(zarray([5], [1]))}
    folder = plain(tmp_path / "refs", GOOD, metadata=documents, record_size=3)
    with pytest.raises(InvalidArgumentError, match="2 rows"):
        zm.virtual.import_kerchunk(repo, folder)
    folder = plain(folder, GOOD, metadata={"a/.zarray": json.loads(zarray([1], [1]))})
    zm.virtual.import_kerchunk(repo, folder, "padded")
    plain(
        folder, GOOD | {"path": ["/a", "/b"]}, metadata={"a/.zarray": json.loads(zarray([1], [1]))}
    )
    with pytest.raises(InvalidArgumentError, match="beyond the end"):
        zm.virtual.import_kerchunk(repo, folder, "beyond")


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda at: (at / ".zmetadata").unlink(), NotFoundError),
        (lambda at: (at / ".zmetadata").write_text("{"), InvalidArgumentError),
        (lambda at: (at / ".zmetadata").write_text("[]"), InvalidArgumentError),
        (lambda at: (at / ".zmetadata").write_text('{"metadata": 1}'), InvalidArgumentError),
        (lambda at: (at / ".zmetadata").write_text('{"metadata": {}}'), InvalidArgumentError),
        (lambda at: (at / "a").rename(at / "b"), InvalidArgumentError),
        (lambda at: (at / "a/refs.0.parq").rename(at / "a/refs.7.parq"), InvalidArgumentError),
        (lambda at: (at / "a/refs.0.parq").write_bytes(b"PAR1"), InvalidArgumentError),
        (
            lambda at: (at / "a/refs.0.parq").rename(at / f"a/refs.{10**17}.parq"),
            InvalidArgumentError,
        ),
        (lambda at: plain(at, GOOD, metadata={"a/zarr.json": {}}), UnsupportedFormatError),
        (lambda at: plain(at, GOOD, metadata={"../refs/a/.zarray": TWO}), UnsupportedFormatError),
        (lambda at: plain(at, GOOD, metadata={"/a/.zarray": TWO}), UnsupportedFormatError),
        (lambda at: plain(at, GOOD, metadata={"a/.zarray": {}}), UnsupportedFormatError),
        (lambda at: plain(at, GOOD | {"offset": [0, 0], "size": [0, 0]}), VirtualContainerError),
    ],
)
def test_folders_that_are_refused(
    repo: zm.Repository,
    tmp_path: Path,
    break_it: Callable[[Path], object],
    error: type[ManifestsError],
) -> None:
    folder = plain(tmp_path / "refs", GOOD)
    break_it(folder)
    with pytest.raises(error):
        zm.virtual.import_kerchunk(repo, folder)
    assert len(list(repo.ancestry())) == 1


def test_texts_that_repeat_are_held_once(repo: zm.Repository, tmp_path: Path) -> None:
    """A small file of many references to one very long text."""
    n = 1 << 20
    url = "file:///" + "long/" * 40_000
    paths = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), [url])
    table = pa.table({"path": paths, "offset": np.arange(n), "size": np.full(n, 1)})
    documents = {"a/.zarray": json.loads(zarray([n], [1]))}
    folder = plain(tmp_path / "refs", table, metadata=documents, record_size=n)
    zm.virtual.import_kerchunk(repo, folder)
    assert len(repo.readonly_session().store.get_virtual_refs("a")) == n
    raw = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), [b"x" * 100_000])
    folder = plain(tmp_path / "raw", pa.table({"raw": raw}), metadata=documents, record_size=n)
    with pytest.raises(InvalidArgumentError, match="inline chunks"):
        zm.virtual.import_kerchunk(repo, folder, "raw")


@given(data=st.data())
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damaged_files_give_errors_of_the_project(tmp_path: Path, data: st.DataObject) -> None:
    columns = GOOD | {"raw": pa.array([None, b"inline"])}
    place = plain(tmp_path / "refs", columns) / "a" / "refs.0.parq"
    good = bytearray(place.read_bytes())
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    else:
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    place.write_bytes(good)
    try:
        found = read_kerchunk(place.parent.parent, Containers())
    except ManifestsError:
        return
    assert len(found.offset) <= 2


@pytest.mark.slow
def test_every_byte_may_be_damaged(tmp_path: Path) -> None:
    """Among others, positions in a dictionary then lie beyond it."""
    columns = GOOD | {"raw": pa.array([None, b"inline"])}
    place = plain(tmp_path / "refs", columns) / "a" / "refs.0.parq"
    good = place.read_bytes()
    refused = 0
    for at in range(len(good)):
        place.write_bytes(good[:at] + b"\x01" + good[at + 1 :])
        try:
            read_kerchunk(place.parent.parent, Containers())
        except ManifestsError:
            refused += 1
    assert refused > 50


def test_without_pyarrow_it_is_said_what_to_install(
    repo: zm.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain(tmp_path / "refs", GOOD)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"zarr-manifests\[kerchunk\]"):
        zm.virtual.import_kerchunk(repo, folder)
