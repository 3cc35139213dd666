r"""The envelope around every metadata object, and safe access to the payload inside.

Layout (little-endian, 24 bytes of header)::

    0   8   magic 89 5A 4D 46 0D 0A 1A 0A  ("\x89ZMF\r\n\x1a\n")
    8   4   crc32c of every byte from offset 12 to the end
    12  1   format version (1)
    13  1   kind of the object
    14  1   codec of the payload: 0 stored, 1 zstd
    15  1   flags: 0; a reader refuses unknown bits
    16  8   length of the decoded payload
    24      payload: a msgpack map

Invariants: length, crc, version, flags and kind are checked before the payload is decoded, and
every size read from disk is bounded before it is used to allocate. The crc is stored before the
bytes it covers: the crc of a message followed by its own crc is the same for all messages, so
pointers that repeat it could not tell objects apart.

Maps on disk, described by tables of their fields; objects that hold one, and pointers to these
-----------------------------------------------------------------------------------------------

A line of a table names a field on disk, the attribute it is read to and written from, and how it is
stored. Fields are written and read in the order of the lines. Invariant: a value is built through
its constructor, so readers check what writers check.

A `BlobRef` is the key, length and crc32c of an immutable object, or of a block in one. It may carry
a copy of its bytes, which saves a request. Invariant: the object also exists at its key, so copies
can be dropped.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, Self

import msgpack
import numpy as np
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.grid import Box
from zarr_manifests.ids import crc32c, session_of
from zarr_manifests.runtime import MAX_MS as MAX_MS

FORMAT_VERSION: Final = 1
MAGIC: Final = b"\x89ZMF\r\n\x1a\n"
MAX_PAYLOAD_BYTES: Final = 1 << 30
MAX_ROOT_BYTES: Final = 1 << 24
MAX_SNAPSHOT_BYTES: Final = 1 << 28
"""Bounds for objects that are found by key alone, whose length no pointer states."""
MAX_NUMBER: Final = 2**63 - 1
MAX_EXPANSION: Final = 64
_EXPANDS_FREELY_BYTES: Final = 1 << 20
_FREE_CONTAINERS: Final = 50_000
_BYTES_A_CONTAINER: Final = 4
_HEADER = struct.Struct("<8sIBBBBQ")
HEADER_BYTES: Final = 24
CRC_FROM: Final = 12
"""Offset of the first byte that the checksum covers."""
STORED, _ZSTD = 0, 1
_ZSTD_LEVEL: Final = 3


class _Zstd(threading.local):
    """Each thread's own: creating them takes as long as compressing a small object."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_ZSTD_OF_THREAD: Final = _Zstd()


class ObjectKind(IntEnum):
    """Kind of a metadata object, as its envelope states it."""

    ROOT = 1
    SNAPSHOT = 2
    BASE = 3
    DELTA = 4
    MANIFEST = 5
    INDEX = 6
    PAGE = 7
    DIGEST = 8
    MARKS = 9
    HISTORY = 10
    # 11 and 12 were those of detached sessions, and are not given out again.


_MOST_BYTES: Final = {ObjectKind.ROOT: MAX_ROOT_BYTES, ObjectKind.SNAPSHOT: MAX_SNAPSHOT_BYTES}


def check_numbers(where: str, *numbers: int, most: int = MAX_NUMBER) -> None:
    """Raise unless all are integers from 0 to `most`.

    Readers and writers build values through the same checks, so nobody writes what readers refuse.

    Raises
    ------
    InvalidArgumentError
        If one of them is not.
    """
    for number in numbers:
        if type(number) is not int or not 0 <= number <= most:
            raise InvalidArgumentError(f"{where}: {number!r} is not an integer from 0 to {most}")


def check_texts(where: str, *texts: object) -> None:
    """Raise unless all are strings that UTF-8 can encode.

    Raises
    ------
    InvalidArgumentError
        If one of them is not.
    """
    for text in texts:
        try:
            if isinstance(text, str) and (text.isascii() or text.encode()):
                continue
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{where}: not valid Unicode text: {error}") from error
        raise InvalidArgumentError(f"{where}: expected text, found {type(text).__name__}")


