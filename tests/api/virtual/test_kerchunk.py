"""kerchunk references: in JSON, with templates, in parquet files, and day after day."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
import zstandard
from fsspec.implementations.reference import LazyReferenceMapper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore
from virtualizarr import open_virtual_dataset
from virtualizarr.parsers import KerchunkJSONParser

import zarr_manifests as zm
from effort import examples
from hearing import Hearing
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"here": tmp_path})


def zarray(shape: list[int], chunks: list[int], dtype: str = "<f4") -> dict[str, Any]:
    fields = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "order": "C"}
    return fields | {"compressor": None, "filters": None, "fill_value": 0}


# --- templates -------------------------------------------------------------------------------


def generated(url: str) -> dict[str, Any]:
    """20 x 3 chunks in three files, as kerchunk's specification generates references."""
    return {
        "version": 1,
        "templates": {"u": url, "f": "{{c}}-0{{n}}.bin"},
        "gen": [
            {
                "key": "t/{{i}}.{{j}}",
                "url": "{{u}}/{{f(c='part', n=j)}}",
                "offset": "{{(i + 1) * 10}}",
                "length": "2",
                "dimensions": {"i": {"stop": 19}, "j": [0, 1, 2]},
            },
        ],
        "refs": {
            ".zgroup": '{"zarr_format": 2}',
            "t/.zarray": json.dumps(zarray([20, 3], [1, 1], "<i2")),
            "t/19.0": ["{{u}}/part-00.bin", 30, 2],
        },
    }


def test_what_fsspec_expands_is_imported(repo: zm.Repository, tmp_path: Path) -> None:
    for j in range(3):
        data = np.arange(200, dtype="<i2") + 1000 * j
        (tmp_path / f"part-0{j}.bin").write_bytes(data.tobytes())
    references = generated(tmp_path.as_uri())
    with pytest.raises(UnsupportedFormatError, match=r"'gen'.*simple_templates=False"):
        zm.virtual.import_kerchunk(repo, references)
    how: Any = {"simple_templates": False, "skip_instance_cache": True}
    files = fsspec.filesystem("reference", fo=references, **how)
    zm.virtual.import_kerchunk(repo, files.references)
    values = zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
    assert values[:19].tolist() == [[5 + 5 * i + 1000 * j for j in range(3)] for i in range(19)]
    assert values[19].tolist() == [15, 0, 0]


def imported(references: dict[str, Any], **options: Any) -> tuple[str, ...]:
    """The locations of chunks of an array `t`."""
    repo = zm.create(MemoryStorage())
    zm.virtual.import_kerchunk(repo, references, **options)
    return repo.readonly_session().store.get_virtual_refs("t").locations


def filled(url: str) -> dict[str, Any]:
    """References to one chunk, at a location that may have templates."""
    texts = {"u": "s3://winds", "name": "a"}
    return {"templates": texts, "refs": {"t/.zarray": zarray([1], [1]), "t/0": [url, 0, 4]}}


def test_names_are_replaced_by_their_texts_once() -> None:
    for url in ("{{u}}/{{ name }}.nc", "s3://winds/{{name}}.nc"):
        assert imported(filled(url)) == ("s3://winds/a.nc",)
    assert imported(filled("s3://winds/{u}.nc")) == ("s3://winds/%7Bu%7D.nc",)
    with pytest.raises(InvalidArgumentError, match="'v', which is not defined; known: name, u"):
        imported(filled("{{v}}"))


@pytest.mark.parametrize("url", ["{{u + 1}}", "{{u}}{% raw %}", "{{u", "{{u(c=1)}}", "{{'a' * 9}}"])
def test_expressions_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="Expand them with fsspec"):
        imported(filled(url))
    with pytest.raises(UnsupportedFormatError, match="Expand them with fsspec"):
        imported({"templates": {"u": url}, "refs": {}})


