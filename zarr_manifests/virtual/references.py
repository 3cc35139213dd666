"""Reading a plain Zarr store: its documents, and where its chunks are.

`list_zarr` walks a folder (or a memory storage) and reads only the metadata documents. Its result,
`References`, knows nothing about arrays yet.

Invariant: nothing is skipped silently, since an absent chunk reads as fill value: an unusable entry
is an error.
"""
# Paths are plain strings here, as what a scan of a folder gives:
# ruff: noqa: PTH112, PTH113

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
from msgspec import Struct
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from zarr_manifests.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import Column
from zarr_manifests.keys import directory, join, split
from zarr_manifests.progress import counted
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import open_regular
from zarr_manifests.storage.fsspec_store import own_storage
from zarr_manifests.storage.local import LocalFiles
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import Files
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.containers import (
    REMOTE,
    VirtualLocation,
    location_of,
    parse_location,
    url_at,
)

MAX_BYTES: Final = 1 << 30
"""The most bytes that an import reads at once, unless it is told otherwise."""
_DOCUMENTS: Final = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})


class Listing(Struct, frozen=True):
    """The files at a place.

    Parameters
    ----------
    name : str
        What errors and commits call it: its URL, if it has one.
    scheme, root : str
        Scheme and path of the URL; empty for a store of Zarr, whose entries have no URL.
    files : mapping of str to (int, int)
        Size and time of modification (ms) of each file, by its name below the root.
    max_bytes : int
        The size of the largest file that is read.
    fetch : callable
        The bytes of a file, which is still the listed one.
    """

    name: str
    scheme: str
    root: str
    files: Mapping[str, tuple[int, int]]
    max_bytes: int
    fetch: Callable[[str], bytes]

    def read(self, key: str) -> bytes:
        """The bytes of a file; an error if it is too large, or another one by now."""
        check_bytes(f"{self.name}/{key}", self.files[key][0], self.max_bytes)
        return self.fetch(key)


class References(Struct, frozen=True, eq=False):
    """The entries of a Zarr store; rows are those whose bytes are elsewhere.

    Parameters
    ----------
    values : mapping of str to bytes
        Entries whose bytes are known, including the metadata documents, by key.
    keys : tuple of str
        Keys of the rows.
    locations : tuple of str
        URLs of files; where they are only copied, their keys.
    source, offset, length : int64[n]
        Position of each row's file in `locations`, and its byte range there.
    modified, sizes : int64[len(locations)]
        Modification times and sizes of the files; -1 if unknown.
    fetch : callable, optional
        Returns the bytes of a key. Without it, all entries are documents and chunks.
    """

    values: Mapping[str, bytes]
    keys: tuple[str, ...]
    locations: tuple[str, ...]
    source: Column
    offset: Column
    length: Column
    modified: Column
    sizes: Column
    fetch: Callable[[str], bytes] | None = None


def check_bound(name: str, given: object) -> int:
    """Return the bound if it is a positive whole number.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    """
    if type(given) is not int or given <= 0:
        raise InvalidArgumentError(f"{name} must be a positive whole number, not {given!r}")
    return given


def check_bytes(what: str, nbytes: int, max_bytes: int) -> None:
    """Raise if a file, by its size or by what it states, is larger than is to be read."""
    if nbytes > max_bytes:
        raise InvalidArgumentError(
            f"{what} takes more than {max_bytes} bytes: pass a larger max_bytes= if you trust it "
            "and have that much memory"
        )


