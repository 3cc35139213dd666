"""Object stores that a caller has opened with obstore.

The caller's client is used as it is: its credentials, timeouts, retries and proxies. Its conditions
are tested before the first conditional write of a process, whatever its endpoint is.

A pickle contains the client's options, so a client with secrets among them is not pickled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.object_clients import Endpoint, generation, library
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import Storage
from zarr_manifests.storage.secrets import has_secrets

__all__ = ["OwnClient", "from_obstore", "is_obstore", "open_client"]

_KINDS: Final = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "http"}
_ENDPOINTS: Final = ("endpoint", "endpoint_url_s3", "base_url", "use_emulator")


def from_obstore(store: Any, *, url: str | None = None) -> Storage:
    """Return the storage in an obstore store that the caller has opened.

    Parameters
    ----------
    store : obstore store
        An `S3Store`, `GCSStore`, `AzureStore`, `HTTPStore` (read-only) or `LocalStore` of
        `obstore.store`, or a subclass. Its prefix is the place of the repository.
    url : str, optional
        The URL to show in messages, without secrets; by default that of bucket and prefix.

    Raises
    ------
    InvalidArgumentError
        If it is none of these stores, or the URL is no str.

    Examples
    --------
    >>> from obstore.store import S3Store
    >>> from zarr_manifests.storage import from_obstore
    >>> from_obstore(S3Store("bucket", prefix="winds", region="eu-central-1"))
    ObjectStorage('s3://bucket/winds')
    """
    if not isinstance(url, str | None):
        raise InvalidArgumentError("url must be a str, to be shown in messages")
    return open_client(store, url)


def open_client(store: Any, url: str | None = None, *, read_only: bool = False) -> Storage:
    """Like `from_obstore`; with `read_only` nothing is written."""
    names = [base.__name__ for base in type(store).__mro__] if is_obstore(store) else []
    if "LocalStore" in names and store.prefix is not None and not read_only:
        return LocalStorage(store.prefix)
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None:
        raise InvalidArgumentError(
            f"a {type(store).__name__} cannot hold a repository: of obstore.store, pass one of "
            f"{', '.join(_KINDS)}; for other places a path, file:// or memory://name"
        )
    own = OwnClient(store, url, read_only=read_only)
    if kind == "http":
        return ObjectStorage(Endpoint(kind, store.url, "", own=own))
    config = {name.lower().removeprefix("aws_"): value for name, value in store.config.items()}
    bucket = config.get("bucket") or config.get("container_name") or ""
    options = tuple((name, str(config[name])) for name in _ENDPOINTS if name in config)
    prefix = (store.prefix or "").strip("/")
    return ObjectStorage(Endpoint(kind, bucket, prefix, options, own=own))


def is_obstore(store: object) -> bool:
    """Whether it is a store of obstore, or of a subclass."""
    return any(base.__module__.partition(".")[0] == "obstore" for base in type(store).__mro__)


class OwnClient:
    """A client of the caller, made again in a forked child, where the caller's would hang.

    Parameters
    ----------
    store : obstore store
        The client.
    url : str, optional
        The URL to show.
    read_only : bool
        Whether nothing may be written.
    """

    def __init__(self, store: Any, url: str | None = None, *, read_only: bool = False) -> None:
        self._store, self.url, self.read_only = store, url, read_only
        self._generation = generation()

    def __repr__(self) -> str:
        return "OwnClient()"  # the store's own may contain options

    def __reduce__(self) -> tuple[object, ...]:
        if has_secrets(self._store.__getnewargs_ex__()):
            raise StorageError(
                "a storage of an obstore store with secrets in its options cannot be pickled: give "
                "the store a credential provider that is a named function, or let it find "
                "credentials in the environment"
            )
        return partial(type(self), read_only=self.read_only), (self._store, self.url)

    def client(self, *, singly: bool) -> Any:
        """The client for this process; with `singly`, one that deletes objects one by one."""
        inherited = self._generation != generation()
        if not inherited and not singly:
            return self._store
        given, named = self._store.__getnewargs_ex__()
        kind = next(b.__name__ for b in type(self._store).__mro__ if b.__name__ in _KINDS)
        if singly and kind == "S3Store":
            named = named | {"config": named["config"] | {"disable_bulk_delete": True}}
        return getattr(library().stores, kind)(*given, **named)