@pytest.mark.parametrize(
    ("references", "match"),
    [
        ({"a": ["wind.nc", 0, 1]}, "relative path"),
        ({"a": ["https:me:secret@h", 0, 1]}, "^https: lacks its two slashes"),
        ({"\ud800": ["file:///a", 0, 1]}, "Unicode"),
        ({"a": ["file:///a", 0, True]}, "malformed"),
        ({"version": 1, "templates": ["a"], "refs": {}}, "'templates' one to texts"),
        ({"version": 1, "templates": {"a": 1}, "refs": {}}, "'templates' one to texts"),
        ({"version": 2, "refs": {}}, "version"),
        ({"t/.zarray": zarray([2], [1]), "t/2": ["file:///a", 0, 4]}, "1 of .* no chunk .* 't/2'"),
        ({"t/.zarray": zarray([2], [1]), "t/x": "text"}, "no chunk of an array.*'t/x'"),
        ({".zgroup": {"zarr_format": 2}, "readme": "text"}, "no chunk of an array.*'readme'"),
    ],
)
def test_references_that_are_refused(references: dict[str, Any], match: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedFormatError), match=match):
        imported(references)


# --- parquet ---------------------------------------------------------------------------------


DATA = np.arange(60, dtype="<f4").reshape(6, 10)


@pytest.mark.parametrize("threshold", [1, 1e9], ids=["categories", "texts"])
def test_what_fsspec_writes_is_read(repo: zm.Repository, tmp_path: Path, threshold: float) -> None:
    """One array of 15 chunks in two files and inline, a whole file, absent ones, a scalar."""
    (tmp_path / "head.bin").write_bytes(b"head" + DATA.tobytes())
    (tmp_path / "whole.bin").write_bytes(DATA[2:4, :2].tobytes())
    mapper = LazyReferenceMapper.create(
        str(tmp_path / "refs"),
        fs=fsspec.filesystem("file"),
        record_size=4,
        engine="pyarrow",
        categorical_threshold=threshold,
    )
    mapper[".zgroup"] = b'{"zarr_format": 2}'
    mapper["g/.zgroup"] = b'{"zarr_format": 2}'
    mapper["g/t/.zarray"] = json.dumps(zarray([6, 10], [2, 2])).encode()
    mapper["g/t/1.0"] = [(tmp_path / "whole.bin").as_uri()]
    mapper["g/t/2.4"] = DATA[4:, 8:].tobytes()
    mapper["g/row/.zarray"] = json.dumps(zarray([6, 10], [1, 10])).encode()
    for row in (0, 2, 4, 5):
        mapper[f"g/row/{row}.0"] = [str(tmp_path / "head.bin"), 4 + 40 * row, 40]
    mapper["scalar/.zarray"] = json.dumps(zarray([], [])).encode()
    mapper["scalar/0"] = b"base64:AACAPw=="
    mapper["empty/.zarray"] = json.dumps(zarray([0], [1])).encode()
    mapper.flush()
    hearing = Hearing()
    with zm.show_progress(hearing):
        zm.virtual.import_kerchunk(repo, tmp_path / "refs")
    files = len([*(tmp_path / "refs").rglob("*.parq")])
    assert hearing.totals == {"reading files of references": files, "chunks": 5}
    assert hearing.totals.items() <= hearing.done.items()
    found = zarr.open_group(repo.readonly_session().store, mode="r")
    few, rows = np.zeros_like(DATA), DATA.copy()
    few[2:4, :2], few[4:, 8:], rows[[1, 3]] = DATA[2:4, :2], DATA[4:, 8:], 0
    np.testing.assert_array_equal(found["g/t"][:], few)
    np.testing.assert_array_equal(found["g/row"][:], rows)
    assert (found["scalar"][()], found["empty"].shape) == (1, (0,))


COLUMNS: dict[str, Any] = {
    "path": ["/a", None],
    "offset": [1, 0],
    "size": [5, 0],
    "raw": pa.nulls(2, pa.binary()),
}


def of_length(n: int) -> dict[str, Any]:
    return {"a/.zarray": zarray([n], [1]), ".zgroup": {"zarr_format": 2}}


def plain(folder: Path, columns: dict[str, Any], **fields: Any) -> Path:
    (folder / "a").mkdir(parents=True, exist_ok=True)
    known = {"metadata": of_length(2), "record_size": 2}
    (folder / ".zmetadata").write_text(json.dumps(known | fields))
    pq.write_table(pa.table(columns), folder / "a" / "refs.0.parq")
    return folder


