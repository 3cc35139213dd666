"""Reading kerchunk references in parquet files.

A folder has `.zmetadata`, with all documents and a record size R. Each array has files
`<array>/refs.<n>.parq`, whose row i is chunk n * R + i of the array's grid in C order. The columns
are `path`, `offset`, `size` and `raw`. A row with `raw` is an inline chunk; a row with neither
`raw` nor `path` is absent; offset and size 0 stand for the whole file. A missing file has only
absent chunks. Source: `LazyReferenceMapper` of fsspec, which writes and reads these files.

Invariants:

- Chunks in files are processed as columns, never one by one. There is Python work only for each
  referenced file, each inline chunk, and each parquet file.
- Nothing is skipped silently: a row beyond the end of an array, or a file that belongs to no array,
  is an error, unless it has no references.
- Besides the results, at most one parquet file is in memory, and none with more than `_MOST_RECORD`
  rows is read. Texts are read as dictionaries, so that repeated ones are stored once.
- pyarrow reads nothing before the headers of all pages were measured (`parquet_pages`).
"""
# Paths are plain strings here, as in references.py:
# ruff: noqa: PTH118, PTH208

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.format.columns import Column
from zarr_manifests.keys import (
    V2_ARRAY,
    V2_ATTRIBUTES,
    V2_GROUP,
    ArrayMeta,
    is_inside,
    join,
    parse_documents,
    split,
)
from zarr_manifests.progress import Progress, counted, ignore
from zarr_manifests.records import dataclass
from zarr_manifests.storage.files import open_inside
from zarr_manifests.virtual.budget import Budget
from zarr_manifests.virtual.locations import VirtualLocation
from zarr_manifests.virtual.parquet_pages import MalformedParquetError, measure
from zarr_manifests.virtual.references import Files, Numbered, References

__all__ = ["read_parquet"]

_NAME: Final = re.compile(r"refs\.(0|[1-9][0-9]{0,17})\.parq", re.ASCII)
_COLUMNS: Final = ("path", "offset", "size", "raw")
_TEXTS: Final = ("path", "raw")
_MOST_RECORD: Final = 1 << 22
_ROW_BYTES: Final = 32
_INLINE_BYTES: Final = 128
"""Bytes of an inline chunk besides its own: its key, and its place in a dict."""


@dataclass(frozen=True, slots=True)
class _RefColumns:
    """Some chunks of an array; a length of -1 stands for the whole file."""

    chunk: Column
    source: Column
    offset: Column
    length: Column


def read_parquet(
    folder: str, files: Files, budget: Budget, progress: Progress = ignore
) -> References:
    """Read the references in a folder of parquet files, within the budget of bytes.

    Raises
    ------
    NotFoundError
        If the folder has no `.zmetadata`.
    InvalidArgumentError
        If something in it is malformed, or everything together takes too much memory.
    UnsupportedFormatError
        If an array's metadata is not supported.
    StorageError
        If a file cannot be read.
    VirtualContainerError
        If a chunk is a whole file of unknown size.
    """
    documents, record_size = _metadata(folder, budget)
    arrays = _arrays(folder, documents)
    values = dict(documents)
    parts: list[_RefColumns] = []
    numbered: list[Numbered] = []
    rows = 0
    _check_strays(folder, arrays)
    due = [(path, number) for path in arrays for number in _numbers(os.path.join(folder, path))]
    told = counted(progress, "reading files of references", due)
    for path, some in groupby(told, key=itemgetter(0)):
        found = [
            _read(folder, path, number, arrays[path], record_size, files, values, budget)
            for _, number in some
        ]
        chunk = np.concatenate([part.chunk for part in found])
        numbered.append(Numbered(path, rows, chunk))
        rows += len(chunk)
        parts += found
    none = np.zeros(0, np.int64)
    source, offset, length = (
        np.concatenate([none, *(getattr(part, name) for part in parts)])
        for name in ("source", "offset", "length")
    )
    return files.references(values, (), source, offset, length, numbered)


