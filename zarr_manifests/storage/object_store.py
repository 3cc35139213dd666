"""Objects in an object store: Amazon S3 and compatible ones, Google Cloud, Azure, HTTP.

How each promise is kept:

- *Whole or absent*: an object is written by one request, and exists when that is answered.
- *One winner of `create` and of `cas`*: the store decides, by the conditions `If-None-Match` and
  `If-Match` (the generation, on Google Cloud). A store that ignores them would silently lose
  commits. So a store that does not promise them is tested before the first conditional write of a
  process (see `object_proof`). If it fails, it is read-only.
- *Durable*: the providers promise it for every confirmed write. `sync` only checks that objects
  written by others exist.
- *A lost answer is no error*: requests that may be repeated (reading, deleting, writing once) are
  repeated for a while. A swap is not. If the first request did take effect, the repeated one is
  refused, and the caller finds out by reading: `create` and `cas` return what the store answered.
- The token of a version is the store's own (etag, generation). Where the etag is a digest, the same
  bytes are the same version, so a caller of `cas` has to write something unique.

No text of the client or the server is passed on (see `object_errors`), and errors are not chained
to theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from zarr_manifests.error_cases import ObjectNotFoundError, UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.object_clients import Endpoint, library
from zarr_manifests.storage.object_errors import Failure, storage_error
from zarr_manifests.storage.object_proof import Proof
from zarr_manifests.storage.object_requests import Requests
from zarr_manifests.storage.object_trial import Trial
from zarr_manifests.storage.object_versions import Version, check_name, conditional, version_of
from zarr_manifests.storage.protocol import (
    MAX_TAGGED_BYTES,
    REMOTE_CAPABILITIES,
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    check_key,
    check_prefix,
    check_range,
    is_key,
)

__all__ = ["ObjectStorage"]

_READ_ONLY: Final = replace(REMOTE_CAPABILITIES, create=False, cas=False)
_MOST_OFFSET: Final = 2**63 - 1
_LISTED: Final = 1000
_DELETED: Final = 256  # more at once, and some servers answer for part of them only
_LISTED_FROM: Final = 8
_DELETED_SINGLY: Final = 16
_NO_BULK: Final = (400, 405, 501)
_REMEMBERED: Final = 200_000
_VERSION_TRIES: Final = 5
_ALPHABET: Final = "-./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"


class ObjectStorage:
    """Storage below a prefix of an object store; opened by `from_url`.

    The store is not contacted before the first call.

    Parameters
    ----------
    place : Endpoint
        The store and prefix.

    Examples
    --------
    >>> from zarr_manifests.storage import from_url
    >>> from_url("s3://bucket/winds", region="eu-central-1")  # doctest: +SKIP
    ObjectStorage('s3://bucket/winds')
    """

    def __init__(self, place: Endpoint) -> None:
        self._place = place
        self._proof = Proof(place)  # also fixes the endpoint of requests
        self._requests = Requests(place, self._proof)
        self._trial = Trial(self._requests, self._put, self._stale, place.url)
        # Written by this object and not passed to `sync` yet: these are known to exist.
        self._written: dict[str, None] = {}
        self._deletes_many = True
        storage_class = dict(place.options).get("storage_class")
        self._attributes = storage_class and {"Storage-Class": storage_class}

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    @property
    def place(self) -> Endpoint:
        """The store and prefix, the options and who is asked for credentials."""
        return self._place

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._place,)

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def capabilities(self) -> Capabilities:
        return _READ_ONLY if self._proof.failed or self._place.read_only else REMOTE_CAPABILITIES

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        check_key(key)
        if length == 0:
            self.head(key)
            return b""
        found = self._requests.repeated(partial(self._get, key, start, length))
        return self._bytes_of(found, key)

    def _get(self, key: str, start: int, length: int | None) -> bytes:
        client, obstore = self._requests.client(length), library().obstore
        if length is not None:
            end = min(start + length, _MOST_OFFSET)
            return bytes(obstore.get_range(client, key, start=start, end=end))
        options = {"range": {"offset": start}} if start else None
        return bytes(obstore.get(client, key, options=options).bytes())

    def _bytes_of(self, found: bytes | Failure, key: str) -> bytes:
        if isinstance(found, bytes):
            return found
        if found.range_beyond:
            return b""
        raise storage_error(found, "read", key, self.url)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for start, length in ranges:
            check_range(start, length)
        check_key(key)
        spans = _spans([pair for pair in ranges if pair[1]])
        if not spans:
            self.head(key)
            return [b"" for _ in ranges]
        for _ in range(_VERSION_TRIES):
            read = self._read_spans(key, spans)
            if read is not None:
                return [_cut(spans, read, start, length) for start, length in ranges]
        raise StorageError(
            f"{key!r} in {self.url} was replaced again and again while it was read; try again"
        )

    def _read_spans(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """The spans, from one version; None if the object was replaced in the meantime."""
        if len(spans) == 1:
            return [self.get(key, spans[0][0], spans[0][1] - spans[0][0])]
        tag: dict[str, Any] = {}
        read = []

        def get(start: int, end: int) -> bytes:
            options = {"range": (start, min(end, _MOST_OFFSET)), **tag}
            answer = library().obstore.get(self._requests.client(end - start), key, options=options)
            if answer.meta["e_tag"] and not tag:
                tag["if_match"] = answer.meta["e_tag"]
            return bytes(answer.bytes())

        for start, end in spans:
            found = self._requests.repeated(partial(get, start, end))
            if isinstance(found, Failure) and found.kind == "changed":
                return None
            read.append(self._bytes_of(found, key))
        return read

    def get_tagged(self, key: str) -> Tagged:
        check_key(key)

        def get() -> tuple[bytes, Any]:
            answer = library().obstore.get(self._requests.client(), key)
            if answer.meta["size"] > MAX_TAGGED_BYTES:  # too large, so it is not read to its end
                first = next(iter(answer.stream(min_chunk_size=MAX_TAGGED_BYTES + 1)))
                return bytes(first), answer.meta
            return bytes(answer.bytes()), answer.meta

        data, meta = self._requests.ask("read", key, get)
        return Tagged(data, self._token(meta, data))

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        meta = self._requests.ask(
            "read", key, lambda: library().obstore.head(self._requests.client(), key)
        )
        return _info(key, meta)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if self._place.kind == "http":
            raise UnsupportedStorageError(
                f"{self.url} cannot be listed: a web server has no listing; open the repository "
                "for reading, or use the address of the object store itself"
            )
        return self._list(prefix, after)

    def files(self) -> Iterator[ObjectInfo]:
        """All objects, also those whose names are no keys, such as `.zarray`.

        Raises
        ------
        UnsupportedStorageError
            If it is a web server, which has no listing.
        """
        self.list()  # refuses a web server
        for meta in self._listed("", ""):
            yield _info(meta["path"], meta)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        last = ""
        for meta in self._listed(prefix, max(_listable(after), _just_before(prefix))):
            key = meta["path"]
            if key > prefix and not key.startswith(prefix):
                return
            if key < last:
                raise UnsupportedStorageError(
                    f"{self.url} does not list its objects in the order of their names, as a "
                    "directory bucket does not; use a general purpose bucket"
                )
            last = key
            if key.startswith(prefix) and key > after and is_key(key):
                yield _info(key, meta)

    def _listed(self, prefix: str, offset: str) -> Iterator[Any]:
        """The store's listing from `offset` on, which may include more than was asked for."""
        folder, _, _ = prefix.rpartition("/")
        stream: Any = None
        last = begun = ""

        def page() -> Any:
            nonlocal stream, begun
            if stream is None:  # a failed stream has ended; a new one continues where it was
                begun = last
                at = last or offset or None
                stream = iter(
                    library().obstore.list(
                        self._requests.client(), folder or None, offset=at, chunk_size=_LISTED
                    )
                )
            pages, stream = stream, None
            metas = next(pages, None)
            stream = pages
            return metas

        while (metas := self._requests.ask("list", "", page)) is not None:
            # A store may ignore the offset.
            yield from (meta for meta in metas if not begun or meta["path"] > begun)
            last = metas[-1]["path"] if metas else last

    def stray(self) -> str | None:
        """The first of the first thousand names that is not a valid key."""
        if self._place.kind == "http":
            return None
        names = itertools.islice(self.names(), _LISTED)
        return next((name for name in names if not is_key(name)), None)

    def names(self) -> Iterator[str]:
        """The names of all objects, in order, whether or not they are valid keys."""
        for meta in self._listed("", ""):
            if not meta["path"].startswith("."):
                yield meta["path"]

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        check_key(key)
        if not length:
            return await asyncio.to_thread(self.get, key, start, length)
        end = min(start + length, _MOST_OFFSET)

        def get() -> Awaitable[Any]:
            client = self._requests.client(length)
            read: Awaitable[Any] = library().obstore.get_range_async(
                client, key, start=start, end=end
            )
            return read

        found = await self._requests.answer_async(get)
        if self._requests.is_passing(found):
            return await asyncio.to_thread(self.get, key, start, length)
        return self._bytes_of(found if isinstance(found, Failure) else bytes(found), key)

    # --- objects of others -------------------------------------------------------------------

    def get_version(
        self, name: str, start: int, length: int, known: Version
    ) -> tuple[bytes, Version] | None:
        """Return bytes of the object, and its version; None if it is another than the known one.

        One request asks for both. The store compares as far as HTTP can, and may ignore the
        condition, so the caller compares again. The name need not be a valid key.
        """
        check_range(start, length)
        check_name(name)
        found = self._requests.repeated(partial(self._get_version, name, start, length, known))
        return self._version_of(found, name)

    async def get_version_async(
        self, name: str, start: int, length: int, known: Version
    ) -> tuple[bytes, Version] | None:
        """Like `get_version`."""
        check_range(start, length)
        check_name(name)

        async def get() -> tuple[bytes, Version]:
            client = self._requests.client(length)
            options = conditional(start, length, known)
            answer = await library().obstore.get_async(client, name, options=options)
            return bytes(await answer.bytes_async())[:length], version_of(answer.meta)

        found = await self._requests.answer_async(get)
        if self._requests.is_passing(found):
            return await asyncio.to_thread(self.get_version, name, start, length, known)
        return self._version_of(found, name)

    def _get_version(
        self, name: str, start: int, length: int, known: Version
    ) -> tuple[bytes, Version]:
        client, options = self._requests.client(length), conditional(start, length, known)
        answer = library().obstore.get(client, name, options=options)
        return bytes(answer.bytes())[:length], version_of(answer.meta)

    def _version_of(self, found: Any, name: str) -> tuple[bytes, Version] | None:
        if not isinstance(found, Failure):
            read: tuple[bytes, Version] = found
            return read
        if found.range_beyond:
            return b"", Version()
        if found.kind == "changed":
            return None
        raise storage_error(found, "read", name, self.url)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self.put_file(check_key(key), data)

    def put_file(self, name: str, data: bytes) -> None:
        """Like `put`, also under a name that is no key, such as `.zarray`."""
        self._refuse_read_only()
        self._requests.ask("write", name, partial(self._put, name, data, "overwrite"))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        check_key(key)
        self.end_proof()
        found = self._requests.repeated(partial(self._put, key, data, "create"))
        return self._created(found, key, durable=durable)

    def _created(self, found: Any, key: str, *, durable: bool) -> bool:
        if isinstance(found, Failure) and (
            found.kind != "exists" or self._requests.is_contended(found)
        ):
            raise storage_error(found, "write", key, self.url)
        if not durable and len(self._written) < _REMEMBERED:
            self._written[key] = None
        return not isinstance(found, Failure)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        check_key(key)
        if then_create is not None:
            check_key(then_create[0])
        if token is not None or not self._creates_once():
            self.end_proof()
        mode: Any = "create" if token is None else self._version(token)
        if mode is None:
            return None
        put = partial(self._put, key, data, mode)
        found = self._requests.repeated(put) if mode == "create" else self._requests.answer(put)
        if isinstance(found, Failure):
            if found.kind in ("exists", "changed", "absent") or self._requests.is_contended(found):
                return None
            raise storage_error(found, "write", key, self.url)
        if then_create is not None:
            with contextlib.suppress(RuntimeError):  # no more threads: the program is ending
                SYSTEM.background(partial(self._create_after, *then_create))
        return self._token(found, data)

    def _create_after(self, key: str, data: bytes) -> None:
        # The swap before it has succeeded, and is not affected by a failure here.
        self._requests.repeated(partial(self._put, key, data, "create"))

    def _put(self, key: str, data: bytes | memoryview, mode: Any) -> Any:
        client = self._requests.client(len(data))
        return library().obstore.put(
            client, key, data, mode=mode, use_multipart=False, attributes=self._attributes
        )

    def delete_many(self, keys: Iterable[str]) -> None:
        self.delete_files(map(check_key, keys))

    def delete_files(self, names: Iterable[str]) -> None:
        """Like `delete_many`, also for names that are no keys."""
        self._refuse_read_only()
        due = map(check_name, names)
        while batch := list(itertools.islice(due, _DELETED)):
            for key in batch:
                self._written.pop(key, None)
            if self._deletes_many:
                found = self._requests.repeated(partial(self._delete, batch))
                if not isinstance(found, Failure):
                    continue
                if found.kind not in ("absent", "other"):
                    raise storage_error(found, "delete", "", self.url)
                self._deletes_many = found.status not in _NO_BULK
            # What one request has not deleted is deleted by single ones.
            for some in itertools.batched(batch, _DELETED_SINGLY):
                SYSTEM.parallel([partial(self._delete_one, key) for key in some])

    def _delete_one(self, key: str) -> None:
        found = self._requests.repeated(partial(self._delete, [key], singly=True))
        if isinstance(found, Failure) and found.kind != "absent":
            raise storage_error(found, "delete", key, self.url)

    def _delete(self, keys: Sequence[str], *, singly: bool = False) -> None:
        library().obstore.delete(self._requests.client(singly=singly), keys)

    def sync(self, keys: Iterable[str]) -> None:
        folders: dict[str, set[str]] = {}
        for key in keys:
            if check_key(key) in self._written:
                self._written.pop(key, None)
            else:
                folders.setdefault(key.rpartition("/")[0], set()).add(key)
        for folder, there in folders.items():
            if folder and len(there) > _LISTED_FROM:
                self._check_listed(folder, there)
            else:
                for key in sorted(there):
                    self.head(key)

    def _check_listed(self, folder: str, keys: set[str]) -> None:
        """Like `head` for each of the keys, with as few requests as the listing takes."""
        last = max(keys)
        found = {
            info.key
            for info in itertools.takewhile(
                lambda info: info.key <= last,
                self.list(f"{folder}/", after=_just_before(min(keys))),
            )
        }
        missing = sorted(keys - found)
        if missing:
            raise ObjectNotFoundError(f"there is no object {missing[0]!r} in {self.url}")

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        check_key(key)
        if self._proof.due:
            await asyncio.to_thread(self.end_proof)
        self._refuse_unproven()

        def put() -> Awaitable[Any]:
            sent: Awaitable[Any] = library().obstore.put_async(
                self._requests.client(len(data)),
                key,
                data,
                mode="create",
                use_multipart=False,
                attributes=self._attributes,
            )
            return sent

        found = await self._requests.answer_async(put)
        if self._requests.is_passing(found):
            again = partial(self._put, key, data, "create")
            found = await asyncio.to_thread(self._requests.repeated, again)
        return self._created(found, key, durable=durable)

    # --- versions ----------------------------------------------------------------------------

    def _token(self, meta: Any, data: bytes) -> Token:
        etag, version = meta.get("e_tag"), meta.get("version")
        if self._place.kind == "http":  # where nothing is swapped
            return etag or hashlib.blake2b(data, digest_size=20).hexdigest()
        if not etag or (self._place.kind == "gs" and not version):
            raise UnsupportedStorageError(
                f"{self.url} gives no etag (or generation) with an object, so nothing can be "
                "swapped there; use a store that does"
            )
        return f"{version} {etag}" if self._place.kind == "gs" else str(etag)

    def _version(self, token: Token) -> dict[str, str] | None:
        """The condition that the object is still this version; None if no object can match."""
        if self._place.kind != "gs":
            return {"e_tag": token} if token else None
        version, _, etag = token.partition(" ")
        return {"version": version, "e_tag": etag} if version.isdigit() and etag else None

    def _stale(self, etag: str) -> Any:
        return self._version(f"1 {etag}" if self._place.kind == "gs" else etag)

    # --- whether the store respects conditions -------------------------------------------------

    def begin_proof(self) -> bool:
        """Begin the proof, if one is due; return whether what exists is not created again."""
        if self._proof.due and not self._place.read_only:
            self._trial.begin()
        return self._creates_once()

    def _creates_once(self) -> bool:
        """Whether that is known, even if the proof has not ended."""
        return self._trial.creates_once if self._proof.due else not self._proof.failed

    def end_proof(self) -> None:
        """Raise `UnsupportedStorageError` if the store ignores conditions."""
        self._refuse_read_only()
        if self._proof.due:
            self._proof.make(self._trial.ignored)
        self._refuse_unproven()

    def withdraw_proof(self) -> None:
        """Delete what `begin_proof` has written."""
        self._trial.withdraw(self._delete_one)

    def _refuse_read_only(self) -> None:
        if self._place.read_only and self._place.kind != "http":
            raise UnsupportedStorageError(f"{self.url} was opened read-only; open it for writing")
        if self._place.kind == "http":
            raise UnsupportedStorageError(
                f"{self.url} can only be read; to write, use the address of the object store "
                "itself, such as s3://bucket/prefix"
            )

    def _refuse_unproven(self) -> None:
        if self._proof.failed:
            raise UnsupportedStorageError(
                f"{self.url} can only be read: the store takes no notice of {self._proof.failed}, "
                "so commits could be lost silently. Use a store, or a version of it, that has "
                "conditional writes"
            )