def pack(payload: Any, default: Callable[[object], object] | None = None) -> bytes:
    """Msgpack of `payload`; `default` converts values of types that msgpack does not know."""
    return bytes(msgpack.packb(payload, use_bin_type=True, default=default))


def unpack(data: bytes | memoryview) -> Any:
    """The value of untrusted msgpack bytes; `CorruptObjectError` if they are malformed.

    Memory is bounded by the number of bytes: no list or map is shorter than it claims, and beyond a
    harmless number there is at most one list or map for every 4 bytes.
    """
    most = _FREE_CONTAINERS + len(data) // _BYTES_A_CONTAINER
    hooks: dict[str, Any] = {}
    # Counting costs time; skip it if too few bytes could start a list or map.
    if len(data) > most and _like_containers(data, most) > most:
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
    """Like `unpack`, for a map: the items of the list called `name` stay packed.

    A caller that knows an item's bytes need not unpack it. `unpack` bounds each of the others.
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
        raise CorruptObjectError(
            f"the payload is not a map with a list {name!r}: {error}"
        ) from error
    if unpacker.tell() != len(data):
        raise CorruptObjectError("the payload is not msgpack: trailing bytes")
    return found


def _slices(data: bytes, unpacker: Any, count: int) -> list[bytes]:
    """The next `count` values of the unpacker, still packed."""
    ends = [unpacker.tell()]
    for _ in range(count):
        unpacker.skip()
        ends.append(unpacker.tell())
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _like_containers(data: bytes | memoryview, most: int) -> int:
    """How many bytes could start a list or map: 0x80 to 0x9f and 0xdc to 0xdf.

    Or how many are from 0x80, which is found faster, if these are not more than `most`.
    """
    values = np.frombuffer(data, np.uint8)
    high = int(np.count_nonzero(values >= 0x80))
    if high <= most:
        return high
    return int(np.count_nonzero(values & 0xE0 == 0x80) + np.count_nonzero(values & 0xFC == 0xDC))


def _skip(data: bytes | memoryview) -> None:
    """Scan the bytes without building values; raises if a list or map claims too many items."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    unpacker.skip()


class _Count:
    """A msgpack hook that returns each list and map, and raises after `most` of them."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise CorruptObjectError("the payload has too many lists and maps")
        return value


def encode(kind: ObjectKind, payload: Mapping[str, Any]) -> bytes:
    """The object's bytes: header and payload, compressed if that makes it smaller."""
    try:
        raw = pack(payload)
    except (TypeError, ValueError, OverflowError) as error:  # lone surrogates are a ValueError
        raise InvalidArgumentError(f"cannot encode the {kind.name.lower()}: {error}") from error
    if len(raw) > MAX_PAYLOAD_BYTES:  # readers would refuse the commit
        raise InvalidArgumentError(
            f"an object of {len(raw)} bytes exceeds {MAX_PAYLOAD_BYTES}; commit in several steps"
        )
    packed = compress(raw)
    smaller = len(packed) < len(raw) <= expanded_at_most(packed)
    codec, body = (_ZSTD, packed) if smaller else (STORED, raw)
    return frame(kind, codec, len(raw), body)


def frame(kind: ObjectKind, codec: int, nbytes: int, body: bytes) -> bytes:
    """The object's bytes: the header, then `body`, which decodes to `nbytes`."""
    header = _HEADER.pack(MAGIC, 0, FORMAT_VERSION, kind, codec, 0, nbytes)
    covered = header[CRC_FROM:] + body
    if CRC_FROM + len(covered) > _MOST_BYTES.get(kind, HEADER_BYTES + MAX_PAYLOAD_BYTES):
        raise InvalidArgumentError(
            f"a {kind.name.lower()} of {len(covered)} bytes is larger than readers accept; commit "
            "in several steps, or expire snapshots and collect garbage"
        )
    return header[:8] + struct.pack("<I", crc32c(covered)) + covered


def compress(data: bytes) -> bytes:
    """The data as one zstd frame."""
    return _ZSTD_OF_THREAD.compressor.compress(data)


def crc_of(data: bytes) -> int:
    """The crc32c in an encoded object's header, which pointers repeat."""
    return int.from_bytes(data[8:12], "little")