@pytest.mark.parametrize(
    ("columns", "fields", "match"),
    [
        (COLUMNS | {"offset": [-1, 0]}, {}, "malformed"),
        (COLUMNS | {"size": ["5.5", "0"]}, {}, "cannot be read.*5.5"),
        (COLUMNS | {"path": [b"\xff", None]}, {}, "UTF8"),
        ({"path": COLUMNS["path"]}, {}, "path, offset, size, raw: b'raw'"),
        (COLUMNS, {"record_size": 2**63}, "record_size"),
        (COLUMNS, {"record_size": 1}, "2 rows, beyond"),
        (COLUMNS, {"metadata": of_length(5), "record_size": 3}, "2 rows"),
        (COLUMNS | {"path": ["/a", "/b"]}, {"metadata": of_length(1)}, "beyond the end"),
    ],
)
def test_columns_that_are_refused(
    repo: zm.Repository, tmp_path: Path, columns: Any, fields: Any, match: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        zm.virtual.import_kerchunk(repo, plain(tmp_path / "refs", columns, **fields))
    assert len(list(repo.ancestry())) == 1


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda at: (at / ".zmetadata").unlink(), NotFoundError),
        (lambda at: (at / ".zmetadata").write_text("[]"), InvalidArgumentError),
        (lambda at: (at / "a/refs.0.parq").rename(at / "a/refs.7.parq"), InvalidArgumentError),
        (lambda at: (at / "a/refs.0.parq").write_bytes(b"PAR1"), InvalidArgumentError),
        (lambda at: plain(at, COLUMNS, metadata={"../refs/a/.zarray": {}}), UnsupportedFormatError),
        (lambda at: plain(at, COLUMNS | {"offset": [0, 0], "size": [0, 0]}), VirtualContainerError),
    ],
)
def test_folders_that_are_refused(
    repo: zm.Repository, tmp_path: Path, break_it: Callable[[Path], object], error: type[Exception]
) -> None:
    folder = plain(tmp_path / "refs", COLUMNS)
    break_it(folder)
    with pytest.raises(error):
        zm.virtual.import_kerchunk(repo, folder)
    assert len(list(repo.ancestry())) == 1


@given(data=st.data())
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damaged_files_give_errors_of_the_project(tmp_path: Path, data: st.DataObject) -> None:
    columns = COLUMNS | {"raw": pa.array([None, b"inline"])}
    folder = plain(tmp_path / "refs", columns)
    place = folder / "a" / "refs.0.parq"
    good = bytearray(place.read_bytes())
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    else:
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    place.write_bytes(good)
    with suppress(ManifestsError):
        zm.virtual.import_kerchunk(zm.create(MemoryStorage()), folder)


# --- small inputs that stand for very much ---------------------------------------------------


MIB = 1 << 20
BOUND = 8 * MIB


def test_files_are_measured_before_they_are_read(repo: zm.Repository, tmp_path: Path) -> None:
    (tmp_path / "refs").mkdir()
    for name in ("refs.json", "refs/.zmetadata"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)  # takes no room
        with pytest.raises(InvalidArgumentError, match=f"{name}.*max_bytes="):
            zm.virtual.import_kerchunk(repo, tmp_path / name.partition("/")[0])


def test_a_store_is_measured_before_it_is_read(repo: zm.Repository, tmp_path: Path) -> None:
    place = tmp_path / "plain"
    zarr.create_group(place, zarr_format=2).create_array("t", data=np.arange(1, 3), chunks=(1,))
    (place / "t" / ".zattrs").touch()
    os.truncate(place / "t" / ".zattrs", 1 << 40)
    with pytest.raises(InvalidArgumentError, match=r"t/\.zattrs.*max_bytes="):
        zm.virtual.import_zarr(repo, place)
    (place / "t" / ".zattrs").unlink()
    for nbytes, said in ((1 << 40, r"t/0 takes .*max_bytes="), (0, r"t/0' is empty")):
        os.truncate(place / "t" / "0", nbytes)
        with pytest.raises(InvalidArgumentError, match=said):
            zm.virtual.import_zarr(repo, place, copy=True)


