"""Opening the storage that a URL names.

A URL holds no secrets: one with a user or a password is refused, and no message repeats more of
a refused URL than its scheme.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Final

from zarr_manifests.errors import ConfigError, InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.object_clients import Endpoint, check_installed
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import Storage

__all__ = ["Location", "from_url", "refuse_options", "storage_of"]

type Location = str | os.PathLike[str] | Storage
"""What names a place: a path, a URL, or the storage itself."""

_SLIPPED = re.compile(r"(file|memory|s3|gs|gcs|az|abfss?|https?):(?!//).*", re.DOTALL)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_OPTIONS = {"force": bool, "follow_links": bool}
_MEMORY_OPTIONS: dict[str, type] = {}
_OBJECT_OPTIONS: Final[dict[str, dict[str, type]]] = {
    "s3": {
        "region": str,
        "endpoint": str,
        "allow_http": bool,
        "anonymous": bool,
        "virtual_hosted": bool,
    },
    "gs": {"endpoint": str, "allow_http": bool, "anonymous": bool},
    "az": {"account": str, "endpoint": str, "allow_http": bool, "anonymous": bool},
    "http": {"allow_redirects": bool},
}
_SECRET: Final = re.compile(r"(?i).*(key|secret|token|password|credential|sas|signature).*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
# Characters that the client or the store would write differently.
_ODD: Final = re.compile(r"""[\x00-\x1f\x7f\\{}^%`\[\]"<>~#|*?]""")
_HTTP: Final = re.compile(
    r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[^?#\x00-\x20]*)?"
)


def from_url(url: str | os.PathLike[str], **options: object) -> Storage:
    """Open the storage that `url` names.

    Parameters
    ----------
    url : str or os.PathLike
        A path or `file://` URL of a local folder, `memory://<name>`, `s3://bucket/prefix`,
        `gs://bucket/prefix`, `az://container/prefix`, or, read-only, `https://host/path`.
    **options
        For a local folder: `force` (bool) also writes to network filesystems; `follow_links`
        (bool) follows symbolic links in it. For object stores: `endpoint` (str), if it is not the
        provider's own; `allow_http` (bool), if that is an http:// URL; `anonymous` (bool), to read
        without credentials; on S3 `region` (str) and `virtual_hosted` (bool), if the bucket is part
        of the host name; on Azure `account` (str). For a web server: `allow_redirects` (bool), to
        follow redirects to other hosts. Credentials are not options: they come from the environment
        or from the machine.

    Raises
    ------
    UnsupportedStorageError
        If the scheme of the URL is not one of these, or needs a package that is not installed.
    ConfigError
        If options are unknown or of the wrong type; it names all of them.
    InvalidArgumentError
        If the URL is malformed, or contains a user or a password.

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
    if scheme in ("s3", "gs", "az", "http", "https"):
        return _object(scheme, rest, options)
    raise UnsupportedStorageError(
        f"{scheme}:// is not supported: use a local path, file://, memory://, s3://, gs://, az:// "
        "or, to read only, https://"
    )


def storage_of(location: Location, storage_options: Mapping[str, object] | None = None) -> Storage:
    """Return the storage at a path or URL; a storage is returned as it is.

    Every function that takes a location comes here.

    Parameters
    ----------
    location : str, os.PathLike or Storage
        The place.
    storage_options : mapping, optional
        Options of `from_url`.

    Raises
    ------
    InvalidArgumentError
        If there are options, but the location is a storage; or if they are no mapping.
    UnsupportedStorageError, ConfigError
        As for `from_url`.

    Examples
    --------
    >>> from zarr_manifests.storage.url import storage_of
    >>> storage = storage_of("memory://storage-of-example")
    >>> storage_of(storage) is storage
    True
    """
    if isinstance(location, Storage):
        refuse_options("a storage", storage_options)
        return location
    options: object = {} if storage_options is None else storage_options
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidArgumentError("storage_options is a mapping, such as {'region': 'eu-west-1'}")
    return from_url(location, **options)


def refuse_options(what: str, storage_options: Mapping[str, object] | None) -> None:
    """Refuse options for a place that is open already.

    Raises
    ------
    InvalidArgumentError
        If there are any.
    """
    if storage_options:
        raise InvalidArgumentError(
            f"storage_options belong to a path or URL, and {what} was given, which is open "
            "already: pass its URL, or leave storage_options out"
        )


def _local(path: str, options: Mapping[str, object]) -> LocalStorage:
    _check_options("a local folder", options, _LOCAL_OPTIONS)
    force, follow_links = (bool(options.get(name)) for name in ("force", "follow_links"))
    return LocalStorage(path, force=force, follow_links=follow_links)


def _memory(name: str, options: Mapping[str, object]) -> MemoryStorage:
    _check_options("memory://", options, _MEMORY_OPTIONS)
    if not name:
        raise InvalidArgumentError(
            "memory:// needs a name, as in memory://my-data, to be opened a second time; "
            "`MemoryStorage()` makes one without"
        )
    return MemoryStorage(name)


def _object(scheme: str, rest: str, options: Mapping[str, object]) -> ObjectStorage:
    kind = "http" if scheme == "https" else scheme
    _refuse_secrets(options)
    _check_options(f"{scheme}://", options, _OBJECT_OPTIONS[kind])
    check_installed(scheme)
    if kind == "http":
        if not _HTTP.fullmatch(rest):
            raise InvalidArgumentError(
                f"a {scheme}:// URL is of the form {scheme}://host/path, without a query: what is "
                "signed in a query is a secret, and is refused"
            )
        place = Endpoint(kind, f"{scheme}://{rest.rstrip('/')}", "", _given(options))
        return ObjectStorage(place)
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    segments = prefix.split("/") if prefix else []
    if (
        not _BUCKET.fullmatch(bucket)
        or _ODD.search(prefix)
        or any(segment in ("", ".", "..") for segment in segments)
    ):
        raise InvalidArgumentError(
            f"a {scheme}:// URL is of the form {scheme}://bucket/prefix, without a query, with no "
            "segment of the prefix empty, '.' or '..', and none of the characters "
            '\\ { } ^ % ` [ ] " < > ~ # | * ? in it'
        )
    _check_endpoint(options.get("endpoint"))
    if kind == "az" and not (
        options.get("account") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    ):
        raise ConfigError(["account: az:// needs the name of the storage account: account='...'"])
    return ObjectStorage(Endpoint(kind, bucket, prefix, _given(options)))


def _given(options: Mapping[str, object]) -> tuple[tuple[str, str | bool], ...]:
    given = ((name, value) for name, value in options.items() if isinstance(value, str | bool))
    return tuple(sorted(given))


def _refuse_secrets(options: Mapping[str, object]) -> None:
    secret = [name for name in options if _SECRET.fullmatch(name)]
    if secret:
        raise ConfigError(
            [
                f"{name}: a secret cannot be a storage option, since options end up in pickles: "
                "set the provider's own environment variables, such as AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
                for name in secret
            ]
        )


def _check_endpoint(endpoint: object) -> None:
    if endpoint is None:
        return
    split = _SCHEME.fullmatch(str(endpoint))
    if (
        split is None
        or split[1].lower() not in ("http", "https")
        or "@" in split[2]
        or not _HTTP.fullmatch(split[2])
    ):
        raise ConfigError(
            [
                (
                    "endpoint: must be of the form https://host or http://host:port, without a "
                    "user, a password or a query"
                )
            ]
        )


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
