"""Reading a plain Zarr store: its documents, and where its chunks are.

`list_zarr` walks a folder (or a memory storage) and reads only the metadata documents. Its result,
`References`, knows nothing about arrays yet.

Invariant: nothing is skipped silently, since an absent chunk reads as fill value: an unusable entry
is an error.
"""
# Paths are plain strings here, as what a scan of a folder gives:
# ruff: noqa: PTH112, PTH113, PTH117, PTH118

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.format.columns import Column
from zarr_manifests.progress import Progress, counted, ignore
from zarr_manifests.records import dataclass
from zarr_manifests.runtime import one_by_one
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.storage.files import open_inside, with_room
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.object_versions import Version
from zarr_manifests.storage.own import own_storage
from zarr_manifests.storage.url import refuse_options, refuse_slipped, storage_of
from zarr_manifests.virtual.budget import MAX_BYTES, Budget
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.locations import REMOTE, VirtualLocation, location_of, parse_location
from zarr_manifests.virtual.virtual_files import VirtualReader

__all__ = ["Files", "Numbered", "References", "list_zarr"]

_DOCUMENTS: Final = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})
_LISTING: Final = "looking for files"


@dataclass(frozen=True, slots=True, eq=False)
class Numbered:
    """Chunks of one array that are identified by number instead of keys.

    Parameters
    ----------
    path : str
        Path of the array.
    first : int
        The row of the first chunk; the others follow.
    chunk : int64[n]
        Linear index of each chunk in the array's grid, in C order.
    """

    path: str
    first: int
    chunk: Column


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The entries of a Zarr store.

    Rows are the entries whose bytes are elsewhere: first those with keys, then the numbered ones.

    Parameters
    ----------
    values : mapping of str to bytes
        Entries whose bytes are known, including the metadata documents, by key.
    keys : tuple of str
        Keys of the first rows.
    locations : tuple of str
        URLs of files.
    source, offset, length : int64[n]
        Position of each row's file in `locations`, and its byte range there.
    modified, sizes : int64[len(locations)]
        Modification times and sizes of the files; -1 if unknown.
    numbered : tuple of Numbered
        The other rows.
    fetch : callable, optional
        Returns the bytes of a key, where they are not read from the location.
    """

    values: Mapping[str, bytes]
    keys: tuple[str, ...]
    locations: tuple[str, ...]
    source: Column
    offset: Column
    length: Column
    modified: Column
    sizes: Column
    numbered: tuple[Numbered, ...] = ()
    fetch: Callable[[str], bytes] | None = None


class Files:
    """The files that references refer to, without duplicates.

    Parameters
    ----------
    containers : Containers
        Places whose files may be inspected; nothing is known of other files.
    budget : Budget
        The bytes that may still be made.
    remote_protocol : str, optional
        The scheme of locations without one, such as `s3`.
    """

    def __init__(
        self, containers: Containers, budget: Budget, remote_protocol: str | None = None
    ) -> None:
        self._containers, self._protocol = containers, remote_protocol
        self._budget = budget
        self._given: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def number(self, key: str, given: str) -> int:
        """Return the number of the file at a URL or absolute path.

        Raises
        ------
        InvalidArgumentError
            If it is malformed, or a relative path.
        UnsupportedStorageError
            If the scheme is not supported.
        """
        number = self._given.get(given)
        if number is None and self._protocol is not None and "://" not in given:
            number = self.number(key, f"{self._protocol}://{given}")
            self._given[given] = number
        if number is None:
            if "://" not in given and not os.path.isabs(given):
                refuse_slipped(given)
                raise InvalidArgumentError(
                    f"{key[:200]!r} refers to {given[:80]!r}, a relative path: references do not "
                    "say what it is relative to. Make the paths in them absolute, or file:// URLs"
                )
            if given.encode(errors="replace").decode() != given:
                raise InvalidArgumentError(
                    f"{key[:200]!r} refers to something that is not valid Unicode text"
                )
            self._budget.take(len(given), f"the location {given[:80]!r}")
            location = location_of(given)
            number = self._given[given] = self._numbers.setdefault(location, len(self._numbers))
        return number

    def references(
        self,
        values: Mapping[str, bytes],
        keys: Sequence[str],
        source: Column,
        offset: Column,
        length: Column,
        numbered: Sequence[Numbered] = (),
    ) -> References:
        """Build references to the files; a length of -1 stands for the whole file.

        Raises
        ------
        VirtualContainerError
            If a whole file is below no container, so that its size is unknown.
        """
        urls = tuple(self._numbers)
        modified, sizes = np.full(len(urls), -1), np.full(len(urls), -1)
        reader = VirtualReader(self._containers)
        for i, url in enumerate(urls):
            try:
                version = reader.version(url)
            except VirtualContainerError:  # not inspected, so nothing is known of it
                continue
            modified[i] = -1 if version.modified_ms is None else version.modified_ms
            sizes[i] = version.nbytes or 0  # no bytes at all answer no range
        length = np.where(length < 0, sizes[source], length) if len(source) else length
        if (length < 0).any():
            url = urls[int(source[int(np.flatnonzero(length < 0)[0])])]
            raise VirtualContainerError(
                f"a chunk is the whole file {url}, whose size is not known: open the repository "
                "with a container that holds it"
            )
        kept = _without_consolidated(values)
        return References(
            kept, tuple(keys), urls, source, offset, length, modified, sizes, tuple(numbered)
        )


def _without_consolidated(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """The entries without consolidated metadata, which only repeats other documents.

    A repository does not offer it, since the next commit would make it outdated.

    Raises
    ------
    InvalidArgumentError
        If it is malformed, or refers to a document that does not exist.
    """
    kept = dict(values)
    for key, document in values.items():
        folder, _, name = key.rpartition("/")
        if name == ".zmetadata":
            del kept[key]
            named = _consolidated(key, document, "metadata")[1]
        elif name == "zarr.json" and b'"consolidated_metadata"' in document:
            fields, paths = _consolidated(key, document, "consolidated_metadata", "metadata")
            if "consolidated_metadata" in fields:  # at the top level, not in attributes
                del fields["consolidated_metadata"]
                kept[key] = json.dumps(fields).encode()
            named = [f"{path}/zarr.json" for path in paths]
        else:
            continue
        for other in named:
            place = f"{folder}/{other}" if folder else other
            if place not in values:
                raise InvalidArgumentError(
                    f"the consolidated metadata {key!r} lists {place!r}, which does not exist, so "
                    "the store may be incomplete; consolidate it again, or remove that metadata"
                )
    return kept


def _consolidated(key: str, document: bytes, *names: str) -> tuple[dict[str, Any], list[str]]:
    """A document, and the keys of the map at these names; no keys if it has no such map."""
    try:
        found = fields = json.loads(document)
        for name in names:
            found = found[name] if name == "metadata" else (found.get(name) or {"metadata": {}})
        return fields, list(found.keys())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"the consolidated metadata {key!r} is malformed") from error


type Parallel = Callable[[Sequence[Callable[[], bytes]]], list[bytes]]


def list_zarr(
    given: str | os.PathLike[str] | Storage | Store,
    *,
    max_bytes: int = MAX_BYTES,
    storage_options: Mapping[str, object] | None = None,
    copy: bool = False,
    parallel: Parallel = one_by_one,
    progress: Progress = ignore,
) -> tuple[str, References]:
    """The name of a place, and the entries of the Zarr store there, each a file.

    Documents count up to `max_bytes`. The entries of a Zarr `Store` that is at no place can only be
    copied. `progress` is told how many files were found.

    Raises
    ------
    NotFoundError
        If there is no Zarr metadata.
    InvalidArgumentError
        If documents exceed `max_bytes`, a folder is a symbolic link, a file is a link that leads
        out of the store, or consolidated metadata refers to documents that do not exist.
    UnsupportedFormatError
        If it is a file, such as a ZIP archive.
    UnsupportedStorageError
        If it is on a web server, which has no listing.
    """
    if isinstance(given, LocalStore):
        given = given.root
    if isinstance(given, ObjectStore | FsspecStore):
        given = own_storage(given)
    if isinstance(given, Store):
        if not copy:
            raise InvalidArgumentError(
                f"the chunks of a {type(given).__name__} are at no place that references could "
                "name: pass copy=True"
            )
        return f"a {type(given).__name__}", _in_store(given, Budget(max_bytes))
    if isinstance(given, ObjectStorage):
        refuse_options("a storage", storage_options)
        return given.url, _in_bucket(given, Budget(max_bytes), parallel, progress)
    if not isinstance(given, str | os.PathLike):
        given = given.url
    root = location_of(given)
    scheme, place = parse_location(root)
    if scheme in REMOTE:
        storage = storage_of(root, storage_options)
        assert isinstance(storage, ObjectStorage)
        return root, _in_bucket(storage, Budget(max_bytes), parallel, progress)
    refuse_options("a local folder", storage_options)
    if scheme == "file" and os.path.isfile(place):
        zipped = "a ZIP file" if zipfile.is_zipfile(place) else "a file"
        raise UnsupportedFormatError(
            f"{root} is {zipped}, and only a folder can be imported; unpack it first "
            "(with copy=True the folder is not needed afterwards)"
        )
    values: dict[str, bytes] = {}
    keys, sizes, modified = [], [], []
    budget = Budget(max_bytes)
    entries = _files_below(place, budget) if scheme == "file" else _objects_below(place, budget)
    for key, nbytes, modified_ms, data in counted(progress, _LISTING, entries):
        if data is not None:
            values[key] = data
        else:
            keys.append(key)
            sizes.append(nbytes)
            modified.append(modified_ms)
    if not values:
        raise NotFoundError(f"there is no Zarr metadata at {root}")
    locations = [VirtualLocation(scheme, place, key).url for key in keys]
    return root, _references(values, keys, locations, sizes, modified)


def _references(
    values: Mapping[str, bytes],
    keys: Sequence[str],
    locations: Sequence[str],
    sizes: Sequence[int],
    modified: Sequence[int],
    fetch: Callable[[str], bytes] | None = None,
) -> References:
    n = len(keys)
    return References(
        _without_consolidated(values),
        tuple(keys),
        tuple(locations),
        np.arange(n),
        np.zeros(n, np.int64),
        np.array(sizes, np.int64),
        np.array(modified, np.int64),
        np.array(sizes, np.int64),
        fetch=fetch,
    )


def _in_bucket(
    storage: ObjectStorage, budget: Budget, parallel: Parallel, progress: Progress
) -> References:
    """The entries of a store in a bucket, whose documents are fetched at once."""

    def fetch(key: str) -> bytes:
        found = storage.get_version(key, 0, sizes[key], Version(None, times[key]))
        if found is None or len(found[0]) < sizes[key]:
            raise StorageError(f"{storage.url}/{key} has changed while it was read; try again")
        return found[0]

    listed = [*counted(progress, _LISTING, storage.files())]
    sizes = {info.key: info.nbytes for info in listed}
    times = {info.key: info.modified_ms for info in listed}
    documents = [info.key for info in listed if info.key.rpartition("/")[2] in _DOCUMENTS]
    if not documents:
        raise NotFoundError(f"there is no Zarr metadata at {storage.url}")
    for key in documents:
        budget.take(sizes[key], f"the document {key!r}")
    values = dict(zip(documents, parallel([partial(fetch, k) for k in documents]), strict=True))
    others = [info for info in listed if info.key not in values]
    scheme, place = parse_location(storage.url)
    return _references(
        values,
        [info.key for info in others],
        [VirtualLocation(scheme, place, info.key).url for info in others],
        [info.nbytes for info in others],
        [info.modified_ms for info in others],
        fetch,
    )


def _in_store(store: Store, budget: Budget) -> References:
    """The entries of a store of Zarr, to be copied."""
    prototype = default_buffer_prototype()

    async def get(key: str) -> bytes:
        found = await store.get(key, prototype)
        if found is None:
            raise StorageError(f"{key!r} is listed in the store, and is not there")
        return bytes(found.to_bytes())

    async def scan() -> tuple[dict[str, bytes], dict[str, int]]:
        keys = [key async for key in store.list()]
        sizes = {key: await store.getsize(key) for key in keys}
        documents = [key for key in keys if key.rpartition("/")[2] in _DOCUMENTS]
        for key in documents:
            budget.take(sizes[key], f"the document {key!r}")
        return {key: await get(key) for key in documents}, sizes

    values, sizes = sync(scan())
    if not values:
        raise NotFoundError(f"there is no Zarr metadata in the {type(store).__name__}")
    keys = [key for key in sizes if key not in values]
    lengths = [sizes[key] for key in keys]
    return _references(values, keys, keys, lengths, [-1] * len(keys), lambda key: sync(get(key)))


type _Entry = tuple[str, int, int, bytes | None]
"""Key, size, modification time (ms), and the content of a document."""


def _files_below(root: str, budget: Budget) -> Iterator[_Entry]:
    if not os.path.isdir(root):
        raise NotFoundError(f"there is no folder {_url(root)}")
    due = [""]
    try:
        while due:
            folder = due.pop()
            with with_room(partial(os.scandir, os.path.join(root, folder))) as found_here:
                entries = sorted(found_here, key=lambda entry: entry.name)
            for entry in entries:
                key = folder + entry.name
                if entry.is_dir():
                    if entry.is_symlink():
                        raise InvalidArgumentError(
                            f"{key!r} in {_url(root)} is a symbolic link to a folder; "
                            "put the folder itself there"
                        )
                    due.append(key + "/")
                    continue
                data = None
                if entry.name in _DOCUMENTS or not entry.is_file(follow_symlinks=False):
                    with os.fdopen(open_inside(root, key), "rb") as file:
                        found = os.fstat(file.fileno())
                        if entry.name in _DOCUMENTS:
                            budget.take(found.st_size, f"the document {key!r}")
                            data = file.read(found.st_size)
                else:
                    found = entry.stat()
                yield key, found.st_size, found.st_mtime_ns // 1_000_000, data
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise InvalidArgumentError(
                f"{key!r} in {_url(root)} is a symbolic link that leads out of the "
                "store; put the file itself there"
            ) from error
        raise StorageError(f"{_url(root)} cannot be listed: {error}") from error


def _objects_below(root: str, budget: Budget) -> Iterator[_Entry]:
    name, _, folder = root.partition("/")
    prefix = folder + "/" if folder else ""
    storage = from_url(f"memory://{name}")
    for info in storage.list(prefix):
        data = None
        if info.key.rpartition("/")[2] in _DOCUMENTS:
            budget.take(info.nbytes, f"the document {info.key!r}")
            data = storage.get(info.key)
        yield info.key[len(prefix) :], info.nbytes, info.modified_ms, data


def _url(folder: str) -> str:
    return VirtualLocation("file", folder).url
