"""Exporting a snapshot in a format that other software reads, as copies or references.

Invariants:

- Nobody can open an unfinished export. A folder or a file gets its name when it is whole; in a
  bucket or a store of Zarr, the documents of the root come last; icechunk's branch has its commit
  at the end.
- Nothing is replaced, and nothing deleted.
- References are made only to what a reader of the snapshot may read: files below a container. A tag
  keeps the snapshot, and with it the objects that are referred to; it exists before a reference.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import batched
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from zarr.abc.store import Store
from zarr.core.buffer import cpu
from zarr.core.common import concurrent_foreach
from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.engine.refs import Refs
from zarr_manifests.engine.totals import totals_of
from zarr_manifests.engine.view import Context
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    StorageError,
    UnsupportedFormatError,
    UnsupportedStorageError,
    VirtualContainerError,
)
from zarr_manifests.exporting import Batch, SnapshotSource
from zarr_manifests.format.chunk_table import InlineRef, NativeRef, VirtualRef, VirtualSource
from zarr_manifests.format.manifest import NodeKind
from zarr_manifests.keys import V3_DOCUMENT, ChunkKeys, absolute, join
from zarr_manifests.metrics import unmetered
from zarr_manifests.progress import expect
from zarr_manifests.reports import ExportReport
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.disk import TEMP_PREFIX, PosixDisk, translated
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.texts import known_as, shown
from zarr_manifests.virtual.containers import WEB, VirtualLocation, parse_location
from zarr_manifests.virtual.icechunk_files import icechunk_package

_FORMATS: Final = ("zarr", "kerchunk", "icechunk")
_ICECHUNK_KEYS: Final = ChunkKeys("default", "/")
"""The names of chunks that icechunk knows."""
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_AT_ONCE: Final = 16
_BATCH: Final = 1 << 16
_FLUSHED: Final = 1024
"""Files that are flushed at once; each call takes memory."""
_SHARED: Final = ("file", "s3", "gs", "az", "http", "https")
"""Schemes that mean the same to other software."""
_DISK: Final = PosixDisk()

type _Put = Callable[[Batch], object]
"""Writes keys with their bytes."""
type _Target = AbstractContextManager[tuple[str, _Put]]
"""A block in which an export is written: what the place is called, and how to write there."""


def export(
    contents: SessionView,
    dest: Any,
    format: str,  # noqa: A002 - the name that callers know
    path: str,
    storage_options: Mapping[str, object] | None,
) -> ExportReport:
    """Write the snapshot that a session reads; the arguments are those of `zm.export`."""
    given: object = format
    if not isinstance(given, str) or given not in _FORMATS:
        raise InvalidArgumentError(f"format={shown(given)} is unknown: {known_as(given, _FORMATS)}")
    if format != "zarr":
        refuse_options("a local place", storage_options)
    source = SnapshotSource(contents, path, _ICECHUNK_KEYS if format == "icechunk" else None)
    within = {absolute(path) for path in source.nodes}
    arrays = totals_of(contents.view).arrays
    expect("chunks", sum(array.chunks for array in arrays if array.path in within))
    kept = None
    if format == "kerchunk":
        name, kept = _to_kerchunk(source, dest)
    elif format == "icechunk":
        name = _to_icechunk(source, dest)
    else:
        name = _copy(source, _zarr(source, dest, storage_options))
    expect("chunks", source.count)  # before, only a bound was known
    kinds = [node.kind for node in source.nodes.values()]
    return ExportReport(
        dest=name,
        snapshot_id=source.snapshot_id,
        groups=kinds.count(NodeKind.GROUP),
        arrays=kinds.count(NodeKind.ARRAY),
        chunks=source.count,
        nbytes=source.nbytes,
        referenced=source.referenced,
        tag=kept,
    )


def _copy(source: SnapshotSource, target: _Target) -> str:
    """Write chunks and documents, that of the root last; what the target is called."""
    documents = source.documents()
    with target as (name, put):
        for batch in source.chunks():
            put(batch)
        put(documents[:-1])
        put(documents[-1:])
    return name


# --- a file or a folder ----------------------------------------------------------------------


def _local(source: SnapshotSource, dest: Any, kind: str) -> Path:
    """The path of a file or a folder to write, where nothing is yet but an empty folder."""
    url = parse_location(dest) if isinstance(dest, str) and "://" in dest else None
    if not isinstance(dest, str | os.PathLike) or (url is not None and url[0] != "file"):
        raise InvalidArgumentError(f"dest={dest!r:.80}: give the path of a local {kind}")
    name = os.path.abspath(os.fsdecode(dest) if url is None else url[1])  # noqa: PTH100
    if "\0" in name:
        raise InvalidArgumentError(f"dest={name!r:.80} holds a zero byte")
    if isinstance(source.storage, LocalStorage):
        _check_apart(name, os.path.realpath(source.storage.path), os.path.realpath(name))
    path = Path(name)
    to_fill = kind != "file" and path.is_dir() and not (path.is_symlink() or path.is_mount())
    if any(path.iterdir()) if to_fill else path.exists(follow_symlinks=False):
        raise _exists(name)
    return path


def _check_apart(name: str, own: str, other: str) -> None:
    """Refuse a place in the repository, and one that holds it."""
    own, other = f"{own.rstrip('/')}/", f"{other.rstrip('/')}/"
    if own.startswith(other) or other.startswith(own):
        raise InvalidArgumentError(
            f"{name} is in the repository, or holds it: export to another place"
        )


def _exists(name: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{name} exists, and an export replaces nothing: export to another place, or delete "
        "yourself what is there, such as what an export that was broken off has left in a bucket"
    )


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A path beside it for a file or a folder, which gets the name when the block ends well."""
    with translated(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=TEMP_PREFIX, dir=path.parent) as place:
            new = Path(place, "new")
            yield new
            _flush(new)
            try:
                if new.is_file():
                    path.hardlink_to(new)
                else:
                    new.rename(path)  # fails if it is a folder with anything in it
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                raise _exists(str(path)) from error
            _DISK.fsync_dir(str(path.parent))


