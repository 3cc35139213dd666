"""Clients of object stores, made by obstore, and what their errors mean.

Invariants:

- obstore is not imported before the first call to an object store.
- *A forked child does not call it.* obstore's threads do not exist in a child of `os.fork`, and a
  call to them would wait forever. So there is an error instead.
- *The interpreter does not end during a call*: at exit it waits for running calls, at most
  `_EXIT_S`. A thread of the library that returns to an interpreter that is gone can crash.
- *Every call ends*: an unreachable store fails after some seconds, a store that does not answer
  after two minutes; large bodies get more time.
- *Only the store's own host is contacted*, unless redirects are allowed. The client follows
  redirects by itself, sends the session token of the credentials along, and has no option against
  it. But it has options for a proxy, and for hosts to contact without one. So its proxy is a
  listener in this process, which refuses everything and notes the requested host. If the
  environment sets a proxy, requests have to use that one, and redirects are not blocked.
- Credentials come from a function that is given, or the client finds them in the environment or
  from the machine. They are in no option, and so in no pickle. A client of the caller is used as it
  is, and not pickled if there are secrets among its options.
- *No text of the client is passed on.* It contains addresses, some with signed queries, and
  whatever the server sent, which may repeat keys and tokens. Only the kind of the failure, the
  status, and a known error code are passed on.

Credentials that a caller gives by a function, and options that may be secret by their names
--------------------------------------------------------------------------------------------

Invariants:

- A secret is passed from the function to the client, and kept nowhere else. What the function
  raises is not passed on either, since it may contain one.
- *A pickle holds a reference*: the module and the name of the function. Pickles made by value, as
  cloudpickle makes them of what a notebook defines, would contain the secrets in its code.
- *Credentials are renewed*: the client asks again before the time `expires_at`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import ipaddress
import os
import re
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.runtime import SYSTEM

# What was wrong with a provider, without any text of its own: the messages of its errors.
_RAISED: Final = "the function given as credentials raised an error; call it yourself to see it"
_NO_ANSWER: Final = (
    "the function given as credentials did not return a mapping of the right keys (on S3 "
    "access_key_id, secret_access_key and perhaps token; on Google Cloud token; on Azure token, "
    "sas_token or access_key; all text) and perhaps expires_at, a datetime with a time zone"
)

_SECRET: Final = re.compile(
    r"(?i).*(key|secret|token|password|credential|sas|signature|conn(ection)?_?str).*"
)
_HEADERS: Final = re.compile(r"(?i).*(header|auth).*")
_NOT_FOUND: Final = (ImportError, AttributeError, ValueError)
_ANSWERS: Final = {
    "s3": ({"access_key_id", "secret_access_key"},),
    "gs": ({"token"},),
    "az": ({"token"}, {"sas_token"}, {"access_key"}),
}


def checked_credentials(given: object) -> Callable[[], object]:
    """Return the credentials if they are a function or a provider.

    Raises
    ------
    InvalidArgumentError
        If they are anything else, such as the secrets themselves.
    """
    if not callable(given):
        raise InvalidArgumentError(
            f"credentials is a function without arguments that returns them, not a "
            f"{type(given).__name__}: secrets themselves would end up in pickles and logs"
        )
    return given


def reference_to(credentials: Callable[[], object]) -> str:
    """Return `module:name` of a function or class, by which another process finds it.

    Raises
    ------
    InvalidArgumentError
        If it has no name in a module.
    """
    module, name = (getattr(credentials, each, "") for each in ("__module__", "__qualname__"))
    reference, found = f"{module}:{name}", None
    with contextlib.suppress(*_NOT_FOUND):
        found = resolve_name(reference)
    if found is not credentials:
        raise InvalidArgumentError(
            "these credentials cannot be sent to another process, since only the name of a "
            "function is sent, and never a secret: pass a function or class at the top of a module"
        )
    return reference


def function_named(reference: str) -> Callable[[], object]:
    """Return the function or class with that `module:name`.

    Raises
    ------
    InvalidArgumentError
        If this process has none of that name.
    """
    found: Any = None
    with contextlib.suppress(*_NOT_FOUND):
        found = resolve_name(reference)
    if not callable(found):
        raise InvalidArgumentError(
            f"credentials {reference[:200]!r} cannot be imported in this process: pass "
            "module:function of a module that every process can import"
        )
    return cast("Callable[[], object]", found)


def provider(kind: str, credentials: Callable[[], object]) -> Callable[[], dict[str, Any]]:
    """Return what the client calls for credentials; its errors say nothing of them.

    Parameters
    ----------
    kind : str
        `"s3"`, `"gs"` or `"az"`.
    credentials : callable
        Returns a mapping as obstore's credential providers do. A class is instantiated once.
    """
    made: Any = functools.cache(credentials) if isinstance(credentials, type) else None

    def provide() -> dict[str, Any]:
        failed = False
        try:
            found = made()() if made else credentials()
        except Exception:  # noqa: BLE001 - whatever it raises may contain a secret
            failed = True  # so that the error below does not have that one as its context
        if failed:
            raise RuntimeError(_RAISED)
        answer = dict(found) if isinstance(found, Mapping) else {}
        expires_at = answer.pop("expires_at", None)
        timed = isinstance(expires_at, datetime) and expires_at.tzinfo is not None
        names = answer.keys() - ({"token"} if kind == "s3" else set())
        texts = all(isinstance(answer[name], str) and answer[name] for name in names)
        if names not in _ANSWERS[kind] or not texts or not (timed or expires_at is None):
            raise ValueError(_NO_ANSWER)
        # The client knows no other time zones, such as the SDK's.
        answer["expires_at"] = expires_at.astimezone(UTC) if timed else None
        return ({"token": None} if kind == "s3" else {}) | answer

    return provide


# --- options that may be secret ----------------------------------------------------------------


def is_secret(name: str) -> bool:
    """Whether an option of that name may hold a secret.

    Examples
    --------
    >>> from zarr_manifests.storage.object_clients import is_secret
    >>> [is_secret(name) for name in ("aws_secret_access_key", "connection_string", "region")]
    [True, True, False]
    """
    return _SECRET.fullmatch(name) is not None


def has_secrets(options: object) -> bool:
    """Whether a value in the options, at any depth, may be a secret by its name.

    A named function or a class, which a pickle only refers to, is none.

    Examples
    --------
    >>> from zarr_manifests.storage.object_clients import has_secrets
    >>> has_secrets({"client_kwargs": {"region_name": "eu-west-1"}, "anon": True, "key": None})
    False
    >>> has_secrets([{"config": {"access_key_id": "planted"}}])
    True
    """
    if isinstance(options, Mapping):
        return any(
            has_secrets(value)
            or ((is_secret(str(name)) or _HEADERS.fullmatch(str(name))) and not _is_open(value))
            for name, value in options.items()
        )
    return isinstance(options, list | tuple) and any(map(has_secrets, options))


def _is_open(value: object) -> bool:
    return not value or isinstance(value, bool | int | float | FunctionType | type)


# --- clients ------------------------------------------------------------------------------------


LARGE_BYTES: Final = 8 * 1024 * 1024
"""Bodies larger than this get more time."""

_NAME: Final = "obstore"
_LARGE_TIMES: Final = 15
_EXIT_S: Final = 30.0
_SETTLE_S: Final = 0.2
_ENDPOINT_VARIABLES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_RUNNING: Final[set[object]] = set()
_FORKED: Final[list[bool]] = []


def _mark_child() -> None:
    _RUNNING.clear()  # they belong to the parent
    if f"{_NAME}._{_NAME}" in sys.modules:
        _FORKED.append(True)


os.register_at_fork(after_in_child=_mark_child)


def check_installed(scheme: str) -> None:
    """Refuse a URL of an object store if the package for it is not installed.

    Raises
    ------
    UnsupportedStorageError
        If it is not installed.
    """
    if importlib.util.find_spec(_NAME) is None:
        raise UnsupportedStorageError(
            f"{scheme}:// needs the package {_NAME}: pip install 'zarr-manifests[object]'"
        )


def library() -> Any:
    """The library, imported on first use.

    Raises
    ------
    StorageError
        If this process is a fork of one that has imported it.
    """
    if _FORKED:
        raise StorageError(
            "a process made by os.fork cannot use object stores if its parent did: the client's "
            "threads are missing there, and a request would wait forever. Start processes by the "
            "method 'spawn' or 'forkserver', as by multiprocessing.set_start_method('spawn')"
        )
    return importlib.import_module(_NAME)


# --- running calls ---------------------------------------------------------------------------


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Register a running call for the block."""
    call = object()
    _RUNNING.add(call)
    try:
        yield
    finally:
        _RUNNING.discard(call)


