"""The report of an ingestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_manifests.report import Report
from zarr_manifests.texts import bytes_text, count_text, plain_text

__all__ = ["FailedFile", "IngestReport", "IngestedFile"]

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class IngestedFile(Report):
    """A file whose rows were committed.

    Parameters
    ----------
    url : str
        Where it is.
    start, rows : int
        Its first row in the arrays, and how many it has.
    nbytes : int
        Its size.
    snapshot_id : str
        The commit that has it.
    """

    url: str
    start: int
    rows: int
    nbytes: int
    snapshot_id: str

    def __str__(self) -> str:
        return plain_text(f"{self.url}: rows {self.start} to {self.start + self.rows - 1}")


@dataclass(frozen=True, slots=True)
class FailedFile(Report):
    """A file that was left out.

    Parameters
    ----------
    url : str
        Where it is.
    reason : str
        Why.
    """

    url: str
    reason: str

    def __str__(self) -> str:
        return plain_text(f"{self.url}: {self.reason}")


@dataclass(frozen=True, slots=True)
class IngestReport(Report):
    """What `ingest` has done.

    Parameters
    ----------
    snapshot_ids : tuple of str
        The commits it made, oldest first; empty if there was nothing to do.
    added, replaced : tuple of IngestedFile
        Files whose rows were appended, and files that had changed.
    failed : tuple of FailedFile
        Files that were left out.
    unchanged : int
        The number of files that had been ingested before.
    seconds : float
        How long it took.

    Examples
    --------
    >>> print(IngestReport((), (), (), (), 365, 0.5))
    nothing to do: 365 files were there already
    """

    snapshot_ids: tuple[str, ...]
    added: tuple[IngestedFile, ...]
    replaced: tuple[IngestedFile, ...]
    failed: tuple[FailedFile, ...]
    unchanged: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were read."""
        return sum(file.nbytes for file in (*self.added, *self.replaced))

    def __str__(self) -> str:
        there = f"{count_text(self.unchanged, 'file')} {'was' if self.unchanged == 1 else 'were'}"
        counts = (
            (len(self.added), f"{count_text(len(self.added), 'file')} added"),
            (len(self.replaced), f"{len(self.replaced):,} replaced"),
            (self.unchanged, f"{there} there already"),
            (len(self.failed), f"{len(self.failed):,} left out"),
        )
        lines = [", ".join(what for count, what in counts if count) or "no files"]
        if self.snapshot_ids:
            rate = round(self.nbytes / self.seconds) if self.seconds > 0 else 0
            lines[0] += f", in {count_text(len(self.snapshot_ids), 'commit')}: "
            lines[0] += f"{bytes_text(self.nbytes)} in {self.seconds:.1f} s, {bytes_text(rate)}/s"
        else:
            lines[0] = f"nothing to do: {lines[0]}"
        for title, files in (("added", self.added), ("replaced", self.replaced)):
            lines += _some(title, files)
        return "\n".join(lines + _some("left out", self.failed))


def _some(title: str, files: Sequence[object]) -> list[str]:
    shown = [f"  {title} {file}" for file in files[:_SHOWN]]
    more = [f"  {title} {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else []
    return shown + more
