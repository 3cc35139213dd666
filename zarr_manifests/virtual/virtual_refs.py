"""Virtual chunks: their refs as columns, and reads of their bytes, only from the intended files.

Invariants:

- The table of `VirtualRefs` has one row per coordinate, all inside the array's grid, and file
  locations without secrets; `VirtualRefs.from_table` returns the same columns.
- Nothing outside a container is opened: symbolic links are resolved first, and then every folder on
  the path is opened without following links. So a link put there in the meantime is refused too.
- What an answer of an object store or a web server says of the file, and a local file after the
  read, is compared with the version that was recorded when the file was referenced. So a change
  before or during the read is detected, and no request is added for it.
- Too few bytes are an error, and so is a missing file.
"""

from __future__ import annotations

import os
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    ObjectNotFoundError,
    StorageError,
    VirtualSourceChangedError,
)
from zarr_manifests.format.chunk_table import (
    MAX_ROWS,
    ChunkTable,
    Column,
    RefKind,
    VirtualRef,
    VirtualSource,
    bound_etag,
    bound_of,
    checked_sources,
    known_numbers,
)
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.storage.protocol import Files, Version, plain_etag
from zarr_manifests.texts import bytes_text
from zarr_manifests.virtual.containers import (
    REMOTE,
    Containers,
    VirtualContainer,
    VirtualLocation,
    check_reachable,
)

_MOST_LENGTH: Final = 2**48
_MOST_OFFSET: Final = 2**60
_MOST_CRC: Final = 2**32 - 1
_MEMORY_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class VirtualRefs(Struct, frozen=True, eq=False):
    """The virtual chunks of an array, as columns.

    Parameters
    ----------
    index : int64[n, ndim]
        Chunk coordinates, in C order.
    locations : tuple of str
        URLs of the files; `virtual://<container>/<path>` where the container is not opened.
    source : int64[n]
        Position of each chunk's file in `locations`.
    offset, length : int64[n]
        Byte range of each chunk in its file.
    etags : tuple of (str or None)
        Etags of the files, if known.
    modified, sizes : int64[len(locations)]
        Modification times (milliseconds since 1970 UTC) and sizes of the files in bytes; -1 if
        unknown.
    checksums : int64[n]
        crc32c of each chunk; -1 if unknown.
    unchanged_since : int64[len(locations)]
        Times since which the files must not have changed (milliseconds since 1970 UTC); -1 if
        unknown.
    """

    index: IndexArray
    locations: tuple[str, ...]
    source: Column
    offset: Column
    length: Column
    etags: tuple[str | None, ...]
    modified: Column
    sizes: Column
    checksums: Column
    unchanged_since: Column

    @property
    def guarded(self) -> npt.NDArray[np.bool_]:
        """Whether a change of each file is noticed, because an etag or a time is known of it."""
        tagged = np.array([etag is not None for etag in self.etags], np.bool_)
        return tagged | (self.modified >= 0) | (self.unchanged_since >= 0)

    def __len__(self) -> int:
        return len(self.source)

    @staticmethod
    def from_table(table: ChunkTable | None, ndim: int, containers: Containers) -> VirtualRefs:
        """Build it from the virtual rows of a table."""
        if table is None:
            none = np.zeros(0, np.int64)
            return VirtualRefs(none.reshape(0, ndim), (), none, none, none, (), *[none] * 4)
        rows = table.kind == RefKind.VIRTUAL
        files = table.virtual
        return VirtualRefs(
            table.coords()[rows],
            tuple(containers.url_of(file) for file in files),
            table.source[rows],
            table.offset[rows],
            table.length[rows],
            tuple(file.tag for file in files),
            known_numbers(file.modified_ms for file in files),
            known_numbers(file.nbytes for file in files),
            np.where(table.number[rows] == 1, table.crc32c[rows], -1),
            known_numbers(file.unchanged_since_ms for file in files),
        )

    def to_table(self, grid: Box, containers: Containers) -> ChunkTable | None:
        """Return the chunk table of refs into an array with that grid; None if empty.

        The columns may be all that `set_virtual_refs` takes.

        Raises
        ------
        InvalidArgumentError
            If the columns do not fit together or do not fit the grid, or a location is refused.
        UnsupportedStorageError
            If the scheme of a location is not supported.
        """
        if isinstance(self.locations, str):
            raise InvalidArgumentError("locations must be a sequence of URLs, not one string")
        n = np.shape(np.asarray(self.source))[:1]
        rows = n[0] if n else 0
        source = _column("source", self.source, rows, 0, len(self.locations) - 1)
        offset = _column("offset", self.offset, rows, 0, _MOST_OFFSET)
        length = _column("length", self.length, rows, 1, _MOST_LENGTH)
        crc = _column("checksums", self.checksums, rows, -1, _MOST_CRC)
        coords = _coords(self.index, rows, grid)
        box = Box.around_coords(coords) if rows else grid
        linear = box.ravel(coords)
        order: Any = slice(None)
        if (linear[1:] <= linear[:-1]).any():
            order = np.argsort(linear, kind="stable")
            linear = linear[order]
            twice = np.flatnonzero(linear[1:] == linear[:-1])
            if len(twice):
                place = tuple(coords[order][twice[0]].tolist())
                raise InvalidArgumentError(
                    f"index: the chunk {place} is named twice, as are {len(twice)} in all"
                )
        # Files in the order of the chunks, so that their numbers rise along the table.
        source, crc, first = source[order], crc[order], np.full(len(self.locations), rows)
        first[source[::-1]] = np.arange(rows)[::-1]  # of equal ones, the last is kept
        by_chunk = np.argsort(first)
        used = by_chunk[: np.count_nonzero(first < rows)]
        source = np.argsort(by_chunk)[source]
        files = self._files(containers, used)
        if not rows:
            return None
        return ChunkTable(
            box,
            None if rows == box.size else linear,
            np.broadcast_to(np.int64(RefKind.VIRTUAL), (rows,)),
            source,
            (crc >= 0).astype(np.int64),
            offset[order],
            length[order],
            np.maximum(crc, 0),
            (),
            b"",
            files,
        )

    def _files(self, containers: Containers, used: Column) -> tuple[VirtualSource, ...]:
        """The files at these positions, with what is known of them."""
        n, given = len(self.locations), cast("Any", self.etags)
        tags = [None] * n if given is None else [*given]
        texts = [tag for tag in tags if tag is not None]
        sound = all(isinstance(tag, str) and bound_of(tag) is None for tag in texts)
        if len(tags) != n or not sound or not "".join(texts).isprintable():
            raise InvalidArgumentError(
                f"etags must be {n} strings, one for each location, without control characters, or "
                "None; and for <= and a number give unchanged_since"
            )
        columns = {
            "unchanged_since": _ms(self.unchanged_since),
            "modified": _ms(self.modified),
            "sizes": self.sizes,
        }
        known = [_column(*column, n, -1, _MOST_OFFSET)[used].tolist() for column in columns.items()]
        files = []
        for i, *numbers in zip(used.tolist(), *known, strict=True):
            since, ms, nbytes = (None if number < 0 else number for number in numbers)
            if tags[i] and since is not None:
                raise InvalidArgumentError(
                    "unchanged_since: a file with an etag does not need it; pass -1 for that file"
                )
            tag = tags[i] or (None if since is None else bound_etag(since))
            files.append(VirtualSource(*containers.locate(self.locations[i]), tag, ms, nbytes))
        return checked_sources(files)