def _wait_for_calls() -> None:
    if not _RUNNING:
        return
    until_s = SYSTEM.monotonic_s() + _EXIT_S
    while _RUNNING and SYSTEM.monotonic_s() < until_s:
        SYSTEM.sleep(0.005)
    # The library's thread still has to release objects, for which it needs Python.
    SYSTEM.sleep(_SETTLE_S)


atexit.register(_wait_for_calls)


# --- a client --------------------------------------------------------------------------------


class Patience(Struct, frozen=True):
    """Timeouts and retries of an object store.

    Parameters
    ----------
    connect_s, request_s : float
        Timeouts of a connection and of an answer.
    tries : int
        The largest number of retries.
    tries_s : float
        The time after which there are no more retries.
    first_wait_s, longest_wait_s : float
        The wait before the first retry, doubled each time, and its limit.
    """

    connect_s: float = 5.0
    request_s: float = 60.0
    tries: int = 5
    tries_s: float = 15.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0


PATIENCE = Patience()

type OptionValue = str | bool | int | float | tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an object store is, and how to connect to it; without secrets.

    Parameters
    ----------
    kind : str
        `"s3"`, `"gs"`, `"az"`, `"http"` or `"fsspec"`.
    bucket : str
        The bucket or container; the whole URL for the last two.
    prefix : str
        The prefix, without slashes at its ends; may be empty.
    options : tuple of (str, value)
        The options as given; `headers` as a tuple of pairs.
    credentials : callable, optional
        Returns credentials. A pickle holds its module and name only.
    store : obstore store, optional
        The caller's own client, instead of one that is made from the options.
    only_read : bool
        Whether nothing may be written by it.
    """

    kind: str
    bucket: str
    prefix: str
    options: tuple[tuple[str, OptionValue], ...] = ()
    credentials: Callable[[], object] | None = field(default=None, repr=False)
    store: Any = field(default=None, repr=False, compare=False)
    only_read: bool = field(default=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.store is not None and has_secrets(self.store.__getnewargs_ex__()):
            raise StorageError(
                "a storage of an obstore store with secrets in its options cannot be pickled: give "
                "the store a credential provider that is a named function, or let it find "
                "credentials in the environment"
            )
        reference = None if self.credentials is None else reference_to(self.credentials)
        place = self.kind, self.bucket, self.prefix, self.options
        return _unpickled, (place, reference, {"store": self.store, "only_read": self.only_read})

    @property
    def url(self) -> str:
        """The URL that names the place."""
        if self.kind in ("http", "fsspec"):
            return self.bucket
        return f"{self.kind}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"

    @property
    def patience(self) -> Patience:
        """Timeouts and retries, where the options leave them as they are by default."""
        given: dict[str, Any] = dict(self.options)
        usual, tries = PATIENCE, given.get("retries", PATIENCE.tries)
        return replace(
            usual,
            connect_s=given.get("connect_timeout_s", usual.connect_s),
            request_s=given.get("timeout_s", usual.request_s),
            tries=tries,
            tries_s=max(usual.tries_s, tries * usual.longest_wait_s),
        )

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written: to web servers, and as the caller says of a client."""
        return self.kind == "http" or self.only_read

    def endpoint(self) -> str | None:
        """The endpoint, from the options or the environment; None for the provider's own."""
        given = dict(self.options).get("endpoint")
        names = _ENDPOINT_VARIABLES.get(self.kind, ())
        return str(given) if given else next(filter(None, map(os.environ.get, names)), None)

    def promises_conditions(self, endpoint: str | None) -> bool:
        """Whether the provider of that endpoint promises to respect conditions."""
        host = (endpoint or "").partition("://")[2].partition("/")[0].partition(":")[0]
        emulated = self.kind == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR")
        promised = endpoint is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return promised and self.store is None and not emulated

    def client(self, endpoint: str | None, *, large: bool, singly: bool) -> Any:
        """A client; with `large` for large bodies, with `singly` it deletes objects one by one.

        Raises
        ------
        InvalidArgumentError
            If the endpoint is invalid.
        """
        stores = library().store
        if self.store is not None:
            given, named = self.store.__getnewargs_ex__()
            more = {"config": named.get("config", {}) | {"disable_bulk_delete": True}}
            is_own = not singly or self.kind != "s3"
            return self.store if is_own else stores.S3Store(*given, **named | more)
        options: dict[str, Any] = dict(self.options)
        provide = None if self.credentials is None else provider(self.kind, self.credentials)
        settings = self._settings(options, endpoint, large, provided=provide is not None)
        if self.kind == "http":
            return stores.HTTPStore(self.bucket, **settings)
        config: dict[str, Any] = {}
        if options.get("anonymous") or provide is not None:
            config["skip_signature"] = provide is None  # regardless of the environment
        config["base_url" if self.kind == "gs" else "endpoint"] = endpoint
        if self.kind == "az":
            config["account_name"] = options.get("account")
        if self.kind == "s3":
            # Said here, or the environment would decide.
            config |= {"conditional_put": "etag", "aws_endpoint_url_s3": endpoint}
            config["region"] = options.get("region")
            config["request_payer"] = options.get("requester_pays")
            config["virtual_hosted_style_request"] = options.get("virtual_hosted")
            config["disable_bulk_delete"] = singly or None
        settings["config"] = {name: said for name, said in config.items() if said is not None}
        settings |= {"prefix": self.prefix or None, "credential_provider": provide}
        make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self.kind]
        return make(self.bucket, **settings)

    def _settings(
        self, options: dict[str, Any], endpoint: str | None, large: bool, *, provided: bool
    ) -> dict[str, Any]:
        patience, web = self.patience, self.kind == "http"
        times = _LARGE_TIMES if large else 1
        client_options: dict[str, Any] = {
            "allow_http": _allows_http(self, options, endpoint),
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "timeout": timedelta(seconds=patience.request_s * times),
        }
        if "headers" in options:
            client_options["default_headers"] = dict(options["headers"])
        if not options.get("allow_redirects"):
            in_environment = self.kind == "s3" and "AWS_ACCESS_KEY_ID" in os.environ
            asks = not (web or provided or options.get("anonymous") or in_environment)
            client_options |= _confined(
                self.kind, self.bucket if web else endpoint, asks_for_credentials=asks
            )
        backoff = {
            "init_backoff": timedelta(seconds=patience.first_wait_s),
            "max_backoff": timedelta(seconds=patience.longest_wait_s),
            "base": 2.0,
        }
        retries = {
            "max_retries": patience.tries,
            "retry_timeout": timedelta(seconds=patience.tries_s),
            "backoff": backoff,
        }
        return {"client_options": client_options, "retry_config": retries}


