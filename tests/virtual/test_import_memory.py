"""Small inputs that stand for very much: what is made of them is bounded before it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk import read_kerchunk

MIB = 1 << 20
BOUND = 8 * MIB
ARRAY = {
    "zarr_format": 2,
    "shape": [1 << 20],
    "chunks": [1],
    "dtype": "u1",
    "compressor": None,
    "filters": None,
    "fill_value": 0,
    "order": "C",
}
LONG = "x" * 60_000
COUNT = {"i": {"stop": 1 << 20}}


@pytest.fixture(autouse=True, scope="module")
def traced() -> Iterator[None]:
    """Once for all, since Python may crash where tracing ends beside other threads."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@contextmanager
def few_bytes() -> Iterator[None]:
    """Nothing that is made in the block takes much more than the bound, at any moment."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    yield
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < 4 * BOUND


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repository")


def gen(**changes: object) -> dict[str, Any]:
    one = {"key": "t/{{i}}", "url": "file:///{{i}}", "dimensions": COUNT}
    return {"version": 1, "templates": {"u": LONG}, "refs": {}, "gen": [one | changes]}


REFERENCES: dict[str, Callable[[], dict[str, Any]]] = {
    "generated locations": lambda: gen(url="file:///{{u}}{{i}}"),
    "generated keys": lambda: gen(key="{{u}}{{i}}"),
    "one template of many calls": lambda: {
        "version": 1,
        "templates": {"f": LONG + "{{c}}"},
        "refs": {"t/0": ["file:///" + "{{f(c=1)}}" * 150_000, 0, 1]},
    },
    "calls in calls": lambda: {
        "version": 1,
        "templates": {"f": "{{c}}" * 1000},
        "refs": {"t/0": ["{{f(c=f(c=f(c=f(c='x'))))}}", 0, 1]},
    },
    "expressions that are all different": lambda: gen(
        url="".join(f"{{{{{n}-{n}}}}}" for n in range(5_000))
    ),
    "a long template by many references": lambda: {
        "version": 1,
        "templates": {"u": LONG},
        "refs": {f"t/{i}": ["file:///{{u}}{{" + str(i) + "}}"] for i in range(1_000)},
    },
    "many dimensions": lambda: gen(dimensions=COUNT | {f"n{i}": [0] for i in range(10_000)}),
    "base64": lambda: {"t/0": "base64:" + "AAAA" * (3 * MIB)},
    "inline text": lambda: {f"t/{i}": LONG for i in range(200)},
    "documents": lambda: {f"{i}/.zattrs": {"a": "\x00" * 10_000} for i in range(200)},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_what_references_become_is_bounded(name: str) -> None:
    references = REFERENCES[name]()
    with few_bytes(), pytest.raises(InvalidArgumentError, match=rf"more than {BOUND} .*max_bytes="):
        read_kerchunk(references, Containers(), max_bytes=BOUND)


def test_dimensions_that_generate_nothing_are_not_gone_through() -> None:
    references = gen(dimensions={"i": {"stop": 1 << 60}, "j": []})
    with few_bytes():
        assert read_kerchunk(references, Containers()).keys == ()


def test_each_bound_is_an_option(repo: zm.Repository, tmp_path: Path) -> None:
    array = ARRAY | {"shape": [100]}
    references = gen(url="file:///{{u}}{{i}}", dimensions={"i": {"stop": 100}})
    references["gen"][0] |= {"offset": "0", "length": "1"}
    references["refs"] = {"t/.zarray": array}
    with pytest.raises(InvalidArgumentError, match="max_bytes="):
        zm.virtual.import_kerchunk(repo, references, max_bytes=MIB)
    with pytest.raises(InvalidArgumentError, match="max_references="):
        zm.virtual.import_kerchunk(repo, references, max_references=99)
    zm.virtual.import_kerchunk(repo, references, max_bytes=32 * MIB, max_references=100)
    for wrong in (0, -1, True, 1.5, "1", None):
        for name in ("max_bytes", "max_references"):
            with pytest.raises(InvalidArgumentError, match=name):
                zm.virtual.import_kerchunk(repo, references, "b", **{name: wrong})
        with pytest.raises(InvalidArgumentError, match="max_bytes"):
            zm.virtual.import_zarr(repo, tmp_path, max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["refs.json", "refs/.zmetadata"])
def test_files_are_measured_before_they_are_read(
    repo: zm.Repository, tmp_path: Path, name: str
) -> None:
    (tmp_path / "refs").mkdir()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # takes no room
    with few_bytes(), pytest.raises(InvalidArgumentError, match=f"{name}.*max_bytes="):
        zm.virtual.import_kerchunk(repo, tmp_path / name.partition("/")[0])


@pytest.mark.parametrize("as_file", [False, True])
def test_documents_that_are_nested_too_deep(
    repo: zm.Repository, tmp_path: Path, as_file: bool
) -> None:
    depth = 100_000
    given: Any = {}
    for _ in range(depth):
        given = {"a": given}
    if as_file:
        (tmp_path / "refs.json").write_text(
            '{".zattrs": ' + '{"a":' * depth + "0" + "}" * (depth + 1)
        )
        given = tmp_path / "refs.json"
    else:
        given = {".zattrs": given}
    with pytest.raises(InvalidArgumentError):
        zm.virtual.import_kerchunk(repo, given)


def test_a_store_is_measured_before_it_is_read(repo: zm.Repository, tmp_path: Path) -> None:
    place = tmp_path / "plain"
    zarr.create_group(place, zarr_format=2).create_array("t", data=np.arange(1, 3), chunks=(1,))
    (place / "t" / ".zattrs").touch()
    os.truncate(place / "t" / ".zattrs", 1 << 40)
    with few_bytes(), pytest.raises(InvalidArgumentError, match=r"t/\.zattrs.*max_bytes="):
        zm.virtual.import_zarr(repo, place)
    (place / "t" / ".zattrs").unlink()
    os.truncate(place / "t" / "0", 1 << 40)
    with few_bytes(), pytest.raises(InvalidArgumentError, match=r"t/0 has .*max_bytes="):
        zm.virtual.import_zarr(repo, place, copy=True)


# --- parquet ---------------------------------------------------------------------------------

pa = pytest.importorskip("pyarrow", reason="reads references in parquet files")
pq = pytest.importorskip("pyarrow.parquet", reason="reads references in parquet files")


def parquet(folder: Path, table: Any, files: int = 1, rows: int = 1 << 20) -> Path:
    """A folder of references, as many files as that which are all the same."""
    (folder / "a").mkdir(parents=True)
    array = ARRAY | {"shape": [files * rows]}
    fields = {"metadata": {"a/.zarray": array}, "record_size": rows}
    (folder / ".zmetadata").write_text(json.dumps(fields))
    for number in range(files):
        pq.write_table(table, folder / "a" / f"refs.{number}.parq", compression="zstd")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert total < 200_000
    return folder


def texts(name: str) -> Any:
    """Sixteen texts of 4 MiB."""
    return pa.table({name: [chr(65 + i) * (4 * MIB) for i in range(16)]})


def repeated(name: str, value: object, rows: int = 1 << 18) -> Any:
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [value])
    return pa.table({name: column})


PARQUET: dict[str, Callable[[Path], Path]] = {
    "texts": lambda at: parquet(at, texts("path"), rows=16),
    "inline chunks": lambda at: parquet(at, texts("raw"), rows=16),
    "many references": lambda at: parquet(at, repeated("path", "/a"), 4, 1 << 18),
    "many inline chunks": lambda at: parquet(at, repeated("raw", b""), 4, 1 << 18),
    "a long inline chunk": lambda at: parquet(at, repeated("raw", b"x" * 1000), 1, 1 << 18),
}


@pytest.mark.parametrize("name", PARQUET)
def test_what_parquet_files_become_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = PARQUET[name](tmp_path / "refs")
    made = [0]
    true = pq.ParquetFile.read

    def counted(file: Any, **options: Any) -> Any:
        table = true(file, **options)
        made[0] = max(made[0], table.nbytes)
        return table

    monkeypatch.setattr(pq.ParquetFile, "read", counted)
    with few_bytes(), pytest.raises(InvalidArgumentError, match=r"refs.*max_bytes="):
        read_kerchunk(folder, Containers(), max_bytes=BOUND)
    assert made[0] <= BOUND


def number(value: int, nbytes: int = 0) -> bytes:
    """A number in Thrift's compact protocol, in at least so many bytes."""
    value *= 2
    groups = []
    while value or len(groups) < max(nbytes, 1):
        groups.append(value & 127)
        value >>= 7
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def say(data: bytes, true: int, claimed: int) -> bytes:
    """The file with a number replaced wherever it states that one."""
    old = number(true)
    assert old in data
    new = number(claimed, len(old))
    assert len(new) == len(old)
    return data.replace(old, new)