def test_what_the_footer_of_a_parquet_file_states_is_looked_at_before_it_is_decoded(
    repo: zm.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [chr(65 + i) * (4 * MIB) for i in range(16)]
    fields = {"metadata": of_length(16), "record_size": 16}
    folder = plain(tmp_path / "refs", COLUMNS, **fields)
    zeros = np.zeros(16, np.int64)
    columns = {"path": long, "offset": zeros, "size": zeros, "raw": pa.nulls(16)}
    path = folder / "a" / "refs.0.parq"
    pq.write_table(pa.table(columns), path, compression="zstd")
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(InvalidArgumentError, match=r"refs\.0\.parq.*max_bytes="):
        zm.virtual.import_kerchunk(repo, folder, max_bytes=BOUND)


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress])
def test_compressed_references_are_unpacked_by_fsspec(
    repo: zm.Repository, tmp_path: Path, packed: Callable[[bytes], bytes]
) -> None:
    place = tmp_path / ("refs.json.gz" if packed is gzip.compress else "refs.json.zst")
    place.write_bytes(packed(json.dumps(day_references(tmp_path, 0)).encode()))
    with pytest.raises(InvalidArgumentError, match="compression='infer'"):
        zm.virtual.import_kerchunk(repo, place)
    with fsspec.open(place, compression="infer") as file:
        zm.virtual.import_kerchunk(repo, json.load(file))
    assert len(repo.readonly_session().store.get_virtual_refs("t")) == 4


# --- another day -----------------------------------------------------------------------------


def day_references(folder: Path, number: int) -> dict[str, Any]:
    """References to a day of weather: two steps in a file, with times inline."""
    values = np.arange(12, dtype="i2").reshape(2, 6) + 100 * number
    (folder / f"day-{number}.bin").write_bytes(values.tobytes())
    time = np.arange(2, dtype="i8") + 2 * number

    t: dict[str, Any] = {"_ARRAY_DIMENSIONS": ["time", "x"], "scale_factor": 0.1, "day": number}
    at, x = str(folder / f"day-{number}.bin"), base64.b64encode(np.arange(6).tobytes()).decode()
    return {
        ".zgroup": {"zarr_format": 2},
        "t/.zarray": zarray([2, 6], [1, 3], "<i2"),
        "t/.zattrs": t,
        **{f"t/{i}.{j}": [at, 12 * i + 6 * j, 6] for i in range(2) for j in range(2)},
        "time/.zarray": zarray([2], [2], "<i8"),
        "time/.zattrs": {"_ARRAY_DIMENSIONS": ["time"]},
        "time/0": f"base64:{base64.b64encode(time.tobytes()).decode()}",
        "x/.zarray": zarray([6], [6], "<i8"),
        "x/.zattrs": {"_ARRAY_DIMENSIONS": ["x"]},
        "x/0": f"base64:{x}",
    }


def test_references_of_days_are_appended_by_virtualizarr(
    repo: zm.Repository, tmp_path: Path
) -> None:
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    how: Any = {"registry": registry, "loadable_variables": ["time", "x"], "decode_times": False}
    for number in range(2):
        references = day_references(tmp_path, number)
        texts = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in references.items()}
        place = tmp_path / f"refs-{number}.json"
        place.write_text(json.dumps({"version": 1, "refs": texts}))
        vds = open_virtual_dataset(place.as_uri(), parser=KerchunkJSONParser(), **how)
        zm.virtual.write(vds, repo, append_dim="time")
    store = repo.readonly_session().store
    expected = np.concatenate([np.arange(12).reshape(2, 6), np.arange(100, 112).reshape(2, 6)])
    np.testing.assert_array_equal(zarr.open_array(store, path="t", mode="r")[:], expected)
    assert len(store.get_virtual_refs("t")) == 8


def test_what_is_there_is_replaced_only_by_the_mode_for_it(
    repo: zm.Repository, tmp_path: Path
) -> None:
    zm.virtual.import_kerchunk(repo, day_references(tmp_path, 0))
    references = day_references(tmp_path, 1)
    with pytest.raises(AlreadyExistsError, match="exists already"):
        zm.virtual.import_kerchunk(repo, references)
    with pytest.raises(InvalidArgumentError, match="'w-' or 'w'"):
        zm.virtual.import_kerchunk(repo, references, mode="a")  # type: ignore[arg-type]
    del references["x/0"]
    zm.virtual.import_kerchunk(repo, references, mode="w")
    found = zarr.open_group(repo.readonly_session().store, mode="r")
    assert (found["t"][0, 0], found["x"][1]) == (100, 0)
