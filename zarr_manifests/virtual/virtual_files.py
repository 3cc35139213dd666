"""Reading byte ranges of files outside the repository, and only of the intended files.

Invariants:

- Nothing outside a container is opened: symbolic links are resolved first, and then every folder on
  the path is opened without following links. So a link put there in the meantime is refused too.
- A request to an object store or a web server asks for the version that was recorded when the file
  was referenced. Its answer, and a local file after the read, is compared with that version. So a
  change before or during the read is detected, and no request is added for it.
- Too few bytes are an error, and so is a missing file.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    ObjectNotFoundError,
    StorageError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from zarr_manifests.format.chunk_table import VirtualRef
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.ids import crc32c
from zarr_manifests.storage import from_url
from zarr_manifests.storage.files import open_inside
from zarr_manifests.storage.protocol import Version, plain_etag
from zarr_manifests.texts import bytes_text
from zarr_manifests.virtual.containers import (
    Containers,
    VirtualContainer,
    check_reachable,
    storage_of,
)
from zarr_manifests.virtual.locations import REMOTE, VirtualLocation

if TYPE_CHECKING:
    from zarr_manifests.storage.object_store import ObjectStorage

__all__ = ["VirtualReader", "file_version"]

_MEMORY_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def file_version(found: os.stat_result) -> Version:
    """The version of a local file. Its etag equals the one that object_store gives local files."""
    modified_us = found.st_mtime_ns // 1000
    etag = f"{found.st_ino:x}-{modified_us:x}-{found.st_size:x}"
    return Version(etag, found.st_mtime_ns // 1_000_000, found.st_size)


class VirtualReader:
    """Reads virtual chunks below the given containers."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._storages: dict[VirtualContainer, ObjectStorage] = {}

    def version(self, url: str) -> Version:
        """Return the current version of the file at the location.

        Raises
        ------
        VirtualContainerError
            If it is below no container, or leads out of it. Nothing was read.
        MissingChunkError
            If there is no such file.
        """
        return self._read(self._containers.source_at(url), 0, 0)[1]

    def is_remote(self, source: VirtualSource) -> bool:
        """Whether it takes requests to read the source.

        Raises
        ------
        VirtualContainerError
            If it is below no container.
        """
        return self._containers.resolve(source)[1].scheme in REMOTE

    def read(self, ref: VirtualRef, start: int, length: int) -> bytes:
        """Return `length` bytes of the chunk from `start` on; both are within the chunk.

        Raises
        ------
        VirtualContainerError
            If the file is below no container, or leads out of it. Nothing was read.
        MissingChunkError
            If there is no such file.
        VirtualSourceChangedError
            If the file has changed since it was referenced.
        CorruptObjectError
            If it is too short, or the whole chunk does not match its checksum.
        StorageError
            If it cannot be read.
        """
        data, version = self._read(ref.source, ref.offset + start, length)
        return self.checked(ref, data, length, version.nbytes)

    def read_bytes(self, source: VirtualSource, start: int, length: int) -> bytes:
        """Return bytes of a source, fewer only at its end. Errors are those of `read`."""
        return self._read(source, start, length)[0]

    async def read_source(self, source: VirtualSource, start: int, length: int) -> bytes:
        """Return bytes of a remote source, fewer only at its end. Errors are those of `read`."""
        import asyncio

        container, place = self._containers.resolve(source)
        _check_room(place, length)
        storage = self._storages.get(container)
        if storage is None:
            storage = await asyncio.to_thread(self._opened, container)
        try:
            found = await storage.get_version_async(place.path, start, length, _known(source))
            if found is None:
                await asyncio.to_thread(_check_there, storage, place)
        except ObjectNotFoundError as error:
            raise _missing(place) from error
        return _remote(place, source, start, found)[0]

    def checked(
        self, ref: VirtualRef, data: bytes, length: int, nbytes: int | None = None
    ) -> bytes:
        """The bytes of a chunk, if they are all of them and match its checksum.

        Raises
        ------
        CorruptObjectError
            If they do not.
        """
        if (
            len(data) == length
            and ref.length
            and not (length == ref.length and ref.crc32c is not None and crc32c(data) != ref.crc32c)
        ):
            return data
        url = self._containers.resolve(ref.source)[1].url
        if not ref.length:
            raise CorruptObjectError(
                f"a chunk in {url} is said to have no bytes, which none has; reference it anew"
            )
        if len(data) != length:
            end = "" if nbytes is None else f" at byte {nbytes}"
            raise CorruptObjectError(
                f"{url} ends{end}, within a chunk of {ref.length} bytes "
                f"from {ref.offset} on; restore the file, or reference it anew"
            )
        raise CorruptObjectError(
            f"a chunk of {ref.length} bytes from {ref.offset} on in {url} does not match "
            "its checksum; restore the file, or reference it anew"
        )

    def _read(self, source: VirtualSource, start: int, length: int) -> tuple[bytes, Version]:
        container, place = self._containers.resolve(source)
        _check_room(place, length)
        if place.scheme in REMOTE:
            try:
                storage = self._opened(container)
                found = storage.get_version(place.path, start, length, _known(source))
                if found is None:
                    _check_there(storage, place)
            except ObjectNotFoundError as error:
                raise _missing(place) from error
            return _remote(place, source, start, found)
        read = _read_file if place.scheme == "file" else _read_memory
        data, version = read(place, start, length, source)
        _check_version(place, source, version)
        return data, version

    def _opened(self, container: VirtualContainer) -> ObjectStorage:
        if container not in self._storages:
            check_reachable(container)
            self._storages[container] = storage_of(container)
        return self._storages[container]