def one_page(rows: int) -> tuple[bytes, Any]:
    """A parquet file of `rows` texts of 4 MiB in one page, and what its footer says of it."""
    sink = pa.BufferOutputStream()
    table = pa.table({"path": ["x" * (4 * MIB)] * rows})
    how = {"use_dictionary": False, "write_batch_size": rows, "data_page_size": 1 << 30}
    pq.write_table(table, sink, compression="zstd", write_statistics=False, **how)
    data = sink.getvalue().to_pybytes()
    return data, pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)


def small_footer(data: bytes, group: Any) -> bytes:
    """A footer that states 100 bytes in all."""
    for total in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        data = say(data, total, 100)
    return data


def large_page(data: bytes, group: Any) -> bytes:
    """A page that says that it has 2 GiB; its footer knows of nothing."""
    at = data.index(b"\x15", 5) + 1  # the second field of the first page's header
    assert group.total_byte_size > 1 << 27  # so that its size takes as many bytes as 2 GiB
    return small_footer(data[:at] + number((1 << 31) - 1) + data[at + 5 :], group)


def many_values(data: bytes, group: Any) -> bytes:
    """Columns that say that they have more values than their pages hold."""
    length = int.from_bytes(data[-8:-4], "little") + 8
    return data[:-length] + say(data[-length:], group.num_rows, 1000)


