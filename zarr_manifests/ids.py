"""Session ids, snapshot ids, object keys and crc32c.

A session id is `<start:012d>-<24 hex>`: the root version at which the session began, and 96 random
bits. A session's objects have keys `<kind>/<session>/<n>`, so a key states who wrote the object and
when, in root versions. A snapshot id is session and number joined by a hyphen, so the snapshot's
key follows from it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError

NODE_ID_BYTES: Final = 12
COMMIT_ID_BYTES: Final = 16
_LARGE_BYTES: Final = 64 * 1024
_RANDOM_BYTES: Final = 12
_SESSION = re.compile(r"[0-9]{12}-[0-9a-f]{24}", re.ASCII)
_KEY = re.compile(r"[a-z]+/([0-9]{12}-[0-9a-f]{24})/(?:0|[1-9][0-9]{0,8})", re.ASCII)
_SNAPSHOT = re.compile(r"([0-9]{12}-[0-9a-f]{24})-(0|[1-9][0-9]{0,8})", re.ASCII)


def _library_call() -> Callable[[int, int], int] | None:
    """The library's C function of an address and a length; None if unavailable.

    Calls through the extension module hold the GIL, which for a large chunk takes long.
    """
    extension = getattr(google_crc32c, "_crc32c", None)  # missing without a compiled library
    if extension is None:
        return None
    try:
        call = ctypes.CDLL(extension.__file__).crc32c_value
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint32
    return call


_crc32c_at: Final = _library_call()


def crc32c(data: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli) of `data`, as an unsigned 32-bit integer."""
    if len(data) >= _LARGE_BYTES and _crc32c_at is not None:
        array = np.frombuffer(data, np.uint8)  # also keeps the buffer alive
        return _crc32c_at(array.ctypes.data, array.nbytes)
    plain = type(data) is bytes or not len(data)
    # An array avoids copying a view; NumPy cannot make one of an empty view.
    value: int = google_crc32c.value(bytes(data) if plain else np.frombuffer(data, np.uint8))
    return value


def crc32c_of_each(
    chunks: Sequence[bytes | memoryview] | Sequence[npt.NDArray[np.uint8]],
) -> npt.NDArray[np.int64]:
    """The CRC-32C of each chunk (int64[n]).

    Examples
    --------
    >>> from zarr_manifests.ids import crc32c, crc32c_of_each
    >>> crc32c_of_each([b"one", b""]).tolist() == [crc32c(b"one"), 0]
    True
    """
    small = max(map(len, chunks), default=0) < _LARGE_BYTES
    # Without a function of ours in between, which takes as long as a kilobyte.
    of_one = google_crc32c.value if small else crc32c
    return np.fromiter(map(of_one, chunks), np.int64, len(chunks))


def new_session_id(start: int, random: bytes) -> str:
    """The id of a session that begins at root version `start`; `random` has 12 bytes."""
    if not 0 <= start < 10**12 or len(random) != _RANDOM_BYTES:
        raise InvalidArgumentError(f"no session id from start {start} and {len(random)} bytes")
    return f"{start:012d}-{random.hex()}"


@lru_cache(1 << 14)  # tables that are taken apart and merged name the same sessions again and again
def is_session_id(text: str) -> bool:
    """Whether `text` has the form of a session id."""
    return _SESSION.fullmatch(text) is not None


def is_snapshot_id(text: str) -> bool:
    """Whether `text` has the form of a snapshot id."""
    return _SNAPSHOT.fullmatch(text) is not None


def session_start(session_id: str) -> int:
    """The root version at which the session began."""
    return int(session_id[:12])


def lineage_of(session_id: str) -> str:
    """The part of a session id that all copies share: the start and the first 48 random bits."""
    return session_id[:25]


def object_key(kind: str, session_id: str, number: int) -> str:
    """The key of a session's object of that kind (`"chunks"`, `"deltas"`, ...) and number."""
    return f"{kind}/{session_id}/{number}"


def session_of(key: str) -> str:
    """The session that wrote the object at `key`.

    Raises
    ------
    InvalidArgumentError
        If the key has not the form `<kind>/<session>/<n>`.
    """
    found = _KEY.fullmatch(key)
    if found is not None:
        return found[1]
    raise InvalidArgumentError(f"{key[:80]!r} is not the key of an object that a session wrote")


def snapshot_key(snapshot_id: object) -> str:
    """The key of the snapshot with that id.

    Raises
    ------
    InvalidArgumentError
        If it has not the form of a snapshot id.
    """
    found = _SNAPSHOT.fullmatch(snapshot_id) if isinstance(snapshot_id, str) else None
    if found is None:
        raise InvalidArgumentError(
            f"{str(snapshot_id)[:80]!r} is not a snapshot id; `repo.ancestry()` and "
            "`zarr-manifests log` list ids; `repo.list_branches()` and `repo.list_tags()` list "
            "those of branches and tags"
        )
    return object_key("snapshots", found[1], int(found[2]))


def snapshot_id_of(key: str) -> str:
    """The id of the snapshot at `key`."""
    return f"{session_of(key)}-{key.rsplit('/', 1)[1]}"
