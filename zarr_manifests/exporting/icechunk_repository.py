"""Exporting to a new icechunk repository, with one commit, through the package of icechunk.

Chunks are copied, or become virtual chunks of icechunk: ranges of objects of the repository, and of
files elsewhere, with what is known of these files. Inline chunks are always copied.

Invariant: icechunk's branch has the commit when everything is written; until then it is empty.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from itertools import groupby
from typing import Any, Final
from urllib.parse import quote, unquote

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
)
from zarr_manifests.exporting.export_request import ExportCount, ExportRequest
from zarr_manifests.exporting.placed_chunks import (
    Placed,
    keep,
    native_root,
    placed_chunks,
    virtual_places,
)
from zarr_manifests.exporting.places import Folder, ZarrStore, check_apart
from zarr_manifests.exporting.snapshot_source import DEFAULT_KEYS, SnapshotSource
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.keys import V3_DOCUMENT, absolute, join
from zarr_manifests.reports import ExportReport
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.url import refuse_options
from zarr_manifests.virtual.locations import VirtualLocation

__all__ = ["export_icechunk"]

_BRANCH: Final = "main"


def export_icechunk(source: SnapshotSource, dest: Any, request: ExportRequest) -> ExportReport:
    """Make an icechunk repository of one commit.

    Raises
    ------
    ImportError
        If the package of icechunk is not installed.
    AlreadyExistsError
        If there is anything at the destination.
    UnsupportedFormatError
        If there is a node that icechunk does not take.
    """
    if request.overwrite:
        raise InvalidArgumentError("overwrite=True: an icechunk repository is not replaced")
    if request.copy:
        request.check_no_tag()
    source.chunk_keys = DEFAULT_KEYS
    documents = _documents(source)
    icechunk = _package()
    storage, name = _storage(icechunk, source, dest, request)
    count, tag = ExportCount(request), None
    with _told(icechunk, name):
        if request.copy:
            session = _begun(icechunk, storage, name, None)
            store = ZarrStore(session.store)
            store.put(documents)
            for batch in source.chunks({}, count.add_reused):
                store.put(batch)
                count.add(batch)
        else:
            config = _config(icechunk, source)
            tag = keep(source, request.tag)
            session = _begun(icechunk, storage, name, config)
            ZarrStore(session.store).put(documents)
            for placed in placed_chunks(source):
                _refer(icechunk, session.store, source, placed, count)
        session.commit(f"export of snapshot {source.snapshot_id}", allow_empty=True)
    return count.report(source, name, tag)


def _package() -> Any:
    try:
        return import_module("icechunk")
    except ImportError as error:
        raise ImportError(
            "format='icechunk' needs the package of icechunk, which is not installed; "
            'pip install "zarr-manifests[icechunk]"'
        ) from error


@contextmanager
def _told(icechunk: Any, name: str) -> Iterator[None]:
    """A block in which errors of icechunk become ours."""
    try:
        yield
    except icechunk.IcechunkError as error:
        told = next(iter(str(error).splitlines()), "")
        raise StorageError(f"icechunk failed at {name}: {told}") from error


# --- the destination -------------------------------------------------------------------------


def _storage(
    icechunk: Any, source: SnapshotSource, dest: Any, request: ExportRequest
) -> tuple[Any, str]:
    """Icechunk's storage at the destination, and what it is called."""
    refuse_options("a folder or icechunk's storage", request.storage_options)
    if isinstance(dest, icechunk.Storage):
        return dest, "icechunk's storage"
    url = dest if isinstance(dest, str) else ""
    scheme, found, rest = url.partition("://")
    if not isinstance(dest, str | os.PathLike) or (found and scheme != "file"):
        raise InvalidArgumentError(
            f"dest={dest!r:.80}: give the path of a folder, or icechunk's own storage, such as "
            "icechunk.s3_storage(bucket=..., prefix=...)"
        )
    place = Folder(unquote(rest) if found else os.fsdecode(dest))
    check_apart(source.contents.context.storage, place)
    storage = icechunk.local_filesystem_storage(place.name)
    if not place.is_empty():
        if not icechunk.Repository.exists(storage):
            raise AlreadyExistsError(f"{place.name} holds data; export to an empty folder")
        place.sizes()  # refuses links, which icechunk would follow
    return storage, place.name


def _begun(icechunk: Any, storage: Any, name: str, config: Any) -> Any:
    """A session on a new repository, or on one that an interrupted export has left empty."""
    if icechunk.Repository.exists(storage):
        repository = icechunk.Repository.open(storage, config)
        branches, tags = repository.list_branches(), repository.list_tags()
        if set(branches) != {_BRANCH} or tags or len([*repository.ancestry(branch=_BRANCH)]) > 1:
            raise AlreadyExistsError(f"{name} holds an icechunk repository with commits")
    else:
        repository = icechunk.Repository.create(storage, config)
    if config is not None:
        repository.save_config()
    return repository.writable_session(_BRANCH)


# --- documents -------------------------------------------------------------------------------


