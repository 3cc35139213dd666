"""Clients of object stores, made by obstore, per process.

Invariants:

- obstore is not imported before the first call to an object store.
- *A forked child has its own client.* obstore's threads do not exist in a child, and a call to them
  would wait forever. So the child loads the library a second time, from a copy, and shares nothing
  with its parent.
- *The interpreter does not end during a call*: at exit it waits for running calls, at most
  `_EXIT_S`. A thread of the library that returns to an interpreter that is gone can crash.
- *Every call ends*: an unreachable store fails after some seconds, a store that does not answer
  after two minutes; large bodies get more time.
- Only the store's own host is contacted (see `object_redirects`), unless redirects are allowed.
- Credentials come from a function that is given (see `object_credentials`), from a profile of the
  AWS configuration, or the client finds them in the environment or from the machine. They are in
  no option, and so in no pickle.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.records import dataclass
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.object_credentials import (
    Provider,
    function_named,
    profile_provider,
    profile_region,
    reference_to,
)
from zarr_manifests.storage.object_redirects import confined

__all__ = [
    "LARGE_BYTES",
    "PATIENCE",
    "Endpoint",
    "Library",
    "OptionValue",
    "Patience",
    "calling",
    "check_installed",
    "generation",
    "library",
]

LARGE_BYTES: Final = 8 * 1024 * 1024
"""Bodies larger than this get more time."""

_EXIT_S: Final = 30.0
_SETTLE_S: Final = 0.2
_NAME: Final = "obstore"
_ENDPOINT_VARIABLES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries of an object store.

    Parameters
    ----------
    connect_s, request_s, large_request_s : float
        Timeouts of a connection, of an answer, and of one with a large body.
    tries : int
        The largest number of retries.
    tries_s : float
        The time after which there are no more retries.
    first_wait_s, longest_wait_s : float
        The wait before the first retry, doubled each time, and its limit.
    """

    connect_s: float = 5.0
    request_s: float = 60.0
    large_request_s: float = 900.0
    tries: int = 5
    tries_s: float = 15.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0

    def wait_s(self, attempt: int) -> float:
        """The longest wait after that try, counted from 0."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0**attempt)

    @property
    def retry_config(self) -> dict[str, Any]:
        """The same, as options of the client."""
        return {
            "max_retries": self.tries,
            "retry_timeout": timedelta(seconds=self.tries_s),
            "backoff": {
                "init_backoff": timedelta(seconds=self.first_wait_s),
                "max_backoff": timedelta(seconds=self.longest_wait_s),
                "base": 2.0,
            },
        }


PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Library:
    """obstore, as loaded in this process."""

    obstore: Any
    stores: Any
    errors: tuple[type[BaseException], ...]


@dataclass(slots=True)
class _Here:
    """State of this process."""

    library: Library | None = None
    generation: int = 0
    inherited: bool = False
    calls: set[object] = field(default_factory=set)


_HERE = _Here()
_LOCK = ForkSafeLock()


def _forget() -> None:
    _HERE.library = None
    _HERE.generation += 1
    _HERE.inherited = _HERE.inherited or f"{_NAME}._obstore" in sys.modules
    _HERE.calls = set()  # they belong to the parent


os.register_at_fork(after_in_child=_forget)


def generation() -> int:
    """A number that changes in a forked child, which needs new clients."""
    return _HERE.generation


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


def library() -> Library:
    """The library for this process, loaded on first use."""
    found = _HERE.library
    if found is None:
        with _LOCK:
            found = _HERE.library or _load()
            _HERE.library = found
    return found


def _load() -> Library:
    with _copied() if _HERE.inherited else contextlib.nullcontext():
        obstore: Any = importlib.import_module(_NAME)
        stores: Any = importlib.import_module(f"{_NAME}.store")
        exceptions: Any = importlib.import_module(f"{_NAME}.exceptions")
    return Library(obstore, stores, (exceptions.BaseError, OSError, ValueError, RuntimeError))


@contextlib.contextmanager
def _copied() -> Iterator[None]:
    """Import from a copy of the library, leaving other modules as they are."""
    kept = {name: mod for name, mod in sys.modules.items() if name.partition(".")[0] == _NAME}
    inner = f"{_NAME}._obstore"
    source = kept[inner].__file__
    assert source is not None
    with _copy_of(source) as copy:
        finder = _Finder(inner, copy)
        for name in kept:
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [n for n in sys.modules if n.partition(".")[0] == _NAME]:
                del sys.modules[name]
            sys.modules.update(kept)


@contextlib.contextmanager
def _copy_of(source: str) -> Iterator[str]:
    """A copy of the file, whose name is valid for the block."""
    if sys.platform == "linux":  # folders for temporary files may forbid execution
        fd = os.memfd_create(_NAME)
        try:
            with Path(source).open("rb") as original, open(fd, "wb", closefd=False) as copy:
                shutil.copyfileobj(original, copy)
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield shutil.copy(source, folder)


class _Finder:
    """Finds one module in a file with another name."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self._path)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