def _flush(path: Path) -> None:
    """See that a file, or a folder with all that is in it, survives a crash of the machine."""
    walked = [*os.walk(path)]
    names = [f"{folder}/{name}" for folder, _, names in walked for name in names]

    def flush(name: str) -> None:
        with Path(name).open("rb") as file:
            _DISK.fsync_file(file.fileno())

    for some in batched(names or [str(path)], _FLUSHED):
        SYSTEM.parallel([partial(flush, name) for name in some])
    for each in batched(walked, _FLUSHED):
        SYSTEM.parallel([partial(_DISK.fsync_dir, folder) for folder, *_ in each])


# --- a plain Zarr store ----------------------------------------------------------------------


def _zarr(source: SnapshotSource, dest: Any, options: Mapping[str, object] | None) -> _Target:
    """The folder, bucket or store that a path, a URL, a storage or a store of Zarr means."""
    if isinstance(dest, Store):
        refuse_options("a store", options)
        if dest.read_only:
            raise ReadOnlyError("the store to export to is read-only")
        if not isinstance(dest, LocalStore):
            return _in_store(dest)
        dest = dest.root
    storage: Any = unmetered(storage_of(dest, options))
    if isinstance(storage, LocalStorage):
        return _in_folder(source, storage.path)
    if isinstance(storage, ObjectStorage):
        return _in_bucket(source, storage)
    raise InvalidArgumentError(
        f"{storage.url} cannot hold every key of Zarr: give a path, a bucket, or a store of Zarr, "
        "such as zarr.storage.MemoryStore()"
    )