# --- keys and ranges -------------------------------------------------------------------------


def _info(key: str, meta: Any) -> ObjectInfo:
    # A listing may have milliseconds; a single object's time has only seconds.
    return ObjectInfo(key, meta["size"], int(meta["last_modified"].timestamp()) * 1000)


def _listable(after: str) -> str:
    """The name if the client accepts it unchanged, else a name that sorts before all keys."""
    try:
        return check_prefix(after)
    except InvalidArgumentError:
        return ""


def _just_before(prefix: str) -> str:
    """A name just before all keys with this prefix; empty if there is none."""
    if not prefix or prefix.endswith("/"):
        return ""  # the listing covers just the folder anyway
    head, at = prefix[:-1], _ALPHABET.index(prefix[-1])
    if at and _ALPHABET[at - 1] == "/" and (not head or head.endswith("/")):
        at -= 1  # a segment is never empty
    return head + _ALPHABET[at - 1] + "z" * 8 if at else head.rstrip("/")


def _spans(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint spans (start, end) that cover all ranges, in order."""
    spans: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        end = start + length
        if spans:
            first, last = spans[-1]
            near = start <= last + REMOTE_CAPABILITIES.gap_bytes
            if start < last or (near and max(end, last) - first <= REMOTE_CAPABILITIES.span_bytes):
                spans[-1] = first, max(end, last)
                continue
        spans.append((start, end))
    return spans


def _cut(spans: Sequence[tuple[int, int]], read: Sequence[bytes], start: int, length: int) -> bytes:
    for (first, end), data in zip(spans, read, strict=True):
        if length and first <= start < end:
            return data[start - first : start - first + length]
    return b""
