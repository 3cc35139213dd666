"""Reading kerchunk references: documents, inline chunks, and locations of other chunks.

In JSON, version 0 of the references is a map from keys to values or locations. Version 1 adds
templates: a location with `{{name}}` has the text of that name there. Sources: kerchunk's
"References specification", and the reference file system of fsspec for what it leaves open.

The specification also knows expressions in templates, and references that are generated from them.
They are a programming language that anybody may have written in a file of references, and kerchunk
writes neither, so they are refused.

A folder of parquet files has `.zmetadata`, with all documents and a record size R. Each array has
files `<array>/refs.<n>.parq`, whose row i is chunk n * R + i of the array's grid in C order. The
columns are `path`, `offset`, `size` and `raw`. A row with `raw` is an inline chunk; a row with
neither `raw` nor `path` is absent; offset and size 0 stand for the whole file. A missing file has
only absent chunks. Source: `LazyReferenceMapper` of fsspec, which writes and reads these files.

Invariants:

- Nothing is skipped silently, since an absent chunk reads as fill value: an unusable entry is an
  error, also a row beyond the end of an array, or a file that belongs to no array.
- No file is read that is larger than `max_bytes`. What a parquet file unpacks to is not larger
  either, by what its footer states, which stops accidents, and not who writes a false one.
"""
# Paths are plain strings here, as in references.py:
# ruff: noqa: PTH112, PTH117

from __future__ import annotations

import base64
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    ObjectNotFoundError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import Column
from zarr_manifests.keys import V2_ARRAY, ArrayMeta, join, parse_documents, split
from zarr_manifests.progress import counted
from zarr_manifests.runtime import need
from zarr_manifests.storage.local import LocalFiles
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.url import refuse_options, refuse_slipped, storage_of
from zarr_manifests.virtual.containers import WEB, Containers, location_of, parse_location
from zarr_manifests.virtual.references import (
    MAX_BYTES,
    Listing,
    References,
    check_bound,
    check_bytes,
    in_place,
    read_file,
    without_consolidated,
)
from zarr_manifests.virtual.virtual_refs import VirtualReader

_MOST: Final = 2**62
_NONE: Final = (None, 0, 0)
_RECORD: Final = re.compile(r"(?:(.*)/)?refs\.(0|[1-9][0-9]{0,17})\.parq", re.DOTALL)
_COLUMNS: Final = ("path", "offset", "size", "raw")
_MOST_RECORD: Final = 1 << 22
_NAME: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_JINJA: Final = re.compile(r"\{[{%#]")


