r"""The envelope around every metadata object, and the reader that distrusts what is inside.

Layout (little-endian, 24 bytes of header)::

    0   8   magic 89 5A 4D 46 0D 0A 1A 0A  ("\x89ZMF\r\n\x1a\n")
    8   4   crc32c of every byte from offset 12 to the end
    12  1   format version (1)
    13  1   kind of object
    14  1   codec of the payload: 0 stored, 1 zstd
    15  1   flags: 0; an unknown bit refuses to open
    16  8   length of the payload when decoded
    24      payload: a msgpack map

Invariant: nothing of the payload is looked at before length, crc, version, kind and flags are
right, and no allocation follows a size from disk that was not bounded before. The crc lies in the
header and not behind the bytes it covers: the crc of a message with its own crc appended is the
same constant for every message, and a pointer that repeats it would tell no two objects apart.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np
import zstandard

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.ids import crc32c
from zarr_manifests.runtime import MAX_MS, PerThread

__all__ = [
    "FORMAT_VERSION",
    "MAX_MS",
    "MAX_NUMBER",
    "MAX_ROOT_BYTES",
    "MAX_SNAPSHOT_BYTES",
    "Fields",
    "Kind",
    "check_numbers",
    "check_texts",
    "crc_of",
    "decode",
    "encode",
    "is_sound",
    "pack",
    "unpack",
    "unpack_but",
]

FORMAT_VERSION: Final = 1
MAGIC: Final = b"\x89ZMF\r\n\x1a\n"
MAX_PAYLOAD_BYTES: Final = 1 << 30
MAX_ROOT_BYTES: Final = 1 << 24
MAX_SNAPSHOT_BYTES: Final = 1 << 28
"""What is found by its key alone has a length that no pointer says, so it has a bound."""
MAX_NUMBER: Final = 2**63 - 1
_MAX_EXPANSION: Final = 64
_EXPANDS_FREELY_BYTES: Final = 1 << 20
_FREE_CONTAINERS: Final = 50_000
_BYTES_A_CONTAINER: Final = 4
_HEADER = struct.Struct("<8sIBBBBQ")
_CRC_FROM: Final = 12
_STORED, _ZSTD = 0, 1
_ZSTD_LEVEL: Final = 3


# To make one takes as long as to compress a small object.
_COMPRESSOR: Final = PerThread(partial(zstandard.ZstdCompressor, level=_ZSTD_LEVEL))
_DECOMPRESSOR: Final = PerThread(zstandard.ZstdDecompressor)


class Kind(IntEnum):
    """What an object is."""

    ROOT = 1
    SNAPSHOT = 2
    BASE = 3
    DELTA = 4
    MANIFEST = 5
    INDEX = 6
    PAGE = 7
    DIGEST = 8


_MOST_BYTES: Final = {Kind.ROOT: MAX_ROOT_BYTES, Kind.SNAPSHOT: MAX_SNAPSHOT_BYTES}


def check_numbers(where: str, *numbers: int, most: int = MAX_NUMBER) -> None:
    """Refuse what is no whole number from 0 to `most`.

    Values check themselves with this when they are built, by a reader or a writer: so nothing is
    written that no reader takes.

    Raises
    ------
    InvalidArgumentError
        If one of them is none.
    """
    for number in numbers:
        if type(number) is not int or not 0 <= number <= most:
            raise InvalidArgumentError(f"{where}: {number!r} is no number from 0 to {most}")


def check_texts(where: str, *texts: object) -> None:
    """Refuse what is no string that can be written as UTF-8.

    Raises
    ------
    InvalidArgumentError
        If one of them is none.
    """
    for text in texts:
        try:
            if isinstance(text, str) and (text.isascii() or text.encode()):
                continue
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{where}: no valid Unicode text: {error}") from error
        raise InvalidArgumentError(f"{where}: a {type(text).__name__} is no text")


def pack(payload: Any, default: Callable[[object], object] | None = None) -> bytes:
    """Msgpack of `payload`; `default` makes something else of what msgpack does not know."""
    return bytes(msgpack.packb(payload, use_bin_type=True, default=default))


def unpack(data: bytes) -> Any:
    """The value of untrusted msgpack bytes; `CorruptObjectError` if they are none.

    What they become takes memory in proportion to their number: lists and maps are as long as
    they say, and, beyond a number that does no harm, they take 4 bytes each on average.
    """
    most = _FREE_CONTAINERS + len(data) // _BYTES_A_CONTAINER
    hooks: dict[str, Any] = {}
    # Counting costs time, so it is left where not even as many bytes could begin a list or map.
    if len(data) > most and _like_containers(data) > most:
        hooks = {"list_hook": (count := _Count(most)), "object_hook": count}
    try:
        _skip(data)
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True, **hooks)
    except (
        ValueError,
        TypeError,
        MemoryError,
        RecursionError,
        msgpack.UnpackException,
    ) as error:
        raise CorruptObjectError(f"the payload is not msgpack: {error}") from error


def unpack_but(data: bytes, name: str) -> Any:
    """As `unpack`, of a map in which the items of the list of that name stay packed.

    So whoever has seen an item before need not unpack it, and each of the others is bounded by
    itself.
    """
    try:
        _skip(data)
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=len(data) or 1)
        unpacker.feed(data)
        found: dict[Any, Any] = {}
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if key == name:
                found[key] = _slices(data, unpacker, unpacker.read_array_header())
            elif len(data) <= _FREE_CONTAINERS:
                found[key] = unpacker.unpack()
            else:
                found[key] = unpack(*_slices(data, unpacker, 1))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CorruptObjectError(f"the payload is no map with a list {name!r}: {error}") from error
    if unpacker.tell() != len(data):
        raise CorruptObjectError("the payload is not msgpack: there are bytes behind it")
    return found


def _slices(data: bytes, unpacker: Any, count: int) -> list[bytes]:
    """The next so many values that the unpacker of the data comes to, as they are."""
    ends = [unpacker.tell()]
    for _ in range(count):
        unpacker.skip()
        ends.append(unpacker.tell())
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _like_containers(data: bytes) -> int:
    """How many of the bytes could begin a list or map: 0x80 to 0x9f and 0xdc to 0xdf."""
    values = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero(values & 0xE0 == 0x80) + np.count_nonzero(values & 0xFC == 0xDC))


def _skip(data: bytes) -> None:
    """Go through the bytes without making anything: a list that lies about its length is found."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    unpacker.skip()


