"""Files that ranges are read of, kept open for a moment: most reads then are one system call.

Invariants:

- Only for ranges, which are asked of objects that are never replaced. What is replaced, the root
  state, is read whole, and by a file opened for that one read.
- *An object that was deleted is missing*: at once if this process has deleted it, else at the
  latest `KEPT_S` after that. Until then its own bytes are read, never another object's.
- *Bounded*: at most `MOST` files, and a quarter of those that the process may have open. When it
  may open no more, all of them are closed. The room that a deleted object took on the disk is free
  when the next file is opened after `KEPT_S`, or when the process ends.
- A file is closed when nobody reads it any more, not when it is forgotten: a number that is being
  read from never becomes another file's.
- Small ranges that follow one another are cut out of what was read ahead, which belongs to the open
  file, is never more than `AHEAD_BYTES`, and ends with it. As files never change, it is what the
  disk would say.
- A forked child closes its copies. Reads say where they begin, so a parent and a child that read
  the same open file do not move each other.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
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
"""Up to here to read and to copy takes less than to ask first, or a call of the system for each."""
_SMALL_BYTES: Final = 64 * 1024
_NOWHERE: Final = 2**63
_now_s: Final = SYSTEM.monotonic_s


class Handle:
    """An open file; it is closed with the last reference to this object.

    Attributes
    ----------
    fd : int
        Its number.
    until_s : float
        Until when it is used without being opened anew.
    ahead : tuple of int and bytes
        Bytes that were read ahead, behind where they begin in the file; empty ones begin where the
        last read ended.
    """

    __slots__ = ("ahead", "fd", "until_s")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.until_s = _now_s() + KEPT_S
        self.ahead = _NOWHERE, b""

    def __del__(self, close: object = os.close) -> None:  # a default outlives the module
        if hasattr(self, "fd"):
            close(self.fd)  # type: ignore[operator]


_open: dict[str, Handle] = {}  # by path, from the one opened first to the one opened last
_lock = ForkSafeLock()
os.register_at_fork(after_in_child=_open.clear)


def opened(path: str) -> Handle | None:
    """The file at the path if it was opened a moment ago; keep the object while reading."""
    found = _open.get(path)
    return found if found is not None and _now_s() < found.until_s else None


def known(path: str, start: int, length: int) -> bytes | None:
    """The bytes of that range, if they were read ahead of a file that was opened a moment ago."""
    handle = opened(path)
    if handle is not None:
        at, ahead = handle.ahead
        if 0 <= start - at <= len(ahead) - length <= len(ahead):
            return ahead[start - at : start - at + length]
    return None


def handle_of(path: str, open_it: Callable[[], int]) -> Handle:
    """The file at the path, opened now or a moment ago; keep the object while reading.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    found = opened(path)
    if found is not None:
        return found
    _drop(_most() - 1)  # first: the process may have no descriptor left
    new = Handle(open_it())
    with _lock:
        _open.pop(path, None)
        _open[path] = new
    _drop(_most())
    return new


def _drop(most: int) -> None:
    """Forget what is overdue, and what was opened first of more than so many."""
    with _lock:
        now_s = _now_s()
        while _open:
            first = next(iter(_open))
            if len(_open) <= most and now_s < _open[first].until_s:
                break
            del _open[first]


def _most() -> int:
    """How many files are kept open: what else the process opens needs room as well."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if allowed == resource.RLIM_INFINITY else max(1, min(MOST, allowed // 4))


def _give_up() -> None:
    with _lock:
        _open.clear()


give_up_when_short(_give_up)


def ahead_of(handle: Handle, start: int, length: int) -> int:
    """How many bytes to read for a range: more where it goes on from the ones before it.

    Threads that share the ranges of a file among them ask for them in nearly that order: one that
    lags behind a little changes nothing.
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
    """The bytes of a small range, if they can be had without waiting for the disk."""
    if _NOWAIT is None or length > _COPIED_BYTES:
        return None
    data = bytearray(ahead_of(handle, start, length))
    try:
        count = os.preadv(handle.fd, [data], start, _NOWAIT)
    except OSError:  # the read itself will say; or this filesystem cannot tell
        return None
    if count < length:
        return None
    if len(data) > length:
        handle.ahead = start, bytes(memoryview(data)[:count])
    return bytes(data[:length])


def would_block(handle: Handle, start: int, length: int) -> bool:
    """Whether a read of that range has to wait for the disk, as far as can be told.

    Looked at are its first and its last byte: the system reads many pages at once.
    """
    if _NOWAIT is None:
        return False
    try:
        last = min(start + length - 1, sys.maxsize)
        for at in (start,) if length <= _SMALL_BYTES else (start, last):
            os.preadv(handle.fd, [bytearray(1)], at, _NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # the read itself will say; or this filesystem cannot tell
        return False
    return False


def forget(path: str) -> None:
    """Open the file at the path anew next time: it was deleted or replaced."""
    with _lock:
        _open.pop(path, None)
