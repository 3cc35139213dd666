"""From a URL to the storage it names.

A URL holds no secrets: one with a user or a password is refused, and no message repeats more of
a refused URL than its scheme.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping

from zarr_manifests.errors import ConfigError, InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Storage

__all__ = ["from_url"]

_SLIPPED = re.compile(r"(file|memory|s3|gs|gcs|az|abfss?|https?):(?!//).*", re.DOTALL)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_OPTIONS = {"force": bool}
_MEMORY_OPTIONS: dict[str, type] = {}


def from_url(url: str | os.PathLike[str], **options: object) -> Storage:
    """Open the storage that `url` names.

    Parameters
    ----------
    url : str or os.PathLike
        A path or `file://` URL of a local folder, or `memory://<name>`.
    **options
        For a local folder: `force` (bool), to write to network filesystems too.

    Raises
    ------
    UnsupportedStorageError
        If the scheme of the URL is not one of these.
    ConfigError
        If an option is unknown or of the wrong type; names all of them.
    InvalidArgumentError
        If the URL is malformed, or has a user or a password in it.

    Examples
    --------
    >>> from zarr_manifests.storage import from_url
    >>> from_url("memory://example").url
    'memory://example'
    >>> from_url("/data/my%20winds").url, from_url("file:///data/my%20winds").path
    ('file:///data/my%2520winds', '/data/my winds')
    """
    text = os.fsdecode(url)
    slipped = _SLIPPED.fullmatch(text)
    if slipped is not None:  # a pathlib.Path of a URL looks like this
        raise InvalidArgumentError(
            f"{slipped[1]}: lacks its two slashes: pass the URL as a str, {slipped[1]}://...; for "
            f"a local folder of that name write ./{slipped[1]}:..."
        )
    split = _SCHEME.fullmatch(text)
    if split is None or not isinstance(url, str):
        return _local(text, options)
    scheme, rest = split[1].lower(), split[2]
    if "@" in rest.partition("/")[0]:
        raise InvalidArgumentError(
            f"a {scheme}:// URL with a user or password in it is refused, since URLs end up in "
            "logs and pickles: take them out of the URL"
        )
    if scheme == "file":
        return _local(_file_path(rest), options)
    if scheme == "memory":
        return _memory(rest, options)
    raise UnsupportedStorageError(
        f"{scheme}:// is not supported: use a local path, file:// or memory://"
    )


def _local(path: str, options: Mapping[str, object]) -> LocalStorage:
    _check_options("a local folder", options, _LOCAL_OPTIONS)
    return LocalStorage(path, force=bool(options.get("force", False)))


def _memory(name: str, options: Mapping[str, object]) -> MemoryStorage:
    _check_options("memory://", options, _MEMORY_OPTIONS)
    if not name:
        raise InvalidArgumentError(
            "memory:// needs a name, as in memory://my-data, to be opened a second time; "
            "`MemoryStorage()` makes one without"
        )
    return MemoryStorage(name)


def _file_path(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidArgumentError(
            "a file:// URL has an absolute path after the two slashes, as in file:///data/winds"
        )
    return os.fsdecode(urllib.parse.unquote_to_bytes(slash + path))


def _check_options(place: str, options: Mapping[str, object], known: Mapping[str, type]) -> None:
    takes = f"{place} takes {', '.join(known) or 'no options'}"
    problems = [
        f"{name}: unknown storage option; {takes}"
        if name not in known
        else f"{name}: must be of type {known[name].__name__}"
        for name, value in options.items()
        if name not in known or not isinstance(value, known[name])
    ]
    if problems:
        raise ConfigError(problems)