class _Count:
    """Gives back each list and map, but not more than `most` of them."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise CorruptObjectError("the payload is made of too many lists and maps")
        return value


def encode(kind: Kind, payload: Mapping[str, Any]) -> bytes:
    """The object's bytes: header and payload, compressed where that makes it smaller."""
    try:
        raw = pack(payload)
    except (TypeError, ValueError, OverflowError) as error:  # text that is none is a ValueError
        raise InvalidArgumentError(
            f"a {kind.name.lower()} cannot hold what it is to hold: {error}"
        ) from error
    if len(raw) > MAX_PAYLOAD_BYTES:  # better no commit than one that nobody can open
        raise InvalidArgumentError(
            f"an object of {len(raw)} bytes is beyond {MAX_PAYLOAD_BYTES}; commit in several steps"
        )
    packed = _COMPRESSOR.get().compress(raw)
    smaller = len(packed) < len(raw) <= _expanded_at_most(packed)
    codec, body = (_ZSTD, packed) if smaller else (_STORED, raw)
    header = _HEADER.pack(MAGIC, 0, FORMAT_VERSION, kind, codec, 0, len(raw))
    covered = header[_CRC_FROM:] + body
    if 8 + 4 + len(covered) > _MOST_BYTES.get(kind, _HEADER.size + MAX_PAYLOAD_BYTES):
        raise InvalidArgumentError(
            f"a {kind.name.lower()} of {len(covered)} bytes is beyond what readers take; commit in "
            "several steps, or expire and collect what is not needed any more"
        )
    return header[:8] + struct.pack("<I", crc32c(covered)) + covered


def crc_of(data: bytes) -> int:
    """The crc32c that an encoded object carries, for a pointer to repeat."""
    return int.from_bytes(data[8:12], "little")


def is_sound(data: bytes, length: int, crc: int) -> bool:
    """Whether the bytes are those of the object with this length and checksum."""
    return (
        len(data) == length >= _HEADER.size
        and crc_of(data) == crc
        and crc32c(memoryview(data)[_CRC_FROM:]) == crc
    )


def decode[T](
    data: bytes,
    kind: Kind,
    parse: Callable[[Fields], T],
    where: str,
    *,
    crc: int | None = None,
    length: int | None = None,
    packed: str = "",
) -> T:
    """Check the envelope of `data` and parse its payload.

    Parameters
    ----------
    data : bytes
        The whole object.
    kind : Kind
        What it must be.
    parse : callable
        Makes the value from the payload's fields.
    where : str
        The object's key, for messages.
    crc, length : int, optional
        What the pointer to the object says.
    packed : str, optional
        Name of the list whose items are given to `parse` as they are, packed.

    Raises
    ------
    CorruptObjectError
        If anything is not as it must be.
    UnsupportedFormatError
        If the object was written in a newer format or needs an unknown feature.
    """
    try:
        return parse(Fields(_open(data, kind, crc, length, packed), kind.name.lower()))
    except (CorruptObjectError, UnsupportedFormatError) as error:
        raise type(error)(f"{where}: {error}") from error
    except ManifestsError as error:  # a value that refuses to be built from what is on disk
        raise CorruptObjectError(f"{where}: {error}") from error