def _documents(source: SnapshotSource) -> list[tuple[str, bytes]]:
    """The documents, with the chunk keys that icechunk knows."""
    found = []
    for node in source.nodes:
        if V3_DOCUMENT not in node.documents:
            what = "is of Zarr v2" if node.documents else "is neither a group nor an array"
            raise UnsupportedFormatError(
                f"{absolute(node.path)} {what}, which icechunk does not take; export another "
                "path=, or format='zarr'"
            )
        document = node.documents[V3_DOCUMENT]
        _check_numbers(node.path, document)
        if node.array is not None and node.array.chunk_keys != DEFAULT_KEYS:
            encoding = {"name": "default", "configuration": {"separator": "/"}}
            fields = json.loads(document) | {"chunk_key_encoding": encoding}
            document = json.dumps(fields).encode()
        found.append((source.relative(join(node.path, V3_DOCUMENT)), document))
    return found


def _check_numbers(path: str, document: bytes) -> None:
    """Refuse NaN and infinities outside of texts, which Python takes for JSON and icechunk not."""

    def refuse(name: str) -> None:
        raise UnsupportedFormatError(
            f"the metadata of {absolute(path)} has {name}, which JSON does not know and icechunk "
            "does not take; change that attribute, or export with format='zarr'"
        )

    json.loads(document, parse_constant=refuse)


# --- references ------------------------------------------------------------------------------


def _refer(
    icechunk: Any,
    store: Any,
    source: SnapshotSource,
    chunks: Sequence[Placed],
    count: ExportCount,
) -> None:
    inline = [(source.key(c.node, c.coords), c.data) for c in chunks if c.data is not None]
    ZarrStore(store).put(inline)
    count.add(inline)
    for node, found in groupby((c for c in chunks if c.place is not None), lambda c: c.node):
        placed = [*found]
        specs = [_spec(icechunk, chunk) for chunk in placed]
        refused = store.set_virtual_refs(_path(source, node), specs, validate_containers=True)
        if refused:
            raise StorageError(
                f"icechunk refuses references of {absolute(node.path)}: {len(refused):,} chunks "
                "are in no container"
            )
        count.add_references(len(placed), sum(chunk.length for chunk in placed))


def _path(source: SnapshotSource, node: Node) -> str:
    return "/" + source.relative(join(node.path, V3_DOCUMENT)).removesuffix(V3_DOCUMENT).strip("/")


def _spec(icechunk: Any, chunk: Placed) -> Any:
    assert chunk.place is not None
    etag, modified = _known(chunk.source)
    return icechunk.VirtualChunkSpec(
        list(chunk.coords), chunk.place.url, chunk.offset, chunk.length, etag, modified
    )


def _known(source: VirtualSource | None) -> tuple[str | None, datetime | None]:
    """What icechunk checks when it reads: an etag, or a time since which nothing has changed."""
    if source is None:
        return None, None
    since = source.unchanged_since_ms
    ms = source.modified_ms if since is None else since
    if source.tag is not None or ms is None:
        return source.tag, None
    return None, datetime.fromtimestamp(-(-ms // 1000), UTC)


def _config(icechunk: Any, source: SnapshotSource) -> Any:
    """Icechunk's configuration, with the containers that hold the referenced files."""
    config = icechunk.RepositoryConfig.default()
    storage: Any = source.contents.context.storage
    bare = unmetered(storage)
    own = dict(bare.place.options) if isinstance(bare, ObjectStorage) else {}
    options: dict[str, Mapping[str, Any]] = {_prefix(native_root(source)): own}
    for container in source.contents.context.containers.places.values():
        if container.place[0] in _STORES:
            options.setdefault(_prefix(VirtualLocation(*container.place)), dict(container.options))
    for place in virtual_places(source):
        if not any(place.url.startswith(prefix) for prefix in options):
            folder = posixpath.dirname(posixpath.join(place.root, place.path).rstrip("/"))
            options[_prefix(VirtualLocation(place.scheme, folder))] = {}
    for prefix, given in options.items():
        store = _STORES[prefix.partition("://")[0]](icechunk, prefix, given)
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store))
    return config


def _prefix(folder: VirtualLocation) -> str:
    """The URL of a container for a folder: of a bucket, or of a local folder without escapes.

    icechunk does not find files below a prefix that has escapes in it.
    """
    if folder.scheme != "file":
        return f"{folder.scheme}://{folder.root.partition('/')[0]}/"
    path = folder.root
    while quote(path) != path:
        path = posixpath.dirname(path)
    if path == "/":
        raise UnsupportedStorageError(
            f"icechunk cannot refer to files in {folder.root}, since the name of its first folder "
            "has to be escaped in a URL; export with copy=True"
        )
    return f"file://{path}/"


def _s3(icechunk: Any, prefix: str, options: Mapping[str, Any]) -> Any:
    endpoint = options.get("endpoint")
    return icechunk.s3_store(
        region=options.get("region"),
        endpoint_url=endpoint,
        allow_http=bool(options.get("allow_http")),
        anonymous=bool(options.get("anonymous")),
        s3_compatible=endpoint is not None,
        force_path_style=endpoint is not None and not options.get("virtual_hosted"),
    )


_STORES: Final[Mapping[str, Callable[[Any, str, Mapping[str, Any]], Any]]] = {
    "file": lambda icechunk, prefix, _: icechunk.local_filesystem_store(prefix[len("file://") :]),
    "s3": _s3,
    "gs": lambda icechunk, *_: icechunk.gcs_store(),
    "az": lambda icechunk, _, options: icechunk.azure_store(account=options.get("account", "")),
    "http": lambda icechunk, *_: icechunk.http_store(),
    "https": lambda icechunk, *_: icechunk.http_store(),
}
"""How icechunk reads the places of each scheme."""