def _unpickled(place: tuple[Any, ...], reference: str | None, own: dict[str, Any]) -> Endpoint:
    credentials = None if reference is None else function_named(reference)
    kind, bucket, prefix, options = place
    return Endpoint(kind, bucket, prefix, options, credentials, **own)


def _allows_http(place: Endpoint, options: dict[str, Any], endpoint: str | None) -> bool:
    if place.kind == "http":
        return place.bucket.startswith("http:")
    said = os.environ.get("AWS_ALLOW_HTTP", "") if place.kind == "s3" else ""
    allowed = bool(options.get("allow_http", said.lower() in ("1", "true", "yes", "on")))
    if not allowed and (endpoint or "").startswith("http:"):
        raise InvalidArgumentError(
            "the endpoint is an http:// URL, by which everything travels in the open: use "
            "https://, or pass allow_http=True"
        )
    return allowed and (endpoint or "").startswith("http:")  # never by a redirect


# --- redirects -------------------------------------------------------------------------------


_ANSWER: Final = b"HTTP/1.1 421 Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_READ_BYTES: Final = 64 * 1024
_READ_S: Final = 2.0
_DRAINS: Final = 100
_ASKED: Final = re.compile(rb"(?:CONNECT |\w+ https?://)(?:[^/?# ]*@)?([\w.:\[\]-]{1,255})[/?# ]")
"""The host that a request to a proxy is for, without a user and a password."""
_OWN: Final = {"s3": "amazonaws.com", "gs": "googleapis.com", "az": "blob.core.windows.net"}
# Sources of credentials: services of the machine, the providers' own, and these variables' hosts.
_SOURCES: Final = {
    "s3": ("169.254.0.0/16", "fd00:ec2::/32", "amazonaws.com"),
    "gs": ("169.254.0.0/16", "metadata.google.internal", "googleapis.com", "accounts.google.com"),
    "az": ("169.254.0.0/16", "login.microsoftonline.com", "fabric.microsoft.com"),
}
_VARIABLES: Final = ("AWS_", "GOOGLE_", "AZURE_", "AZURITE_", "IDENTITY_", "MSI_")
_REFUSED: Final = ["unnamed"]
"""The last host that was refused, if known."""


