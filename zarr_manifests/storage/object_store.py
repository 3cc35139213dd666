"""Objects in an object store: Amazon S3 and compatible ones, Google Cloud, Azure, HTTP.

How each promise is kept:

- *Whole or absent*: an object is written by one request, and exists when that is answered.
- *One winner of `create` and of `cas`*: the store decides, by the conditions `If-None-Match` and
  `If-Match` (the generation, on Google Cloud). A store that ignores them would silently lose
  commits. So unless the provider promises to respect them, the store is tested before the first
  conditional write of a process, and is read-only if it fails.
- *Durable*: the providers promise it for every confirmed write. `sync` only checks that objects
  written by others exist.
- *A lost answer is no error*: the client repeats what the store has refused for a while. If no
  answer came, requests that may be repeated (reading, deleting, writing once) are repeated here. A
  swap is not. If the first request did take effect, the repeated one is refused, and the caller
  finds out by reading: `create` and `cas` return what the store answered.
- The token of a version is the store's own (etag, generation). Where the etag is a digest, the same
  bytes are the same version, so a caller of `cas` has to write something unique.

No text of the client or the server is passed on (see `object_clients`), and errors are not chained
to theirs.

The test is one object, `.probe`. It is created twice and replaced on an ETag that no object has, by
three requests at once. A store that respects conditions refuses all but one of them. What it did
not refuse is sent again, once the object is there for sure. So is the swap where the object is new,
since its refusal proves nothing if it came before the object; a root can be created beside that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final

from msgspec.structs import replace

from zarr_manifests.errors import InvalidArgumentError, ObjectNotFoundError, UnsupportedStorageError
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.object_clients import (
    LARGE_BYTES,
    Endpoint,
    Failure,
    calling,
    failure_of,
    library,
    storage_error,
)
from zarr_manifests.storage.protocol import (
    MAX_TAGGED_BYTES,
    REMOTE_CAPABILITIES,
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    Version,
    check_key,
    check_prefix,
    check_range,
    is_key,
)

type _Call = Callable[[Any], Any]
"""A request, given the library."""
type _Read = tuple[bytes, Version]
"""Bytes of an object and its version."""

_READ_ONLY: Final = replace(REMOTE_CAPABILITIES, cas=False)
_MOST_OFFSET: Final = 2**63 - 1
_LISTED: Final = 1000
_DELETED: Final = 256  # more at once, and some servers answer for part of them only
_DELETED_SINGLY: Final = 16
_BEYOND: Final = b"", Version()
_REFUSED: Final = dict.fromkeys(("exists", "changed", "absent", "contended"))
"""What a failure of a read, and of a swap, means."""
_REMEMBERED: Final = 200_000
_LOOK_S: Final = 0.002

RACERS: Final = 16
_PROBE_KEY: Final = ".probe"  # not a valid key, so it is no object and never listed
_PROBE: Final = b"Here it was tried whether this store heeds conditions.\n"
_NO_SUCH_ETAG: Final = '"00000000000000000000000000000000"'
# By place and endpoint: the condition that a test has shown to be ignored; empty if there is none.
_IGNORED: Final[dict[tuple[Endpoint, str | None], str | None]] = {}
_TESTING: Final = ForkSafeLock()


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
        self.place, self.url = place, place.url
        options = dict(place.options)
        limit = options.get("concurrency")
        self._room = threading.Semaphore(limit) if isinstance(limit, int) else None
        self._clients: dict[tuple[bool, bool], Any] = {}
        self._making = threading.Lock()
        # Written by this object and not passed to `sync` yet: these are known to exist.
        self._written: dict[str, bool] = {}
        self._made_probe = self._creates_once = False
        storage_class = options.get("storage_class")
        self._attributes = storage_class and {"Storage-Class": storage_class}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.place,)

    @property
    def capabilities(self) -> Capabilities:
        return _READ_ONLY if self._ignored or self.place.read_only else REMOTE_CAPABILITIES

    # --- requests ----------------------------------------------------------------------------

    @cached_property
    def _endpoint(self) -> str | None:
        """The endpoint as it was on first use, even if the environment changes later."""
        return self.place.endpoint()

    def _client(self, nbytes: int | None = None, *, singly: bool = False) -> Any:
        """The client for a body of that size; with `singly` it deletes each object by a request."""
        at = (nbytes or 0) > LARGE_BYTES, singly
        if at not in self._clients:
            with self._making:  # it takes milliseconds, so threads that begin together share it
                if at not in self._clients:
                    made = self.place.client(self._endpoint, large=at[0], singly=singly)
                    self._clients[at] = made
        return self._clients[at]

    _library = staticmethod(library)

    def _answer(self, call: _Call) -> Any:
        """Return what the call returns, or the `Failure` it ended with."""
        obstore = self._library()
        with self._room or contextlib.nullcontext(), calling():
            try:
                return call(obstore)
            except (obstore.exceptions.BaseError, OSError, ValueError, RuntimeError) as error:
                return failure_of(error, self.place.kind)

    async def _answer_async(self, call: _Call) -> Any:
        """Like `_answer`."""
        obstore = self._library()
        # Room is shared with threads, and to wait for it as they do would stop the event loop.
        while self._room is not None and not self._room.acquire(blocking=False):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        try:
            with calling():
                return await call(obstore)
        except (obstore.exceptions.BaseError, OSError, ValueError, RuntimeError) as error:
            return failure_of(error, self.place.kind)
        finally:
            if self._room is not None:
                self._room.release()

    def _repeat(self, call: _Call) -> Any:
        """Like `_answer`, again for a while if that may help; only for what may be done twice.

        It makes at least two attempts, since the first one may have taken all the time.
        """
        found = self._answer(call)
        if self._is_passing(found):
            patience = self.place.patience
            until_s = SYSTEM.monotonic_s() + patience.tries_s
            for attempt in range(patience.tries):
                wait_s = min(patience.longest_wait_s, patience.first_wait_s * 2.0**attempt)
                SYSTEM.sleep(SYSTEM.jitter(wait_s))
                found = self._answer(call)
                if not self._is_passing(found) or SYSTEM.monotonic_s() > until_s:
                    break
        return found

    def _ask(self, doing: str, key: str, call: _Call, **means: Any) -> Any:
        """Like `_repeat`, but raise an error for a failure, unless its kind means a result."""
        return self._meant(self._repeat(call), doing, key, means)

    async def _ask_async(
        self, doing: str, key: str, call: _Call, again: Callable[[], Any], **means: Any
    ) -> Any:
        """Like `_ask`; if it may help to ask again, that is done by `again`, in a thread."""
        found = await self._answer_async(call)
        if self._is_passing(found):
            return await asyncio.to_thread(again)
        return self._meant(found, doing, key, means)

    def _meant(self, found: Any, doing: str, key: str, means: dict[str, Any]) -> Any:
        """What was found; errors are raised outside of the client's, so not chained to it."""
        if not isinstance(found, Failure):
            return found
        if found.kind in means:
            return means[found.kind]
        raise storage_error(found, doing, key, self.url)

    def _is_passing(self, found: Any) -> bool:
        """Whether the answer was lost, or another request to the same object was running.

        The client itself retries if the store reports an error or cannot be reached.
        """
        return isinstance(found, Failure) and found.kind in ("cut", "timeout", "contended")

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get_version(check_key(key), start, length)[0]

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        check_key(key)
        if not length:
            return await asyncio.to_thread(self.get, key, start, length)
        span = {"start": start, "end": min(start + length, _MOST_OFFSET)}
        found = await self._ask_async(
            "read",
            key,
            # One call instead of two, as for a version, which take longer in an event loop.
            lambda obstore: obstore.get_range_async(self._client(length), key, **span),
            partial(self.get, key, start, length),
            beyond=b"",
        )
        return bytes(found)

    def get_tagged(self, key: str) -> Tagged:
        check_key(key)

        def get(obstore: Any) -> tuple[bytes, Any]:
            answer = obstore.get(self._client(), key)
            if answer.meta["size"] > MAX_TAGGED_BYTES:  # too large, so it is not read to its end
                first = next(iter(answer.stream(min_chunk_size=MAX_TAGGED_BYTES + 1)))
                return bytes(first), answer.meta
            return bytes(answer.bytes()), answer.meta

        data, meta = self._ask("read", key, get)
        return Tagged(data, self._token(meta, data))

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return _info(key, self._ask("read", key, lambda obstore: obstore.head(self._client(), key)))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        return self._list(check_prefix(prefix), after)

    def files(self) -> Iterator[ObjectInfo]:
        """All objects, also those whose names are no keys, such as `.zarray`.

        Raises
        ------
        UnsupportedStorageError
            If it is a web server, which has no listing.
        """
        for meta in self._listed("", ""):
            yield _info(meta["path"], meta)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        last = ""
        for meta in self._listed(prefix, max(after if is_key(after) else "", _before(prefix))):
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
        if self.place.kind == "http":
            raise UnsupportedStorageError(
                f"{self.url} cannot be listed: a web server has no listing; open the repository "
                "for reading, or use the address of the object store itself"
            )
        folder = prefix.rpartition("/")[0] or None
        stream: Any = None
        last = begun = ""

        def page(obstore: Any) -> Any:
            nonlocal stream, begun
            if stream is None:  # a failed stream has ended; a new one continues where it was
                begun, at = last, last or offset or None
                pages = obstore.list(self._client(), folder, offset=at, chunk_size=_LISTED)
                stream = iter(pages)
            pages, stream = stream, None
            metas = next(pages, None)
            stream = pages
            return metas

        while (metas := self._ask("list", "", page)) is not None:
            # A store may ignore the offset.
            yield from (meta for meta in metas if not begun or meta["path"] > begun)
            last = metas[-1]["path"] if metas else last

    def stray(self) -> str | None:
        """The first of the first thousand names that is not a valid key."""
        return next((n for n in itertools.islice(self.names(), _LISTED) if not is_key(n)), None)

    def names(self) -> Iterator[str]:
        """The names of all objects, in order, whether or not they are valid keys."""
        return (info.key for info in self.files() if not info.key.startswith("."))

    # --- objects of others -------------------------------------------------------------------

    def get_version(self, name: str, start: int, length: int | None) -> _Read:
        """Return bytes of the object and its version, from one response; of no version at its end.

        The name need not be a valid key.
        """
        check_range(start, length)
        check_name(name)

        def get(obstore: Any) -> _Read:
            options = _ranged(start, length)
            answer = obstore.get(self._client(length), name, options=options)
            return bytes(answer.bytes())[:length], _version_of(answer.meta)

        found: _Read = self._ask("read", name, get, beyond=_BEYOND)
        return found

    async def get_version_async(self, name: str, start: int, length: int) -> _Read:
        """Like `get_version`."""
        check_range(start, length)
        check_name(name)

        async def get(obstore: Any) -> _Read:
            options = _ranged(start, length)
            answer = await obstore.get_async(self._client(length), name, options=options)
            return bytes(await answer.bytes_async())[:length], _version_of(answer.meta)

        again = partial(self.get_version, name, start, length)
        found: _Read = await self._ask_async("read", name, get, again, beyond=_BEYOND)
        return found

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self.put_file(check_key(key), data)

    def put_file(self, name: str, data: bytes) -> None:
        """Like `put`, also under a name that is no key, such as `.zarray`."""
        self._refuse_read_only()
        self._ask("write", name, self._putting(name, data, "overwrite"))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        check_key(key)
        self.prove()
        made = self._ask("write", key, self._putting(key, data, "create"), exists=False)
        return self._noted(made, key, durable=durable)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        check_key(key)
        if self._ignored is None:
            await asyncio.to_thread(self.prove)
        self.prove()
        put, again = self._putting(key, data, "create", "put_async"), partial(self.create, key)
        made = await self._ask_async("write", key, put, partial(again, data), exists=False)
        return self._noted(made, key, durable=durable)

    def _noted(self, made: Any, key: str, *, durable: bool) -> bool:
        if not durable and len(self._written) < _REMEMBERED:
            self._written[key] = True
        return made is not False

    def _putting(self, key: str, data: bytes | memoryview, mode: Any, how: str = "put") -> _Call:
        """A request that writes an object; `mode` is `"create"`, `"overwrite"` or a condition."""
        options = {"mode": mode, "use_multipart": False, "attributes": self._attributes}
        return lambda obstore: getattr(obstore, how)(self._client(len(data)), key, data, **options)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        check_key(key)
        self.prove(swaps=token is not None)
        new = self._swap(key, data, token)
        if new is not None and then_create is not None:
            # The swap has succeeded, and is not affected by a failure here.
            then = partial(self._repeat, self._putting(*then_create, "create"))
            with contextlib.suppress(RuntimeError):  # no more threads: the program is ending
                SYSTEM.background(then)
        return new

    def _swap(self, key: str, data: bytes, token: Token | None) -> Token | None:
        mode: Any = "create" if token is None else self._version(token)
        if mode is None:
            return None
        put = self._putting(key, data, mode)
        found = self._repeat(put) if mode == "create" else self._answer(put)
        refused = self._meant(found, "write", key, _REFUSED) is None
        return None if refused else self._token(found, data)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.delete_files(map(check_key, keys))

    def delete_files(self, names: Iterable[str]) -> None:
        """Like `delete_many`, also for names that are no keys."""
        self._refuse_read_only()
        for batch in itertools.batched(map(check_name, names), _DELETED):
            for key in batch:
                self._written.pop(key, None)
            found = self._repeat(self._deleting(batch, singly=False))
            if not isinstance(found, Failure):
                continue
            if found.kind not in ("absent", "other"):
                raise storage_error(found, "delete", "", self.url)
            # What one request has not deleted is deleted by single ones.
            for some in itertools.batched(batch, _DELETED_SINGLY):
                SYSTEM.parallel([partial(self._delete_one, key) for key in some])

    def _delete_one(self, key: str) -> None:
        self._ask("delete", key, self._deleting([key], singly=True), absent=None)

    def _deleting(self, keys: Sequence[str], *, singly: bool) -> _Call:
        return lambda obstore: obstore.delete(self._client(singly=singly), keys)

    def sync(self, keys: Iterable[str]) -> None:
        folders: dict[str, set[str]] = {}
        for key in keys:
            if not self._written.pop(check_key(key), False):
                folders.setdefault(key[: key.rfind("/") + 1], set()).add(key)
        for folder, missing in folders.items():
            last = max(missing)
            for info in self.list(folder, after=_before(min(missing))):
                missing.discard(info.key)
                if info.key >= last:
                    break
            if missing:
                raise ObjectNotFoundError(f"there is no object {min(missing)!r} in {self.url}")

    # --- versions ----------------------------------------------------------------------------

    def _token(self, meta: Any, data: bytes) -> Token:
        etag, version = meta.get("e_tag"), meta.get("version")
        if self.place.read_only:  # so nothing is swapped
            return etag or hashlib.blake2b(data, digest_size=20).hexdigest()
        if not etag or (self.place.kind == "gs" and not version):
            raise UnsupportedStorageError(
                f"{self.url} gives no etag (or generation) with an object, so nothing can be "
                "swapped there; use a store that does"
            )
        return f"{version} {etag}" if self.place.kind == "gs" else str(etag)

    def _version(self, token: Token) -> dict[str, str] | None:
        """The condition that the object is still this version; None if no object can match."""
        if self.place.kind != "gs":
            return {"e_tag": token} if token else None
        version, _, etag = token.partition(" ")
        return {"version": version, "e_tag": etag} if version.isdigit() and etag else None

    # --- whether the store respects conditions -------------------------------------------------

    _shown = "the store takes no notice of"

    @property
    def _ignored(self) -> str | None:
        """The condition that the store ignores, empty if there is none; None if a test is due."""
        if self.place.promises_conditions(self._endpoint):
            return ""
        return _IGNORED.get((self.place, self._endpoint))

    def prove(self, *, swaps: bool = True) -> None:
        """Raise `UnsupportedStorageError` if the store ignores conditions; test it once.

        Without `swaps`, it may stay open whether it ignores those of swaps.
        """
        self._refuse_read_only()
        if self._ignored is None and (swaps or not self._creates_once):
            with _TESTING:  # a second caller waits for the first
                if self._ignored is None:
                    _IGNORED[self.place, self._endpoint] = self._find_ignored(swaps=swaps)
        if self._ignored:
            raise UnsupportedStorageError(
                f"{self.url} can only be read: {self._shown} {self._ignored}, so commits could be "
                "lost silently. Use a store, or a version of it, that has conditional writes"
            )

    def withdraw_proof(self) -> None:
        """Delete the probe if `prove` has made it."""
        if self._made_probe:
            with _TESTING:  # a swap of what is not there would prove nothing
                self._creates_once = False
                self._delete_one(_PROBE_KEY)

    def _find_ignored(self, *, swaps: bool) -> str | None:
        """The header that the store ignores, empty if there is none; None if a swap is to tell."""
        create, swap = (partial(self._probe, swaps=each) for each in (False, True))
        if not self._creates_once:
            *created, swapped = SYSTEM.parallel([create, create, swap])
            # Another process may have deleted the object between them, and some stores swap what
            # is not there.
            if all(created) and create():
                return "If-None-Match"
            self._creates_once = self._made_probe and not swapped
            if not swapped and not (swaps and self._made_probe):
                return None if self._made_probe else ""
        return "If-Match" if swap() and swap() else ""

    def _probe(self, *, swaps: bool) -> bool:
        """Whether the store does what the condition forbids, or does not know conditions."""
        stale = self._version(f"1 {_NO_SUCH_ETAG}" if self.place.kind == "gs" else _NO_SUCH_ETAG)
        found = self._repeat(self._putting(_PROBE_KEY, _PROBE, stale if swaps else "create"))
        if not isinstance(found, Failure):
            self._made_probe = True
            return True
        if found.status != 501 and found.kind not in ("exists", "changed", "absent"):
            raise storage_error(found, "write", _PROBE_KEY, self.url)
        return found.status == 501

    def _refuse_read_only(self) -> None:
        if self.place.read_only:
            why = "was opened read-only; open it for writing"
            if self.place.kind == "http":
                why = "can only be read; to write, use the address of the object store itself, "
                why += "such as s3://bucket/prefix"
            raise UnsupportedStorageError(f"{self.url} {why}")