def read_kerchunk(
    given: str | os.PathLike[str] | Mapping[str, Any],
    containers: Containers,
    *,
    max_bytes: int = MAX_BYTES,
    remote_protocol: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> References:
    """Read kerchunk references: a mapping, a JSON file, or a folder of parquet files.

    A JSON file may lie at any URL. A folder is local, or in an object store.

    For files below a container, size and modification time are recorded.

    Parameters
    ----------
    given : mapping, str or path
        The references.
    containers : Containers
        Places whose files may be inspected.
    max_bytes : int
        The most bytes of one file of references; of a parquet file, also unpacked.
    remote_protocol : str, optional
        The scheme of locations without one, such as `s3`.
    storage_options : mapping, optional
        Options of `from_url` for the URL of the references.

    Raises
    ------
    NotFoundError
        If there is no such file or folder.
    InvalidArgumentError
        If it is malformed, or exceeds a bound.
    UnsupportedFormatError
        If its templates or its version are not supported.
    VirtualContainerError
        If a chunk is a whole file of unknown size.
    """
    check_bound("max_bytes", max_bytes)
    if not isinstance(given, Mapping):
        url = location_of(given)
        folder = _folder(url, max_bytes, storage_options)
        if folder is not None:
            return _referred(_parquet(folder), {}, containers, remote_protocol)
        given = _loaded(read_file(url, max_bytes, storage_options), url)
    refs, texts = _parts(given)
    counting = counted("reading references", refs.items())
    return _referred(counting, texts, containers, remote_protocol)


def _referred(
    refs: Iterable[tuple[str, Any]],
    texts: Mapping[str, str],
    containers: Containers,
    remote_protocol: str | None,
) -> References:
    """What kerchunk says of each key, in columns."""
    values: dict[str, bytes] = {}
    keys: list[str] = []
    rows = array("q")
    files: dict[str, int] = {}
    known: dict[str, int] = {}
    for key, ref in refs:
        if type(ref) not in (list, tuple):
            values[key] = _value(key, ref)
            continue
        url, first, nbytes = ref if len(ref) == 3 else (*ref, 0, -1) if len(ref) == 1 else _NONE
        whole = type(first) is type(nbytes) is int and -1 <= nbytes < _MOST and 0 <= first < _MOST
        if type(url) is not str or not whole or (nbytes < 0 and len(ref) == 3):
            raise _malformed(key)
        number = known.get(url)
        if number is None:
            location = _location(key, _filled(url, texts), remote_protocol)
            number = known[url] = files.setdefault(location, len(files))
        keys.append(key)
        rows.extend((number, first, nbytes))
    names = "".join((*values, *keys))
    if names.encode(errors="replace").decode() != names:
        raise InvalidArgumentError("a key of the references is not valid Unicode text")
    source, offset, length = np.array(rows, np.int64).reshape(-1, 3).T
    urls = tuple(files)
    modified, sizes = _versions(containers, urls)
    if len(source):
        length = np.where(length < 0, sizes[source], length)
    if (length < 0).any():
        raise VirtualContainerError(
            f"a chunk is the whole file {urls[source[np.argmin(length)]]}, whose size is not known:"
            " open the repository with a container that holds it"
        )
    kept = without_consolidated(values)
    return References(kept, tuple(keys), urls, source, offset, length, modified, sizes)


def _location(key: str, given: str, remote_protocol: str | None) -> str:
    """The URL of a file that a reference names by its URL or absolute path."""
    place = given if "://" in given or not remote_protocol else f"{remote_protocol}://{given}"
    if "://" not in place and not os.path.isabs(given):
        refuse_slipped(given)
        raise InvalidArgumentError(
            f"{key[:200]!r} refers to {given[:80]!r}, a relative path: references do not say what "
            "it is relative to. Make the paths in them absolute, or file:// URLs"
        )
    return location_of(place)


def _versions(containers: Containers, urls: Sequence[str]) -> tuple[Column, Column]:
    """Times of modification and sizes of files; -1 for those below no container."""
    modified, sizes = np.full(len(urls), -1), np.full(len(urls), -1)
    reader = VirtualReader(containers)
    for i, url in enumerate(urls):
        with suppress(VirtualContainerError):
            version = reader.version(url)
            modified[i] = -1 if version.modified_ms is None else version.modified_ms
            sizes[i] = version.nbytes or 0  # no bytes at all answer no range
    return modified, sizes


def _value(key: str, ref: object) -> bytes:
    try:
        if isinstance(ref, dict):
            ref = json.dumps(ref)
        if isinstance(ref, str) and ref.startswith("base64:"):
            return base64.b64decode(ref.removeprefix("base64:"), validate=True)
        if isinstance(ref, str | bytes):
            return ref.encode() if isinstance(ref, str) else ref
    except (TypeError, ValueError, RecursionError) as error:
        raise _malformed(key) from error
    raise _malformed(key)


def _malformed(key: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"kerchunk reference {key[:200]!r} is malformed: it must be text, base64 after 'base64:', "
        "[url], or [url, offset, length]"
    )


def _folder(url: str, max_bytes: int, options: Mapping[str, object] | None) -> Listing | None:
    """The folder of parquet files at a URL; None if it is no folder."""
    scheme, path = parse_location(url)
    if scheme == "file":
        refuse_options("a local file or folder", options)
        return in_place(LocalFiles(path), max_bytes) if os.path.isdir(path) else None
    if scheme in ("memory", *WEB):
        return None
    storage = storage_of(url, options)
    assert isinstance(storage, ObjectStorage)
    try:
        storage.get_version(".zmetadata", 0, 1)
    except ObjectNotFoundError:
        return None
    return in_place(storage, max_bytes)


def _loaded(data: bytes, url: str) -> Any:
    """The value that a JSON file holds."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{url} is not JSON: {error}. If it is compressed, import the mapping "
            "json.load(fsspec.open(..., compression='infer').open())"
        ) from error


def _parts(found: Any) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """All references, and the texts of the templates by name."""
    texts: Any = {}
    if isinstance(found, Mapping) and not {"version", "refs"}.isdisjoint(found):
        if found.get("version", 1) != 1:
            raise UnsupportedFormatError(
                f"kerchunk references of version {str(found['version'])[:20]!r} are not known"
            )
        if found.get("gen"):
            raise _not_plain("'gen'")
        texts, found = found.get("templates") or {}, found.get("refs", {})
    maps = isinstance(texts, Mapping) and isinstance(found, Mapping)
    if not maps or not all(isinstance(text, str) for text in (*found, *texts, *texts.values())):
        raise InvalidArgumentError(
            "kerchunk references are a map from keys to references, 'templates' one to texts"
        )
    for text in texts.values():
        if "{{" in text:
            raise _not_plain(text)
    return found, texts


def _filled(url: str, texts: Mapping[str, str]) -> str:
    """The URL with texts in place of the names in double braces."""
    if "{{" not in url:
        return url
    parts = _NAME.split(url)
    if any(_JINJA.search(literal) for literal in parts[::2]):
        raise _not_plain(url)
    for place in range(1, len(parts), 2):
        if parts[place] not in texts:
            known = ", ".join(sorted(texts)[:10]) or "none"
            raise InvalidArgumentError(
                f"{url[:80]!r} needs the template {parts[place][:80]!r}, which is not defined; "
                f"known: {known}"
            )
        parts[place] = texts[parts[place]]
    return "".join(parts)


def _not_plain(what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the kerchunk references have more than names in templates: {what[:80]}. Expand them with "
        "fsspec, if you trust who wrote them, and import the mapping "
        'fsspec.filesystem("reference", fo=..., simple_templates=False).references'
    )


def _parquet(place: Listing) -> Iterator[tuple[str, Any]]:
    """The references in a folder of parquet files, as a JSON file would have them."""
    documents, record_size = _documents(place)
    yield from documents.items()
    arrays = {
        split(key)[0]: parse_documents({V2_ARRAY: document})
        for key, document in documents.items()
        if split(key)[1] == V2_ARRAY
    }
    records = [(key, found) for key in place.files if (found := _RECORD.fullmatch(key))]
    due = sorted((found[1] or "", int(found[2]), key) for key, found in records)
    for path, number, key in counted("reading files of references", due):
        where, meta, first = f"{place.name}/{key}", arrays.get(path), number * record_size
        if not isinstance(meta, ArrayMeta):
            raise UnsupportedFormatError(
                f"{where} holds references, but .zmetadata has no array {path!r} that is understood"
            )
        columns = _columns(place, key, record_size)
        rows, end = len(columns[0]), max(min(record_size, meta.grid.size - first), 0)
        if rows < end:
            raise InvalidArgumentError(
                f"{where} has {rows} rows; with a record_size of {record_size} it must have "
                f"{end}, because the array /{path} has {meta.grid.size} chunks"
            )
        coords = meta.grid.unravel(np.arange(first, first + end)).tolist()
        for row, (url, offset, nbytes, raw) in enumerate(zip(*columns, strict=True)):
            if raw is None and url is None:
                continue
            if row >= end:
                raise InvalidArgumentError(
                    f"{where} has references beyond the end of the array /{path}, which has "
                    f"{meta.grid.size} chunks"
                )
            span = (offset, nbytes) if offset or nbytes else ()
            chunk = join(path, meta.chunk_keys.encode(tuple(coords[row])))
            yield chunk, [url, *span] if raw is None else raw


def _documents(place: Listing) -> tuple[dict[str, bytes], int]:
    """The documents of a folder, and the number of rows of each file."""
    if ".zmetadata" not in place.files:
        raise NotFoundError(f"there are no kerchunk references in {place.name}: no .zmetadata")
    where = f"{place.name}/.zmetadata"
    match _loaded(place.read(".zmetadata"), where):
        case {"metadata": dict(found), "record_size": int(rows)} if 0 < rows <= _MOST_RECORD:
            return {key: _value(key, document) for key, document in found.items()}, rows
    raise InvalidArgumentError(
        f"{where} must have metadata, and a record_size of 1 to {_MOST_RECORD}; if the folder is "
        "a Zarr store, use import_zarr"
    )


def _columns(place: Listing, key: str, record_size: int) -> list[list[Any]]:
    """The columns of a file; texts that repeat are in memory once."""
    need("a folder of kerchunk references", "kerchunk", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def texts(name: str, kind: pa.DataType) -> list[Any]:
        column = table.column(name).combine_chunks()
        if not pa.types.is_dictionary(column.type):  # such as nulls only
            column = column.dictionary_encode()
        known = column.dictionary.cast(kind).to_pylist()
        return [None if at is None else known[at] for at in column.indices.to_pylist()]

    def numbers(name: str) -> Any:
        return table.column(name).cast(pa.int64()).fill_null(0).to_pylist()

    data = pa.BufferReader(place.read(key))
    try:
        with pq.ParquetFile(data, read_dictionary=["path", "raw"]) as file:
            footer = file.metadata
            if footer.num_rows > record_size:
                raise ValueError(f"it has {footer.num_rows} rows, beyond its record_size")
            groups = map(footer.row_group, range(footer.num_row_groups))
            stated = sum(group.total_byte_size for group in groups)
            check_bytes("what it unpacks to", stated, place.max_bytes)
            table = file.read(columns=[*_COLUMNS])
        table.validate(full=True)  # above all the positions in dictionaries
        paths, raw = texts("path", pa.large_string()), texts("raw", pa.large_binary())
        return [paths, numbers("offset"), numbers("size"), raw]
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InvalidArgumentError(
            f"{place.name}/{key} cannot be read as parquet with {', '.join(_COLUMNS)}: {error}"
        ) from error
