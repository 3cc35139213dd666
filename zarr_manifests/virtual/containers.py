"""Containers: the places outside the repository that its opener allows it to read.

A container is a name and a URL prefix. References in a repository are not trusted, since anybody
may have written them. So a file is read only if it is below a container that the opener gave.

Invariants:

- Without a container nothing is read: resolving a source does no I/O.
- Prefixes and locations are normalized before they are compared, and contain no secrets.
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from zarr_manifests.errors import (
    InvalidArgumentError,
    UnsupportedStorageError,
    VirtualContainerError,
)
from zarr_manifests.format.virtual_sources import VirtualSource, check_container_name
from zarr_manifests.storage import check_key

__all__ = ["Containers", "VirtualLocation", "parse_location"]

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NUMBER: Final = r"(?:0|[1-9][0-9]*)"
_CHUNK: Final = re.compile(
    rf"(.+?)/[^/]+/(?:c(?:(?:/{_NUMBER})+|(?:\.{_NUMBER})+)?|{_NUMBER}(?:[./]{_NUMBER})*)"
)
"""A chunk of an array in a Zarr store, and the folder of the array's group."""


@dataclass(frozen=True, slots=True)
class VirtualLocation:
    """A file or folder outside the repository.

    Parameters
    ----------
    scheme : {"file", "memory"}
        The kind of place.
    root : str
        A folder's absolute path, or the name of a memory storage.
    path : str
        The file's path below the root; empty for the root itself.
    """

    scheme: Literal["file", "memory"]
    root: str
    path: str = ""

    @property
    def url(self) -> str:
        """The URL of the place."""
        return _url(self.scheme, posixpath.join(self.root, self.path) if self.path else self.root)


def _url(scheme: str, path: str) -> str:
    try:
        return f"{scheme}://{urllib.parse.quote(path)}"
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a {scheme}:// location is not valid Unicode text") from error


def parse_location(url: object) -> tuple[Literal["file", "memory"], str]:
    """Return scheme and normalized path of a URL; a memory path starts with the store's name.

    Raises
    ------
    InvalidArgumentError
        If it is malformed, has `..` segments, or contains a user or a password. The message
        repeats only its scheme.
    UnsupportedStorageError
        If the scheme is neither `file` nor `memory`.
    """
    split = _SCHEME.fullmatch(url) if isinstance(url, str) else None
    if split is None:
        raise InvalidArgumentError(
            "a location is a URL, such as file:///data/winds.nc; for a local file use "
            "pathlib.Path(...).absolute().as_uri()"
        )
    scheme, rest = split[1].lower(), split[2]
    host = rest.partition("/")[0]
    if "@" in host:
        raise InvalidArgumentError(
            f"a {scheme}:// location with a user or password in it is refused: what is referenced "
            "is written to the repository. Take them out of the URL"
        )
    if scheme not in ("file", "memory"):
        raise UnsupportedStorageError(
            f"{scheme}:// locations are not supported; use file:// or memory://"
        )
    if _ESCAPE.search(rest):
        raise InvalidArgumentError(f"a {scheme}:// location has a % that escapes nothing")
    try:
        text = urllib.parse.unquote(rest, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"a {scheme}:// location is not valid Unicode text") from error
    if "\0" in text:
        raise InvalidArgumentError(f"a {scheme}:// location holds a zero byte")
    if scheme == "file":
        if host not in ("", "localhost"):
            raise InvalidArgumentError(
                "a file:// location has an absolute path after the two slashes, as in "
                "file:///data/winds.nc"
            )
        return "file", "/" + posixpath.normpath(text[len(host) :]).lstrip("/")
    if not host:
        raise InvalidArgumentError("a memory:// location starts with the name of a storage")
    return "memory", _checked_key(text)


def _checked_key(text: str) -> str:
    name, _, key = text.rstrip("/").partition("/")
    if key:
        check_key(key)
    return f"{name}/{key}" if key else name


