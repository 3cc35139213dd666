"""Locations of files elsewhere: URLs, parsed and normalized.

Invariants:

- Equal places have equal locations: the scheme and a web server's host are in lower case, a default
  port is left out, and escapes are resolved. So prefixes can be compared segment by segment.
- A location cannot climb: below an object store or a web server, a path with an empty, `.` or `..`
  segment is refused, escaped or not. Paths of local files are normalized.
- A location contains no secrets, and no message repeats a refused URL.
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from dataclasses import dataclass
from typing import Final

from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.keys import is_inside, join
from zarr_manifests.storage.protocol import check_key
from zarr_manifests.storage.url import refuse_slipped

__all__ = ["REMOTE", "WEB", "VirtualLocation", "location_of", "parse_location", "url_at"]

WEB: Final = ("http", "https")
"""Schemes of web servers."""
REMOTE: Final = ("s3", "gs", "az", *WEB)
"""Schemes of places that are read by requests."""

_SAME: Final = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_PORTS: Final = {"http": 80, "https": 443}
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_HOST: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ODD: Final = re.compile(r"[\x00-\x1f\x7f\\]")
_KEPT: Final = "/=:+,@"


@dataclass(frozen=True, slots=True)
class VirtualLocation:
    """A file or folder outside the repository.

    Parameters
    ----------
    scheme : str
        The kind of place: `file`, `memory`, or one of `REMOTE`.
    root : str
        A folder's absolute path, the name of a memory storage, a bucket, or a web server's host.
    path : str
        The file's path below the root; empty for the root itself.
    """

    scheme: str
    root: str
    path: str = ""

    @property
    def url(self) -> str:
        """The URL of the place."""
        return url_at(self.scheme, posixpath.join(self.root, self.path) if self.path else self.root)


def location_of(given: str | os.PathLike[str]) -> str:
    """Return the normalized URL of a URL or a local path; errors are those of `parse_location`."""
    text = os.fspath(given)
    if isinstance(given, str) and "://" in text:
        return url_at(*parse_location(text))
    refuse_slipped(text)
    return url_at("file", os.path.abspath(text))  # noqa: PTH100 - a str is due


def url_at(scheme: str, path: str) -> str:
    """The URL of a normalized path, as `parse_location` returns it."""
    root, slash, rest = path.partition("/") if scheme in WEB else ("", "", path)
    kept = _KEPT if scheme in REMOTE else "/"
    try:
        return f"{scheme}://{root}{slash}{urllib.parse.quote(rest, safe=kept)}"
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a {scheme}:// location is not valid Unicode text") from error


def parse_location(url: object) -> tuple[str, str]:
    """Return scheme and normalized path of a URL.

    The path of a local file is absolute. Others start with the name of the memory storage, the
    bucket, or the web server's host.

    Raises
    ------
    InvalidArgumentError
        If it is malformed, has `..` segments, or contains a user, a password or a query. The
        message repeats only its scheme.
    UnsupportedStorageError
        If the scheme is not supported.
    """
    split = _SCHEME.fullmatch(url) if isinstance(url, str) else None
    if split is None:
        raise InvalidArgumentError(
            "a location is a URL, such as s3://bucket/winds.nc; for a local file use "
            "pathlib.Path(...).absolute().as_uri()"
        )
    scheme, rest = split[1].lower(), split[2]
    scheme = _SAME.get(scheme, scheme)
    host = rest.partition("/")[0]
    if "@" in host:
        raise InvalidArgumentError(
            f"a {scheme}:// location with a user or password in it is refused: what is referenced "
            "is written to the repository. Take them out of the URL"
        )
    if scheme not in ("file", "memory", *REMOTE):
        raise UnsupportedStorageError(
            f"{scheme}:// locations are not supported; use file://, memory://, s3://, gs://, az:// "
            "or https://"
        )
    if scheme in REMOTE and ("?" in rest or "#" in rest):
        raise InvalidArgumentError(
            f"a {scheme}:// location with a query is refused: what is signed in a query is a "
            "secret. Write a ? in a file's name as %3F, and a # as %23"
        )
    text = _unescaped(scheme, rest)
    if scheme == "file":
        if host not in ("", "localhost"):
            raise InvalidArgumentError(
                "a file:// location has an absolute path after the two slashes, as in "
                "file:///data/winds.nc"
            )
        return "file", "/" + posixpath.normpath(text[len(host) :]).lstrip("/")
    if scheme == "memory":
        if not host:
            raise InvalidArgumentError("a memory:// location starts with the name of a storage")
        name, _, key = text.rstrip("/").partition("/")
        return "memory", f"{name}/{check_key(key)}" if key else name
    root, key = _root(scheme, host), text[len(host) + 1 :].removesuffix("/")
    if key and (_ODD.search(key) or not is_inside(key)):
        raise InvalidArgumentError(
            f"a {scheme}:// location with an empty, '.' or '..' segment, a backslash or a control "
            "character is refused"
        )
    return scheme, join(root, key) if key else root


def _unescaped(scheme: str, rest: str) -> str:
    if _ESCAPE.search(rest):
        raise InvalidArgumentError(
            f"a {scheme}:// location has a % that escapes nothing; write it as %25"
        )
    try:
        text = urllib.parse.unquote(rest, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"a {scheme}:// location is not valid Unicode text") from error
    if "\0" in text:
        raise InvalidArgumentError(f"a {scheme}:// location holds a zero byte")
    return text


def _root(scheme: str, host: str) -> str:
    """The bucket, or the host and port of a web server."""
    if scheme not in WEB:
        if _BUCKET.fullmatch(host):
            return host
        raise InvalidArgumentError(f"a {scheme}:// location starts with the name of a bucket")
    found = _HOST.fullmatch(host)
    if found is None or (found[2] and not 0 < int(found[2]) < 65_536):
        raise InvalidArgumentError(f"a {scheme}:// location starts with a host, such as data.org")
    name, port = found[1].lower(), int(found[2] or _PORTS[scheme])
    return name if port == _PORTS[scheme] else f"{name}:{port}"
