"""Reading icechunk repositories through the package of icechunk: refs, snapshots and chunks.

The metadata that is needed is copied to a temporary folder, and icechunk reads it there. So a
repository is read at every kind of place, with its options, and icechunk is given none of them.

Invariants:

- What a file of metadata unpacks to is bounded before icechunk reads it. An error names the file.
- icechunk contacts only places that the reader trusts, as the reader reaches them, whatever the
  repository says of them. It reads one byte of each file there, and so compares the file with what
  it has noted of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import zstandard
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    NotARepositoryError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import V3_DOCUMENT, is_inside, join
from zarr_manifests.runtime import Runtime, need
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import REMOTE, WEB, Containers, VirtualContainer
from zarr_manifests.virtual.virtual_refs import VirtualReader

if TYPE_CHECKING:
    import icechunk

_HEADER_BYTES: Final = 39
_NATIVE: Final = 1
_CLOUDS: Final = {"s3": "s3", "gs": "gcs", "az": "azure"}


class ForeignNode(NamedTuple):
    """A group or array of an icechunk snapshot.

    Attributes
    ----------
    snapshot : str
        Id of the snapshot.
    node_id : str
        Its id, which stays when it is moved.
    path : str
        Its path, without a slash at its ends.
    document : bytes
        Its `zarr.json`.
    manifests : list of dict, or None
        Of an array the `id` of each manifest, and the `extents` that count in it.
    """

    snapshot: str
    node_id: str
    path: str
    document: bytes
    manifests: list[dict[str, Any]] | None


class ForeignFile(NamedTuple):
    """A file that holds chunks, and how a change of it is noticed; None and -1 are unknown."""

    location: str
    etag: str | None = None
    modified_ms: int = -1
    nbytes: int = -1
    unchanged_since_ms: int = -1


class IcechunkFiles:
    """The files of an icechunk repository.

    Parameters
    ----------
    storage : Storage
        Where they are.
    folder : Path
        An empty folder for copies of its metadata.
    trusted : Containers
        Places of virtual chunks whose files may be looked at.
    max_bytes : int
        That a file of metadata may have, unpacked.
    runtime : Runtime
        Makes calls at once.

    Attributes
    ----------
    branches, tags : dict of str to str
        Ids of snapshots by name.
    files : dict of ForeignFile to int
        The files that chunks read so far are in, each with its position.
    inlined : dict of bytes to int
        The inline chunks read so far, each with its position.

    Raises
    ------
    ImportError
        If the package of icechunk is not installed.
    NotARepositoryError
        If there is no icechunk repository.
    CorruptObjectError
        If a file is damaged.
    UnsupportedFormatError
        If its format is not known.
    """

    def __init__(
        self, storage: Storage, folder: Path, trusted: Containers, max_bytes: int, runtime: Runtime
    ) -> None:
        self._icechunk = icechunk = icechunk_package("importing from icechunk")
        self._storage, self._folder = storage, folder
        self._trusted, self._reader = trusted, VirtualReader(trusted)
        self._max_bytes, self._parallel = max_bytes, runtime.parallel
        self.files: dict[ForeignFile, int] = {}
        self.inlined: dict[bytes, int] = {}
        self._settled: dict[str, int] = {"": 0}
        self._objects: dict[str, ForeignFile] = {}
        if not self._copy("repo", needed=False):  # format 1 has a file for each ref instead
            listed = [*storage.list("refs/"), *storage.list("snapshots/")]
            if not listed:
                raise NotARepositoryError(f"there is no icechunk repository at {storage.url}")
            self._fetch(info.key for info in listed if is_inside(info.key))
            self._copy("config.yaml", needed=False)
        with self._told("its refs"):
            place = icechunk.local_filesystem_storage(str(folder))
            config = icechunk.Repository.fetch_config(place) or icechunk.RepositoryConfig.default()
            preload = icechunk.ManifestPreloadConfig(max_total_refs=0)
            config.manifest = icechunk.ManifestConfig(preload=preload)
            self._repo = icechunk.Repository.open(place, config, self._grant(config))
            branches, tags = self._repo.list_branches(), self._repo.list_tags()
            self.branches = {name: self._repo.lookup_branch(name) for name in branches}
            self.tags = {name: self._repo.lookup_tag(name) for name in tags}

    def lineage(self, name: str) -> list[icechunk.SnapshotInfo]:
        """A snapshot and its ancestors, oldest first.

        Raises
        ------
        CorruptObjectError
            If one is missing, damaged, or its own ancestor.
        """
        found: dict[str, icechunk.SnapshotInfo] = {}
        with self._told(f"the ancestors of the snapshot {name}"):
            for each in self._repo.ancestry(snapshot_id=name):
                if each.id in found:
                    raise CorruptObjectError(f"the icechunk snapshot {each.id} is its own ancestor")
                found[each.id] = each
        return [*found.values()][::-1]

    def nodes(self, name: str) -> dict[str, ForeignNode]:
        """The nodes of a snapshot, by id."""
        self._fetch([f"snapshots/{name}"])
        with self._told(f"snapshots/{name}", LookupError, TypeError):
            # It is called a tool for tests, and nothing else says where the chunks of an array are.
            listed = self._repo.inspect_snapshot(name)["nodes"]
            store = self._repo.readonly_session(snapshot_id=name).store
            keys = [(join(each["path"].strip("/"), V3_DOCUMENT), None) for each in listed]
            documents: Any = sync(store.get_partial_values(default_buffer_prototype(), keys))
            nodes = {}
            for each, document in zip(listed, documents, strict=True):
                node_id, path, data = each["id"], each["path"].strip("/"), document.to_bytes()
                if path and not is_inside(path):
                    raise CorruptObjectError(f"snapshots/{name} has a node at {path[:80]!r}")
                nodes[node_id] = ForeignNode(name, node_id, path, data, each.get("manifest_refs"))
        return nodes

    def keep_manifests(self, nodes: Iterable[ForeignNode]) -> None:
        """Have the manifests of these nodes, which are read next, and no others."""
        names = {each["id"] for node in nodes for each in node.manifests or ()}
        for copied in (self._folder / "manifests").glob("*"):
            if copied.name not in names:
                copied.unlink()
        self._fetch(f"manifests/{name}" for name in names)

    def chunks(self, node: ForeignNode, ndim: int) -> IndexArray:
        """The chunks of an array: their coordinates, and three columns that say where each is.

        These are the position in `files`, or `~` that in `inlined`; the offset and the length.

        Raises
        ------
        CorruptObjectError
            If a manifest is missing or damaged.
        MissingChunkError
            If an object of the icechunk repository is missing.
        """
        self._fetch(f"manifests/{each['id']}" for each in node.manifests or ())
        parts = [np.zeros((0, ndim + 3), np.int64)]
        with self._told(f"the chunks of /{node.path} in snapshots/{node.snapshot}"):
            store = self._repo.readonly_session(snapshot_id=node.snapshot).store
            batches: Any = store.array_chunk_iterator("/" + node.path)
            for batch in batches:  # it can be iterated without an event loop
                coords, kinds, paths, offsets, lengths, inlined = batch
                if coords.shape[1] != ndim:
                    raise CorruptObjectError(f"/{node.path} has chunks of other axes than its own")
                native, root = np.flatnonzero(kinds == _NATIVE).tolist(), f"{self._storage.url}/"
                for info in self._storage.list("chunks/") if native and not self._objects else ():
                    file = ForeignFile(root + info.key, None, info.modified_ms, info.nbytes)
                    self._objects[file.location] = file
                for row in native:
                    paths[row] = f"{root}chunks/{paths[row]}"
                    if paths[row] not in self._objects:
                        raise MissingChunkError(
                            f"{paths[row]}, which a snapshot needs, is not there: restore it, or "
                            "delete the branch and expire the snapshot in icechunk"
                        )
                numbers = self._of_files(store, node.path, paths, coords)
                for row, data in inlined.items():
                    numbers[row] = ~self.inlined.setdefault(data, len(self.inlined))
                where = np.array(numbers), offsets.astype(np.int64), lengths.astype(np.int64)
                parts.append(np.column_stack((coords.astype(np.int64), *where)))
        return np.concatenate(parts)

    # --- files with chunks -------------------------------------------------------------------

    def _of_files(
        self, store: icechunk.IcechunkStore, path: str, locations: Sequence[str], coords: Any
    ) -> list[int]:
        """The position in `files` of each chunk's file, of which all is noted that may be."""
        rows = dict(zip(reversed(locations), reversed(range(len(locations))), strict=True))
        looks: list[partial[ForeignFile]] = []
        trusted, now = self._trusted, dict[str, int]()
        for location in [each for each in dict.fromkeys(locations) if each not in self._settled]:
            file = self._objects.get(location, ForeignFile(location))
            if location not in self._objects and trusted.places and trusted.locate(location)[0]:
                key = "/".join((path, "c", *map(str, coords[rows[location]].tolist())))
                looks.append(partial(self._look, store, key.lstrip("/"), location))
            else:
                self._settled[location] = self.files.setdefault(file, len(self.files))
        for file in self._parallel(looks):
            # A later snapshot may refer to what a file that has changed is now.
            kept = self._settled if file.unchanged_since_ms < 0 else now
            kept[file.location] = self.files.setdefault(file, len(self.files))
        return [now[each] if each in now else self._settled[each] for each in locations]

    def _look(self, store: icechunk.IcechunkStore, key: str, location: str) -> ForeignFile:
        """What a file is now, if icechunk says that it is the one which the chunk is of.

        One that has changed, or is gone, must not have changed since 1970, so it is not read.
        """
        try:
            now = self._reader.version(location)  # before the check, so that no change is missed
            sync(store.get(key, default_buffer_prototype(), RangeByteRequest(0, 1)))
        except MissingChunkError:
            return ForeignFile(location, unchanged_since_ms=0)
        except self._icechunk.IcechunkError as error:
            changed = getattr(error, "kind", "") == "virtual-chunk-modified"
            return ForeignFile(location, unchanged_since_ms=0 if changed else -1)
        etag = now.etag if location.partition("://")[0] in REMOTE else None
        modified_ms = -1 if etag is not None or now.modified_ms is None else now.modified_ms
        return ForeignFile(location, etag, modified_ms, -1 if now.nbytes is None else now.nbytes)

    def _grant(self, config: icechunk.RepositoryConfig) -> dict[str, Any]:
        """Let icechunk read where the reader trusts; its credentials by prefix."""
        named = {key: one.name for key, one in (config.virtual_chunk_containers or {}).items()}
        access = {}
        for container in self._trusted.places.values():
            root, reached = container.url.rstrip("/") + "/", _reached(self._icechunk, container)
            for prefix in {root, *named}:
                if reached is not None and (prefix.startswith(root) or root.startswith(prefix)):
                    store, access[prefix] = reached
                    given = self._icechunk.VirtualChunkContainer(prefix, store, named.get(prefix))
                    config.set_virtual_chunk_container(given)
        granted: dict[str, Any] = self._icechunk.containers_credentials(access)
        return granted

    # --- metadata ----------------------------------------------------------------------------

    def _fetch(self, keys: Iterable[str]) -> None:
        """Have copies of these files.

        Raises
        ------
        CorruptObjectError
            If one is missing.
        """
        due = [key for key in keys if not (self._folder / key).exists()]
        self._parallel([partial(self._copy, key) for key in due])

    def _copy(self, key: str, *, needed: bool = True) -> bool:
        """Copy a file, if it is there."""
        where = f"{self._storage.url}/{key}"
        try:
            data = self._storage.get(key)
        except ObjectNotFoundError as error:
            if not needed:
                return False
            raise CorruptObjectError(f"{where} is missing: restore it") from error
        nbytes = len(data)
        with suppress(zstandard.ZstdError):  # it is text, or icechunk refuses it
            nbytes = zstandard.frame_content_size(data[_HEADER_BYTES:])
        if not 0 <= nbytes <= self._max_bytes:
            raise InvalidArgumentError(
                f"{where} has {nbytes} bytes, and an import unpacks up to {self._max_bytes}: "
                "pass a larger max_bytes= if you trust it"
            )
        copied = self._folder / key
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(data)
        return True

    @contextmanager
    def _told(self, what: str, *also: type[Exception]) -> Iterator[None]:
        """A block in which errors of icechunk, and these, become ours."""
        try:
            yield
        except BaseException as error:
            known = isinstance(error, (self._icechunk.IcechunkError, *also))
            if not known and type(error).__name__ != "PanicException":
                raise
            new = getattr(error, "kind", "") == "unsupported-spec-version"
            kind = UnsupportedFormatError if new else CorruptObjectError
            told = next(iter(str(error).splitlines()), "")
            reader = f"icechunk {self._icechunk.__version__}"
            raise kind(f"{reader} cannot read {what}, at {self._storage.url}: {told}") from error