def fixed_width() -> Any:
    rows = 1 << 12
    width = 16_384
    return pa.table(
        {"path": ["/a"] * rows, "raw": pa.array([b"x" * width] * rows, pa.binary(width))}
    )


def lists() -> Any:
    rows = 1 << 12
    ends = np.arange(rows + 1, dtype="i4") * 2048
    return pa.table({"path": pa.ListArray.from_arrays(ends, pa.nulls(rows * 2048, pa.int64()))})


SMALL: dict[str, tuple[int, Callable[[], Any], str]] = {
    "a small footer": (16, lambda: small_footer(*one_page(16)), "max_bytes="),
    "a large page": (33, lambda: large_page(*one_page(33)), "max_bytes="),
    "many values": (1000, lambda: many_values(*one_page(70)), "do not hold the values"),
    "fixed width": (1 << 12, fixed_width, "it must be text"),
    "lists": (1 << 12, lists, "one value for each row"),
}

READ = """
import sys
import pyarrow as pa
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk import read_kerchunk

for folder in sys.argv[2:]:
    try:
        read_kerchunk(folder, Containers(), max_bytes=int(sys.argv[1]))
    except InvalidArgumentError as error:
        print(pa.default_memory_pool().max_memory(), error)
"""


@pytest.mark.slow
def test_small_parquet_files_that_become_large(tmp_path: Path) -> None:
    """By lies about their sizes, or by types; pyarrow would allocate 64 MiB to 2 GiB for each."""
    for name, (rows, make, _) in SMALL.items():
        made = make()
        folder = parquet(tmp_path / name, pa.table({"path": ["/a"]}), rows=rows)
        place = folder / "a" / "refs.0.parq"
        if isinstance(made, bytes):
            place.write_bytes(made)
        else:
            pq.write_table(made, place, compression="zstd")
        assert place.stat().st_size < 200_000
    ended = subprocess.run(
        [sys.executable, "-c", READ, str(BOUND), *(tmp_path / name for name in SMALL)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for line, (_, _, match) in zip(ended.stdout.splitlines(), SMALL.values(), strict=True):
        assert match in line
        assert int(line.split()[0]) <= BOUND