@contextmanager
def _in_folder(source: SnapshotSource, dest: str) -> Iterator[tuple[str, _Put]]:
    path = _local(source, dest, "folder")

    def write(items: Batch) -> None:
        for key, data in items:
            (new / key).parent.mkdir(parents=True, exist_ok=True)
            (new / key).write_bytes(data)

    def put(batch: Batch) -> None:
        SYSTEM.parallel([partial(write, batch[at::_AT_ONCE]) for at in range(_AT_ONCE)])

    with _staged(path) as new:
        new.mkdir()
        yield str(path), put


def _in_bucket(source: SnapshotSource, storage: ObjectStorage) -> _Target:
    if isinstance(source.storage, ObjectStorage):
        _check_apart(storage.url, source.storage.url, storage.url)

    def put(batch: Batch) -> None:
        SYSTEM.parallel([partial(storage.put_file, key, data) for key, data in batch])

    return _unnamed(storage.url, put, is_empty=not any(storage.files()))


def _in_store(store: Store) -> _Target:
    name = str(store).partition("\n")[0]
    with _told(name):
        is_empty = sync(store.is_empty(""))
    return _unnamed(name, partial(_put, store, name), is_empty=is_empty)


def _put(store: Store, name: str, batch: Batch) -> None:
    items = [(key, cpu.Buffer.from_bytes(data)) for key, data in batch]
    with _told(name):
        sync(concurrent_foreach(items, store.set, _AT_ONCE))


