"""What a plain Zarr store, or a kerchunk file, says: documents, and where the chunks are.

`list_zarr` walks a folder (or a storage in memory) and reads the metadata documents only;
`read_kerchunk` reads one JSON file. Both give `References`, which know nothing of arrays yet.

Invariant: nothing is left out silently, since an absent chunk reads as fill value: what cannot be
taken is an error.
"""
# Paths are plain strings here, as what a scan of a folder gives:
# ruff: noqa: PTH100, PTH112, PTH117, PTH118, PTH123

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.format.columns import Column
from zarr_manifests.storage import from_url
from zarr_manifests.virtual.containers import Containers, Place, parse_location
from zarr_manifests.virtual.files import VirtualReader

__all__ = ["References", "list_zarr", "location_of", "read_kerchunk"]

_DOCUMENTS: Final = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})
_TEMPLATE: Final = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """Entries of a Zarr store.

    Parameters
    ----------
    values : mapping of str to bytes
        Entries whose bytes are known, the metadata documents among them, by key.
    keys : tuple of str
        Keys of the other entries.
    locations : tuple of str
        URLs of files.
    source, offset, length : int64[len(keys)]
        Position in `locations` of each entry's file, and where it is there.
    modified, sizes : int64[len(locations)]
        What is known of the files; -1 where not.
    """

    values: Mapping[str, bytes]
    keys: tuple[str, ...]
    locations: tuple[str, ...]
    source: Column
    offset: Column
    length: Column
    modified: Column
    sizes: Column


def location_of(given: str | os.PathLike[str]) -> str:
    """The normalised URL of a URL or of a local path."""
    text = os.fspath(given)
    if not isinstance(given, str) or "://" not in text:
        return Place("file", os.path.abspath(text)).url
    return Place(*parse_location(text)).url


def list_zarr(url: str | os.PathLike[str]) -> References:
    """The entries of the Zarr store at `url`, each a file.

    Raises
    ------
    NotFoundError
        If there is no Zarr metadata.
    InvalidArgumentError
        If a folder in it is a symbolic link, which may lead anywhere.
    """
    root = location_of(url)
    scheme, place = parse_location(root)
    values: dict[str, bytes] = {}
    keys, sizes, modified = [], [], []
    entries = _files_below(place) if scheme == "file" else _objects_below(place)
    for key, nbytes, modified_ms, data in entries:
        if data is not None:
            values[key] = data
        else:
            keys.append(key)
            sizes.append(nbytes)
            modified.append(modified_ms)
    if not values:
        raise NotFoundError(f"there is no Zarr metadata at {root}")
    n = len(keys)
    return References(
        values,
        tuple(keys),
        tuple(Place(scheme, place, key).url for key in keys),
        np.arange(n),
        np.zeros(n, np.int64),
        np.array(sizes, np.int64),
        np.array(modified, np.int64),
        np.array(sizes, np.int64),
    )


type _Entry = tuple[str, int, int, bytes | None]
"""Key, bytes, time of modification (ms), and what is in it if it is a document."""


def _files_below(root: str) -> Iterator[_Entry]:
    if not os.path.isdir(root):
        raise NotFoundError(f"there is no folder {Place('file', root).url}")
    due = [""]
    try:
        while due:
            folder = due.pop()
            with os.scandir(os.path.join(root, folder)) as found_here:
                entries = sorted(found_here, key=lambda entry: entry.name)
            for entry in entries:
                key = folder + entry.name
                if entry.is_dir():
                    if entry.is_symlink():
                        raise InvalidArgumentError(
                            f"{key!r} in {Place('file', root).url} is a symbolic link to a folder; "
                            "put the folder itself there"
                        )
                    due.append(key + "/")
                    continue
                found = entry.stat()
                data = None
                if entry.name in _DOCUMENTS:
                    with open(entry.path, "rb") as file:
                        data = file.read()
                yield key, found.st_size, found.st_mtime_ns // 1_000_000, data
    except OSError as error:
        raise StorageError(f"{Place('file', root).url} cannot be listed: {error}") from error


def _objects_below(root: str) -> Iterator[_Entry]:
    name, _, folder = root.partition("/")
    prefix = folder + "/" if folder else ""
    storage = from_url(f"memory://{name}")
    for info in storage.list(prefix):
        data = storage.get(info.key) if info.key.rpartition("/")[2] in _DOCUMENTS else None
        yield info.key[len(prefix) :], info.nbytes, info.modified_ms, data


