"""Virtual refs as numpy columns, validated as a whole and converted to a chunk table without loops.

Invariant: the table of `table_of` has one row per coordinate, all inside the array's grid, and file
locations without secrets; `VirtualRefs.from_table` returns the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.columns import MAX_ROWS, Column
from zarr_manifests.format.virtual_sources import VirtualSources, bound_etag, bound_of
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.virtual.containers import Containers

__all__ = ["VirtualRefs", "table_at", "table_of"]

_MOST_LENGTH: Final = 2**48
_MOST_OFFSET: Final = 2**60
_MOST_CRC: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class VirtualRefs:
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
        none = np.zeros(0, np.int64)
        if table is None:
            empty = none.reshape(0, ndim)
            return VirtualRefs(empty, (), none, none, none, (), none, none, none, none)
        rows = table.kind == RefKind.VIRTUAL
        files = table.virtual
        known = [files[i] for i in range(len(files))]
        return VirtualRefs(
            table.coords()[rows],
            tuple(containers.url_of(file) for file in known),
            table.source[rows],
            table.offset[rows],
            table.length[rows],
            tuple(file.tag for file in known),
            files.modified_ms.copy(),
            files.nbytes.copy(),
            np.where(table.number[rows] == 1, table.crc32c[rows], -1),
            np.array(
                [-1 if (since := file.unchanged_since_ms) is None else since for file in known],
                np.int64,
            ),
        )


def table_of(
    grid: Box,
    containers: Containers,
    index: npt.ArrayLike,
    locations: Sequence[str],
    source: npt.ArrayLike,
    offset: npt.ArrayLike,
    length: npt.ArrayLike,
    *,
    etags: Sequence[str | None] | None = None,
    modified: npt.ArrayLike | None = None,
    sizes: npt.ArrayLike | None = None,
    checksums: npt.ArrayLike | None = None,
    unchanged_since: npt.ArrayLike | None = None,
) -> ChunkTable | None:
    """Return the chunk table of virtual refs into an array with that grid; None if empty.

    Raises
    ------
    InvalidArgumentError
        If the columns do not fit together or do not fit the grid, or a location is refused.
    UnsupportedStorageError
        If the scheme of a location is not supported.
    """
    files = _files(containers, locations, etags, modified, sizes, unchanged_since)
    return table_at(grid, files, index, source, offset, length, checksums)


def table_at(
    grid: Box,
    files: VirtualSources,
    index: npt.ArrayLike,
    source: npt.ArrayLike,
    offset: npt.ArrayLike,
    length: npt.ArrayLike,
    checksums: npt.ArrayLike | None = None,
) -> ChunkTable | None:
    """Like `table_of`, of files that are located already."""
    n = np.shape(np.asarray(source))[:1]
    rows = n[0] if n else 0
    columns = {
        "source": _column("source", source, rows, 0, len(files) - 1),
        "offset": _column("offset", offset, rows, 0, _MOST_OFFSET),
        "length": _column("length", length, rows, 1, _MOST_LENGTH),
        "crc32c": _column("checksums", checksums, rows, -1, _MOST_CRC),
    }
    coords = _coords(index, rows, grid)
    if not rows:
        return None
    box = Box.around_coords(coords) if grid.ndim else grid
    linear = box.ravel(coords)
    order: Any = slice(None)
    if (linear[1:] <= linear[:-1]).any():
        order = np.argsort(linear, kind="stable")
        linear = linear[order]
        twice = np.flatnonzero(linear[1:] == linear[:-1])
        if len(twice):
            first = tuple(coords[order][twice[0]].tolist())
            raise InvalidArgumentError(
                f"index: the chunk {first} is named twice, as are {len(twice)} in all"
            )
    used, source_of = np.unique(columns["source"], return_inverse=True)
    crc = columns["crc32c"][order]
    return ChunkTable(
        box,
        None if rows == box.size else linear,
        np.broadcast_to(np.int64(RefKind.VIRTUAL), (rows,)),
        source_of[order].astype(np.int64),
        (crc >= 0).astype(np.int64),
        columns["offset"][order],
        columns["length"][order],
        np.maximum(crc, 0),
        (),
        b"",
        files if len(used) == len(files) else files.take(used),
    )


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


def _files(
    containers: Containers,
    locations: Sequence[str],
    etags: Sequence[object] | None,
    modified: npt.ArrayLike | None,
    sizes: npt.ArrayLike | None,
    unchanged_since: npt.ArrayLike | None,
) -> VirtualSources:
    if isinstance(locations, str):
        raise InvalidArgumentError("locations must be a sequence of URLs, not one string")
    n = len(locations)
    tags = [] if etags is None else ["" if etag is None else etag for etag in etags]
    if etags is not None and len(tags) != n:
        raise InvalidArgumentError(f"etags: expected {n}, one for each location, not {len(tags)}")
    texts = [tag for tag in tags if isinstance(tag, str)]
    joined = "".join(texts)
    if len(texts) != len(tags) or not joined.isprintable():
        raise InvalidArgumentError("etags must be strings without control characters, or None")
    if "<=" in joined and any(bound_of(tag) is not None for tag in texts):
        raise InvalidArgumentError("etags: one begins with <=; give the time as unchanged_since")
    since = _column("unchanged_since", _ms(unchanged_since), n, -1, _MOST_OFFSET)
    texts = _with_bounds(texts, since)
    names, container, paths = containers.locate_all(locations)
    return VirtualSources(
        names,
        container,
        paths,
        _column("modified", _ms(modified), n, -1, _MOST_OFFSET),
        _column("sizes", sizes, n, -1, _MOST_OFFSET),
        tuple(texts) if any(texts) else (),
    )


def _ms(times: npt.ArrayLike | None) -> npt.ArrayLike | None:
    """Times as milliseconds; "not a time" is the smallest int64."""
    if times is None or np.asarray(times).dtype.kind != "M":
        return times
    return np.maximum(np.asarray(times).astype("datetime64[ms]").astype(np.int64), -1)


def _with_bounds(etags: list[str], since: Column) -> list[str]:
    """The etags, with the times since which other files must not have changed."""
    times = np.unique(since).tolist()
    if not times or times[-1] < 0:
        return etags
    written = {ms: bound_etag(ms) if ms >= 0 else "" for ms in times}
    bounds = [written[ms] for ms in since.tolist()]
    if not etags:
        return bounds
    found = [*zip(etags, bounds, strict=True)]
    if any(etag and bound for etag, bound in found):
        raise InvalidArgumentError(
            "unchanged_since: a file with an etag does not need it; pass -1 for that file"
        )
    return [etag or bound for etag, bound in found]