def _check_room(place: VirtualLocation, length: int) -> None:
    """Raise `StorageError` for more bytes than the machine has: a sparse file may offer them."""
    if length > _MEMORY_BYTES:
        raise StorageError(
            f"a chunk of {bytes_text(length)} in {place.url} is larger than this machine's memory, "
            f"{bytes_text(_MEMORY_BYTES)}; reference smaller chunks"
        )


def _check_there(storage: ObjectStorage, place: VirtualLocation) -> None:
    """Raise `ObjectNotFoundError` if the file is gone: some stores look at conditions first."""
    storage.get_version(place.path, 0, 1, Version())


def _known(source: VirtualSource) -> Version:
    since_ms = source.unchanged_since_ms
    modified_ms = since_ms if source.modified_ms is None else source.modified_ms
    return Version(source.tag, modified_ms, source.nbytes)


def _remote(
    place: VirtualLocation, known: VirtualSource, start: int, found: tuple[bytes, Version] | None
) -> tuple[bytes, Version]:
    """What a store answered, if it is the known version."""
    if found is None:
        raise _changed(place, "the store says so")
    data, version = found
    if version.nbytes is not None:
        _check_version(place, known, version, remote=True)
    elif known.nbytes is not None and start < known.nbytes:
        raise _changed(place, f"it ends before byte {start + 1}, and had {known.nbytes} bytes")
    return data, version


def _check_version(
    place: VirtualLocation, known: VirtualSource, found: Version, *, remote: bool = False
) -> None:
    changes: list[tuple[str, object, object]] = []
    if known.tag is not None and (
        found.etag is None or plain_etag(found.etag) != plain_etag(known.tag)
    ):
        changes.append(("etag", found.etag, known.tag))
    unit_ms = 1000 if remote else 1  # HTTP gives times in seconds
    if known.modified_ms is not None and (
        found.modified_ms is None or found.modified_ms // unit_ms != known.modified_ms // unit_ms
    ):
        changes.append(("time of modification (ms)", found.modified_ms, known.modified_ms))
    since_ms = known.unchanged_since_ms
    if since_ms is not None and (
        found.modified_ms is None or found.modified_ms // unit_ms > since_ms // unit_ms
    ):
        changes.append(("time of modification (ms)", found.modified_ms, f"at most {since_ms}"))
    if known.nbytes is not None and found.nbytes != known.nbytes:
        changes.append(("size", found.nbytes, known.nbytes))
    if changes:
        told = [
            f"its {what} is {'not known' if is_now is None else is_now}, and was {was}"
            for what, is_now, was in changes
        ]
        raise _changed(place, "; ".join(told))


def _changed(place: VirtualLocation, how: str) -> VirtualSourceChangedError:
    return VirtualSourceChangedError(
        f"{place.url} has changed since it was referenced: {how}. Restore the file, or reference "
        "it anew"
    )


def _missing(place: VirtualLocation) -> MissingChunkError:
    return MissingChunkError(
        f"{place.url}, which a chunk lies in, is not there; restore the file, or open the "
        "repository with the place where it is now. It is not read as fill value"
    )


def _read_memory(
    place: VirtualLocation, start: int, length: int, known: VirtualSource
) -> tuple[bytes, Version]:
    storage = from_url(f"memory://{place.root}")
    try:
        data = storage.get(place.path, start, length)
        info, token = storage.head(place.path), ""
        if known.tag is not None:
            token = storage.get_tagged(place.path).token
    except ObjectNotFoundError as error:
        raise _missing(place) from error
    except InvalidArgumentError as error:
        raise StorageError(f"{place.url} cannot be read: {error}") from error
    return data, Version(token, info.modified_ms, info.nbytes)


def _read_file(
    place: VirtualLocation, start: int, length: int, known: VirtualSource
) -> tuple[bytes, Version]:
    fd = _open(place)
    try:
        parts = []
        while length:
            part = os.pread(fd, min(length, 2**30), start)
            if not part:
                break
            parts.append(part)
            start += len(part)
            length -= len(part)
        # After the read, so that a change during it is detected.
        return parts[0] if len(parts) == 1 else b"".join(parts), file_version(os.fstat(fd))
    except (OSError, OverflowError, MemoryError) as error:
        why = str(error) or type(error).__name__
        raise StorageError(f"{place.url} cannot be read: {why}") from error
    finally:
        os.close(fd)


def _open(place: VirtualLocation) -> int:
    try:
        return open_inside(place.root, place.path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(place) from error
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise VirtualContainerError(
                f"{place.url} leads out of its container through a symbolic link; open the "
                "repository with a container that holds the link's target too"
            ) from error
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise StorageError(f"{place.url} is not a file: {error}") from error
        if error.errno == errno.ELOOP:
            raise VirtualContainerError(
                f"a folder on the way to {place.url} became a symbolic link while it was opened"
            ) from error
        raise StorageError(f"{place.url} cannot be read: {error}") from error
