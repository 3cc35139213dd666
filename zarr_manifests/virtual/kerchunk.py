"""Reading kerchunk references in JSON: documents, inline chunks, and locations of other chunks.

Version 0 of the references is a map from keys to values or locations. Version 1 adds templates and
generated references. Sources: kerchunk's "References specification", and the reference file system
of fsspec for what the specification leaves open.

Invariants:

- Nothing is skipped silently, since an absent chunk reads as fill value: an unusable entry is an
  error.
- What a small file can expand to is bounded before it is expanded: the number of generated
  references, and the bytes of everything.
"""
# Paths are plain strings here, as in references.py:
# ruff: noqa: PTH112

from __future__ import annotations

import base64
import binascii
import gzip
import io
import itertools
import json
import math
import os
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard

from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.keys import is_inside
from zarr_manifests.progress import Progress, counted, ignore
from zarr_manifests.storage.files import open_regular
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.object_versions import Version
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.budget import MAX_BYTES, MAX_REFERENCES, Budget, check_bound
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk_parquet import read_parquet
from zarr_manifests.virtual.locations import WEB, location_of, parse_location, url_at
from zarr_manifests.virtual.references import Files, References
from zarr_manifests.virtual.templates import Templates

__all__ = ["read_kerchunk"]

_DIMENSION_BYTES: Final = 16
_PART_BYTES: Final = 1 << 20
_BROKEN: Final = (
    *(ValueError, RecursionError, EOFError),
    *(gzip.BadGzipFile, zlib.error, zstandard.ZstdError),
)
_ENDINGS: Final = (".json", ".gz", ".zst")
"""Of names that are not those of folders."""
_GRIB: Final = re.compile(rb'"id"\s*:\s*"grib"')


