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
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from zarr_manifests.errors import InvalidArgumentError

__all__ = [
    "MAX_TAGGED_BYTES",
    "Capabilities",
    "KeepsReserve",
    "KeepsRoom",
    "KeepsTemporaryFiles",
    "ObjectInfo",
    "ReadableStorage",
    "Storage",
    "Tagged",
    "TakesTurns",
    "Token",
    "Turn",
    "check_key",
    "check_prefix",
    "check_range",
    "is_key",
]

MAX_TAGGED_BYTES: Final = 1 << 24
"""How large an object may be that is swapped."""

type Token = str
"""Names one version of one object; only equality means anything."""

# Disks limit a name to 255 bytes; 200 leave room for what a backend adds to it.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*", re.ASCII)
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?", re.ASCII)
_MAX_KEY_CHARS = 512
_MAX_OFFSET = 2**62  # beyond any object, within what system calls take


def check_key(key: str) -> str:
    """Return `key` if it is one that a storage accepts.

    Raises
    ------
    InvalidArgumentError
        For an empty or overlong key (512 characters, 200 a segment), an absolute one, one with
        `.`, `..`, empty or hidden segments, or with characters outside `[A-Za-z0-9._-]`.

    Examples
    --------
    >>> from zarr_manifests.storage import check_key
    >>> check_key("root/00000000000000000001")
    'root/00000000000000000001'
    """
    if len(key) <= _MAX_KEY_CHARS and _KEY.fullmatch(key):
        return key
    raise InvalidArgumentError(
        f"storage key {key[:80]!r} is refused: keys are relative paths of [A-Za-z0-9._-] segments "
        "that do not start with a dot"
    )


def is_key(name: str) -> bool:
    """Whether a storage accepts the name as a key.

    Examples
    --------
    >>> from zarr_manifests.storage.protocol import is_key
    >>> is_key("root/1"), is_key(".lock")
    (True, False)
    """
    try:
        check_key(name)
    except InvalidArgumentError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Return `prefix` if a key can start with it; the empty one is fine.

    Raises
    ------
    InvalidArgumentError
        If no key that `check_key` accepts starts with it.

    Examples
    --------
    >>> from zarr_manifests.storage import check_prefix
    >>> check_prefix("root/0000")
    'root/0000'
    """
    if len(prefix) <= _MAX_KEY_CHARS and _PREFIX.fullmatch(prefix):
        return prefix
    raise InvalidArgumentError(
        f"storage prefix {prefix[:80]!r} is refused: no key can start with it; "
        "see `zarr_manifests.storage.check_key`"
    )


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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a storage can do.

    Parameters
    ----------
    create : bool
        Put-if-absent is atomic.
    cas : bool
        Compare-and-swap is atomic. Without it a repository is read-only.
    inline : bool
        Calls are so cheap (memory, a local disk) that they are made on the calling thread, in
        an event loop too.
    durable : bool
        What has been written survives a crash of the machine (false for memory).
    shared : bool
        Another process that opens the same URL sees the same objects (false for memory).
    turns : bool
        Writers of one machine can take turns; see `TakesTurns`.
    gap_bytes : int
        Ranges of one object that an event loop asks for at once, with no more between them that
        nobody asked for, are fetched as one request. So many bytes should take about as long as
        one request more takes of the processor. Not looked at where calls are `inline`.
    span_bytes : int
        Bytes of such a request at most, unless one range alone is longer.

    Raises
    ------
    InvalidArgumentError
        If a number of bytes is negative.
    """

    create: bool = True
    cas: bool = True
    inline: bool = False
    durable: bool = True
    shared: bool = True
    turns: bool = False
    gap_bytes: int = 64 * 1024
    span_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.gap_bytes < 0 or self.span_bytes < 0:
            raise InvalidArgumentError(
                f"a storage that brings ranges together up to {self.gap_bytes} bytes apart and "
                f"{self.span_bytes} bytes in all: neither may be negative"
            )


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Key, size in bytes and modification time (milliseconds since 1970 UTC) of an object."""

    key: str
    nbytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Tagged:
    """The bytes of an object and the token of that version, from one response."""

    data: bytes
    token: Token


@runtime_checkable
class ReadableStorage(Protocol):
    """Bytes under keys below one prefix, to read. Every `Storage` is one."""

    @property
    def url(self) -> str:
        """The URL that opens this storage again, free of secrets."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of the object from `start` on, at most `length` of them.

        A range that ends beyond the object gives what there is (b"" if nothing).
        Raises `ObjectNotFoundError` if there is no such object.
        """
        ...

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """As `get` for each `(start, length)`, from one version of the object."""
        ...

    def get_tagged(self, key: str) -> Tagged:
        """The object and its token, from one response.

        What is swapped is small: of an object of more than `MAX_TAGGED_BYTES` there are only so
        many bytes and at least one more, whatever its size.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and time of the object; `ObjectNotFoundError` if there is none."""
        ...

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and sorts after `after`, in key order."""
        ...

    def stray(self) -> str | None:
        """Name of something that lies at the place and that no key can name; None if nothing is.

        So that a repository is not made among somebody's other files.
        """
        ...

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """As `get`, for an event loop."""
        ...


@runtime_checkable
class Storage(ReadableStorage, Protocol):
    """Bytes under keys below one prefix. Thread-safe, picklable where `shared` is true."""

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Write the object, replacing what is there."""
        ...

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        """Write the object if there is none; False, and nothing is changed, if there is.

        With `durable=False` the object may be lost in a crash until `sync` has named it. A
        `memoryview` is of bytes, and is the caller's again when the call returns.
        """
        ...

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        """Replace the object if `token` still names its version; None if it does not.

        A `token` of None demands that there is no object. Durable when it returns.
        `then_create` is a `(key, bytes)` to put-if-absent right after a swap that took effect:
        under the same lock where the storage has one, elsewhere in the background, unawaited.
        Its failure is never an error of the swap.
        """
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete the objects; keys that do not exist are no error."""
        ...

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects written with `durable=False` survive a crash."""
        ...

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """As `create`, for an event loop."""
        ...


@runtime_checkable
class KeepsTemporaryFiles(Protocol):
    """A storage in which there can be files that are no objects, and folders of none."""

    def remove_temporary(self, before_ms: int) -> int:
        """Remove what nobody has changed since then; the number of files, without folders."""
        ...


class KeepsRoom(Protocol):
    """Room that is set aside."""

    def keep(self) -> int:
        """Set it aside, as far as there is some; how many bytes."""
        ...

    def give_up(self) -> bool:
        """Let others have it; whether there was any."""
        ...


@runtime_checkable
class KeepsReserve(Protocol):
    """A storage that can be full, and has set room aside for what makes room."""

    @property
    def reserve(self) -> KeepsRoom:
        """That room."""
        ...


class Turn(Protocol):
    """A writer's turn, which it has to ask for until it has it."""

    def take(self) -> bool:
        """Whether it has it now."""
        ...

    @property
    def is_next(self) -> bool:
        """Whether nobody else who waits comes first; then it may ask again soon."""
        ...

    def end(self) -> None:
        """Have it no more, or ask for it no more."""
        ...


@runtime_checkable
class TakesTurns(Protocol):
    """A storage in which the writers of one machine can take turns at what one of them does.

    A turn is a courtesy that saves work: nothing relies on it, and who has waited long enough goes
    ahead without. It ends with the process that has it.
    """

    def turn(self, name: str) -> Turn:
        """A turn at what is named so (letters), not taken yet."""
        ...