def _metadata(folder: str, budget: Budget) -> tuple[dict[str, bytes], int]:
    where = VirtualLocation("file", folder).url
    try:
        with os.fdopen(open_inside(folder, ".zmetadata"), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            # The file, and its documents, each of which is encoded again.
            budget.take(2 * nbytes, f"{where}/.zmetadata")
            fields = json.loads(file.read(nbytes))
        found, record_size = fields["metadata"], fields.get("record_size")
        if not all(isinstance(value, dict) for value in found.values()):
            raise TypeError("documents are maps")
        documents = {key: json.dumps(value).encode() for key, value in found.items()}
    except FileNotFoundError as error:
        raise NotFoundError(
            f"there are no kerchunk references in {where}: no .zmetadata"
        ) from error
    except OSError as error:
        raise StorageError(f"{where}/.zmetadata cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"{where}/.zmetadata is malformed: {error}") from error
    if record_size is None:
        raise InvalidArgumentError(
            f"{where}/.zmetadata has no record_size, so that the folder holds no kerchunk "
            "references; if it is a Zarr store, use import_zarr"
        )
    if type(record_size) is not int or not 0 < record_size <= _MOST_RECORD:
        raise InvalidArgumentError(
            f"{where}/.zmetadata has the record_size {str(record_size)[:40]}; it must be 1 to "
            f"{_MOST_RECORD}"
        )
    return documents, record_size


def _arrays(folder: str, documents: Mapping[str, bytes]) -> dict[str, ArrayMeta]:
    arrays = {}
    for key in documents:
        path, name = split(key)
        if name not in (V2_ARRAY, V2_GROUP, V2_ATTRIBUTES) or not _is_path(path):
            raise UnsupportedFormatError(
                f"{_url(folder)}/.zmetadata holds {key[:200]!r}, and parquet "
                "references have documents of Zarr v2 only"
            )
        if name == V2_ARRAY:
            meta = parse_documents({V2_ARRAY: documents[key]})
            if not isinstance(meta, ArrayMeta):
                raise UnsupportedFormatError(
                    f"the Zarr metadata {key[:200]!r} is not understood, so that it is not clear "
                    "which chunks the references are of"
                )
            arrays[path] = meta
    return arrays


def _is_path(path: str) -> bool:
    """Whether it can be the path of a node, and of a folder below another."""
    if not path:
        return True
    return path.encode(errors="replace").decode() == path and is_inside(path)


def _check_strays(folder: str, arrays: Mapping[str, ArrayMeta]) -> None:
    for at, _, names in os.walk(folder):
        path = os.path.relpath(at, folder).replace(os.sep, "/").removeprefix(".")
        if path not in arrays and any(map(_NAME.fullmatch, names)):
            raise InvalidArgumentError(
                f"{_url(folder)} holds references of {path!r}, but .zmetadata has no such array"
            )


def _numbers(folder: str) -> Iterator[int]:
    """The numbers of the parquet files in a folder, in order."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(f"{_url(folder)} cannot be listed: {error}") from error
    yield from sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def _read(
    folder: str,
    path: str,
    number: int,
    meta: ArrayMeta,
    record_size: int,
    files: Files,
    values: dict[str, bytes],
    budget: Budget,
) -> _RefColumns:
    """Read the chunks in one parquet file; inline ones are added to the values."""
    name = join(path, f"refs.{number}.parq")
    where = VirtualLocation("file", folder, name).url
    first, size = number * record_size, meta.grid.size
    table, rows = _table(folder, name, record_size, budget)
    due = max(min(record_size, size - first), 0)
    if rows < due:
        raise InvalidArgumentError(
            f"{where} has {rows} rows; with a record_size of {record_size} it must have {due}, "
            f"because the array /{path} has {size} chunks"
        )
    inline, raws = _texts(where, table, "raw", rows)
    there, urls = _texts(where, table, "path", rows)
    if max(there[due:].max(initial=-1), inline[due:].max(initial=-1)) >= 0:
        raise InvalidArgumentError(
            f"{where} has references beyond the end of the array /{path}, which has {size} chunks"
        )
    if not due:
        none = np.zeros(0, np.int64)
        return _RefColumns(none, none, none, none)
    offset, length = (_sizes(where, table, name, rows) for name in ("offset", "size"))
    _keep_inline(where, path, meta, first, inline, raws, values, budget)
    row = np.flatnonzero((there >= 0) & (inline < 0))
    budget.take(len(row) * (_ROW_BYTES + 8 * len(meta.grid.shape)), where)
    offset, length, there = offset[row], length[row], there[row]
    if len(row) and int(min(offset.min(), length.min())) < 0:
        raise InvalidArgumentError(f"{where} has a negative offset or size")
    sources = np.full(len(urls), -1, np.int64)
    for used in np.unique(there).tolist():
        sources[used] = files.number(f"{path}/refs.{number}", _text(where, urls[used]))
    length = np.where((offset == 0) & (length == 0), -1, length)
    return _RefColumns(first + row, sources[there], offset, length)


def _keep_inline(
    where: str,
    path: str,
    meta: ArrayMeta,
    first: int,
    inline: Column,
    raws: list[Any],
    values: dict[str, bytes],
    budget: Budget,
) -> None:
    row = np.flatnonzero(inline >= 0)
    sizes = np.array([len(raw or b"") for raw in raws], np.int64)
    if len(row):
        nbytes = int(sizes[inline[row]].astype(float).sum())
        budget.take(nbytes + _INLINE_BYTES * len(row), f"the inline chunks of {where}")
    coords = meta.grid.unravel(first + row)
    for which, at in zip(inline[row].tolist(), coords.tolist(), strict=True):
        raw = raws[which]
        data = raw.encode() if isinstance(raw, str) else raw
        values[join(path, meta.chunk_keys.encode(tuple(at)))] = data


def _table(folder: str, name: str, record_size: int, budget: Budget) -> tuple[Any, int]:
    """The columns of a parquet file, and its number of rows."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            "kerchunk references in parquet files are read with pyarrow, which is not installed; "
            'get it with: pip install "zarr-manifests[kerchunk]"'
        ) from error
    where = VirtualLocation("file", folder, name).url
    try:
        with os.fdopen(open_inside(folder, name), "rb") as source:
            nbytes = os.fstat(source.fileno()).st_size
            budget.check(nbytes, where)
            data = source.read(nbytes)
        rows, unpacked = measure(data)
        budget.check(nbytes + unpacked, where)
        if rows > record_size:
            raise InvalidArgumentError(f"{where} has {rows} rows, beyond its record_size")
        buffer = pa.py_buffer(data)
        schema = pq.read_schema(pa.BufferReader(buffer))
        texts, sizes = _columns(where, schema)
        with pq.ParquetFile(pa.BufferReader(buffer), read_dictionary=texts) as file:
            table = file.read(columns=texts + sizes)
            table.validate(full=True)  # above all the positions in dictionaries
    except MalformedParquetError as error:
        raise InvalidArgumentError(f"{where} cannot be read as parquet: {error}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:  # names are decoded unchecked
        raise InvalidArgumentError(f"{where} cannot be read as parquet: {error}") from error
    except OSError as error:
        raise StorageError(f"{where} cannot be read: {error}") from error
    if table.num_rows != rows:
        raise InvalidArgumentError(f"{where} has fewer rows than it says")
    return table, rows


def _columns(where: str, schema: Any) -> tuple[list[str], list[str]]:
    """The names of the text columns and of the size columns that exist.

    Other types are refused before anything is read: a few bytes of fixed-size or list values can
    expand to any size.
    """
    from pyarrow import types

    names = schema.names
    if len(set(names)) < len(names) or ("path" not in names and "raw" not in names):
        raise InvalidArgumentError(
            f"{where} has the columns {', '.join(names)[:200]}; it must have {', '.join(_COLUMNS)}"
        )
    found = [name for name in _COLUMNS if name in names]
    for name in found:
        kind = schema.field(name).type
        if types.is_null(kind):
            continue
        due, known = "it must be whole numbers", [types.is_integer]
        if name in _TEXTS:
            kind = kind.value_type if types.is_dictionary(kind) else kind
            due, known = "it must be text", [types.is_string, types.is_large_string]
            known += [types.is_binary, types.is_large_binary]
        if not any(is_one(kind) for is_one in known):
            raise InvalidArgumentError(f"{where} has a column {name!r} of {kind}; {due}")
    return [name for name in found if name in _TEXTS], [n for n in found if n not in _TEXTS]


def _texts(where: str, table: Any, name: str, rows: int) -> tuple[Column, list[Any]]:
    """A column of texts or bytes, as positions (-1 for null) in a list of distinct values."""
    import pyarrow as pa

    if name not in table.schema.names or pa.types.is_null(table.schema.field(name).type):
        return np.full(rows, -1, np.int64), []
    column = table.column(name)
    try:
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        whole = column.unify_dictionaries().combine_chunks()
        parts = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
        if not parts:
            return np.full(rows, -1, np.int64), []
        places = np.concatenate([_filled(part.indices) for part in parts])
        values = parts[0].dictionary.to_pylist()
        if len(places) and not -1 <= int(places.min()) <= int(places.max()) < len(values):
            raise InvalidArgumentError(f"{where} has a bad column {name!r}: no such value")
        return places, values
    except (pa.ArrowException, ValueError) as error:
        raise InvalidArgumentError(f"{where} has a bad column {name!r}: {error}") from error


def _filled(indices: Any, least: int = -1) -> NDArray[np.int64]:
    filled = indices.fill_null(least) if indices.null_count else indices
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def _sizes(where: str, table: Any, name: str, rows: int) -> Column:
    """A column of whole numbers, 0 for null."""
    import pyarrow as pa

    if name not in table.schema.names:
        return np.zeros(rows, np.int64)
    try:
        whole = table.column(name).cast(pa.int64()).combine_chunks()
    except pa.ArrowException as error:
        raise InvalidArgumentError(f"{where} has a bad column {name!r}: {error}") from error
    parts = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    return np.concatenate([np.zeros(0, np.int64), *(_filled(part, 0) for part in parts)])


def _text(where: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{where} has a path that is not text") from error


def _url(folder: str) -> str:
    return VirtualLocation("file", folder).url
