"""Cases of the errors in `errors` that the package itself tells apart.

Callers catch the classes of `errors`, and look at `kind` if they need to.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    SessionClosedError,
    SnapshotExpiredError,
    StorageError,
)
from zarr_manifests.texts import plain_text

__all__ = [
    "ConfigError",
    "FencedError",
    "HistoryExpiredError",
    "JavaNotFoundError",
    "LeaseError",
    "NotARepositoryError",
    "ObjectNotFoundError",
    "PickledStoreWarning",
    "StorageFullError",
    "UnmergedForksError",
    "UnsupportedStorageError",
    "VirtualSourceChangedError",
    "WhereError",
]


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
        before = plain_text(self.text[: self.position])
        shown = before + plain_text(self.text[self.position :])
        return f"{plain_text(self.reason)}\n  {shown}\n  {' ' * len(before)}^\n{self.grammar}"

    def __reduce__(self) -> tuple[type[WhereError], tuple[str, str, int, str]]:
        return WhereError, (self.reason, self.text, self.position, self.grammar)


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