def read_kerchunk(
    given: str | os.PathLike[str] | Mapping[str, Any], containers: Containers
) -> References:
    """What kerchunk references say: a mapping, or path or `file://` URL of a JSON file.

    Size and time of modification are noted of those files that lie below a container.

    Raises
    ------
    NotFoundError
        If there is no such file.
    InvalidArgumentError
        If it is malformed.
    UnsupportedFormatError
        If it generates references, or its templates compute.
    """
    refs, templates = _kerchunk_refs(given if isinstance(given, Mapping) else _load(given))
    values: dict[str, bytes] = {}
    locations: dict[str, str] = {}
    numbers: dict[str, int] = {}
    keys, source, offset, length = [], [], [], []
    for key, ref in refs.items():
        match ref:
            case str() | bytes() | dict():
                values[key] = _value(key, ref)
            case [str(url), *span] if len(span) in (0, 2) and all(
                type(x) is int and x >= 0 for x in span
            ):
                if url not in locations:
                    locations[url] = location_of(_absolute(_filled(url, templates)))
                keys.append(key)
                source.append(numbers.setdefault(locations[url], len(numbers)))
                offset.append(span[0] if span else 0)
                length.append(span[1] if span else -1)
            case _:
                raise InvalidArgumentError(f"kerchunk reference {key!r} is malformed")
    urls = list(numbers)
    reader = VirtualReader(containers)
    modified, sizes = np.full(len(urls), -1), np.full(len(urls), -1)
    for i, url in enumerate(urls):
        try:
            version = reader.version(url)
        except VirtualContainerError:  # not touched, so nothing is known of it
            continue
        modified[i], sizes[i] = version.modified_ms, version.nbytes
    lengths, sources = np.array(length, np.int64), np.array(source, np.int64)
    whole = lengths < 0
    lengths[whole] = sizes[sources[whole]]
    if (lengths < 0).any():
        raise VirtualContainerError(
            f"{keys[int(np.flatnonzero(lengths < 0)[0])]!r} is a whole file, whose size is not "
            "known: open the repository with a container that holds it"
        )
    return References(
        values,
        tuple(keys),
        tuple(urls),
        sources,
        np.array(offset, np.int64),
        lengths,
        modified,
        sizes,
    )


def _load(given: str | os.PathLike[str]) -> Any:
    scheme, path = parse_location(location_of(given))
    if scheme != "file":
        raise InvalidArgumentError("kerchunk references are a mapping, or a local JSON file")
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {Place('file', path).url}") from error
    except OSError as error:
        raise StorageError(f"{Place('file', path).url} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{Place('file', path).url} is no JSON: {error}") from error


def _kerchunk_refs(found: Any) -> tuple[dict[str, Any], dict[str, str]]:
    templates: Any = {}
    if isinstance(found, Mapping) and "refs" in found:
        if found.get("gen"):
            raise UnsupportedFormatError(
                "kerchunk references that are generated ('gen') are not supported; write them out"
            )
        found, templates = found["refs"], found.get("templates") or {}
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise InvalidArgumentError("kerchunk references are a map from keys to references")
    return dict(found), dict(templates)


def _filled(url: str, templates: Mapping[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        value = templates.get(found[1])
        if not isinstance(value, str):
            raise InvalidArgumentError(f"kerchunk template {found[1]!r} is not there")
        return value

    filled = _TEMPLATE.sub(fill, url)
    if "{{" in filled or "{%" in filled:
        raise UnsupportedFormatError("kerchunk templates that compute are not supported")
    return filled


def _absolute(url: str) -> str:
    if "://" not in url and not os.path.isabs(url):
        raise InvalidArgumentError(
            f"kerchunk reference to {url[:80]!r}, a relative path: relative to what is not said"
        )
    return url


def _value(key: str, ref: str | bytes | dict[str, Any]) -> bytes:
    if isinstance(ref, bytes):
        return ref
    if isinstance(ref, dict):
        return json.dumps(ref).encode()
    if not ref.startswith("base64:"):
        return ref.encode()
    try:
        return base64.b64decode(ref.removeprefix("base64:"), validate=True)
    except binascii.Error as error:
        raise InvalidArgumentError(f"kerchunk reference {key!r} is no base64") from error