def is_sound(data: bytes, length: int, crc: int) -> bool:
    """Whether the bytes are an intact object with this length and checksum."""
    return (
        len(data) == length >= HEADER_BYTES
        and crc_of(data) == crc
        and crc32c(memoryview(data)[CRC_FROM:]) == crc
    )


def decode[T](
    data: bytes,
    kind: ObjectKind,
    parse: Callable[[Fields], T],
    where: str,
    *,
    crc: int | None = None,
    length: int | None = None,
    packed: str = "",
) -> T:
    """Check the envelope of `data` and parse the payload.

    Parameters
    ----------
    data : bytes
        The whole object.
    kind : ObjectKind
        The kind it must have.
    parse : callable
        Builds the value from the payload's fields.
    where : str
        The object's key, for error messages.
    crc, length : int, optional
        The checksum and length that the pointer states.
    packed : str, optional
        Name of a list whose items `parse` gets still packed.

    Raises
    ------
    CorruptObjectError
        If the envelope or the payload is invalid.
    UnsupportedFormatError
        If the object has a newer format or needs an unknown feature.
    """
    with refusing(where):
        return parse(Fields(_open(data, kind, crc, length, packed), kind.name.lower()))


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Errors of the block name `where`; what a constructor refuses there is corrupt."""
    try:
        yield
    except (CorruptObjectError, UnsupportedFormatError) as error:
        raise type(error)(f"{where}: {error}") from error
    except ManifestsError as error:  # a constructor refused what is on disk
        raise CorruptObjectError(f"{where}: {error}") from error


def _open(data: bytes, kind: ObjectKind, crc: int | None, length: int | None, packed: str) -> Any:
    if length is not None and len(data) != length:
        raise CorruptObjectError(f"{len(data)} bytes, but its pointer says {length}; {_MEND}")
    most = _MOST_BYTES.get(kind)
    if most is not None and len(data) > most:
        raise CorruptObjectError(
            f"more than {most} bytes, the limit for a {kind.name.lower()}; {_MEND}"
        )
    header = Header.of(data)
    if crc32c(memoryview(data)[CRC_FROM:]) != header.crc32c:
        raise CorruptObjectError(f"the checksum does not match the bytes; {_MEND}")
    header.check(kind, crc)
    payload = _payload(data[HEADER_BYTES:], header.codec, header.nbytes)
    return unpack_but(payload, packed) if packed else unpack(payload)


class Header(NamedTuple):
    """What the header of an object states.

    Parameters
    ----------
    crc32c : int
        Checksum of the bytes from `CRC_FROM`.
    version, kind, codec, flags, nbytes : int
        The other fields; `nbytes` is the length of the decoded payload.
    """

    crc32c: int
    version: int
    kind: int
    codec: int
    flags: int
    nbytes: int

    @classmethod
    def of(cls, data: bytes) -> Header:
        """The header at the beginning of the data.

        Raises
        ------
        CorruptObjectError
            If there is none.
        UnsupportedFormatError
            If the object has a newer format.
        """
        if len(data) < HEADER_BYTES or data[:8] != MAGIC:
            raise CorruptObjectError(f"not an object of a repository, or a damaged header; {_MEND}")
        header = cls(*_HEADER.unpack_from(data)[1:])
        if header.version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"written in format {header.version}, this version of zarr-manifests reads up to "
                f"{FORMAT_VERSION}; upgrade the package"
            )
        return header

    def check(self, kind: ObjectKind, crc: int | None) -> None:
        """Raise unless this is the header of the object that its pointer names.

        The caller has compared the checksum with the bytes.
        """
        if crc is not None and crc != self.crc32c:
            raise CorruptObjectError(f"not the object its pointer names; {_MEND}")
        if self.version != FORMAT_VERSION or self.flags:
            raise UnsupportedFormatError(
                f"unknown format {self.version} with flags {self.flags:#x}; upgrade the package"
            )
        if self.kind > max(ObjectKind):
            raise UnsupportedFormatError(f"unknown kind {self.kind} of object; upgrade the package")
        if self.kind != kind:
            raise CorruptObjectError(f"expected kind {kind.name}, found kind {self.kind}")


def expanded_at_most(body: bytes | memoryview) -> int:
    """Most bytes a compressed payload may expand to, so that small objects cannot fill memory."""
    return max(_EXPANDS_FREELY_BYTES, MAX_EXPANSION * len(body))


def _payload(body: bytes, codec: int, nbytes: int) -> bytes:
    if nbytes > MAX_PAYLOAD_BYTES:
        raise CorruptObjectError(f"a payload of {nbytes} bytes exceeds {MAX_PAYLOAD_BYTES}")
    if codec == _ZSTD:
        return decompress(body, expanded_at_most(body), nbytes)
    if codec != STORED:
        raise UnsupportedFormatError(f"unknown payload codec {codec}; upgrade the package")
    if len(body) != nbytes:
        raise CorruptObjectError(f"expected a payload of {nbytes} bytes, found {len(body)}")
    return body


def decompress(data: bytes | memoryview, most: int, nbytes: int | None = None) -> bytes:
    """The content of a zstd frame, which is compared with `nbytes` if given.

    Raises
    ------
    CorruptObjectError
        If it is malformed, of another size, or has more than `most` bytes.
    """
    try:
        # Compare the frame's own size before decompressing.
        found = zstandard.frame_content_size(data)
        size = found if nbytes is None else nbytes
        if size > min(most, MAX_PAYLOAD_BYTES):
            raise CorruptObjectError(f"{len(data)} bytes cannot hold a payload of {size}")
        if found < 0 or found != size:
            raise CorruptObjectError("header and zstd frame state different sizes")
        content = _ZSTD_OF_THREAD.decompressor.decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CorruptObjectError(f"the payload does not decompress: {error}") from error
    if len(content) != size:
        raise CorruptObjectError(f"expected a payload of {size} bytes, found {len(content)}")
    return content


_MEND = "restore it from a backup, or open an older snapshot that does not use it"


class Fields(Struct, frozen=True):
    """A map read from disk, whose accessors check the type and bounds of a field."""

    value: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, dict):
            raise CorruptObjectError(
                f"{self.where}: expected a map, found {type(self.value).__name__}"
            )

    def _fault(self, name: str, expected: str) -> CorruptObjectError:
        found = type(self.value[name]).__name__ if name in self.value else "nothing"
        return CorruptObjectError(f"{self.where}.{name}: expected {expected}, found {found}")

    def has(self, name: str) -> bool:
        """Whether the field is present and not nil."""
        return self.value.get(name) is not None

    def number(self, name: str, most: int = 2**63 - 1) -> int:
        """An integer from 0 to `most`."""
        value = self.value.get(name)
        if type(value) is int and 0 <= value <= most:
            return value
        raise self._fault(name, f"a number from 0 to {most}")

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.value.get(name)
        if isinstance(value, bool):
            return value
        raise self._fault(name, "true or false")

    def text(self, name: str) -> str:
        """A string."""
        value = self.value.get(name)
        if isinstance(value, str):
            return value
        raise self._fault(name, "a string")

    def binary(self, name: str, length: int | None = None) -> bytes:
        """A byte string, of exactly `length` bytes if given."""
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

    def table(self, name: str) -> dict[str, Any]:
        """A map with string keys; empty if the field is absent."""
        value = self.value.get(name, {})
        if isinstance(value, dict) and are(str, value):
            return value
        raise self._fault(name, "a map with string keys")

    def counters(self, name: str) -> dict[str, int]:
        """A map from strings to integers of at least 0; empty if the field is absent."""
        value = self.table(name)
        if are_counts(value.values()):
            return value
        raise self._fault(name, "a map from strings to numbers")

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty if the field is absent."""
        value = self.items(name)
        if are_counts(value):
            return tuple(value)
        raise self._fault(name, "a list of numbers")