def _numbers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InvalidArgumentError(f"{name}: {error}") from error
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} must be whole numbers, not {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > 2**63 - 1:
        raise InvalidArgumentError(f"{name}: a value is beyond 2**63")
    # A copy, so that later changes to the caller's array have no effect.
    return array.astype(np.int64)


def _column(name: str, values: npt.ArrayLike | None, n: int, least: int, most: int) -> Column:
    if values is None:
        return np.full(n, -1, np.int64)
    column = _numbers(name, values)
    if column.shape != (n,):
        raise InvalidArgumentError(f"{name} must have {n} values in one axis, not {column.shape}")
    if n and not (least <= int(column.min()) and int(column.max()) <= most):
        raise InvalidArgumentError(f"{name}: a value is not in {least}..{most}")
    return column


def _coords(index: npt.ArrayLike, n: int, grid: Box) -> IndexArray:
    coords = _numbers("index", index)
    if coords.shape != (n, grid.ndim):
        raise InvalidArgumentError(
            f"index must be chunk coordinates of shape {(n, grid.ndim)}, not {coords.shape}"
        )
    if n > MAX_ROWS:
        raise InvalidArgumentError(
            f"{n} refs are more than the {MAX_ROWS} that one call sets; set them in parts"
        )
    outside = (coords < 0) | (coords >= np.asarray(grid.hi, np.int64))
    if outside.any():
        first = tuple(coords[outside.any(axis=1)][0].tolist())
        raise InvalidArgumentError(
            f"index: the chunk {first} is not in the array's grid of {grid.shape} chunks"
        )
    return coords


def _ms(times: npt.ArrayLike | None) -> npt.ArrayLike | None:
    """Times as milliseconds; "not a time" is the smallest int64."""
    if times is None or np.asarray(times).dtype.kind != "M":
        return times
    return np.maximum(np.asarray(times).astype("datetime64[ms]").astype(np.int64), -1)


# --- reading ---------------------------------------------------------------------------------


class VirtualReader:
    """Reads virtual chunks below the given containers."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._storages: dict[VirtualContainer, Any] = {}

    def version(self, url: str) -> Version:
        """Return the current version of the file at the location.

        Raises
        ------
        VirtualContainerError
            If it is below no container, or leads out of it. Nothing was read.
        MissingChunkError
            If there is no such file.
        """
        return self._read(VirtualSource(*self._containers.locate(url)), 0, 0)[1]

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
        return self.checked(ref, self.read_bytes(ref.source, ref.offset + start, length), length)

    def read_bytes(self, source: VirtualSource, start: int, length: int) -> bytes:
        """Return bytes of a source, fewer only at its end. Errors are those of `read`."""
        return self._read(source, start, length)[0]

    async def read_source(self, source: VirtualSource, start: int, length: int) -> bytes:
        """Return bytes of a remote source, fewer only at its end. Errors are those of `read`."""
        import asyncio

        container, place = self._containers.resolve(source)
        _check_room(place, length)
        if container not in self._storages:
            await asyncio.to_thread(self._opened, container)
        try:
            found = await self._storages[container].get_version_async(place.path, start, length)
        except ObjectNotFoundError as error:
            raise _missing(place) from error
        return _checked(place, source, start, found)[0]

    def checked(self, ref: VirtualRef, data: bytes, length: int) -> bytes:
        """The bytes of a chunk, if they are all of them and match its checksum.

        Raises
        ------
        CorruptObjectError
            If they do not.
        """
        due = ref.crc32c if length == ref.length else None  # of a part, none is known
        if ref.length and len(data) == length and (due is None or crc32c(data) == due):
            return data
        raise CorruptObjectError(
            f"a chunk of {ref.length} bytes from {ref.offset} on in "
            f"{self._containers.resolve(ref.source)[1].url} has no bytes, goes beyond the end of "
            "the file, or does not match its checksum; restore the file, or reference it anew"
        )

    def _read(self, source: VirtualSource, start: int, length: int) -> tuple[bytes, Version]:
        container, place = self._containers.resolve(source)
        _check_room(place, length)
        try:
            found = self._opened(container).get_version(place.path, start, length)
        except ObjectNotFoundError as error:
            raise _missing(place) from error
        return _checked(place, source, start, found)

    def _opened(self, container: VirtualContainer) -> Files:
        if container not in self._storages:
            check_reachable(container)
            self._storages[container] = container.storage
        files: Files = self._storages[container]
        return files


def _check_room(place: VirtualLocation, length: int) -> None:
    """Raise `StorageError` for more bytes than the machine has: a sparse file may offer them."""
    if length > _MEMORY_BYTES:
        raise StorageError(
            f"a chunk of {bytes_text(length)} in {place.url} is larger than this machine's memory, "
            f"{bytes_text(_MEMORY_BYTES)}; reference smaller chunks"
        )


def _checked(
    place: VirtualLocation, known: VirtualSource, start: int, answer: tuple[bytes, Version]
) -> tuple[bytes, Version]:
    """What a place has answered, if it is of the known version."""
    found = answer[1]
    if found.nbytes is None:  # it says nothing of what ends before
        if known.nbytes is not None and start < known.nbytes:
            raise _changed(place)
        return answer
    unit_ms = 1000 if place.scheme in REMOTE else 1  # HTTP gives times in seconds
    now = None if found.modified_ms is None else found.modified_ms // unit_ms
    since_ms = known.unchanged_since_ms
    tagged = known.tag is None or (
        found.etag is not None and plain_etag(found.etag) == plain_etag(known.tag)
    )
    timed = known.modified_ms is None or now == known.modified_ms // unit_ms
    older = since_ms is None or (now is not None and now <= since_ms // unit_ms)
    sized = known.nbytes is None or found.nbytes == known.nbytes
    if not (tagged and timed and older and sized):
        raise _changed(place)
    return answer


def _changed(place: VirtualLocation) -> VirtualSourceChangedError:
    return VirtualSourceChangedError(
        f"{place.url} has another etag, time of modification or size than when it was referenced: "
        "restore the file, or reference it anew"
    )


def _missing(place: VirtualLocation) -> MissingChunkError:
    return MissingChunkError(
        f"{place.url}, which a chunk lies in, is not there; restore the file, or open the "
        "repository with the place where it is now. It is not read as fill value"
    )
