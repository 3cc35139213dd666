"""Every error this package raises on purpose, in one tree, grouped by what a caller would do.

- *Ask differently*: `NotFoundError`, `AlreadyExistsError`, `InvalidArgumentError`, `ConfigError`,
  `VirtualContainerError`.
- *Decide, then commit again*: `ConflictError`, `UnmergedForksError`.
- *Open a new session*: `SnapshotExpiredError`, `HistoryExpiredError`, `FencedError`,
  `LeaseError`, `SessionClosedError`.
- *Look before doing anything else*: `CommitOutcomeUnknownError`.
- *Something is damaged*: `CorruptObjectError`, `VirtualSourceChangedError`, `MissingChunkError`,
  `UnsupportedFormatError`.
- *The storage said no*: `StorageError` and what derives from it.
- *Something must be installed*: `JavaNotFoundError`.

Each also inherits the built-in exception a caller would expect. Two deliberately do not inherit
`KeyError` or `FileNotFoundError`: in Zarr those mean "absent, use the fill value", and a chunk
that is referenced but cannot be had must never read as fill (`MissingChunkError`,
`CorruptObjectError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_manifests.plain import plain_text

__all__ = [
    "AlreadyExistsError",
    "CommitOutcomeUnknownError",
    "ConfigError",
    "Conflict",
    "ConflictError",
    "CorruptObjectError",
    "FencedError",
    "HistoryExpiredError",
    "InvalidArgumentError",
    "JavaNotFoundError",
    "LeaseError",
    "ManifestsError",
    "MissingChunkError",
    "NotARepositoryError",
    "NotFoundError",
    "ObjectNotFoundError",
    "PickledStoreWarning",
    "ReadOnlyError",
    "SessionClosedError",
    "SnapshotExpiredError",
    "StorageError",
    "StorageFullError",
    "UnmergedForksError",
    "UnsupportedFormatError",
    "UnsupportedStorageError",
    "VirtualContainerError",
    "VirtualSourceChangedError",
]


class ManifestsError(Exception):
    """Root of every error of this package.

    Shown, it is one line of harmless text, whatever names it holds; `args` has them as they are.
    """

    def __str__(self) -> str:
        # Not what the built-in would make of it: `KeyError` prints the repr of the message.
        return plain_text(self.args[0] if len(self.args) == 1 else super().__str__())


# --- ask differently -------------------------------------------------------------------------


class NotFoundError(ManifestsError, KeyError):
    """A branch, tag, snapshot, path or variable that was asked for by name does not exist."""


class NotARepositoryError(FileNotFoundError, NotFoundError):
    """There is no repository at the place that was opened."""

    __str__ = ManifestsError.__str__  # `FileNotFoundError` comes before it


class AlreadyExistsError(ManifestsError, FileExistsError):
    """A repository, branch or tag of that name exists, or a deleted tag had that name.

    Or what is to be written is there already: a group that has data, labels of an append.
    """


class InvalidArgumentError(ManifestsError, ValueError):
    """An argument, option or combination of them has no meaning here."""


class ReadOnlyError(ManifestsError, PermissionError, ValueError):
    """A write was asked of something that was opened for reading only (Zarr: a `ValueError`)."""


class VirtualContainerError(ManifestsError, PermissionError):
    """A virtual chunk lies where the repository was not opened to read; nothing was touched."""


class ConfigError(InvalidArgumentError):
    """A configuration has faults; `problems` lists all of them, each with its place.

    Parameters
    ----------
    problems : sequence of str
        One line a fault, each starting with its place (`max-delta-count: ...`).
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)


# --- decide, then commit again ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conflict:
    """One place where two writers changed what cannot be brought together.

    Parameters
    ----------
    path : str
        Absolute path of the node, such as `/air/temperature`.
    component : str
        What was changed on this side: `"chunks"`, `"metadata"`, `"history"`, ...
    reason : str
        What the other side did.
    chunks : tuple of tuple of int
        The chunk coordinates concerned (at most 20 are listed), empty when not about chunks.
    """

    path: str
    component: str
    reason: str
    chunks: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        where = f" {list(self.chunks)}" if self.chunks else ""
        return plain_text(f"{self.path}: {self.component}{where}: {self.reason}")