def are(kind: type, values: Collection[object]) -> bool:
    """Whether all values have exactly that type."""
    return not values or set(map(type, values)) == {kind}  # without a loop, since it is hot


def are_counts(values: Collection[int]) -> bool:
    """Whether all values are integers from 0 to 2**63 - 1."""
    return not values or (are(int, values) and min(values) >= 0 and max(values) < 2**63)


# --- records ------------------------------------------------------------------------------------


PARENT_COPY_BYTES: Final = 8 * 1024
ROOT_COPY_BYTES: Final = 16 * 1024
MOST_BLOB_BYTES: Final = 2**40


class BlobRef(Struct, frozen=True):
    """Pointer to an immutable metadata object, or to a block in one.

    Parameters
    ----------
    key : str
        `<kind>/<session>/<n>` below the repository.
    length : int
        Bytes of the whole object, or of the block.
    crc32c : int
        The checksum in its envelope; of a block, that of its bytes.
    copy : bytes, optional
        The object's bytes, if the pointer carries them.
    offset : int, default 0
        Where the block begins in the object; 0 for the whole object. It is not stored here.

    Raises
    ------
    InvalidArgumentError
        If the key is not that of a session's object, a number is out of range, or the copy has
        another length.
    """

    key: str
    length: int
    crc32c: int
    copy: bytes | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        session_of(self.key)
        sound = 0 <= self.length <= MOST_BLOB_BYTES and 0 <= self.crc32c < 2**32
        sound = sound and type(self.length) is type(self.crc32c) is int
        if not sound or (self.copy is not None and len(self.copy) != self.length):
            raise InvalidArgumentError(f"a pointer to {self.key} with invalid numbers or copy")

    @classmethod
    def to(cls, key: str, data: bytes) -> BlobRef:
        """The pointer to an encoded object at `key`."""
        return cls(key, len(data), crc_of(data))

    @property
    def name(self) -> str:
        """The key, and where the block begins."""
        return f"{self.key}:{self.offset}" if self.offset else self.key

    def bare(self) -> BlobRef:
        """The pointer without the copy."""
        return self if self.copy is None else replace(self, copy=None)

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        packed: dict[str, Any] = {"k": self.key, "n": self.length, "c": self.crc32c}
        if self.copy is not None:
            packed["b"] = self.copy
        return packed

    @classmethod
    def parse(cls, fields: Fields) -> BlobRef:
        """From a map that `pack` made."""
        length = fields.number("n")
        copy = fields.binary("b", length) if fields.has("b") else None
        return cls(fields.text("k"), length, fields.number("c"), copy)

    @classmethod
    def parse_optional(cls, fields: Fields, name: str) -> BlobRef | None:
        """The pointer in the field of that name; None if absent."""
        if not fields.has(name):
            return None
        return cls.parse(Fields(fields.value[name], f"{fields.where}.{name}"))

    @classmethod
    def parse_required(cls, fields: Fields, name: str) -> BlobRef:
        """The pointer in the field of that name; raises if absent."""
        return cls.parse(Fields(fields.value.get(name), f"{fields.where}.{name}"))


