"""The storage contract: bytes under keys, put-if-absent, and one compare-and-swap.

Invariants every backend keeps (one test suite runs over all of them):

- A key is a relative POSIX path of `[A-Za-z0-9._-]` segments; `check_key` refuses all else, so
  no key can leave the repository's prefix. No key may be a folder of another (`a` and `a/b`): a
  disk cannot hold both and refuses the second.
- A reader sees an object whole or not at all.
- Of any number of racing `create` calls for one key exactly one returns True.
- Of any number of racing `cas` calls with the same token exactly one returns a token.
- What `create(durable=True)`, `put(durable=True)`, `cas` and `sync` have returned for survives
  a crash of the machine.
- Every failure is a `StorageError`; an absent object is an `ObjectNotFoundError`. After any
  other `StorageError` from a writing call the effect may or may not have happened.

Few requests for many byte ranges
---------------------------------

Ranges of one object are taken in order of their offsets. A range joins the request before it if the
gap between them is at most `gap_bytes` and the request stays at most `span_bytes` long. Where bytes
in gaps are to be few, only the smallest gaps are bridged. Invariants:

- Every range is a member of exactly one request, and lies within it.
- A request starts at its first member and ends at the furthest end of a member. Gaps between
  members are at most `gap_bytes`, and those of all requests together at most `spare` of the bytes
  of the ranges, if that is given, or 1 KiB if that is more.
- A request longer than `span_bytes` has one member, or all its members lie within the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError

MAX_TAGGED_BYTES: Final = 1 << 24
"""The largest object that can be swapped."""

type Token = str
"""Identifies one version of one object; can only be compared for equality."""

# Disks limit a name to 255 bytes; 200 leave room for what a backend adds to it.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*", re.ASCII)
_MAX_KEY_CHARS = 512
_MAX_OFFSET = 2**62  # beyond any object, within what system calls take


def check_key(key: str) -> str:
    """Return `key` if it is a valid storage key.

    Raises
    ------
    InvalidArgumentError
        For an empty or overlong key (512 characters, 200 a segment), an absolute one, one with
        `.`, `..`, empty or hidden segments, or with characters outside `[A-Za-z0-9._-]`.

    Examples
    --------
    >>> from zarr_manifests.storage.protocol import check_key
    >>> check_key("root/00000000000000000001")
    'root/00000000000000000001'
    """
    if is_key(key):
        return key
    raise InvalidArgumentError(
        f"storage key {key[:80]!r} is refused: keys are relative paths of [A-Za-z0-9._-] segments "
        "that do not start with a dot"
    )


def is_key(name: str) -> bool:
    """Whether the name is a valid storage key.

    Examples
    --------
    >>> from zarr_manifests.storage.protocol import is_key
    >>> is_key("root/1"), is_key(".lock")
    (True, False)
    """
    return len(name) <= _MAX_KEY_CHARS and _KEY.fullmatch(name) is not None


def check_prefix(prefix: str) -> str:
    """Return `prefix` if a key can start with it; the empty one is fine.

    Raises
    ------
    InvalidArgumentError
        If no key that `check_key` accepts starts with it.

    Examples
    --------
    >>> from zarr_manifests.storage.protocol import check_prefix
    >>> check_prefix("root/0000")
    'root/0000'
    """
    check_key(f"{prefix}x")
    return prefix


def check_range(start: int, length: int | None) -> None:
    """Refuse a byte range that begins before the object or has a negative length.

    Raises
    ------
    InvalidArgumentError
        If `start` is not in 0..2**62 or `length` is negative.
    """
    if 0 <= start <= _MAX_OFFSET and (length is None or length >= 0):
        return
    raise InvalidArgumentError(
        f"no byte range starts at {start} with length {length}: the start must be in 0..2**62 and "
        "the length 0 or more"
    )


class Capabilities(Struct, frozen=True):
    """What a storage can do.

    Parameters
    ----------
    cas : bool
        Put-if-absent and compare-and-swap are atomic. Without it a repository is read-only.
    inline : bool
        Calls are so cheap (memory, a local disk) that they are made on the calling thread, even
        in an event loop.
    durable : bool
        Written objects survive a crash of the machine (false for memory).
    shared : bool
        Another process that opens the same URL sees the same objects (false for memory).
    turns : bool
        Writers on one machine can take turns; see `TakesTurns`.
    gap_bytes : int
        In an event loop, ranges of one object with gaps of at most this size are fetched in one
        request. Reading so many bytes should cost about as much processor time as another request.
        Ignored where calls are `inline`.
    span_bytes : int
        The largest size of such a request, unless a single range is longer.
    """

    cas: bool = True
    inline: bool = False
    durable: bool = True
    shared: bool = True
    turns: bool = False
    gap_bytes: int = 64 * 1024
    span_bytes: int = 4 * 1024 * 1024


# A request costs 0.34 ms of processor time, 256 KiB more in one request 0.15 ms, and more with TLS.
REMOTE_CAPABILITIES: Final = Capabilities(gap_bytes=256 * 1024)
"""What object stores can do."""


class ObjectInfo(Struct, frozen=True):
    """Key, size in bytes and modification time (milliseconds since 1970 UTC) of an object."""

    key: str
    nbytes: int
    modified_ms: int


class Tagged(Struct, frozen=True):
    """The bytes of an object and the token of that version, from one response."""

    data: bytes
    token: Token


class Version(Struct, frozen=True):
    """What distinguishes versions of a file of somebody else; None is unknown.

    HTTP gives times in whole seconds, so a change within the second of the known time is only
    noticed by the etag or the size.

    Parameters
    ----------
    etag : str, optional
        Its etag, with or without quotes.
    modified_ms : int, optional
        Its time of modification, in milliseconds since 1970 UTC.
    nbytes : int, optional
        Its size.
    """

    etag: str | None = None
    modified_ms: int | None = None
    nbytes: int | None = None


class Files(Protocol):
    """A place with files of somebody else, of any name."""

    @property
    def url(self) -> str:
        """The URL of the place."""

    def files(self) -> Iterator[ObjectInfo]:
        """All files; their names are relative to the place."""

    def get_version(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        """Bytes of a file, fewer only at its end, and its version.

        Raises `ObjectNotFoundError` if there is no such file.
        """


def plain_etag(etag: str) -> str:
    """The etag without its quotes and its mark of weakness."""
    return etag.removeprefix("W/").strip('"')


@runtime_checkable
class ReadableStorage(Protocol):
    """Read access to bytes under keys below one prefix. Every `Storage` is one."""

    @property
    def url(self) -> str:
        """The URL that opens this storage again, without secrets."""

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return at most `length` bytes of the object, from `start` on.

        A range that ends beyond the object is cut (to b"" if it begins there).
        Raises `ObjectNotFoundError` if there is no such object.
        """

    def get_tagged(self, key: str) -> Tagged:
        """Return the object and its token, from one response.

        Of an object larger than `MAX_TAGGED_BYTES`, it may return only the beginning, but always
        more than `MAX_TAGGED_BYTES`.
        """

    def head(self, key: str) -> ObjectInfo:
        """Return size and time of the object; `ObjectNotFoundError` if there is none."""

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix` and sorts after `after`, in key order."""

    def stray(self) -> str | None:
        """The name of something at the place that is not a valid key; None if there is nothing.

        Used to refuse creating a repository among other files.
        """

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Like `get`, for an event loop."""


@runtime_checkable
class Storage(ReadableStorage, Protocol):
    """Bytes under keys below one prefix. Thread-safe, picklable where `shared` is true."""

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Write the object, replacing an existing one."""

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        """Write the object if it does not exist; False, without a change, if it does.

        With `durable=False` the object may be lost in a crash until it is passed to `sync`. A
        `memoryview` has to be of bytes, and is not used after the call returns.
        """

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        """Replace the object if `token` is the token of its version; None if it is not.

        A `token` of None requires that the object does not exist. The swap is durable on return.
        `then_create` is a valid key and bytes to put-if-absent right after a successful swap: under
        the same lock if the storage has one, otherwise in the background without waiting. Its
        failure is never an error of the swap.
        """

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete the objects; missing keys are ignored."""

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects written with `durable=False` durable."""

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Like `create`, for an event loop."""


@runtime_checkable
class KeepsTemporaryFiles(Protocol):
    """A storage that may have temporary files, and folders without objects."""

    def remove_temporary(self, before_ms: int) -> int:
        """Remove those unchanged since then; return the number of files, without folders."""


@runtime_checkable
class ReadsInto(Protocol):
    """A storage that can read into memory of the caller, which saves a copy."""

    def read_into(self, key: str, start: int, room: memoryview) -> int | None:
        """Fill `room` with the object's bytes from `start` on, and return how many there are.

        They are fewer than there is room for if the object ends there; None if the storage only has
        `get`. Raises `ObjectNotFoundError` if there is no such object.
        """


@runtime_checkable
class ProvesConditions(Protocol):
    """A storage that finds out by itself whether the place respects conditions.

    It does so before the first conditional write. Who knows that one is coming can save a round of
    requests, and call `prove` beside other requests.
    """

    def names(self) -> Iterator[str]:
        """The names of what is at the place, valid keys or not, in order; not hidden ones."""

    def prove(self, *, swaps: bool = True) -> None:
        """Raise `UnsupportedStorageError` if the place ignores conditions.

        Without `swaps`, it may not know yet whether those of swaps are.
        """

    def withdraw_proof(self) -> None:
        """Delete what `prove` has written."""


class Turn(Protocol):
    """A writer's turn; `take` is repeated until it succeeds."""

    def take(self) -> bool:
        """Try to take the turn; return whether it is held."""

    def end(self) -> None:
        """Release the turn, or stop asking for it."""


@runtime_checkable
class TakesTurns(Protocol):
    """A storage on which writers of one machine can take turns.

    A turn only saves work; nothing relies on it. A writer that has waited long enough goes ahead
    without one. A turn ends with the process that holds it.
    """

    def turn(self, name: str) -> Turn:
        """The turn with that name (letters), not taken yet."""


# --- byte ranges -------------------------------------------------------------------------------

_FREE_BYTES: Final = 1024
"""To fetch so much takes less time than to send a request, however little is wanted."""


class RangeRequest(Struct, frozen=True):
    """One request for a contiguous part of an object.

    Parameters
    ----------
    start, length : int
        The part, in bytes.
    members : tuple of int
        Positions of its ranges in the input, in order of their offsets.
    """

    start: int
    length: int
    members: tuple[int, ...]


def coalesce(
    offsets: Sequence[int] | npt.NDArray[np.int64],
    lengths: Sequence[int] | npt.NDArray[np.int64],
    *,
    gap_bytes: int,
    span_bytes: int,
    spare: float | None = None,
) -> list[RangeRequest]:
    """Return the requests for these ranges of one object, in order of their offsets.

    Parameters
    ----------
    offsets, lengths : sequence or array of int
        The ranges, in any order; they may overlap, be the same, or be empty.
    gap_bytes : int
        The largest gap between two ranges of a request.
    span_bytes : int
        The longest request of several ranges.
    spare : float, optional
        How many bytes may lie in gaps, as a share of the bytes of all ranges, or 1 KiB if that is
        more; by default any number. The smallest gaps are bridged.

    Examples
    --------
    >>> from zarr_manifests.storage.protocol import coalesce
    >>> for request in coalesce([900, 0, 100], [50, 90, 90], gap_bytes=10, span_bytes=1000):
    ...     print(request.start, request.length, request.members)
    0 190 (1, 2)
    900 50 (0,)
    """
    if not len(offsets):
        return []
    starts = np.asarray(offsets, np.int64)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    # The furthest end of a member so far. A request that begins reaches further than all before it.
    reach = np.maximum.accumulate(starts + np.asarray(lengths, np.int64)[order])
    between = np.maximum(starts[1:] - reach[:-1], 0)
    apart = between > gap_bytes
    if spare is not None:
        wanted = int(reach[-1] - starts[0]) - int(between.sum())
        apart |= _too_many(between, apart, max(int(spare * wanted), _FREE_BYTES))
    gaps = [*(np.flatnonzero(apart) + 1).tolist(), len(order)]
    members = order.tolist()
    requests: list[RangeRequest] = []
    first = 0
    for stop in gaps:
        while first < stop:
            start = int(starts[first])
            # What lies within the first member joins it, however long that is.
            most = max(start + span_bytes, int(reach[first]))
            end = first + int(reach[first:stop].searchsorted(most, side="right"))
            length = int(reach[end - 1]) - start
            requests.append(RangeRequest(start, length, tuple(members[first:end])))
            first = end
    return requests


def _too_many(
    between: npt.NDArray[np.int64], apart: npt.NDArray[np.bool_], most: int
) -> npt.NDArray[np.bool_]:
    """Which gaps are not bridged: all but the smallest, which are `most` bytes together."""
    ascending = np.argsort(between, kind="stable")
    spent = np.cumsum(np.where(apart, 0, between)[ascending])
    found = np.zeros(len(between), np.bool_)
    found[ascending] = spent > most
    return found