def _confined(kind: str, url: str | None, *, asks_for_credentials: bool) -> dict[str, str]:
    """Client options with which it contacts no other host than the store's.

    Credentials come from other hosts. A URL of None is the provider's own.
    """
    from urllib.request import getproxies  # loads the client of HTTP

    if any(name in ("http", "https", "all") for name in getproxies()):
        return {}
    hosts = {_host_of(url) if url else _OWN[kind]}
    if asks_for_credentials:
        hosts.update(_SOURCES[kind])
        for name, value in os.environ.items():
            if name.upper().startswith(_VARIABLES) and re.match(r"https?://", value):
                hosts.add(_host_of(value))
        if "AZURE_STORAGE_USE_EMULATOR" in os.environ:
            hosts.add("127.0.0.1")
    excluded = ",".join(sorted(hosts - {""}))
    return {"proxy_url": f"http://127.0.0.1:{_refusing_port()}", "proxy_excludes": excluded}


def _host_of(url: str) -> str:
    host = (urllib.parse.urlsplit(url).hostname or "").lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


@functools.cache
def _refusing_port() -> int:
    """The port of a proxy in this process that refuses every request; 0 is unreachable, too."""
    try:
        server = socket.create_server(("127.0.0.1", 0))
        SYSTEM.later(0.0, functools.partial(_refuse_all, server))
    except (OSError, RuntimeError):  # no descriptor, or no thread
        return 0
    return int(server.getsockname()[1])