class ConflictError(ManifestsError, RuntimeError):
    """Somebody else committed what this commit cannot be rebased over; nothing was committed.

    The session keeps its changes. `conflicts` lists every place.
    """

    def __init__(self, message: str, conflicts: Sequence[Conflict] = ()) -> None:
        self.message = message
        self.conflicts = tuple(conflicts)
        lines = [message, *(f"  {conflict}" for conflict in self.conflicts[:20])]
        more = len(self.conflicts) - 20
        super().__init__("\n".join([*lines, f"  ... and {more} more"] if more > 0 else lines))

    def __str__(self) -> str:
        conflicts = str(self.args[0])[len(self.message) :]  # in lines, each of which is plain
        return plain_text(self.message) + conflicts

    def __reduce__(self) -> tuple[type[ConflictError], tuple[str, tuple[Conflict, ...]]]:
        return ConflictError, (self.message, self.conflicts)


class UnmergedForksError(ManifestsError, RuntimeError):
    """Writable copies of the session's store went to other processes and none was merged back."""


class PickledStoreWarning(UserWarning):
    """A writable store was pickled: what such a copy writes is in no commit unless it is merged."""


# --- open a new session ----------------------------------------------------------------------


class SnapshotExpiredError(ManifestsError, LookupError):
    """The snapshot is not, or no longer, in the history of the repository.

    A `LookupError` and no `KeyError`: Zarr reads a `KeyError` from a store as fill value.
    """


class HistoryExpiredError(SnapshotExpiredError):
    """A part of the history that was asked for has expired; nothing of the rest was returned."""


class FencedError(ManifestsError, PermissionError):
    """A session, or maintenance, that others have shut out since: it may no longer commit.

    It began before the repository's fence and holds no lease, or before a claim of somebody else.
    """


class LeaseError(ManifestsError, RuntimeError):
    """A lease that was not renewed within its timeout, or could not be renewed if it were taken.

    It may still be there, and nothing may be lost; it is not to be relied on.
    """


class SessionClosedError(ManifestsError, ValueError):
    """The session has ended; its store can no longer be used for writing."""


# --- look before doing anything else ---------------------------------------------------------


class CommitOutcomeUnknownError(ManifestsError, OSError):
    """The swap was sent, and whether it took effect could not be found out.

    Never retried by the package. Open the repository again and look for `commit_id` in
    `Repository.ancestry` before writing the same data once more.
    """

    def __init__(self, message: str, commit_id: str = "") -> None:
        self.message = message
        self.commit_id = commit_id
        super().__init__(message)

    def __reduce__(self) -> tuple[type[CommitOutcomeUnknownError], tuple[str, str]]:
        return CommitOutcomeUnknownError, (self.message, self.commit_id)


# --- something is damaged --------------------------------------------------------------------


class CorruptObjectError(ManifestsError, OSError):
    """An object of the repository is not what its pointer, checksum or format says."""


class VirtualSourceChangedError(CorruptObjectError):
    """A file that a virtual chunk lies in is not what it was when it was referenced."""


class MissingChunkError(ManifestsError, OSError):
    """A chunk is referenced and its bytes are not there; never the same as an absent chunk.

    Attributes
    ----------
    key : str or None
        The object that should hold them, if it is one of the repository's.
    """

    key: str | None = None


class UnsupportedFormatError(ManifestsError, ValueError):
    """The repository was written in a newer format, or needs a feature unknown here."""


# --- the storage said no ---------------------------------------------------------------------


class StorageError(ManifestsError, OSError):
    """The storage failed; the operation may be tried again."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The storage has no object under that key."""


class StorageFullError(StorageError):
    """There is no room left where the repository lies."""


class UnsupportedStorageError(StorageError, ValueError):
    """The storage cannot do what is asked of it, such as compare-and-swap."""


# --- something must be installed -------------------------------------------------------------


class JavaNotFoundError(ManifestsError, RuntimeError):
    """Spark was asked for, and neither this machine nor a package has a Java it can run on."""
