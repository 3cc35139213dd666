"""The errors that callers catch, grouped by what they can do.

- *Correct the call*: `NotFoundError`, `AlreadyExistsError`, `InvalidArgumentError`,
  `ReadOnlyError`, `VirtualContainerError`.
- *Resolve, then commit again*: `ConflictError`.
- *Open a new session*: `SnapshotExpiredError`, `SessionClosedError`.
- *Check before doing anything else*: `CommitOutcomeUnknownError`, `TransactionGapError`.
- *Go on, it is done*: `TransactionAlreadyCommitted`.
- *Repair damage*: `CorruptObjectError`, `MissingChunkError`, `UnsupportedFormatError`.
- *Fix the storage*: `StorageError`.

`kind` tells finer cases apart, whose classes stand at the end of the module.

Each also inherits a matching built-in exception. `MissingChunkError` and `CorruptObjectError` do
not inherit `KeyError` or `FileNotFoundError`: Zarr takes those for an absent chunk and returns the
fill value.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

_NEAR: Final = 200
"""Characters of a where that are shown on each side of a fault."""

__all__ = [
    "AlreadyExistsError",
    "CommitOutcomeUnknownError",
    "ConflictError",
    "CorruptObjectError",
    "InvalidArgumentError",
    "ManifestsError",
    "MissingChunkError",
    "NotFoundError",
    "ReadOnlyError",
    "SessionClosedError",
    "SnapshotExpiredError",
    "StorageError",
    "TransactionAlreadyCommitted",
    "TransactionGapError",
    "UnsupportedFormatError",
    "VirtualContainerError",
]


def plain_text(value: object, *, lines: bool = False, most: int | None = None) -> str:
    r"""The value as text with control characters escaped, such as `\x1b`.

    Characters that change the direction of text and invisible characters are escaped, too.

    Parameters
    ----------
    value : object
        Converted with `str`.
    lines : bool
        Keep newlines.
    most : int, optional
        Longer text is cut, and ends with `…`.

    Examples
    --------
    >>> from zarr_manifests.errors import plain_text
    >>> print(plain_text("air\x1b[2J\nerror: none"))
    air\x1b[2J\nerror: none
    """
    text = str(value)
    if not text.isprintable():
        kept = (c if _harmless(c) or (lines and c == "\n") else _written_out(c) for c in text)
        text = "".join(kept)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def _harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # any kind of space


def _written_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


class ConflictKind(StrEnum):
    """What collided, as a word for programs."""

    CHUNK = "chunk"
    """Both sides wrote the same chunk."""
    SHAPE = "shape"
    """One side resized an array that the other wrote to or resized."""
    APPEND = "append"
    """Both sides appended along one dimension."""
    ATTRIBUTE = "attribute"
    """Both sides gave one attribute a value."""
    STRUCTURE = "structure"
    """One side changed how an array is encoded."""
    METADATA = "metadata"
    """The documents of a node, or its place, are not what the change was made on."""
    CREATE = "create"
    """Both sides created something at one path, or one below the array of the other."""
    DELETE = "delete"
    """One side deleted or moved what the other changed or created."""
    READ = "read"
    """The other side changed what this one had read."""
    TXN = "txn"
    """The last version that an application has committed is not the one expected."""
    HISTORY = "history"
    """The branch was moved or reset, or its history has expired."""


class Conflict(Struct, frozen=True):
    """One place where changes of two writers conflict.

    Parameters
    ----------
    kind : ConflictKind
        What collided, as a word for programs.
    path : str
        Absolute path of the node, such as `/air/temperature`.
    component : str
        What this side changed: `"chunks"`, `"metadata"`, `"history"`, ...
    reason : str
        What the other side did.
    chunks : tuple of tuple of int
        The chunk coordinates in conflict, at most 20; empty if not about chunks.
    """

    kind: ConflictKind
    path: str
    component: str
    reason: str
    chunks: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        where = f" {list(self.chunks)}" if self.chunks else ""
        return plain_text(f"{self.path}: {self.component}{where}: {self.reason}")


class ManifestsError(Exception):
    """Base class of all errors of this package.

    `str` escapes control characters; `args` has the original text.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> try:
    ...     zm.open("memory://nowhere")
    ... except zm.errors.NotFoundError as error:
    ...     error.kind
    'not-a-repository'
    """

    @property
    def kind(self) -> str:
        """The case, as a word for programs, such as `history-expired` or `storage-full`."""
        name = type(self).__name__.removesuffix("Error")
        return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()

    def __str__(self) -> str:
        # Not `super().__str__()`: `KeyError` returns the repr of the message.
        return plain_text(self.args[0] if len(self.args) == 1 else super().__str__())


# --- correct the call ------------------------------------------------------------------------


class NotFoundError(ManifestsError, KeyError):
    """There is no branch, tag, snapshot, path or variable of that name."""


class AlreadyExistsError(ManifestsError, FileExistsError):
    """A repository, branch or tag exists already, or a deleted tag had that name.

    Also raised if a group already has data, or labels to append are already there.
    """


class InvalidArgumentError(ManifestsError, ValueError):
    """An argument, option or combination of them is invalid."""


class ReadOnlyError(ManifestsError, PermissionError, ValueError):
    """The session or store is read-only; also a `ValueError`, as in Zarr."""


class VirtualContainerError(ManifestsError, PermissionError):
    """A virtual chunk is outside the containers authorised at open; nothing was read."""


# --- resolve, then commit again --------------------------------------------------------------


class ConflictError(ManifestsError, RuntimeError):
    """The commit conflicts with commits of others; nothing was committed.

    The session keeps its changes. `conflicts` lists every place. If other commits came first,
    `base` is the id of the snapshot that the changes were made on, and `head` that of the branch's
    head; else they are None.
    """

    def __init__(
        self,
        message: str,
        conflicts: Sequence[Conflict] = (),
        base: str | None = None,
        head: str | None = None,
    ) -> None:
        self.message, self.base, self.head = message, base, head
        self.conflicts = tuple(conflicts)
        lines = [message, *(f"  {conflict}" for conflict in self.conflicts[:20])]
        more = len(self.conflicts) - 20
        super().__init__("\n".join([*lines, f"  ... and {more} more"] if more > 0 else lines))

    def __str__(self) -> str:
        conflicts = str(self.args[0])[len(self.message) :]  # lines, already escaped
        return plain_text(self.message) + conflicts


# --- open a new session ----------------------------------------------------------------------


class SnapshotExpiredError(ManifestsError, LookupError):
    """The snapshot is not, or no longer, in the history of the repository.

    A `LookupError` and not a `KeyError`, which Zarr takes for an absent chunk.
    """


class SessionClosedError(ManifestsError, ValueError):
    """The session has ended; its store can no longer be written."""


# --- check before doing anything else --------------------------------------------------------


class CommitOutcomeUnknownError(ManifestsError, OSError):
    """The swap was sent, but it is unknown whether it took effect.

    The package does not retry. Open the repository again and look for `commit_id` in
    `Repository.ancestry` before you write the same data again.
    """

    def __init__(self, message: str, commit_id: str = "") -> None:
        self.message = message
        self.commit_id = commit_id
        super().__init__(message)


class TransactionGapError(ManifestsError, RuntimeError):
    """The version before is not the one that the transaction must come after.

    Versions between are missing on the branch, perhaps because it was reset or restored. Nothing
    was committed, and the session keeps its changes.
    """


# --- go on, it is done -----------------------------------------------------------------------


class TransactionAlreadyCommitted(ManifestsError, RuntimeError):  # noqa: N818 - it is no failure
    """The application has committed this version, or a later one, to the branch before.

    Nothing was committed again. The session has ended, and its changes are dropped.

    Parameters
    ----------
    message : str
        What happened.
    app : str
        Name of the application.
    version : int
        The version that was to be committed.
    last : int
        The last version that the application has committed.
    snapshot_id : str or None
        Id of the snapshot that committed the version; None if that has expired, was amended, or
        lies far back, or if the version was left out.
    """

    def __init__(
        self,
        message: str,
        app: str = "",
        version: int = 0,
        last: int = 0,
        snapshot_id: str | None = None,
    ) -> None:
        self.message, self.app, self.version, self.last = message, app, version, last
        self.snapshot_id = snapshot_id
        super().__init__(message)


# --- repair damage ---------------------------------------------------------------------------


class CorruptObjectError(ManifestsError, OSError):
    """An object does not match its pointer, its checksum or the format."""


class MissingChunkError(ManifestsError, OSError):
    """The bytes of a referenced chunk are missing; this never reads as an absent chunk.

    Attributes
    ----------
    key : str or None
        Key of the missing object, if it belongs to the repository.
    """

    key: str | None = None


class UnsupportedFormatError(ManifestsError, ValueError):
    """The repository has a newer format, or needs a feature that this version does not know.

    Also raised for the document of an array whose chunk grid or chunk keys are unknown.
    """


# --- fix the storage -------------------------------------------------------------------------


class StorageError(ManifestsError, OSError):
    """The storage failed; the operation may be retried."""


class NotARepositoryError(FileNotFoundError, NotFoundError):
    """There is no repository at that location."""

    __str__ = ManifestsError.__str__  # `FileNotFoundError` comes before it


class ConfigError(InvalidArgumentError):
    """The configuration is invalid; `problems` lists every problem with its place.

    Parameters
    ----------
    problems : sequence of str
        One line for each problem, starting with its place (`max-delta-count: ...`).
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)