def _refuse_all(server: socket.socket) -> None:
    with contextlib.suppress(OSError), server:
        while True:
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_READ_S)
                _refuse(connection)


def _refuse(connection: socket.socket) -> None:
    asked = _ASKED.match(connection.recv(_READ_BYTES))
    _REFUSED[-1] = asked[1].decode().lower() if asked else "unnamed"
    connection.sendall(_ANSWER)
    connection.shutdown(socket.SHUT_WR)
    for _ in range(_DRAINS):  # unread bytes would reset the connection before the answer
        if not connection.recv(_READ_BYTES):
            return


# --- errors --------------------------------------------------------------------------------------


_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REDIRECT: Final = re.compile(
    r'kind: Redirect.*?url: "https?://([A-Za-z0-9._:\[\]-]{1,255})', re.DOTALL
)
_READ_CHARS: Final = 100_000

_CREDENTIALS: Final = (
    "give credentials by a function, from_url(..., credentials=...), by the variables of the "
    "environment that are the provider's own (on S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, "
    "if there is one, AWS_SESSION_TOKEN) or by the role of the machine; anonymous=True reads what "
    "is public"
)
_BUCKET: Final = "make the bucket, or correct its name, the endpoint or the account"
_ELSEWHERE: Final = (
    "the store sends to another region or address: give that one, region=... or endpoint=..."
)
_FULL: Final = "make room there, or raise its quota, then try again"
_LATER: Final = "the store asks for fewer requests, or has a fault; try again later"
_HINTS: Final = {
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"), _BUCKET),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed"), _ELSEWHERE),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"), _CREDENTIALS),
    **dict.fromkeys(("InvalidToken", "AuthenticationFailed"), _CREDENTIALS),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "XMinioStorageQuotaExceeded"), _FULL),
    "XMinioAdminBucketQuotaExceeded": _FULL,
}
"""What to do about an error code; only these are repeated in messages."""
_BY_STATUS: Final = {
    **dict.fromkeys((301, 302, 303, 307, 308), _ELSEWHERE),
    401: _CREDENTIALS,
    403: "these credentials do not allow it here; reading takes the rights to get and to list "
    "objects, writing those to put and to delete them as well",
    409: "somebody else writes the same object; try again",
    413: "one object cannot be as large there; make the chunks smaller",
    **dict.fromkeys((429, 500, 503), _LATER),
    507: _FULL,
}
_SAYS: Final = {
    "credentials": f"no credentials were found; {_CREDENTIALS}",
    "elsewhere": _ELSEWHERE,
    "whole": "the server has no byte ranges, and answers with the whole object; use a server that "
    "has them, or copy what is there",
    "unreachable": "the store cannot be reached; check the endpoint and the network",
    "timeout": "the store did not answer in time; check the endpoint and the network",
    "cut": "the store broke the connection off before its answer was whole; check the network",
}