def read_kerchunk(
    given: str | os.PathLike[str] | Mapping[str, Any],
    containers: Containers,
    *,
    max_bytes: int = MAX_BYTES,
    max_references: int = MAX_REFERENCES,
    remote_protocol: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress = ignore,
) -> References:
    """Read kerchunk references: a mapping, a JSON file, or a folder of parquet files.

    A JSON file may be compressed with gzip or zstd, and lie at any URL. A folder is local, or in an
    object store, from which it is downloaded first.

    For files below a container, size and modification time are recorded.

    Parameters
    ----------
    given : mapping, str or path
        The references.
    containers : Containers
        Places whose files may be inspected.
    max_bytes : int
        The most bytes to read and make.
    max_references : int
        The most references that templates may generate.
    remote_protocol : str, optional
        The scheme of locations without one, such as `s3`.
    storage_options : mapping, optional
        Options of `from_url` for the URL of the references.
    progress : callable
        Called with what is being done, and how many references or files were read.

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
    budget = Budget(max_bytes)
    most = check_bound("max_references", max_references)
    if remote_protocol is not None:
        url_at(*parse_location(f"{remote_protocol}://name"))  # says if there is no such scheme
    files = Files(containers, budget, remote_protocol)
    if not isinstance(given, Mapping):
        url = location_of(given)
        scheme, place = parse_location(url)
        if scheme == "file" and os.path.isdir(place):
            return read_parquet(place, files, budget, progress)
        found = _remote_folder(scheme, url, files, budget, storage_options, progress)
        if found is not None:
            return found
        if scheme == "file":
            refuse_options("a local file", storage_options)
            data = _local(place, url, budget)
        else:
            data = _remote(url, budget, storage_options)
        given = _loaded(data, url, budget)
    refs, templates = _parts(given, budget, most)
    values: dict[str, bytes] = {}
    keys: list[str] = []
    source, offset, length = array("q"), array("q"), array("q")
    try:
        for key, ref in counted(progress, "reading references", refs.items()):
            if type(ref) not in (list, tuple):
                values[key] = _value(key, ref, budget)
                continue
            if len(ref) not in (1, 3):
                raise _malformed(key)
            url, first, nbytes = ref if len(ref) == 3 else (*ref, 0, -1)
            sound = type(url) is str and type(first) is type(nbytes) is int and first >= 0
            if not sound or (nbytes < 0 and len(ref) != 1):
                raise _malformed(key)
            keys.append(key)
            source.append(files.number(key, templates.render(url) if "{" in url else url))
            offset.append(first)
            length.append(nbytes)
    except OverflowError as error:
        raise _malformed(key) from error
    if any(_surrogates("".join(each)) for each in (values, keys)):
        raise InvalidArgumentError("a key of the kerchunk references is not valid Unicode text")
    _check_grib(values)
    sources, offsets, lengths = (np.array(each, np.int64) for each in (source, offset, length))
    return files.references(values, keys, sources, offsets, lengths)


def _check_grib(values: Mapping[str, bytes]) -> None:
    """Refuse chunks that are GRIB messages if nothing could decode them."""
    for key, document in values.items():
        if key.endswith(".zarray") and _GRIB.search(document) and not find_spec("eccodes"):
            raise ImportError(
                f"the chunks of {key.removesuffix('/.zarray')!r} are GRIB messages, which eccodes "
                'decodes, and it is not installed: pip install "zarr-manifests[grib]"'
            )


def _local(path: str, url: str, budget: Budget) -> bytes:
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            budget.take(nbytes, url)
            return file.read(nbytes)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {url}") from error
    except OSError as error:
        raise StorageError(f"{url} cannot be read: {error}") from error


def _remote(url: str, budget: Budget, storage_options: Mapping[str, object] | None) -> bytes:
    folder, _, name = url.rpartition("/")
    storage = storage_of(folder, storage_options)
    try:
        budget.take(storage.head(name).nbytes, url)
        return storage.get(name)
    except ObjectNotFoundError as error:
        hint = "; a folder of parquet files can be local or in an object store"
        raise NotFoundError(f"there is no file {url}{hint}") from error


def _remote_folder(
    scheme: str,
    url: str,
    files: Files,
    budget: Budget,
    storage_options: Mapping[str, object] | None,
    progress: Progress,
) -> References | None:
    """The references of a folder of parquet files in an object store; None if there is none."""
    if scheme in ("file", *WEB) or url.endswith(_ENDINGS):
        return None
    storage = storage_of(url, storage_options)
    if not isinstance(storage, ObjectStorage):
        return None
    try:
        storage.get_version(".zmetadata", 0, 1, Version())
    except ObjectNotFoundError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for info in counted(progress, "fetching files", [*storage.files()]):
            if not is_inside(info.key):
                raise InvalidArgumentError(f"{url} has an object with an odd name, {info.key!r}")
            budget.take(info.nbytes, url)
            read = storage.get_version(info.key, 0, info.nbytes, Version())
            path = Path(folder, info.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read[0] if read is not None else b"")
        return read_parquet(folder, files, budget, progress)


def _unpacked(reader: Any, url: str, budget: Budget) -> bytes:
    """All members or frames of a compressed file, in parts: a bound is no size to allocate."""
    parts = []
    with reader:
        while part := reader.read(_PART_BYTES):
            budget.take(len(part), url)
            parts.append(part)
    return b"".join(parts)


def _loaded(data: bytes, url: str, budget: Budget) -> Any:
    """The value that a JSON file holds, which may be compressed."""
    try:
        if data.startswith(b"\x1f\x8b"):
            data = _unpacked(gzip.GzipFile(fileobj=io.BytesIO(data)), url, budget)
        elif data.startswith(zstandard.FRAME_HEADER):
            reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
            data = _unpacked(reader, url, budget)
        return json.loads(data)
    except _BROKEN as error:
        if isinstance(error, InvalidArgumentError):  # of the budget, which is a ValueError
            raise
        raise InvalidArgumentError(f"{url} is not JSON: {error}") from error


def _parts(found: Any, budget: Budget, most: int) -> tuple[Mapping[str, Any], Templates]:
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
    if not isinstance(given, Mapping) or not isinstance(generators, list):
        raise InvalidArgumentError("'templates' of kerchunk references are a map, 'gen' a list")
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise InvalidArgumentError("kerchunk references are a map from keys to references")
    templates = Templates(given, budget)
    if generators:
        # As in fsspec: generated references replace listed ones.
        found = dict(found) | dict(_generated(generators, templates, budget, most))
    return found, templates


def _generated(
    generators: list[Any], templates: Templates, budget: Budget, most: int
) -> Iterator[tuple[str, Any]]:
    left = most
    for number, generator in enumerate(generators):
        match generator:
            case {"key": str(key), "url": str(url), "dimensions": dict(dimensions), **others}:
                spans = [others[name] for name in ("offset", "length") if name in others]
            case _:
                raise InvalidArgumentError(
                    f"'gen' number {number} of the kerchunk references is malformed: it needs key, "
                    "url and dimensions"
                )
        if len(spans) == 1 or not all(type(span) in (str, int) for span in spans):
            raise InvalidArgumentError(
                f"'gen' number {number} of the kerchunk references must have both or none of "
                "offset and length, as text or numbers"
            )
        axes = [_axis(number, name, values) for name, values in dimensions.items()]
        count = math.prod(map(len, axes))
        if not count:
            continue  # an empty axis: skip the others, which may be very long
        left -= count
        if left < 0:
            raise InvalidArgumentError(
                f"the kerchunk references generate more than {most} others: write them to parquet, "
                "which is read without work for each, or pass a larger max_references="
            )
        where = f"'gen' number {number} of the kerchunk references"
        budget.take(count * len(axes) * _DIMENSION_BYTES, where)
        for values in itertools.product(*axes):
            names = dict(zip(dimensions, values, strict=True))
            place = templates.render(key, names)
            span = [_whole(place, templates.render(str(text), names)) for text in spans]
            yield place, [templates.render(url, names), *span]


def _axis(number: int, name: str, given: Any) -> Sequence[int | str]:
    if isinstance(given, list) and all(type(value) in (int, str) for value in given):
        return list(given)
    if isinstance(given, dict):
        bounds = [given.get("start", 0), given.get("stop"), given.get("step", 1)]
        if all(type(x) is int and abs(x) < 2**61 for x in bounds) and bounds[2]:
            return range(*bounds)
    raise InvalidArgumentError(
        f"the dimension {name[:80]!r} of 'gen' number {number} of the kerchunk references is "
        "malformed: give a list of numbers and texts, or start, stop and step"
    )


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"the generated kerchunk reference {key[:80]!r} has {text[:40]!r} as offset or length"
        ) from error


def _surrogates(text: str) -> bool:
    return text.encode(errors="replace").decode() != text


def _malformed(key: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"kerchunk reference {key[:200]!r} is malformed: it must be text, [url], or "
        "[url, offset, length]"
    )


def _value(key: str, ref: object, budget: Budget) -> bytes:
    if isinstance(ref, bytes):
        return ref
    where = f"kerchunk reference {key[:200]!r}"
    if isinstance(ref, dict):
        try:
            document = json.dumps(ref).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _malformed(key) from error
        budget.take(len(document), where)
        return document
    if not isinstance(ref, str):
        raise _malformed(key)
    budget.take(len(ref), where)
    try:
        if not ref.startswith("base64:"):
            return ref.encode()
        return base64.b64decode(ref.removeprefix("base64:"), validate=True)
    except binascii.Error as error:
        raise InvalidArgumentError(f"kerchunk reference {key[:200]!r} is not base64") from error
    except UnicodeEncodeError as error:
        raise _malformed(key) from error
