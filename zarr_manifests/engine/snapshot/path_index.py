"""Paths of nodes by the directory they are in, so that no listing walks all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

_NONE: Final[Mapping[str, None]] = {}


class Paths(Protocol):
    """Paths by directory, possibly also of nodes that were deleted."""

    def paths(self, directory: str) -> Mapping[str, None]:
        """The paths right in the directory, as keys."""

    def directories(self, directory: str) -> Mapping[str, None]:
        """The directories right in the directory that have paths at any depth, as keys."""

    def unlisted(self, directory: str) -> Mapping[str, None]:
        """Those of its directories that may have paths though there is no node at their own."""


class PathIndex:
    """Paths by directory, in the order they were added.

    A directory is a text that ends with a slash, or is empty; a path is in the directory that ends
    with its last slash. The root's path, which is empty, is in no directory. Readers need no lock
    if one thread at a time changes the index.

    Parameters
    ----------
    paths : iterable of str
        The first paths.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._paths: dict[str, dict[str, None]] = {}
        self._directories: dict[str, dict[str, None]] = {}
        for path in paths:
            self.add(path)

    def paths(self, directory: str) -> Mapping[str, None]:
        """The paths right in the directory, as keys."""
        return self._paths.get(directory, _NONE)

    def directories(self, directory: str) -> Mapping[str, None]:
        """The directories right in the directory that have paths at any depth, as keys."""
        return self._directories.get(directory, _NONE)

    def unlisted(self, directory: str) -> Mapping[str, None]:
        """Those of its directories that may have paths though there is no node at their own."""
        return self.directories(directory)

    def add(self, path: str) -> None:
        """Add a path; the root's is left out."""
        if not path:
            return
        directory = path[: path.rfind("/") + 1]
        self._paths.setdefault(directory, {})[path] = None
        while directory:
            inner, directory = directory, _above(directory)
            beside = self._directories.setdefault(directory, {})
            if inner in beside:
                return
            beside[inner] = None

    def discard(self, path: str) -> None:
        """Remove a path, if it is there."""
        directory = path[: path.rfind("/") + 1]
        beside = self._paths.get(directory, {})
        beside.pop(path, None)
        if not beside:
            self._paths.pop(directory, None)
        while directory and directory not in self._paths and directory not in self._directories:
            inner, directory = directory, _above(directory)
            beside = self._directories.get(directory, {})
            beside.pop(inner, None)
            if not beside:
                self._directories.pop(directory, None)


def _above(directory: str) -> str:
    """The directory that this one is in."""
    return directory[: directory.rfind("/", 0, -1) + 1]