class Failure(Struct, frozen=True):
    """The kind of a failure, without any text of the client or the server.

    Parameters
    ----------
    kind : str
        `"absent"`, `"exists"`, `"changed"`, `"contended"` (another request to the same object was
        running, so it may not exist), `"beyond"` (the range begins where the object has ended),
        `"credentials"`, `"unreachable"`, `"timeout"`, `"cut"` (the connection ended before the
        answer), `"elsewhere"` (in another region), `"redirected"`, `"whole"` (it has no byte
        ranges), `"provider"` (of credentials), `"filesystem"` (of fsspec) or `"other"`.
    status : int, optional
        The status of the answer, if there was one.
    code : str
        The error code in the answer, if it is a known one.
    detail : str
        The host of a redirect, if known, or what was wrong with the provider or the filesystem.
    """

    kind: str
    status: int | None = None
    code: str = ""
    detail: str = ""


class FailedCallError(Exception):
    """Raised by a client that tells its failures itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def failure_of(error: BaseException, store: str) -> Failure:
    """Classify an error of the client of that kind of store; one of this package is raised."""
    if isinstance(error, ManifestsError):
        raise error
    if isinstance(error, FailedCallError):
        return error.failure
    text = str(error)[:_READ_CHARS]
    own = text.partition("Server returned")[0]  # the client's own words
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    code = next((code for code in _CODE.findall(text) if code in _HINTS), "")
    fault = next((fault for fault in (_RAISED, _NO_ANSWER) if fault in own), "")
    if fault:
        return Failure("provider", status, code, fault)
    name, no_answer, no_bucket = type(error).__name__, status is None, _HINTS.get(code) == _BUCKET
    # The first that fits.
    kinds = {
        "contended": status == 409 and store == "s3",
        "exists": name == "AlreadyExistsError",
        "changed": name == "PreconditionError" and not no_bucket,
        "absent": (isinstance(error, FileNotFoundError) or status == 410) and not no_bucket,
        # Some servers answer a range that begins at the end of the object; the client refuses that.
        "beyond": status == 416 or "StartTooLarge {" in own,
        "whole": "Range request not supported" in text or "non-partial response when range" in text,
        "credentials": "//169.254.169.254/" in own
        or "token request" in own
        or "/api/token " in own,
        "redirected": status == 421 or "TunnelUnsuccessful" in own or "kind: Redirect" in own,
        "elsewhere": "redirect without LOCATION" in own,
        "timeout": no_answer and ("kind: Timeout" in text or "TimedOut" in text),
        "cut": no_answer and "kind: Interrupted" in text,
        "unreachable": no_answer
        and ("kind: Connect" in text or "error sending request" in text or "kind: Request" in text),
    }
    to = _REDIRECT.search(own)
    kind = next((kind for kind, fits in kinds.items() if fits), "other")
    host = to[1] if to else _REFUSED[-1] if kind == "redirected" else ""
    return Failure(kind, status, code, host)


def storage_error(failure: Failure, doing: str, key: str, url: str) -> StorageError:
    """The error to raise: the action, the object, the reason, and what to do about it."""
    if failure.kind == "absent":
        return ObjectNotFoundError(f"there is no object {key!r} in {url}")
    said = " ".join(filter(None, [str(failure.status or ""), failure.code]))
    hint = _HINTS.get(failure.code) or _BY_STATUS.get(failure.status or 0, "")
    why = f"the store refused ({said})" if said else "the client of the store failed"
    why += f": {hint}" if hint else ""
    kind: type[StorageError] = StorageError
    if failure.kind in ("provider", "filesystem"):
        why = failure.detail
    elif failure.kind == "redirected":
        why = (
            f"the store sends to another host, {failure.detail}, which was not asked: use the "
            "address that it sends to, or, for a web server, from_url(..., allow_redirects=True)"
        )
    elif failure.kind in _SAYS:
        why = _SAYS[failure.kind]
        kind = UnsupportedStorageError if failure.kind == "whole" else StorageError
    elif hint == _FULL:
        kind = StorageFullError
    elif failure.status == 501:
        kind = UnsupportedStorageError
    return kind(f"cannot {doing} {f'{key!r} in {url}' if key else url}: {why}")