class WhereError(InvalidArgumentError):
    """The text of a where cannot be read; the message shows the place and the grammar.

    Parameters
    ----------
    reason : str
        What is wrong.
    text : str
        The text of the where.
    position : int
        Where in the text, in characters from 0 on.
    grammar : str
        What may stand there.
    """

    def __init__(self, reason: str, text: str = "", position: int = 0, grammar: str = "") -> None:
        self.reason, self.text, self.position, self.grammar = reason, text, position, grammar
        super().__init__(reason)

    def __str__(self) -> str:
        if not self.grammar:
            return super().__str__()
        first, last = max(self.position - _NEAR, 0), self.position + _NEAR
        before = "..." * (first > 0) + plain_text(self.text[first : self.position])
        shown = before + plain_text(self.text[self.position : last])
        shown += "..." * (last < len(self.text))
        return f"{plain_text(self.reason)}\n  {shown}\n  {' ' * len(before)}^\n{self.grammar}"


class UnmergedForksError(InvalidArgumentError, RuntimeError):
    """Writable copies of the session's store were pickled, and none was merged back."""


class PickledStoreWarning(UserWarning):
    """A writable store was pickled: its writes are not committed unless it is merged."""


class HistoryExpiredError(SnapshotExpiredError):
    """A part of the requested history has expired; nothing was returned."""


class FencedError(PermissionError, SessionClosedError):
    """The session or maintenance task may no longer commit.

    It began before the repository's fence and holds no lease, or somebody else has since claimed
    the branch or the task.
    """

    __str__ = ManifestsError.__str__  # `PermissionError` comes before it


class LeaseError(SessionClosedError, RuntimeError):
    """A lease was not renewed in time, or cannot be renewed in the background.

    The lease may still be valid, but do not rely on it.
    """


class VirtualSourceChangedError(CorruptObjectError):
    """The file of a virtual chunk has changed since it was referenced."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The storage has no object under that key."""


class StorageFullError(StorageError):
    """The storage is full."""


class UnsupportedStorageError(StorageError, ValueError):
    """The storage lacks an operation that is needed, such as compare-and-swap."""


class JavaNotFoundError(ManifestsError, RuntimeError):
    """Spark needs Java, and none was found on this machine or in a package."""