def with_copies(
    refs: Sequence[BlobRef], known: Mapping[str, bytes], budget_bytes: int
) -> list[BlobRef]:
    """The same pointers, with copies of known bytes in order while they fit the budget."""
    out = []
    for ref in refs:
        data = known.get(ref.key, ref.copy)
        if data is not None and len(data) <= budget_bytes:
            budget_bytes -= len(data)
            out.append(ref if data == ref.copy else replace(ref, copy=data))
        else:
            out.append(ref.bare())
    return out


# --- records -----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """How a field is stored.

    Parameters
    ----------
    parse : callable
        The value of the field of that name, checked; that of an absent field, too.
    pack : callable, optional
        The value for msgpack.
    rare : bool
        Whether the field is left out if its value is empty or None.
    """

    parse: Callable[[Fields, str], Any]
    pack: Callable[[Any], Any] = lambda value: value
    rare: bool = False

    def left_out(self) -> Stored:
        """The same, left out if it is empty or None."""
        return self._replace(rare=True)


type Field = tuple[str, str, Stored]
"""Name on disk, attribute, and how it is stored."""

NUMBER: Final = Stored(Fields.number)
FLAG: Final = Stored(Fields.flag)
TEXT: Final = Stored(Fields.text)
OPTIONAL_TEXT: Final = Stored(lambda fields, name: fields.text(name) if fields.has(name) else None)
ITEMS: Final = Stored(Fields.items)
TUPLE: Final = Stored(lambda fields, name: tuple(fields.items(name)))
NUMBERS: Final = Stored(Fields.numbers)
TABLE: Final = Stored(Fields.table, dict)
COUNTERS: Final = Stored(Fields.counters, dict)
SORTED_COUNTERS: Final = Stored(Fields.counters, lambda counts: dict(sorted(counts.items())))
COPIED: Final = Stored(BlobRef.parse_required, BlobRef.pack)
"""A pointer with its copy."""
POINTER: Final = Stored(BlobRef.parse_required, lambda ref: ref.bare().pack())
OPTIONAL_POINTER: Final = Stored(
    BlobRef.parse_optional, lambda ref: None if ref is None else ref.bare().pack()
)
OPTIONAL_COPIED: Final = Stored(
    BlobRef.parse_optional, lambda ref: None if ref is None else ref.pack()
)


def binary(length: int | None = None) -> Stored:
    """Bytes, so many if it is said."""
    return Stored(lambda fields, name: fields.binary(name, length))


def maps(kind: Any) -> Stored:
    """A list of maps that `kind` packs and parses."""
    return Stored(lambda fields, name: tuple(map(kind.parse, fields.maps(name))), packed)


def rows(kind: Any) -> Stored:
    """A list of lists that `kind` packs, and parses given where they are, for error messages."""

    def parse(fields: Fields, name: str) -> Any:
        where = f"{fields.where}.{name}"
        return tuple([kind.parse(value, where) for value in fields.items(name)])

    return Stored(parse, packed)


def inner(kind: Any, absent: Callable[[], Any] = lambda: None) -> Stored:
    """A map that `kind` packs and parses; `absent` gives the value where there is none."""

    def parse(fields: Fields, name: str) -> Any:
        if not fields.has(name):
            return absent()
        return kind.parse(Fields(fields.value[name], f"{fields.where}.{name}"))

    return Stored(parse, kind.pack)


def by_name(parse: Callable[[Any, str], Any], pack: Callable[[Any], Any]) -> Stored:
    """A map in order of names; `parse` gets a value and where it is, for error messages."""

    def parsed(fields: Fields, name: str) -> dict[str, Any]:
        table, where = fields.table(name), f"{fields.where}.{name}"
        return {key: parse(value, f"{where}[{key!r}]") for key, value in table.items()}

    return Stored(parsed, lambda values: {key: pack(values[key]) for key in sorted(values)})


def pointer(value: object, where: str) -> BlobRef:
    """The pointer that `BlobRef.pack` made."""
    return BlobRef.parse(Fields(value, where))


POINTERS: Final = by_name(pointer, POINTER.pack)


def packed(values: Any) -> list[Any]:
    """Values for msgpack."""
    return [value.pack() for value in values]


def box_of(lo: list[Any], hi: list[Any], where: str) -> Box:
    """The box with these bounds."""
    if not are(int, (*lo, *hi)):
        raise CorruptObjectError(f"{where}: expected a box of integers")
    return Box(tuple(lo), tuple(hi))


class Record(Struct, frozen=True):
    """A value that is a map on disk."""

    _FIELDS: ClassVar[tuple[Field, ...]]

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        found = {}
        for name, attribute, stored in self._FIELDS:
            value = getattr(self, attribute)
            if value or not stored.rare:
                found[name] = stored.pack(value)
        return found

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """From a map that `pack` made."""
        return cls(**{attribute: how.parse(fields, name) for name, attribute, how in cls._FIELDS})


class MetadataObject(Record, frozen=True):
    """A record that is an immutable object of its own."""

    _KIND: ClassVar[ObjectKind]
    _TYPE: ClassVar[str] = ""
    """What its field `type` says, where objects of one kind are of several types."""
    _PACKED: ClassVar[str] = ""
    """Name of a list whose items `parse` gets still packed."""

    def encode(self) -> bytes:
        """The object's bytes."""
        said = {"type": self._TYPE} if self._TYPE else {}
        return encode(self._KIND, said | self.pack())

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Self:
        """Decode the object that the pointer names."""
        return decoded(cls, data, ref)


def decoded[T: MetadataObject](kind: type[T], data: bytes, ref: BlobRef) -> T:
    """The object that the pointer names, checked as its envelope and its table of fields say."""

    def parse(fields: Fields) -> T:
        if kind._TYPE and fields.text("type") != kind._TYPE:
            raise CorruptObjectError(f"{fields.where}: of another type than {kind._TYPE}")
        return kind.parse(fields)

    told: Any = {"crc": ref.crc32c, "length": ref.length, "packed": kind._PACKED}
    return decode(data, kind._KIND, parse, ref.key, **told)
