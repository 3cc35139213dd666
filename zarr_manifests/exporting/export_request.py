"""What a caller says of an export, and what an export counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import absolute
from zarr_manifests.progress import Progress, expect
from zarr_manifests.records import dataclass
from zarr_manifests.reports import ExportReport

__all__ = ["ExportCount", "ExportRequest"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a caller says of an export.

    Parameters
    ----------
    format : str
        One of the formats.
    copy : bool
        Whether chunks are copied, and not referred to.
    path : str
        What becomes the root of the export.
    overwrite : bool
        Whether what is at the destination may be replaced.
    tag : str, optional
        The name of the tag that keeps what is referred to.
    storage_options : mapping, optional
        ExportRequest for the destination.
    progress : callable, optional
        Called with a stage and the number done.
    """

    format: str
    copy: bool
    path: str
    overwrite: bool
    tag: str | None
    storage_options: Mapping[str, object] | None
    progress: Progress | None

    def check_copies(self) -> None:
        """Refuse what only goes with references.

        Raises
        ------
        InvalidArgumentError
            If chunks are to be referred to, or a tag is named.
        """
        if not self.copy:
            raise InvalidArgumentError(
                f"format={self.format!r} holds copies of all chunks; format='kerchunk' and "
                "format='icechunk' can refer to them"
            )
        self.check_no_tag()

    def check_no_tag(self) -> None:
        """Refuse a tag for an export that refers to nothing.

        Raises
        ------
        InvalidArgumentError
            If a tag is named.
        """
        if self.tag is not None:
            raise InvalidArgumentError("tag= goes with copy=False: a copy needs nothing to be kept")


@dataclass(slots=True)
class ExportCount:
    """Counts what an export writes, and tells of it.

    Parameters
    ----------
    request : ExportRequest
        What the caller says.
    """

    request: ExportRequest
    chunks: int = field(init=False, default=0)
    nbytes: int = field(init=False, default=0)
    referenced: int = field(init=False, default=0)
    reused: int = field(init=False, default=0)

    def add(self, chunks: Sequence[tuple[object, bytes]]) -> None:
        """Count chunks that were written."""
        self.count(len(chunks), sum(len(data) for _, data in chunks))

    def add_references(self, chunks: int, nbytes: int) -> None:
        """Count chunks that are referred to."""
        self.referenced += chunks
        self.count(chunks, nbytes)

    def add_reused(self, chunks: int, nbytes: int) -> None:
        """Count chunks that were there."""
        self.reused += chunks
        self.count(chunks, nbytes)

    def count(self, chunks: int, nbytes: int) -> None:
        """Count chunks, and tell the caller how many there are."""
        self.chunks += chunks
        self.nbytes += nbytes
        if self.request.progress is not None:
            self.request.progress("chunks", self.chunks)

    def report(self, source: SnapshotSource, dest: str, tag: str | None = None) -> ExportReport:
        """What the export has written."""
        if self.request.progress is not None:  # of the chunks before, only a bound was known
            expect(self.request.progress, "chunks", self.chunks)
        return ExportReport(
            format=self.request.format,
            dest=dest,
            snapshot_id=source.snapshot_id,
            path=absolute(source.path),
            groups=source.count(NodeKind.GROUP),
            arrays=source.count(NodeKind.ARRAY),
            chunks=self.chunks,
            nbytes=self.nbytes,
            referenced=self.referenced,
            reused=self.reused,
            tag=tag,
        )