# --- running calls ---------------------------------------------------------------------------


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Register a running call for the block."""
    calls, call = _HERE.calls, object()
    calls.add(call)
    try:
        yield
    finally:
        calls.discard(call)


def _wait_for_calls() -> None:
    if not _HERE.calls:
        return
    until_s = SYSTEM.monotonic_s() + _EXIT_S
    while _HERE.calls and SYSTEM.monotonic_s() < until_s:
        SYSTEM.sleep(0.005)
    # The library's thread still has to release objects, for which it needs Python.
    SYSTEM.sleep(_SETTLE_S)


atexit.register(_wait_for_calls)


# --- a client --------------------------------------------------------------------------------


type OptionValue = str | bool | int | float | tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an object store is, and how to connect to it; without secrets.

    Parameters
    ----------
    kind : str
        `"s3"`, `"gs"`, `"az"` or `"http"`.
    bucket : str
        The bucket or container; the whole URL for `"http"`.
    prefix : str
        The prefix, without slashes at its ends; may be empty.
    options : tuple of (str, value)
        The options as given; `headers` as a tuple of pairs.
    credentials : callable, optional
        Returns credentials. A pickle holds its module and name only.
    own : OwnClient, optional
        The caller's own client, instead of one that is made from the options.
    """

    kind: str
    bucket: str
    prefix: str
    options: tuple[tuple[str, OptionValue], ...] = ()
    credentials: Callable[[], object] | None = field(default=None, repr=False)
    own: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        reference = None if self.credentials is None else reference_to(self.credentials)
        return _unpickled, (self.kind, self.bucket, self.prefix, self.options, reference, self.own)

    @property
    def url(self) -> str:
        """The URL that names the place."""
        if self.own is not None and self.own.url is not None:
            return str(self.own.url)
        if self.kind == "http":
            return self.bucket
        return f"{self.kind}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"

    @property
    def patience(self) -> Patience:
        """Timeouts and retries, where the options leave them as they are by default."""
        options: dict[str, Any] = dict(self.options)
        patience = PATIENCE
        if "connect_timeout_s" in options:
            patience = replace(patience, connect_s=float(options["connect_timeout_s"]))
        if "timeout_s" in options:
            large = patience.large_request_s / patience.request_s
            s = float(options["timeout_s"])
            patience = replace(patience, request_s=s, large_request_s=s * large)
        if "retries" in options:
            tries = int(options["retries"])
            tries_s = max(patience.tries_s, tries * patience.longest_wait_s)
            patience = replace(patience, tries=tries, tries_s=tries_s)
        return patience

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written: to web servers, and as the caller says of a client."""
        return self.kind == "http" or (self.own is not None and bool(self.own.read_only))

    def endpoint(self) -> str | None:
        """The endpoint, from the options or the environment; None for the provider's own."""
        given = dict(self.options).get("endpoint")
        names = _ENDPOINT_VARIABLES.get(self.kind, ())
        return (
            str(given) if given else next((os.environ[n] for n in names if os.environ.get(n)), None)
        )

    def client(self, endpoint: str | None, *, large: bool, singly: bool = False) -> Any:
        """A client of this process.

        With `large` it has longer timeouts. With `singly` it deletes each object by a request.

        Raises
        ------
        InvalidArgumentError
            If the endpoint is invalid.
        """
        if self.own is not None:
            return self.own.client(singly=singly)
        stores, patience = library().stores, self.patience
        options: dict[str, Any] = dict(self.options)
        request_s = patience.large_request_s if large else patience.request_s
        settings: dict[str, Any] = {
            "client_options": {
                "allow_http": self._allows_http(options, endpoint),
                "connect_timeout": timedelta(seconds=patience.connect_s),
                "timeout": timedelta(seconds=request_s),
            },
            "retry_config": patience.retry_config,
        }
        if "headers" in options:
            settings["client_options"]["default_headers"] = dict(options["headers"])
        provider = self._provider(options)
        if provider is not None:
            settings["credential_provider"] = provider
        if not options.get("allow_redirects"):
            url = self.bucket if self.kind == "http" else endpoint
            settings["client_options"] |= confined(
                self.kind, url, credentials=provider is None and self._asks_for_credentials(options)
            )
        if self.kind == "http":
            return stores.HTTPStore(self.bucket, **settings)
        settings["prefix"] = self.prefix or None
        config: dict[str, Any] = {}
        if options.get("anonymous") or provider is not None:
            config["skip_signature"] = provider is None  # regardless of the environment
        if endpoint is not None:
            config["base_url" if self.kind == "gs" else "endpoint"] = endpoint
            if self.kind == "s3":  # else the environment variable would take precedence
                config["aws_endpoint_url_s3"] = endpoint
        if self.kind == "gs":
            return stores.GCSStore(self.bucket, config=config, **settings)
        if self.kind == "az":
            if "account" in options:
                config["account_name"] = options["account"]
            return stores.AzureStore(self.bucket, config=config, **settings)
        config |= _s3_config(options) | ({"disable_bulk_delete": True} if singly else {})
        return stores.S3Store(self.bucket, config=config, **settings)

    def _provider(self, options: Mapping[str, Any]) -> Provider | None:
        if self.credentials is not None:
            return Provider(self.kind, self.credentials)
        return profile_provider(options["profile"]) if "profile" in options else None

    def _asks_for_credentials(self, options: Mapping[str, Any]) -> bool:
        given = self.kind == "s3" and "AWS_ACCESS_KEY_ID" in os.environ
        return self.kind != "http" and not options.get("anonymous") and not given

    def _allows_http(self, options: Mapping[str, Any], endpoint: str | None) -> bool:
        if self.kind == "http":
            return self.bucket.startswith("http:")
        said = os.environ.get("AWS_ALLOW_HTTP", "") if self.kind == "s3" else ""
        allowed = bool(options.get("allow_http", said.lower() in ("1", "true", "yes", "on")))
        if not allowed and (endpoint or "").startswith("http:"):
            raise InvalidArgumentError(
                "the endpoint is an http:// URL, by which everything travels in the open: use "
                "https://, or pass allow_http=True"
            )
        return allowed and (endpoint or "").startswith("http:")  # never by a redirect


def _unpickled(
    kind: str,
    bucket: str,
    prefix: str,
    options: tuple[tuple[str, OptionValue], ...],
    reference: str | None,
    own: Any,
) -> Endpoint:
    credentials = None if reference is None else function_named(reference)
    return Endpoint(kind, bucket, prefix, options, credentials, own)


def _s3_config(options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"conditional_put": "etag"}  # regardless of the environment
    region = options.get("region")
    if region is None and "profile" in options:
        region = profile_region(options["profile"])
    if region is not None:
        config["region"] = region
    if "requester_pays" in options:
        config["request_payer"] = options["requester_pays"]
    if "virtual_hosted" in options:
        config["virtual_hosted_style_request"] = options["virtual_hosted"]
    return config