@contextmanager
def _told(name: str) -> Iterator[None]:
    """A block in which whatever a library raises becomes an error of this package."""
    try:
        yield
    except ManifestsError:
        raise
    except Exception as error:
        raise StorageError(f"{name} failed: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def _unnamed(name: str, put: _Put, *, is_empty: bool) -> Iterator[tuple[str, _Put]]:
    """A place where nothing can be renamed, so that what a broken export has written stays."""
    if not is_empty:
        raise _exists(name)
    try:
        yield name, put
    except BaseException as error:
        error.add_note(f"{name} holds what was written so far: delete it, and export again")
        raise


# --- where chunks are ------------------------------------------------------------------------


def _keep(source: SnapshotSource) -> str:
    """The name of a tag of the snapshot, which is made if there is none."""
    context = source.contents.context
    if not isinstance(context, Context):
        raise ReadOnlyError("a tag has to be made, and the repository is only open for reading")
    name, refs = f"export-{source.snapshot_id}", Refs(context)
    there = refs.tags().get(name)
    if there is None:
        refs.create_tag(name, source.snapshot_id)
    elif there != source.snapshot_id:
        raise AlreadyExistsError(f"tag {name!r} is of another snapshot, {there}; delete it")
    return name


def _object_url(source: SnapshotSource, key: str) -> str:
    """The URL of an object of the repository."""
    root = _shared(source.storage.url)
    if root.scheme == "file":
        source.storage.head(key)  # which refuses links
    return _fsspec_url(VirtualLocation(root.scheme, root.root, key))


def _file_url(source: SnapshotSource, file: VirtualSource) -> str:
    """The URL of a file elsewhere."""
    place = source.contents.context.containers.resolve(file)[1]
    if place.scheme == "file":
        inside = os.path.realpath(place.root).rstrip("/") + "/"
        if not os.path.realpath(inside + place.path).startswith(inside):
            raise VirtualContainerError(
                f"{place.url} leads out of its container through a symbolic link, so nothing is "
                "told to read there; export with format='zarr', or with a container of the target"
            )
    return _fsspec_url(_shared(place.url))


def _shared(url: str) -> VirtualLocation:
    if url.partition("://")[0] not in _SHARED:
        raise UnsupportedStorageError(
            f"chunks in {url} cannot be referred to from elsewhere; export with format='zarr'"
        )
    return VirtualLocation(*parse_location(url))


# --- kerchunk --------------------------------------------------------------------------------


def _to_kerchunk(source: SnapshotSource, dest: Any) -> tuple[str, str]:
    """Write a JSON file of references; its path, and the tag that keeps what they refer to."""
    path = _local(source, dest, "file")
    _shared(source.storage.url)
    documents, kept = source.documents(), _keep(source)

    object_url, file_url = (cache(partial(each, source)) for each in (_object_url, _file_url))

    def entries() -> Iterator[tuple[str, object]]:
        for key, data in documents:
            yield key, _text(data)
        for node, table in source.tables():
            for coords, ref in table.refs():
                placed: object = _encoded(ref.data if isinstance(ref, InlineRef) else b"")
                if isinstance(ref, NativeRef) and ref.length:
                    placed = [object_url(ref.key), ref.offset, ref.length]
                if isinstance(ref, VirtualRef):
                    placed = [file_url(ref.source), ref.offset, ref.length]
                yield source.key(node, coords), placed
            source.refer(table)

    with _staged(path) as new, new.open("x") as file:
        file.write('{"version": 1, "refs": {')
        for number, some in enumerate(batched(entries(), _BATCH)):
            file.write(("," if number else "") + "\n" + json.dumps(dict(some))[1:-1])
        file.write("}}\n")
    return str(path), kept


def _text(data: bytes) -> str:
    with suppress(UnicodeDecodeError):
        text = data.decode()
        if not text.startswith("base64:"):  # which fsspec would decode
            return text
    return _encoded(data)


def _encoded(data: bytes) -> str:
    return "base64:" + base64.b64encode(data).decode("ascii")


def _fsspec_url(place: VirtualLocation) -> str:
    """The URL as fsspec takes it: only those of web servers have escapes."""
    if place.scheme in WEB:
        return place.url
    return f"{place.scheme}://{place.root}" + (f"/{place.path}" if place.path else "")


# --- icechunk --------------------------------------------------------------------------------


def _to_icechunk(source: SnapshotSource, dest: Any) -> str:
    """Make an icechunk repository of one commit; its name."""
    documents = _icechunk_documents(source)
    icechunk = icechunk_package("format='icechunk'")
    name = "icechunk's storage"
    opened: AbstractContextManager[Any] = nullcontext(dest)
    if not isinstance(dest, icechunk.Storage):
        kind = "folder, or icechunk's own storage, such as icechunk.s3_storage(bucket=...)"
        path = _local(source, dest, kind)
        name, opened = str(path), _staged(path)
    with opened as place:
        with _told(name):
            storage = place if place is dest else icechunk.local_filesystem_storage(str(place))
            if icechunk.Repository.exists(storage):
                raise AlreadyExistsError(
                    f"{name} holds an icechunk repository, which is not replaced: give another "
                    "place, or delete it, as an export that was broken off leaves an empty one"
                )
            session = icechunk.Repository.create(storage).writable_session("main")
        put = partial(_put, session.store, name)
        put(documents)
        for batch in source.chunks():
            put(batch)
        with _told(name):
            session.commit(f"export of snapshot {source.snapshot_id}", allow_empty=True)
    return name


def _icechunk_documents(source: SnapshotSource) -> Batch:
    """The documents, with the chunk keys that icechunk knows."""
    found = []
    for node in source.nodes.values():
        try:
            fields = json.loads(node.documents[V3_DOCUMENT])
            if node.array is not None:
                default = {"name": "default", "configuration": {"separator": "/"}}
                fields["chunk_key_encoding"] = default
            document = json.dumps(fields, allow_nan=False).encode()
        except (KeyError, ValueError) as error:
            raise UnsupportedFormatError(
                f"icechunk does not take {absolute(node.path)}: it is of Zarr v2, or neither a "
                "group nor an array, or its metadata has NaN or an infinity. Change it, or export "
                "another path= or format='zarr'"
            ) from error
        found.append((source.relative(join(node.path, V3_DOCUMENT)), document))
    return found