@dataclass(frozen=True, slots=True)
class Containers:
    """The containers of an opened repository.

    Parameters
    ----------
    prefixes : mapping of str to str
        Normalized URL prefixes, by name.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, str | os.PathLike[str]] | None) -> Containers:
        """Build containers from URL prefixes by name; a path counts as a `file://` URL.

        Raises
        ------
        InvalidArgumentError
            If a name or prefix is malformed, or a prefix contains a user or a password.
        UnsupportedStorageError
            If the scheme of a prefix is not supported.
        """
        prefixes = {}
        for name, prefix in (given or {}).items():
            check_container_name(name)
            text = os.fspath(prefix)
            if not isinstance(prefix, str) or "://" not in prefix:
                text = _url("file", os.path.abspath(text))  # noqa: PTH100 - a str is due
            prefixes[name] = _url(*parse_location(text))
        return Containers(prefixes)

    def locate(self, url: object) -> tuple[str, str]:
        """Return container (empty for none) and path of a location, as they are stored.

        A location is a URL, or `virtual://<container>/<path>`.
        """
        if isinstance(url, str) and url.startswith("virtual://"):
            name, _, path = url.removeprefix("virtual://").partition("/")
            check_container_name(name)
            surrogates = path.encode(errors="replace").decode() != path
            if (
                not path
                or "\0" in path
                or surrogates
                or not {"", ".", ".."}.isdisjoint(path.split("/"))
            ):
                raise InvalidArgumentError(
                    f"a location in container {name!r} is refused: a relative path without empty, "
                    "'.' or '..' segments is due"
                )
            return name, path
        scheme, path = parse_location(url)
        held = self._holding(scheme, path)
        if held is None:
            return "", _url(scheme, path)
        name, root = held
        return name, path[len(root) :].lstrip("/")

    def source_at(
        self, url: str, modified_ms: int | None = None, nbytes: int | None = None
    ) -> VirtualSource:
        """The source that a location means, with what is known of it."""
        return VirtualSource(*self.locate(url), None, modified_ms, nbytes)

    def _holding(self, scheme: str, path: str) -> tuple[str, str] | None:
        """Name and path of the innermost container that holds a normalised path."""
        found: tuple[str, str] | None = None
        for name, prefix in self.prefixes.items():
            kind, root = parse_location(prefix)
            below = path.startswith(root.rstrip("/") + "/") and kind == scheme
            if below and (found is None or len(root) > len(found[1])):
                found = name, root
        return found

    def resolve(self, source: VirtualSource) -> VirtualLocation:
        """Return where a source is, if it may be read.

        Raises
        ------
        VirtualContainerError
            If it is below no container.
        """
        if source.container:
            prefix = self.prefixes.get(source.container)
            if prefix is None:
                raise VirtualContainerError(
                    f"a chunk lies in the file {source.path!r} of the container "
                    f"{source.container!r}, which this repository was not opened with: open it "
                    f"with virtual_containers={{{source.container!r}: <URL of the folder>}} if "
                    "you trust it to read there"
                )
            return _below(*parse_location(prefix), source.path)
        try:
            scheme, path = parse_location(source.path)
        except InvalidArgumentError as error:
            raise VirtualContainerError(
                f"a chunk lies at a location that cannot be read: {error}"
            ) from error
        held = self._holding(scheme, path)
        if held is None:
            folder = _url(scheme, _folder_to_trust(path))
            raise VirtualContainerError(
                f"a chunk lies in the file {_url(scheme, path)}, below no container that this "
                f"repository was opened with: open it with virtual_containers={{<a name>: "
                f"{folder!r}}} if you trust it to read there"
            )
        return _below(scheme, held[1], path[len(held[1]) :].lstrip("/"))

    def url_of(self, source: VirtualSource) -> str:
        """The source's URL if its container is known, else its location as stored."""
        if source.container in self.prefixes:
            return self.resolve(source).url
        return source.location


def _folder_to_trust(path: str) -> str:
    """The root of the Zarr store that the file seems to belong to, else the file's folder.

    Decided from names alone. If no folder's name ends in `.zarr`, it is the folder of the group.
    """
    folders = posixpath.dirname(path).split("/")
    for depth, folder in enumerate(folders, 1):
        if folder.endswith(".zarr"):
            return "/".join(folders[:depth])
    chunk = _CHUNK.fullmatch(path)
    return posixpath.dirname(path) if chunk is None else chunk[1]


def _below(scheme: Literal["file", "memory"], root: str, path: str) -> VirtualLocation:
    if scheme == "memory":
        name, _, folder = root.partition("/")
        return VirtualLocation(scheme, name, f"{folder}/{path}" if folder else path)
    return VirtualLocation(scheme, root, path)
