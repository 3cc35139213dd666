"""Files outside the repository that virtual refs of a chunk table point into, as columns.

A source is a path below a *named container*, which the caller maps to a location when opening the
repository, or an absolute URL, with an empty container name. It also has the file's etag,
modification time and size when it was referenced, if known. Paths are stored one after another,
which compresses well.

Invariants: a path below a container is relative and cannot leave it (no empty, `.` or `..`
segment); no path contains NUL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.columns import MAX_ROWS, Column, decode_column, encode_column
from zarr_manifests.format.envelope import Fields
from zarr_manifests.keys import is_inside

_MAX_NAME_CHARS: Final = 64
_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MOST: Final = 2**62
_BOUND: Final = re.compile(r"<=(0|[1-9][0-9]{0,18})", re.ASCII)


def bound_etag(unchanged_since_ms: int) -> str:
    """What stands in the place of an etag if only a bound of the modification time is known.

    It equals no etag of a file, so who does not know it reads nothing.
    """
    return f"<={unchanged_since_ms}"


def bound_of(etag: str) -> int | None:
    """The time that `bound_etag` wrote; None for a real etag."""
    found = _BOUND.fullmatch(etag)
    return int(found[1]) if found else None


def check_container_name(name: object) -> str:
    """Return `name` if it is a valid container name.

    Raises
    ------
    InvalidArgumentError
        Unless it is 1 to 64 characters of `[A-Za-z0-9._-]`.
    """
    if isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS and _NAME_CHARS.issuperset(name):
        return name
    raise InvalidArgumentError(
        f"invalid container name {str(name)[:80]!r}: expected 1 to {_MAX_NAME_CHARS} characters of "
        "[A-Za-z0-9._-]"
    )


@dataclass(frozen=True, slots=True)
class VirtualSource:
    """A file outside the repository.

    Parameters
    ----------
    container : str
        Name of the container that `path` is relative to; empty if `path` is an absolute URL.
    path : str
        Path or URL of the file.
    etag : str or None
        Etag when it was referenced, if known; or `<=` and a time, see `unchanged_since_ms`.
    modified_ms : int or None
        Modification time then, in milliseconds since 1970 UTC, if known.
    nbytes : int or None
        Size then, if known.
    """

    container: str
    path: str
    etag: str | None = None
    modified_ms: int | None = None
    nbytes: int | None = None

    @property
    def tag(self) -> str | None:
        """The etag, if it is one."""
        return None if self.unchanged_since_ms is not None else self.etag

    @property
    def unchanged_since_ms(self) -> int | None:
        """The time since which it must not have changed, in milliseconds, if that is known."""
        return bound_of(self.etag) if self.etag is not None else None

    @property
    def is_dated(self) -> bool:
        """Whether it is known which version of the file is meant."""
        return self.etag is not None or self.modified_ms is not None

    @property
    def location(self) -> str:
        """The URL, or `virtual://<container>/<path>`."""
        return f"virtual://{self.container}/{self.path}" if self.container else self.path


@dataclass(frozen=True, slots=True, eq=False)
class VirtualSources:
    """Files outside the repository, as columns.

    Parameters
    ----------
    names : tuple of str
        Container names; the empty name marks absolute URLs.
    container : int64[n]
        Position of each source's container in `names`.
    paths : tuple of str
        Path of each source.
    modified_ms, nbytes : int64[n]
        Modification time and size of each source; -1 if unknown.
    etags : tuple of str
        Etag of each source, empty if unknown; no elements if all are unknown.

    Raises
    ------
    CorruptObjectError
        If the columns contradict each other, or a path could leave its container.
    """

    names: tuple[str, ...]
    container: Column
    paths: tuple[str, ...]
    modified_ms: Column
    nbytes: Column
    etags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.paths)
        sound = (
            len(self.container) == len(self.modified_ms) == len(self.nbytes) == n
            and len(self.etags) in (0, n)
            and (not n or int(self.container.max()) < len(self.names))
        )
        if not sound:
            raise CorruptObjectError("the columns of virtual sources contradict each other")
        try:
            for name in self.names:
                if name:
                    check_container_name(name)
        except InvalidArgumentError as error:
            raise CorruptObjectError(f"virtual sources: {error}") from error
        # Searching one long text is about a hundred times faster than a loop over paths.
        text = "/\0/".join(("", *self.paths, ""))
        relative = [bool(name) for name in self.names]
        if "" in self.paths or text.count("\0") != n + 1:
            raise CorruptObjectError("virtual sources: a path is empty or contains NUL")
        climbs = any(relative) and ("//" in text or "/./" in text or "/../" in text)
        if climbs and any(
            relative[c] and not is_inside(path)
            for c, path in zip(self.container.tolist(), self.paths, strict=True)
        ):
            raise CorruptObjectError("virtual sources: a path could leave its container")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> VirtualSource:
        modified_ms, nbytes = self.modified_ms.item(position), self.nbytes.item(position)
        return VirtualSource(
            self.names[self.container.item(position)],
            self.paths[position],
            (self.etags[position] or None) if self.etags else None,
            modified_ms if modified_ms >= 0 else None,
            nbytes if nbytes >= 0 else None,
        )

    def take(self, positions: Column) -> VirtualSources:
        """The sources at the given positions, in that order."""
        wanted = positions.tolist()
        return VirtualSources(
            self.names,
            self.container[positions],
            tuple([self.paths[i] for i in wanted]),
            self.modified_ms[positions],
            self.nbytes[positions],
            tuple([self.etags[i] for i in wanted]) if self.etags else (),
        )

    @staticmethod
    def of(sources: Sequence[VirtualSource]) -> VirtualSources:
        """The table of the given sources."""
        names: dict[str, int] = {}
        container = [names.setdefault(source.container, len(names)) for source in sources]
        known = any(source.etag for source in sources)
        return VirtualSources(
            tuple(names),
            np.array(container, np.int64),
            tuple(source.path for source in sources),
            np.array([-1 if s.modified_ms is None else s.modified_ms for s in sources], np.int64),
            np.array([-1 if s.nbytes is None else s.nbytes for s in sources], np.int64),
            tuple(source.etag or "" for source in sources) if known else (),
        )

    @staticmethod
    def union(tables: Sequence[VirtualSources]) -> tuple[VirtualSources, list[Column]]:
        """One table of all sources, and the positions in it of each table's sources."""
        first = next((table for table in tables if len(table)), NO_SOURCES)
        if all(table is first or not len(table) for table in tables):
            return first, [np.arange(len(table)) for table in tables]
        found: dict[tuple[str, str, int, int, str], int] = {}
        places = [
            np.array([found.setdefault(key, len(found)) for key in table._keys()], np.int64)
            for table in tables
        ]
        containers, paths, modified, nbytes, etags = zip(*found, strict=True)
        names = {name: i for i, name in enumerate(dict.fromkeys(containers))}
        union = VirtualSources(
            tuple(names),
            np.array([names[name] for name in containers], np.int64),
            paths,
            np.array(modified, np.int64),
            np.array(nbytes, np.int64),
            etags if any(etags) else (),
        )
        return union, places

    def _keys(self) -> Iterator[tuple[str, str, int, int, str]]:
        """All fields of each source, as plain tuples, which compare faster."""
        return zip(
            [self.names[i] for i in self.container.tolist()],
            self.paths,
            self.modified_ms.tolist(),
            self.nbytes.tolist(),
            self.etags or repeat("", len(self)),
            strict=True,
        )

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack; needs at least one source."""
        packed: dict[str, Any] = {
            "n": len(self),
            "names": list(self.names),
            "paths": "\0".join(self.paths).encode(),
            "container": encode_column(self.container),
            "modified": encode_column(self.modified_ms + 1),
            "size": encode_column(self.nbytes + 1),
        }
        if self.etags:
            packed["etags"] = "\0".join(self.etags).encode()
        return packed

    @classmethod
    def parse(cls, fields: Fields) -> VirtualSources:
        """From an untrusted map that `pack` made."""
        n = fields.number("n", MAX_ROWS)
        names = fields.items("names")
        if not n or not all(isinstance(name, str) for name in names):
            raise CorruptObjectError(f"{fields.where}: expected names and at least one source")
        container, modified, size = (
            decode_column(fields.value.get(name), n, _MOST)
            for name in ("container", "modified", "size")
        )
        return cls(
            tuple(names),
            container,
            _texts(fields, "paths", n),
            modified - 1,
            size - 1,
            _texts(fields, "etags", n) if fields.has("etags") else (),
        )


def _texts(fields: Fields, name: str, n: int) -> tuple[str, ...]:
    data = fields.binary(name)
    if data.count(b"\0") != n - 1:
        raise CorruptObjectError(f"{fields.where}.{name}: expected {n} strings")
    try:
        return tuple(data.decode().split("\0"))
    except UnicodeDecodeError as error:
        raise CorruptObjectError(f"{fields.where}.{name}: not UTF-8") from error


_NONE: Final = np.zeros(0, np.int64)
NO_SOURCES: Final = VirtualSources((), _NONE, (), _NONE, _NONE)
