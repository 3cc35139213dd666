"""Reading kerchunk references: documents, inline chunks, and locations of other chunks.

In JSON, version 0 of the references is a map from keys to values or locations. Version 1 adds
templates and generated references. Sources: kerchunk's "References specification", and the
reference file system of fsspec for what the specification leaves open.

A folder of parquet files has `.zmetadata`, with all documents and a record size R. Each array has
files `<array>/refs.<n>.parq`, whose row i is chunk n * R + i of the array's grid in C order. The
columns are `path`, `offset`, `size` and `raw`. A row with `raw` is an inline chunk; a row with
neither `raw` nor `path` is absent; offset and size 0 stand for the whole file. A missing file has
only absent chunks. Source: `LazyReferenceMapper` of fsspec, which writes and reads these files.

Invariants:

- Nothing is skipped silently, since an absent chunk reads as fill value: an unusable entry is an
  error, also a row beyond the end of an array, or a file that belongs to no array.
- Rows of parquet files are processed as columns. There is Python work only for each referenced
  file, each inline chunk, and each parquet file.
- No file is read that is larger than `max_bytes`, or unpacks to more. What a parquet file unpacks
  to is what its footer states, which stops accidents, and not who writes a false one.
- An expression in a template has at most `_MOST_CHARS` characters, and numbers are below 2**63. A
  text can still become long, since it may call another one many times.

Templates are texts with expressions in double braces. Anybody may have written a file of
references, and a template language such as Jinja is a programming language. Its sandbox keeps a
template from forbidden objects, but not from working for hours (`{{ 'a' * 10**10 }}`). So only what
references are known to need is supported, and everything else is an error: names, whole numbers,
`+ - * // %`, parentheses, a number formatted by `'%03d' % i`, and a template that is called with
values (`{{ f(c='t2m') }}`).
"""
# Paths are plain strings here, as in references.py:
# ruff: noqa: PTH112

from __future__ import annotations

import ast
import base64
import gzip
import io
import itertools
import json
import math
import operator
import os
import re
import zlib
from array import array
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import zstandard

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import Column
from zarr_manifests.keys import V2_ARRAY, ArrayMeta, join, parse_documents, split
from zarr_manifests.ondemand import need
from zarr_manifests.progress import counted
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import Version
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.containers import WEB, Containers, location_of, parse_location, url_at
from zarr_manifests.virtual.references import (
    MAX_BYTES,
    MAX_REFERENCES,
    Files,
    Listing,
    Numbered,
    References,
    check_bound,
    check_bytes,
    in_bucket,
    in_folder,
    read_file,
)

type _Value = int | str