def race(put: Callable[[bytes, Token | None], Token | None]) -> tuple[str, int] | None:
    """The condition by which not exactly one of several writers wins, and how many do; or None.

    Parameters
    ----------
    put : callable
        Writes bytes in place of a version, or where nothing is; returns the new version if it won.
    """
    token: Token | None = None
    for condition in ("If-None-Match", "If-Match"):
        # Different bytes, since etags may be digests.
        data = [f"{condition} {number}".encode() for number in range(RACERS)]
        made = SYSTEM.parallel([partial(put, one, token) for one in data])
        won = [new for new in made if new is not None]
        if len(won) != 1:
            return condition, len(won)
        token = won[0]
    return None


# --- keys ------------------------------------------------------------------------------------


def _info(key: str, meta: Any) -> ObjectInfo:
    # A listing may have milliseconds; a single object's time has only seconds.
    return ObjectInfo(key, meta["size"], int(meta["last_modified"].timestamp()) * 1000)


def _before(prefix: str) -> str:
    """A name before all keys with this prefix; empty for a folder, which is listed whole."""
    return prefix[:-1].rstrip("/") if prefix.rpartition("/")[2] else ""


# --- versions of objects that others write -----------------------------------------------------


def check_name(name: str) -> str:
    """Return the name of an object, if no segment of it is empty, `.` or `..`.

    Raises
    ------
    InvalidArgumentError
        If one is, or the name is not valid Unicode text.
    """
    text = name.encode(errors="replace").decode()
    if text != name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidArgumentError(
            "the name of an object is valid Unicode text, and none of its segments is empty, '.' "
            "or '..'"
        )
    return name


def _ranged(start: int, length: int | None) -> dict[str, Any]:
    """Options of a request for a byte range; at least a byte, since there is no empty range."""
    if length is None:
        return {"range": {"offset": start}} if start else {}
    return {"range": (start, min(start + max(length, 1), _MOST_OFFSET))}


def _version_of(meta: Any) -> Version:
    """The version that an answer says; the client replaces an unknown time by zero."""
    modified_ms = int(meta["last_modified"].timestamp()) * 1000
    return Version(meta["e_tag"] or None, modified_ms or None, meta["size"])
