"""Opening the storage that a URL names.

A URL holds no secrets: one with a user or a password is refused, and no message repeats more of
a refused URL than its scheme.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.errors import ConfigError, InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.storage.object_clients import checked_credentials, function_named, is_secret
from zarr_manifests.storage.protocol import Storage

if TYPE_CHECKING:
    from zarr_manifests.storage.object_clients import OptionValue
    from zarr_manifests.storage.object_store import ObjectStorage

type Location = str | os.PathLike[str] | Storage
"""What names a place: a path, a URL, or the storage itself."""

_SLIPPED = re.compile(r"(file|memory|s3a?|gs|gcs|az|abfss?|https?):(?!//).*", re.DOTALL)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_CLIENT_OPTIONS: Final[dict[str, type]] = {
    "headers": Mapping,
    "retries": int,
    "timeout_s": float,
    "connect_timeout_s": float,
    "concurrency": int,
}
_STORE_OPTIONS: Final = {
    "endpoint": str,
    "allow_http": bool,
    "anonymous": bool,
    "credentials": Callable,
    "storage_class": str,
    **_CLIENT_OPTIONS,
}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "file": {"force": bool},
    "memory": {},
    "s3": {
        "region": str,
        "virtual_hosted": bool,
        "requester_pays": bool,
        **_STORE_OPTIONS,
    },
    "gs": _STORE_OPTIONS,
    "az": {"account": str, **_STORE_OPTIONS},
    "http": {"allow_redirects": bool, **_CLIENT_OPTIONS},
}
_ALSO: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "https": "http"}
_KINDS: Final = {kind: kind for kind in _OPTIONS} | _ALSO
"""The kind of place by scheme."""
_SPARK_AZURE: Final = re.compile(
    r"([a-z0-9$-]+)@([a-z0-9]{3,24})\.(?:dfs|blob)\.core\.windows\.net(/.*)?"
)
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{0,4096}")
_SECRET_HEADER: Final = re.compile(
    r"(?i).*(authorization|cookie|secret|token|password|credential|signature|key(?!-id)).*"
)
_MOST: Final = {"retries": 100, "timeout_s": 86400, "connect_timeout_s": 3600, "concurrency": 10000}
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
# Characters that the client or the store would write differently.
_ODD: Final = re.compile(r"""[\x00-\x1f\x7f\\{}^%`\[\]"<>~#|*?]""")
_HTTP: Final = re.compile(
    r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[^?#\x00-\x20]*)?"
)


def from_url(
    url: str | os.PathLike[str],
    *,
    credentials: Callable[[], object] | None = None,
    **options: object,
) -> Storage:
    """Open the storage that `url` names.

    Parameters
    ----------
    url : str or os.PathLike
        A path or `file://` URL of a local folder, `memory://<name>`, `s3://bucket/prefix`,
        `gs://bucket/prefix`, `az://container/prefix`, or, read-only, `https://host/path`. Also as
        Spark writes them: `s3a://`, `gcs://`, `abfs://container@account.dfs.core.windows.net/...`.
    credentials : callable, optional
        Called without arguments for the credentials of the object store, and again before they
        expire. It returns a mapping, as the credential providers of obstore do: `access_key_id`,
        `secret_access_key` and perhaps `token` on S3; `token` on Google Cloud; `token`,
        `sas_token` or `access_key` on Azure; and perhaps `expires_at`, a datetime. Only the name
        of a function or class goes to other processes, so it should be at the top of a module. By
        default credentials come from the environment or from the machine.
    **options
        For a local folder: `force` (bool) also writes to network filesystems.

        For object stores: `endpoint` (str), if it is not the provider's own; `allow_http` (bool),
        if that is an http:// URL; `anonymous` (bool), to read without credentials;
        `storage_class` (str) of what is written.

        On S3 `region` (str); `virtual_hosted` (bool), if the bucket is part of the host name;
        `requester_pays` (bool). On Azure `account` (str).

        For a web server: `allow_redirects` (bool), to follow redirects to other hosts.

        For object stores and web servers: `headers` (mapping of str to str), sent with every
        request; `retries` (int), how often a request is repeated that fails; `timeout_s` (float)
        for an answer, fifteen times as long for a body of more than 8 MiB; `connect_timeout_s`
        (float); `concurrency` (int), the largest number of requests at a time.

    Raises
    ------
    UnsupportedStorageError
        If the scheme of the URL is not one of these, or needs a package that is not installed.
    ConfigError
        If options are unknown, of the wrong type or contradict each other; it names all of them.
    InvalidArgumentError
        If the URL is malformed, or contains a user or a password; or if `credentials` is not a
        function.

    Examples
    --------
    >>> from zarr_manifests.storage import from_url
    >>> from_url("memory://example").url
    'memory://example'
    >>> from_url("/data/my%20winds").url, from_url("file:///data/my%20winds").path
    ('file:///data/my%2520winds', '/data/my winds')
    """
    if credentials is not None:
        options["credentials"] = checked_credentials(credentials)
    scheme, rest, said = _split(url, options)
    _check(scheme, said)
    if scheme == "file":
        from zarr_manifests.storage.local import LocalStorage

        return LocalStorage(rest, **said)
    if scheme != "memory":
        return _object(scheme, rest, said)
    from zarr_manifests.storage.memory import MemoryStorage

    return MemoryStorage(rest)


def parse_options(url: str | os.PathLike[str], texts: Mapping[str, str]) -> dict[str, object]:
    """Return the options of `from_url` for that URL, from text.

    Parameters
    ----------
    url : str or os.PathLike
        The place, whose kind says which options there are.
    texts : mapping of str to str
        The options: `true` and `false`, numbers, a JSON object for `headers`, and
        `module:function` for `credentials`.

    Raises
    ------
    ConfigError
        If options are unknown, or their text is not of the right kind; it names all of them.
    InvalidArgumentError
        If `credentials` names no function, or the URL is malformed.

    Examples
    --------
    >>> from zarr_manifests.storage.url import parse_options
    >>> parse_options("s3://bucket/winds", {"region": "eu-west-1", "retries": "3"})
    {'region': 'eu-west-1', 'retries': 3}
    """
    scheme, _, _ = _split(url, {})
    known = _OPTIONS[_KINDS[scheme]]
    options = {name: _value(text, known.get(name)) for name, text in texts.items()}
    _check(scheme, options)
    return options


def _value(text: str, due: Any) -> object:
    """The value that a text means; the text itself, which `_check` refuses, if it means none."""
    if due is Callable:
        return function_named(text)
    if due in (None, str):
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text.lower() if due is bool else text)
    return text


def refuse_slipped(text: str) -> None:
    """Refuse a URL without its two slashes, as a `pathlib.Path` of one is; it may hold a password.

    Raises
    ------
    InvalidArgumentError
        If it is one.
    """
    slipped = _SLIPPED.fullmatch(text)
    if slipped is not None:
        raise InvalidArgumentError(
            f"{slipped[1]}: lacks its two slashes: pass the URL as a str, {slipped[1]}://...; for "
            f"a local folder of that name write ./{slipped[1]}:..."
        )


def _split(
    url: str | os.PathLike[str], options: Mapping[str, object]
) -> tuple[str, str, dict[str, Any]]:
    """The scheme, what follows it, and the options; for a local folder its path."""
    text = os.fsdecode(url)
    refuse_slipped(text)
    split = _SCHEME.fullmatch(text)
    if split is None or not isinstance(url, str):
        return "file", text, dict(options)
    scheme, rest = split[1].lower(), split[2]
    spark = _SPARK_AZURE.fullmatch(rest) if scheme in ("abfs", "abfss") else None
    if spark is not None:
        rest = f"{spark[1]}{spark[3] or ''}"
        if options.get("account", spark[2]) != spark[2]:
            raise ConfigError(["account: is another than the one in the URL"])
        return "az", rest, {**options, "account": spark[2]}
    if "@" in rest.partition("/")[0]:
        raise InvalidArgumentError(
            f"a {scheme}:// URL with a user or password in it is refused, since URLs end up in "
            "logs and pickles: take them out of the URL"
        )
    if scheme == "file":
        return scheme, _file_path(rest), dict(options)
    kind = _KINDS.get(scheme)
    if kind is None:
        raise UnsupportedStorageError(
            f"{scheme}:// is not supported: use a local path, file://, memory://, s3://, gs://, "
            "az:// or, to read only, https://"
        )
    return scheme if kind == "http" else kind, rest, dict(options)


def storage_of(location: Location, storage_options: Mapping[str, object] | None = None) -> Storage:
    """Return the storage at a path or URL; a storage is returned as it is.

    Every function that takes a location comes here.

    Parameters
    ----------
    location : str, os.PathLike, Storage, or a store of obstore, zarr or fsspec
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
    given: object = location
    if not isinstance(given, str | os.PathLike):
        from zarr_manifests.storage.fsspec_store import own_storage

        storage = given if isinstance(given, Storage) else own_storage(given)
        refuse_options("a storage", storage_options)
        return storage
    options: object = {} if storage_options is None else storage_options
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidArgumentError("storage_options is a mapping, such as {'region': 'eu-west-1'}")
    arguments: dict[str, Any] = dict(options)
    return from_url(given, **arguments)


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


def _object(scheme: str, rest: str, options: Mapping[str, Any]) -> ObjectStorage:
    from zarr_manifests.storage.object_clients import Endpoint, check_installed
    from zarr_manifests.storage.object_store import ObjectStorage

    kind = _KINDS[scheme]
    check_installed(scheme)
    if kind == "http":
        if not _HTTP.fullmatch(rest):
            raise InvalidArgumentError(
                f"a {scheme}:// URL is of the form {scheme}://host/path, without a query: the "
                "signature of a signed URL is a secret, and is refused"
            )
        return ObjectStorage(Endpoint(kind, f"{scheme}://{rest.rstrip('/')}", "", _given(options)))
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if (
        not _BUCKET.fullmatch(bucket)
        or _ODD.search(prefix)
        or (prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")))
    ):
        raise InvalidArgumentError(
            f"a {scheme}:// URL is of the form {scheme}://bucket/prefix, without a query, with no "
            "segment of the prefix empty, '.' or '..', and none of the characters "
            '\\ { } ^ % ` [ ] " < > ~ # | * ? in it'
        )
    if kind == "az" and not (
        options.get("account") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    ):
        raise ConfigError(["account: az:// needs the name of the storage account: account='...'"])
    return ObjectStorage(
        Endpoint(kind, bucket, prefix, _given(options), options.get("credentials"))
    )


def _given(options: Mapping[str, object]) -> tuple[tuple[str, OptionValue], ...]:
    """The options as they are kept, without those that are off or left out."""
    kept: dict[str, OptionValue] = {}
    for name, value in options.items():
        if isinstance(value, str | int | float):
            kept[name] = value
        elif isinstance(value, Mapping):
            kept[name] = tuple(sorted(value.items()))
    return tuple(sorted(kept.items()))


def _file_path(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidArgumentError(
            "a file:// URL has an absolute path after the two slashes, as in file:///data/winds"
        )
    return os.fsdecode(urllib.parse.unquote_to_bytes(slash + path))


def _check(scheme: str, options: Mapping[str, object]) -> None:
    """Report all faults of the options at once."""
    known = _OPTIONS[_KINDS[scheme]]
    place = "a local folder" if scheme == "file" else f"{scheme}://"
    takes = f"{place} takes {', '.join(known) or 'no options'}"
    problems = []
    for name, value in options.items():
        if name in known:
            problem = _fault(name, value, known[name])
        elif name != "credentials" and is_secret(name):
            problem = (
                "a secret cannot be a storage option, since options end up in pickles: give a "
                "function, credentials=..., or set the provider's own environment variables, such "
                "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        else:
            problem = f"unknown storage option; {takes}"
        problems += [f"{name}: {problem}"] if problem else []
    if options.get("anonymous") and options.get("credentials"):
        problems.append("credentials: contradicts anonymous; give one of them")
    if problems:
        raise ConfigError(problems)


def _fault(name: str, value: object, due: Any) -> str:
    """What is wrong with a value; empty if nothing is."""
    if due is Mapping:
        return _fault_of_headers(value)
    if due in (int, float):
        most = _MOST[name]
        kinds = (int,) if due is int else (int, float)
        least = 0 if name == "retries" else 1 if due is int else 0.001
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            return f"must be of type {due.__name__}, from {least} to {most}"
        return ""
    if not isinstance(value, due):
        return "must be true or false" if due is bool else f"must be of type {due.__name__}"
    return _fault_of_endpoint(value) if name == "endpoint" else ""


def _fault_of_headers(value: object) -> str:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str)
        and _HEADER.fullmatch(name)
        and isinstance(text, str)
        and _HEADER_VALUE.fullmatch(text)
        for name, text in value.items()
    ):
        return 'must map names of headers to text in ASCII, such as {"x-team": "winds"}'
    if any(_SECRET_HEADER.fullmatch(name) for name in value):
        return (
            "must hold no secrets, since options end up in pickles: give credentials by a "
            "function, credentials=..."
        )
    return ""


def _fault_of_endpoint(endpoint: object) -> str:
    split = _SCHEME.fullmatch(str(endpoint))
    if (
        split is None
        or split[1].lower() not in ("http", "https")
        or "@" in split[2]
        or not _HTTP.fullmatch(split[2])
    ):
        return (
            "must be of the form https://host or http://host:port, without a user, a password or a "
            "query"
        )
    return ""