def _open(data: bytes, kind: Kind, crc: int | None, length: int | None, packed: str) -> Any:
    if length is not None and len(data) != length:
        raise CorruptObjectError(f"{len(data)} bytes where its pointer says {length}; {_MEND}")
    most = _MOST_BYTES.get(kind)
    if most is not None and len(data) > most:
        raise CorruptObjectError(
            f"more than {most} bytes, which no {kind.name.lower()} has; {_MEND}"
        )
    if len(data) < _HEADER.size or data[:8] != MAGIC:
        raise CorruptObjectError(f"not an object of a repository, or its start is damaged; {_MEND}")
    _, stored_crc, version, found, codec, flags, nbytes = _HEADER.unpack_from(data)
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"written in format {version}, this version of zarr-manifests reads up to "
            f"{FORMAT_VERSION}; upgrade the package"
        )
    if crc32c(memoryview(data)[_CRC_FROM:]) != stored_crc:
        raise CorruptObjectError(f"its checksum does not match its bytes; {_MEND}")
    if crc is not None and crc != stored_crc:
        raise CorruptObjectError(f"it is not the object its pointer names; {_MEND}")
    if version != FORMAT_VERSION or flags:
        raise UnsupportedFormatError(
            f"format {version} with flags {flags:#x} is unknown here; upgrade the package"
        )
    if found != kind:
        raise CorruptObjectError(f"an object of kind {found} where {kind.name} is due")
    payload = _payload(data[_HEADER.size :], codec, nbytes)
    return unpack_but(payload, packed) if packed else unpack(payload)


def _expanded_at_most(body: bytes) -> int:
    """Bytes that a compressed payload may become: no small object fills the memory."""
    return max(_EXPANDS_FREELY_BYTES, _MAX_EXPANSION * len(body))


def _payload(body: bytes, codec: int, nbytes: int) -> bytes:
    if nbytes > MAX_PAYLOAD_BYTES:
        raise CorruptObjectError(f"a payload of {nbytes} bytes is beyond {MAX_PAYLOAD_BYTES}")
    if codec == _ZSTD:
        if nbytes > _expanded_at_most(body):
            raise CorruptObjectError(f"{len(body)} bytes cannot hold a payload of {nbytes}")
        try:
            # The frame's own size is compared before a byte of it is decompressed.
            if zstandard.frame_content_size(body) != nbytes:
                raise CorruptObjectError("header and zstd frame disagree about the size")
            body = _DECOMPRESSOR.get().decompress(body, max_output_size=nbytes)
        except zstandard.ZstdError as error:
            raise CorruptObjectError(f"the payload does not decompress: {error}") from error
    elif codec != _STORED:
        raise UnsupportedFormatError(f"payload codec {codec} is unknown here; upgrade the package")
    if len(body) != nbytes:
        raise CorruptObjectError(f"a payload of {len(body)} bytes where {nbytes} are due")
    return body


_MEND = "restore it from a backup, or open an older snapshot that does not use it"


@dataclass(frozen=True, slots=True)
class Fields:
    """A map read from disk: every access names the field, its type and its bounds."""

    value: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, dict):
            raise CorruptObjectError(f"{self.where}: a {type(self.value).__name__}, not a map")

    def _fault(self, name: str, due: str) -> CorruptObjectError:
        found = type(self.value[name]).__name__ if name in self.value else "nothing"
        return CorruptObjectError(f"{self.where}.{name}: {due} is due, {found} was found")

    def has(self, name: str) -> bool:
        """Whether the field is there and not nil."""
        return self.value.get(name) is not None

    def number(self, name: str, most: int = 2**63 - 1) -> int:
        """A whole number from 0 to `most`."""
        value = self.value.get(name)
        if type(value) is int and 0 <= value <= most:
            return value
        raise self._fault(name, f"a number from 0 to {most}")

    def text(self, name: str) -> str:
        """A string."""
        value = self.value.get(name)
        if isinstance(value, str):
            return value
        raise self._fault(name, "a string")

    def binary(self, name: str, length: int | None = None) -> bytes:
        """A byte string, of that length if one is given."""
        value = self.value.get(name)
        if isinstance(value, bytes) and length in (None, len(value)):
            return value
        raise self._fault(name, "bytes" if length is None else f"{length} bytes")

    def items(self, name: str) -> list[Any]:
        """A list; empty if the field is absent."""
        value = self.value.get(name, [])
        if isinstance(value, list):
            return value
        raise self._fault(name, "a list")

    def maps(self, name: str) -> list[Fields]:
        """A list of maps; empty if the field is absent."""
        return [Fields(v, f"{self.where}.{name}[{i}]") for i, v in enumerate(self.items(name))]

    def named(self, name: str) -> dict[str, Fields]:
        """A map from strings to maps; empty if the field is absent."""
        return {k: Fields(v, f"{self.where}.{name}[{k!r}]") for k, v in self.table(name).items()}

    def table(self, name: str) -> dict[str, Any]:
        """A map from strings to anything; empty if the field is absent."""
        value = self.value.get(name, {})
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            return value
        raise self._fault(name, "a map from strings")

    def counters(self, name: str) -> dict[str, int]:
        """A map from strings to whole numbers of at least 0; empty if the field is absent."""
        value = self.table(name)
        if all(type(n) is int and 0 <= n < 2**63 for n in value.values()):
            return value
        raise self._fault(name, "a map from strings to numbers")

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        value = self.items(name)
        if all(type(v) is int and 0 <= v < 2**63 for v in value):
            return tuple(value)
        raise self._fault(name, "a list of numbers")