def icechunk_package(what: str) -> Any:
    """The package of icechunk.

    Raises
    ------
    ImportError
        If it is not installed; the message says what needs it.
    """
    need(what, "icechunk", "icechunk")
    return import_module("icechunk")


def _reached(icechunk: Any, container: VirtualContainer) -> tuple[Any, Any] | None:
    """How icechunk reads at a container, and with which credentials; None if it cannot."""
    scheme, path = container.place
    options, credentials = dict(container.options), icechunk.credentials
    if scheme == "file":
        return icechunk.local_filesystem_store(path), credentials.LocalFileSystemAccess
    if scheme in WEB:
        return icechunk.http_store(), credentials.HttpAccess
    endpoint = options.get("endpoint")
    elsewhere = scheme != "s3" and endpoint is not None
    if scheme not in _CLOUDS or container.credentials is not None or elsewhere:
        return None
    if scheme == "s3":
        store = icechunk.s3_store(
            region=options.get("region"),
            endpoint_url=endpoint,
            allow_http=bool(options.get("allow_http")),
            anonymous=bool(options.get("anonymous")),
            s3_compatible=endpoint is not None,
            force_path_style=endpoint is not None and not options.get("virtual_hosted"),
        )
    elif scheme == "gs":
        store = icechunk.gcs_store()
    else:
        store = icechunk.ObjectStoreConfig.Azure({"account": str(options.get("account", ""))})
    how = "anonymous" if options.get("anonymous") else "from_env"
    return store, getattr(credentials, f"{_CLOUDS[scheme]}_{how}_credentials")()