def without_consolidated(values: Mapping[str, bytes]) -> dict[str, bytes]:
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
        is_v2 = name == ".zmetadata"
        if not is_v2 and (name != "zarr.json" or b'"consolidated_metadata"' not in document):
            continue
        try:
            fields = json.loads(document)
            found = fields if is_v2 else fields.pop("consolidated_metadata", None)
            named = [] if found is None else [*found["metadata"].keys()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgumentError(f"the consolidated metadata {key!r} is malformed") from error
        if is_v2:
            del kept[key]
        else:
            kept[key] = json.dumps(fields).encode()
        for other in named:
            place = join(folder, other if is_v2 else f"{other}/zarr.json")
            if place not in values:
                raise InvalidArgumentError(
                    f"the consolidated metadata {key!r} lists {place!r}, which does not exist, so "
                    "the store may be incomplete; consolidate it again, or remove that metadata"
                )
    return kept


def list_zarr(
    given: str | os.PathLike[str] | Storage | Store,
    *,
    max_bytes: int = MAX_BYTES,
    storage_options: Mapping[str, object] | None = None,
    copy: bool = False,
) -> tuple[str, References]:
    """The name of a place, and the entries of the Zarr store there, each a file.

    Documents count up to `max_bytes`. The entries of a Zarr `Store` that is at no place can only be
    copied.

    Raises
    ------
    NotFoundError
        If there is no Zarr metadata.
    InvalidArgumentError
        If documents exceed `max_bytes`, there is a symbolic link in a folder, or consolidated
        metadata refers to documents that do not exist.
    UnsupportedFormatError
        If it is a file, such as a ZIP archive.
    UnsupportedStorageError
        If it is on a web server, which has no listing.
    """
    check_bound("max_bytes", max_bytes)
    place = _place(given, max_bytes, storage_options, copy)
    documents = [key for key in place.files if split(key)[1] in _DOCUMENTS]
    if not documents:
        raise NotFoundError(f"there is no Zarr metadata in {place.name}")
    nbytes = 0
    for key in documents:
        nbytes += place.files[key][0]
        check_bytes(f"the metadata up to {key!r}", nbytes, max_bytes)
    read = SYSTEM.parallel([partial(place.read, key) for key in documents])
    values = dict(zip(documents, read, strict=True))
    keys = tuple(key for key in place.files if key not in values)
    places = keys if copy else [VirtualLocation(place.scheme, place.root, key).url for key in keys]
    sizes, times = np.array([place.files[key] for key in keys], np.int64).reshape(-1, 2).T
    return place.name, References(
        without_consolidated(values),
        keys,
        tuple(places),
        np.arange(len(keys)),
        np.zeros(len(keys), np.int64),
        sizes,
        times,
        sizes,
        fetch=place.read,
    )


def _place(
    given: str | os.PathLike[str] | Storage | Store,
    max_bytes: int,
    storage_options: Mapping[str, object] | None,
    copy: bool,
) -> Listing:
    if isinstance(given, LocalStore):
        given = given.root
    if isinstance(given, Store) and not isinstance(given, ObjectStore | FsspecStore):
        if not copy:
            raise InvalidArgumentError(
                f"the chunks of a {type(given).__name__} are at no place that references could "
                "name: pass copy=True"
            )
        return _in_store(given, max_bytes)
    if not isinstance(given, str | os.PathLike | Storage):
        given = own_storage(given)  # a mapper of fsspec, too
    if isinstance(given, ObjectStorage) and given.place.kind != "fsspec":
        refuse_options("a storage", storage_options)
        return in_place(given, max_bytes)
    if not isinstance(given, str | os.PathLike):
        given = given.url
    root = location_of(given)
    scheme, path = parse_location(root)
    if scheme in REMOTE:
        storage = storage_of(root, storage_options)
        assert isinstance(storage, ObjectStorage)
        return in_place(storage, max_bytes)
    refuse_options("a local folder", storage_options)
    if scheme == "memory":
        name, _, folder = path.partition("/")
        return in_place(MemoryStorage(name), max_bytes, directory(folder))
    if os.path.isfile(path):
        raise UnsupportedFormatError(
            f"{root} is a file, and only a folder can be imported; unpack a ZIP file first "
            "(with copy=True the folder is not needed afterwards)"
        )
    if not os.path.isdir(path):
        raise NotFoundError(f"there is no folder {root}")
    return in_place(LocalFiles(path), max_bytes)


def in_place(place: Files, max_bytes: int, prefix: str = "") -> Listing:
    """The files at a place, below a prefix."""
    scheme, path = parse_location(place.url)
    # Of a remote one a listing may be more exact than an answer, whose time is in whole seconds.
    slack_ms = 1000 if scheme in REMOTE else 0

    def read(key: str) -> bytes:
        nbytes, modified_ms = files[key]
        data, now = place.get_version(prefix + key, 0, nbytes)
        since_ms = modified_ms if now.modified_ms is None else now.modified_ms
        same = now.nbytes in (None, nbytes) and abs(since_ms - modified_ms) <= slack_ms
        if not same or len(data) < nbytes:
            raise StorageError(f"{place.url}/{key} has changed while it was read; try again")
        return data

    listed = (info for info in place.files() if info.key.startswith(prefix))
    files = {
        info.key[len(prefix) :]: (info.nbytes, info.modified_ms)
        for info in counted("looking for files", listed)
    }
    root = join(path, prefix.removesuffix("/")) if prefix else path
    return Listing(url_at(scheme, root), scheme, root, files, max_bytes, read)


def _in_store(store: Store, max_bytes: int) -> Listing:
    """The entries of a store of Zarr, which are at no place."""

    def read(key: str) -> bytes:
        found = sync(store.get(key, default_buffer_prototype()))
        if found is None:
            raise StorageError(f"{key!r} is listed in the store, and is not there")
        return bytes(found.to_bytes())

    async def scan() -> dict[str, tuple[int, int]]:
        return {key: (await store.getsize(key), -1) async for key in store.list()}

    return Listing(f"a {type(store).__name__}", "", "", sync(scan()), max_bytes, read)


def read_file(url: str, max_bytes: int, storage_options: Mapping[str, object] | None) -> bytes:
    """The bytes of a file at a URL."""
    scheme, path = parse_location(url)
    try:
        if scheme == "file":
            with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                check_bytes(url, nbytes, max_bytes)
                return file.read(nbytes)
        folder, _, name = url.rpartition("/")
        storage = storage_of(folder, storage_options)
        check_bytes(url, storage.head(name).nbytes, max_bytes)
        return storage.get(name)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {url}, and no folder with a .zmetadata") from error
    except OSError as error:
        raise StorageError(f"{url} cannot be read: {error}") from error
