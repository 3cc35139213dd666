"""Files kept open for a moment, so that most range reads are a single system call.

Invariants:

- Only used for ranges, which are read from objects that are never replaced. The root, which is
  replaced, is read whole from a file opened for that one read.
- *A deleted object is missing*: at once if this process has deleted it, otherwise after `KEPT_S` at
  the latest. Until then its own bytes are read, never another object's.
- *Bounded*: at most `MOST` files, and a quarter of those that the process may have open. If the
  process cannot open any more, all are closed. The disk space of a deleted object is free when the
  next file is opened after `KEPT_S`, or when the process ends.
- A file is closed when nobody reads it any more, not when it is dropped from here. So a descriptor
  never changes its file during a read.
- Small sequential ranges are served from bytes that were read ahead. These belong to the open file,
  are at most `AHEAD_BYTES`, and are dropped with it. As files never change, they equal the disk's.
- A forked child closes its copies. Reads give their own offset, so a parent and a child that read
  the same open file do not affect each other.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Final

from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.files import give_up_when_short

__all__ = [
    "AHEAD_BYTES",
    "KEPT_S",
    "MOST",
    "Handle",
    "ahead_of",
    "at_hand",
    "forget",
    "handle_of",
    "known",
    "opened",
    "would_block",
]

AHEAD_BYTES: Final = 64 * 1024
KEPT_S: Final = 1.0
MOST: Final = 64

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # off Linux a read just waits
_COPIED_BYTES: Final = 16 * 1024
"""Up to this size, reading and copying is faster than asking first, or a system call for each."""
_SMALL_BYTES: Final = 64 * 1024
_NOWHERE: Final = 2**63
_now_s: Final = SYSTEM.monotonic_s


class Handle:
    """An open file; closed with the last reference to this object.

    Attributes
    ----------
    fd : int
        Its descriptor.
    until_s : float
        Until when it is used without being opened again.
    ahead : tuple of int and bytes
        The offset of bytes that were read ahead, and the bytes. If they are empty, the offset is
        the end of the last read.
    """

    __slots__ = ("ahead", "fd", "until_s")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.until_s = _now_s() + KEPT_S
        self.ahead = _NOWHERE, b""

    def __del__(self, close: object = os.close) -> None:  # a default outlives the module
        if hasattr(self, "fd"):
            close(self.fd)  # type: ignore[operator]


_open: dict[str, Handle] = {}  # by path, oldest first
_lock = ForkSafeLock()
os.register_at_fork(after_in_child=_open.clear)


def opened(path: str) -> Handle | None:
    """The file at the path if it is open; keep the object while reading."""
    found = _open.get(path)
    return found if found is not None and _now_s() < found.until_s else None


def known(path: str, start: int, length: int) -> bytes | None:
    """The bytes of the range if they were read ahead of an open file."""
    handle = opened(path)
    if handle is not None:
        at, ahead = handle.ahead
        if 0 <= start - at <= len(ahead) - length <= len(ahead):
            return ahead[start - at : start - at + length]
    return None


def handle_of(path: str, open_it: Callable[[], int]) -> Handle:
    """The file at the path, opened if it is not open yet; keep the object while reading.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    found = opened(path)
    if found is not None:
        return found
    _drop(_most() - 1)  # before opening: the process may have no descriptor left
    new = Handle(open_it())
    with _lock:
        _open.pop(path, None)
        _open[path] = new
    _drop(_most())
    return new


def _drop(most: int) -> None:
    """Drop files that are overdue, and the oldest ones beyond `most`."""
    with _lock:
        now_s = _now_s()
        while _open:
            first = next(iter(_open))
            if len(_open) <= most and now_s < _open[first].until_s:
                break
            del _open[first]


def _most() -> int:
    """How many files are kept open, leaving descriptors for the rest of the process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if allowed == resource.RLIM_INFINITY else max(1, min(MOST, allowed // 4))


def _give_up() -> None:
    with _lock:
        _open.clear()


give_up_when_short(_give_up)


def ahead_of(handle: Handle, start: int, length: int) -> int:
    """How many bytes to read for a range: more if it continues the ranges before it.

    Threads that share the ranges of a file read them in nearly that order. A thread that lags a
    little behind does not stop reading ahead.
    """
    at, data = handle.ahead
    if length > _COPIED_BYTES:
        return length
    if 0 <= start - at <= len(data):
        return AHEAD_BYTES
    if not 0 < at - start <= AHEAD_BYTES:
        handle.ahead = start + length, b""
    return length


def at_hand(handle: Handle, start: int, length: int) -> bytes | None:
    """The bytes of a small range if they are available without waiting for the disk."""
    if _NOWAIT is None or length > _COPIED_BYTES:
        return None
    data = bytearray(ahead_of(handle, start, length))
    try:
        count = os.preadv(handle.fd, [data], start, _NOWAIT)
    except OSError:  # unsupported by the filesystem, or the read itself will raise it
        return None
    if count < length:
        return None
    if len(data) > length:
        handle.ahead = start, bytes(memoryview(data)[:count])
    return bytes(data[:length])


def would_block(handle: Handle, start: int, length: int) -> bool:
    """Whether reading the range has to wait for the disk, as far as can be determined.

    Only its first and last byte are checked, since the system reads many pages at once.
    """
    if _NOWAIT is None:
        return False
    try:
        last = min(start + length - 1, sys.maxsize)
        for at in (start,) if length <= _SMALL_BYTES else (start, last):
            os.preadv(handle.fd, [bytearray(1)], at, _NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # unsupported by the filesystem, or the read itself will raise it
        return False
    return False


def forget(paths: Iterable[str]) -> None:
    """Open the files at the paths again next time, since they were deleted or replaced."""
    with _lock:
        for path in paths:
            _open.pop(path, None)