_PART_BYTES: Final = 1 << 20
_BROKEN: Final = (ValueError, RecursionError, EOFError, OSError, zlib.error, zstandard.ZstdError)
_MOST: Final = 2**62
_NONE: Final = (None, 0, 0)
_ENDINGS: Final = (".json", ".gz", ".zst")
"""Of names that are not those of folders."""
_RECORD: Final = re.compile(r"(?:(.*)/)?refs\.(0|[1-9][0-9]{0,17})\.parq", re.DOTALL)
_COLUMNS: Final = ("path", "offset", "size", "raw")
_MOST_RECORD: Final = 1 << 22
_GRIB: Final = re.compile(rb'"id"\s*:\s*"grib"')
_EXPRESSION: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FORMAT: Final = re.compile(r"%0?[0-9]{0,2}d")
_MOST_CHARS: Final = 200
_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_kerchunk(
    given: str | os.PathLike[str] | Mapping[str, Any],
    containers: Containers,
    *,
    max_bytes: int = MAX_BYTES,
    max_references: int = MAX_REFERENCES,
    remote_protocol: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> References:
    """Read kerchunk references: a mapping, a JSON file, or a folder of parquet files.

    A JSON file may be compressed with gzip or zstd, and lie at any URL. A folder is local, or in an
    object store.

    For files below a container, size and modification time are recorded.

    Parameters
    ----------
    given : mapping, str or path
        The references.
    containers : Containers
        Places whose files may be inspected.
    max_bytes : int
        The most bytes of one file of references, also unpacked.
    max_references : int
        The most references that templates may generate.
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
        If its templates or metadata are not supported.
    VirtualContainerError
        If a chunk is a whole file of unknown size.
    """
    check_bound("max_bytes", max_bytes)
    check_bound("max_references", max_references)
    if remote_protocol is not None:
        url_at(*parse_location(f"{remote_protocol}://name"))  # says if there is no such scheme
    files = Files(containers, remote_protocol)
    if not isinstance(given, Mapping):
        url = location_of(given)
        folder = _folder(url, max_bytes, storage_options)
        if folder is not None:
            return _parquet(folder, files)
        given = _loaded(read_file(url, max_bytes, storage_options), url, max_bytes)
    refs, templates = _parts(given, max_references)
    values: dict[str, bytes] = {}
    keys: list[str] = []
    rows = array("q")
    for key, ref in counted("reading references", refs.items()):
        if type(ref) not in (list, tuple):
            values[key] = _value(key, ref)
            continue
        url, first, nbytes = ref if len(ref) == 3 else (*ref, 0, -1) if len(ref) == 1 else _NONE
        whole = type(first) is type(nbytes) is int and -1 <= nbytes < _MOST and 0 <= first < _MOST
        if type(url) is not str or not whole or (nbytes < 0 and len(ref) == 3):
            raise _malformed(key)
        keys.append(key)
        url = templates.render(url) if "{" in url else url
        rows.extend((files.number(key, url), first, nbytes))
    for key, document in values.items():
        if key.endswith(".zarray") and _GRIB.search(document):
            need(f"{key.removesuffix('/.zarray')!r}, of GRIB messages,", "grib", "eccodes")
    return files.references(values, keys, *np.array(rows, np.int64).reshape(-1, 3).T)


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
        return in_folder(path, max_bytes) if os.path.isdir(path) else None
    if scheme in ("memory", *WEB) or url.endswith(_ENDINGS):
        return None
    storage = storage_of(url, options)
    assert isinstance(storage, ObjectStorage)
    try:
        storage.get_version(".zmetadata", 0, 1, Version())
    except ObjectNotFoundError:
        return None
    return in_bucket(storage, max_bytes)


def _loaded(data: bytes, url: str, max_bytes: int) -> Any:
    """The value that a JSON file holds, which may be compressed."""
    reader: Any = None
    try:
        if data.startswith(b"\x1f\x8b"):
            reader = gzip.GzipFile(fileobj=io.BytesIO(data))
        elif data.startswith(zstandard.FRAME_HEADER):
            reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
        if reader is not None:
            unpacked = bytearray()
            while part := reader.read(_PART_BYTES):  # a bound is no size to allocate
                unpacked += part
                check_bytes(f"{url}, unpacked,", len(unpacked), max_bytes)
            data = bytes(unpacked)
        return json.loads(data)
    except _BROKEN as error:
        if isinstance(error, InvalidArgumentError):  # of the bound
            raise
        raise InvalidArgumentError(f"{url} is not JSON: {error}") from error


def _parts(found: Any, most: int) -> tuple[Mapping[str, Any], Templates]:
    """All references, including generated ones, and the templates."""
    given: Any = {}
    generators: Any = []
    if isinstance(found, Mapping) and not {"version", "refs"}.isdisjoint(found):
        if found.get("version", 1) != 1:
            raise UnsupportedFormatError(
                f"kerchunk references of version {str(found['version'])[:20]!r} are not known"
            )
        given, generators = found.get("templates") or {}, found.get("gen") or []
        found = found.get("refs", {})
    maps = isinstance(given, Mapping) and isinstance(found, Mapping)
    if not (maps and isinstance(generators, list) and all(isinstance(key, str) for key in found)):
        raise InvalidArgumentError(
            "kerchunk references are a map from keys to references, 'templates' a map, 'gen' a list"
        )
    templates = Templates(given)
    if generators:
        # As in fsspec: generated references replace listed ones.
        found = dict(found) | dict(_generated(generators, templates, most))
    return found, templates


def _generated(generators: list[Any], templates: Templates, most: int) -> Iterator[tuple[str, Any]]:
    left = most
    for number, one in enumerate(generators):
        try:
            key, url, dimensions = str(one["key"]), str(one["url"]), one["dimensions"]
            spans = [str(one[name]) for name in ("offset", "length") if name in one]
            axes = [
                axis
                if isinstance(axis, list)
                else range(axis.get("start", 0), axis["stop"], axis.get("step", 1))
                for axis in dimensions.values()
            ]
            count = math.prod(map(len, axes))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidArgumentError(
                f"'gen' number {number} of the kerchunk references is malformed: it needs key, url "
                "and dimensions, each of them a list, or start, stop and step as whole numbers"
            ) from error
        left -= count
        if left < 0:
            raise InvalidArgumentError(
                f"the kerchunk references generate more than {most} others: write them to parquet, "
                "which is read without work for each, or pass a larger max_references="
            )
        for values in itertools.product(*axes) if count else ():
            names = dict(zip(dimensions, values, strict=True))
            texts = [templates.render(text, names) for text in spans]
            # What is no number is refused with the other references.
            span = [int(text) if text.isdecimal() and len(text) < 20 else text for text in texts]
            yield templates.render(key, names), [templates.render(url, names), *span]


def _parquet(place: Listing, files: Files) -> References:
    """The references in a folder of parquet files."""
    values, record_size = _documents(place)
    arrays = {
        split(key)[0]: parse_documents({V2_ARRAY: document})
        for key, document in values.items()
        if split(key)[1] == V2_ARRAY
    }
    records = [(key, found) for key in place.files if (found := _RECORD.fullmatch(key))]
    due = sorted((found[1] or "", int(found[2]), key) for key, found in records)
    none = np.zeros(0, np.int64)
    columns = [(none, none, none)]
    numbered: list[Numbered] = []
    rows = 0
    for path, number, key in counted("reading files of references", due):
        where, meta, first = f"{place.name}/{key}", arrays.get(path), number * record_size
        if not isinstance(meta, ArrayMeta):
            raise UnsupportedFormatError(
                f"{where} holds references, but .zmetadata has no array {path!r} that is understood"
            )
        inline, raws, there, paths, offset, length = _columns(place, key, record_size)
        end = max(min(record_size, meta.grid.size - first), 0)
        if len(there) < end:
            raise InvalidArgumentError(
                f"{where} has {len(there)} rows; with a record_size of {record_size} it must have "
                f"{end}, because the array /{path} has {meta.grid.size} chunks"
            )
        if max(there[end:].max(initial=-1), inline[end:].max(initial=-1)) >= 0:
            raise InvalidArgumentError(
                f"{where} has references beyond the end of the array /{path}, which has "
                f"{meta.grid.size} chunks"
            )
        row = np.flatnonzero(inline >= 0)
        coords = meta.grid.unravel(first + row).tolist()
        for which, at in zip(inline[row].tolist(), coords, strict=True):
            values[join(path, meta.chunk_keys.encode(tuple(at)))] = raws[which]
        row = np.flatnonzero((there >= 0) & (inline < 0))
        offset, length = offset[row], length[row]
        if min(offset.min(initial=0), length.min(initial=0)) < 0:
            raise InvalidArgumentError(f"{where} has a negative offset or size")
        source = np.full(len(paths), -1, np.int64)
        for used in np.unique(there[row]).tolist():
            source[used] = files.number(key, paths[used])
        length = np.where((offset == 0) & (length == 0), -1, length)
        columns.append((source[there[row]], offset, length))
        numbered.append(Numbered(path, rows, first + row))
        rows += len(row)
    sources, offsets, lengths = map(np.concatenate, zip(*columns, strict=True))
    return files.references(values, (), sources, offsets, lengths, numbered)


def _documents(place: Listing) -> tuple[dict[str, bytes], int]:
    """The documents of a folder, and the number of rows of each file."""
    if ".zmetadata" not in place.files:
        raise NotFoundError(f"there are no kerchunk references in {place.name}: no .zmetadata")
    where = f"{place.name}/.zmetadata"
    match _loaded(place.read(".zmetadata"), where, place.max_bytes):
        case {"metadata": dict(found), "record_size": int(rows)} if 0 < rows <= _MOST_RECORD:
            return {key: _value(key, document) for key, document in found.items()}, rows
    raise InvalidArgumentError(
        f"{where} must have metadata, and a record_size of 1 to {_MOST_RECORD}; if the folder is "
        "a Zarr store, use import_zarr"
    )


def _columns(
    place: Listing, key: str, record_size: int
) -> tuple[Column, list[bytes], Column, list[str], Column, Column]:
    """Where rows have inline bytes, and these; where they have paths, and these; offsets, sizes.

    Texts are read as dictionaries, so that repeated ones are in memory once: each row has the
    position of its text, or -1.
    """
    need("a folder of kerchunk references", "kerchunk", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def texts(name: str) -> tuple[Column, list[bytes]]:
        column = table.column(name).combine_chunks()
        if not pa.types.is_dictionary(column.type):  # such as nulls only
            column = column.dictionary_encode()
        found = column.dictionary.cast(pa.large_binary()).to_pylist()
        return np.asarray(column.indices.fill_null(-1), np.int64), [text or b"" for text in found]

    def numbers(name: str) -> Column:
        column = table.column(name)
        if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
            raise ValueError(f"{name!r} is of {column.type}, and must be whole numbers")
        return np.asarray(column.cast(pa.int64()).fill_null(0), np.int64)

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
        inline, raws = texts("raw")
        there, paths = texts("path")
        decoded = [path.decode() for path in paths]
        return inline, raws, there, decoded, numbers("offset"), numbers("size")
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InvalidArgumentError(
            f"{place.name}/{key} cannot be read as parquet with {', '.join(_COLUMNS)}: {error}"
        ) from error


# --- templates -------------------------------------------------------------------------------


class Templates:
    """Named texts that other texts may use.

    Parameters
    ----------
    texts : mapping of str to str
        Texts by name. A text with an expression is called; others are inserted unchanged.

    Raises
    ------
    InvalidArgumentError
        If names or texts are not strings.

    Examples
    --------
    >>> from zarr_manifests.virtual.kerchunk import Templates
    >>> templates = Templates({"u": "s3://winds", "f": "{{c}}.nc"})
    >>> templates.render("{{u}}/{{ '%02d' % (i + 1) }}/{{ f(c='t') }}", {"i": 6})
    's3://winds/07/t.nc'
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        if not all(isinstance(text, str) for pair in texts.items() for text in pair):
            raise InvalidArgumentError("kerchunk templates are a map from names to texts")
        self._texts = dict(texts)
        self._plain: dict[str, _Value] = {k: v for k, v in texts.items() if "{{" not in v}

    def render(self, text: str, values: Mapping[str, _Value] | None = None) -> str:
        """Return the text with its expressions evaluated.

        Raises
        ------
        InvalidArgumentError
            If a name is unknown, or a number is divided by zero or beyond 2**63.
        UnsupportedFormatError
            If an expression is not supported.
        """
        if "{" not in text:
            return text
        names = ChainMap(dict(values or {}), self._plain)
        parts = _EXPRESSION.split(text)
        if any(sign in literal for literal in parts[::2] for sign in ("{{", "{%", "{#")):
            raise _not_understood(text)
        for place in range(1, len(parts), 2):
            try:
                tree = _parsed(parts[place])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise _not_understood(text) from error
            parts[place] = str(self._value(text, tree, names))
        return "".join(parts)

    def _value(self, text: str, node: ast.expr, names: Mapping[str, _Value]) -> _Value:
        match node:
            case ast.Constant(int() | str() as value) if type(value) is not bool:
                pass
            case ast.Name(name):
                if name not in names:
                    known = ", ".join(sorted(names)[:10]) or "none"
                    raise _wrong(text, f"needs {name!r}, which is not defined; known: {known}")
                value = names[name]
            case ast.UnaryOp(ast.USub(), operand):
                value = -self._number(text, operand, names)
            case ast.BinOp(ast.Constant(str(form)), ast.Mod(), right) if _FORMAT.fullmatch(form):
                value = form % self._number(text, right, names)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                numbers = [self._number(text, operand, names) for operand in (left, right)]
                try:
                    value = _OPERATORS[type(sign)](*numbers)
                except ZeroDivisionError as error:
                    raise _wrong(text, "divides by zero") from error
            case ast.Call(ast.Name(name), [], keywords) if name in self._texts and all(
                each.arg for each in keywords
            ):
                given = {str(each.arg): self._value(text, each.value, names) for each in keywords}
                # It sees only its arguments, so templates cannot call each other recursively.
                value = Templates({}).render(self._texts[name], given)
            case _:
                raise _not_understood(text)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise _wrong(text, "goes beyond 2**63")
        return value

    def _number(self, text: str, node: ast.expr, names: Mapping[str, _Value]) -> int:
        value = self._value(text, node, names)
        if type(value) is not int:
            raise _wrong(text, f"needs a number, not the text {str(value)[:80]!r}")
        return value


@lru_cache(maxsize=1000)
def _parsed(source: str) -> ast.expr:
    if len(source) > _MOST_CHARS:
        raise ValueError("too long")
    return ast.parse(source.strip(), mode="eval").body


def _wrong(text: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the kerchunk template {text[:80]!r} {why}")


def _not_understood(text: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the kerchunk template {text[:80]!r} is not supported: names, whole numbers, + - * // %, "
        "'%03d' % number and template(name=value) are. Write the references out, for instance "
        "by kerchunk itself"
    )
