"""Reading byte ranges of files outside the repository, and only of the intended files.

Invariants:

- Nothing outside a container is opened: symbolic links are resolved first, and then every folder on
  the path is opened without following links. So a link put there in the meantime is refused too.
- After its bytes are read, a file is compared with what was recorded when it was referenced, so a
  change before or during the read is detected.
- Too few bytes are an error, and so is a missing file.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

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
from zarr_manifests.virtual.containers import Containers, VirtualLocation

__all__ = ["Version", "VirtualReader", "file_version"]


@dataclass(frozen=True, slots=True)
class Version:
    """What distinguishes versions of a file."""

    etag: str
    modified_ms: int
    nbytes: int


def file_version(found: os.stat_result) -> Version:
    """The version of a local file. Its etag equals the one that object_store gives local files."""
    modified_us = found.st_mtime_ns // 1000
    etag = f"{found.st_ino:x}-{modified_us:x}-{found.st_size:x}"
    return Version(etag, found.st_mtime_ns // 1_000_000, found.st_size)


class VirtualReader:
    """Reads virtual chunks below the given containers."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    def version(self, url: str) -> Version:
        """Return the current version of the file at the location.

        Raises
        ------
        VirtualContainerError
            If it is below no container, or leads out of it. Nothing was read.
        MissingChunkError
            If there is no such file.
        """
        source = self._containers.source_at(url)
        place = self._containers.resolve(source)
        read = _read_file if place.scheme == "file" else _read_memory
        return read(place, 0, 0, source)[1]

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
        place = self._containers.resolve(ref.source)
        read = _read_file if place.scheme == "file" else _read_memory
        data, version = read(place, ref.offset + start, length, ref.source)
        _check_version(place, ref.source, version)
        if len(data) != length:
            raise CorruptObjectError(
                f"{place.url} ends at byte {version.nbytes}, within a chunk of {ref.length} bytes "
                f"from {ref.offset} on; restore the file, or reference it anew"
            )
        if length == ref.length and ref.crc32c is not None and crc32c(data) != ref.crc32c:
            raise CorruptObjectError(
                f"a chunk of {ref.length} bytes from {ref.offset} on in {place.url} does not match "
                "its checksum; restore the file, or reference it anew"
            )
        return data


def _check_version(place: VirtualLocation, known: VirtualSource, found: Version) -> None:
    changes = [
        f"its {what} is {is_now}, and was {was}"
        for what, was, is_now in (
            ("etag", known.etag, found.etag),
            ("time of modification (ms)", known.modified_ms, found.modified_ms),
            ("size", known.nbytes, found.nbytes),
        )
        if was is not None and was != is_now
    ]
    if changes:
        raise VirtualSourceChangedError(
            f"{place.url} has changed since it was referenced: {'; '.join(changes)}. Restore the "
            "file, or reference it anew"
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
        if known.etag is not None:
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
    except (OSError, OverflowError) as error:
        raise StorageError(f"{place.url} cannot be read: {error}") from error
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
