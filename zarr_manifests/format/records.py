r"""The envelope around every metadata object, and safe access to the payload inside.

Layout (little-endian, 24 bytes of header)::

    0   8   magic 89 5A 4D 46 0D 0A 1A 0A  ("\x89ZMF\r\n\x1a\n")
    8   4   crc32c of every byte from offset 12 to the end
    12  1   format version (4)
    13  1   kind of the object
    14  1   codec of the payload: 0 stored, 1 zstd
    15  1   flags: 0; a reader refuses unknown bits
    16  8   length of the decoded payload
    24      payload: a msgpack map

Invariants: length, crc, version, flags and kind are checked before the payload is decoded, and
every size read from disk is bounded before it is used to allocate. The crc is stored before the
bytes it covers: the crc of a message followed by its own crc is the same for all messages, so
pointers that repeat it could not tell objects apart.

Records: values that are maps or lists on disk, and pointers to them
--------------------------------------------------------------------

A record is a struct. Its annotations say what a reader accepts, and msgspec checks them; what they
cannot say is checked by its constructor, for readers and writers alike. A field with its default is
left out of a map, and so has one if it may be absent. Readers ignore names that they do not know.

A `BlobRef` is the key, length and crc32c of an immutable object, or of a block in one. It may carry
a copy of its bytes, which saves a request. Invariant: the object also exists at its key, so copies
can be dropped.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import msgpack
import zstandard
from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.msgpack import encode as encode_msgpack
from msgspec.structs import force_setattr, replace

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    UnsupportedFormatError,
)
from zarr_manifests.ids import COMMIT_ID_BYTES, NODE_ID_BYTES, crc32c, session_of
from zarr_manifests.runtime import MAX_MS as MAX_MS
from zarr_manifests.runtime import ForkSafeLock

FORMAT_VERSION: Final = 4
_LAST_OF_DRAFT: Final = "9fc86d01"
"""The last commit of this package that reads version 3, and names those for older ones."""
MAGIC: Final = b"\x89ZMF\r\n\x1a\n"
MAX_PAYLOAD_BYTES: Final = 1 << 30
MAX_ROOT_BYTES: Final = 1 << 24
MAX_SNAPSHOT_BYTES: Final = 1 << 28
"""Bounds for objects that are found by key alone, whose length no pointer states."""
MAX_NUMBER: Final = 2**63 - 1
MOST_BLOB_BYTES: Final = 2**40
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
    BUNDLE = 8
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


type Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
type Crc = Annotated[int, Meta(ge=0, le=2**32 - 1)]
type BlobLength = Annotated[int, Meta(ge=0, le=MOST_BLOB_BYTES)]
type TimeMs = Annotated[int, Meta(ge=0, le=MAX_MS)]
type NodeId = Annotated[bytes, Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
type CommitId = Annotated[bytes, Meta(min_length=COMMIT_ID_BYTES, max_length=COMMIT_ID_BYTES)]


def plain(value: Any) -> Any:
    """Records as maps and lists."""
    return to_builtins(value, builtin_types=(bytes,))


def pack(payload: Any) -> bytes:
    """Msgpack of `payload`, with records as maps and lists."""
    return encode_msgpack(payload)


_RESOLVED: Final[set[type]] = set()
_RESOLVING: Final = ForkSafeLock()


def record[T](kind: type[T], value: Any, where: str) -> T:
    """The value of that kind that `plain` made; it is untrusted."""
    if kind not in _RESOLVED:
        # msgspec reads annotations at the first use, and two threads that do so at once can crash.
        with _RESOLVING:
            with suppress(ValidationError):
                convert(None, kind)
            _RESOLVED.add(kind)
    try:
        return convert(value, kind, builtin_types=(bytes,))
    except ValidationError as error:
        said, _, at = str(error).partition(" - at `$")
        raise CorruptObjectError(f"{where}{at.removesuffix('`')}: {said}") from error


def unpack(data: bytes | memoryview) -> Any:
    """The value of untrusted msgpack bytes; `CorruptObjectError` if they are malformed.

    Memory is bounded by the number of bytes: no list or map is shorter than it claims, and beyond a
    harmless number there is at most one list or map for every 4 bytes.
    """
    most = _FREE_CONTAINERS + len(data) // _BYTES_A_CONTAINER
    hooks: dict[str, Any] = {}
    if len(data) > most:  # else there are not enough bytes for more
        hooks = {"list_hook": (count := _Count(most)), "object_hook": count}
    try:
        _skip(data)
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True, **hooks)
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.UnpackException) as error:
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


def encode(kind: ObjectKind, payload: object) -> bytes:
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


def decode[T](
    data: bytes,
    kind: ObjectKind,
    parse: Callable[[Any], T],
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
        Builds the value from the payload.
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
        return parse(_open(data, kind, crc, length, packed))


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
        if header.version < FORMAT_VERSION:
            raise UnsupportedFormatError(
                "written in an earlier draft of the format, which this version does not read: get "
                f"the commit {_LAST_OF_DRAFT} of zarr-manifests, and export there what you need"
            )
        return header

    def check(self, kind: ObjectKind, crc: int | None) -> None:
        """Raise unless this is the header of the object that its pointer names.

        The caller has compared the checksum with the bytes.
        """
        if crc is not None and crc != self.crc32c:
            raise CorruptObjectError(f"not the object its pointer names; {_MEND}")
        if self.flags:
            raise UnsupportedFormatError(f"unknown flags {self.flags:#x}; upgrade the package")
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


def are(kind: type, values: Collection[object]) -> bool:
    """Whether all values have exactly that type."""
    return not values or set(map(type, values)) == {kind}  # without a loop, since it is hot


# --- records ------------------------------------------------------------------------------------


PARENT_COPY_BYTES: Final = 8 * 1024
ROOT_COPY_BYTES: Final = 16 * 1024


class BlobRef(
    Struct,
    frozen=True,
    omit_defaults=True,
    rename={"key": "k", "length": "n", "crc32c": "c", "copy": "b"},
):
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
    def offset(self) -> int:
        """Where the block begins in the object; 0 for the whole object."""
        return 0

    @property
    def name(self) -> str:
        """The key, and where the block begins."""
        return f"{self.key}:{self.offset}" if self.offset else self.key

    def bare(self) -> BlobRef:
        """The pointer without the copy."""
        return self if self.copy is None else replace(self, copy=None)


class BlockRef(BlobRef, frozen=True):
    """Pointer to a block that begins at `start` in its object; it is not stored."""

    start: int = 0

    @property
    def offset(self) -> int:
        """Where the block begins in the object."""
        return self.start


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


class ListRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that is a list on disk."""


class Record(Struct, frozen=True, omit_defaults=True):
    """A value that is a map on disk."""


def drop_copies(value: Struct, *names: str) -> None:
    """Let the pointers in these fields carry no copies; for constructors."""
    for name in names:
        ref: BlobRef | None = getattr(value, name)
        if ref is not None and ref.copy is not None:
            force_setattr(value, name, ref.bare())


class MetadataObject(Record, frozen=True):
    """A record that is an immutable object of its own."""

    _KIND: ClassVar[ObjectKind]
    _PACKED: ClassVar[str] = ""
    """Name of a list whose items `parse` gets still packed."""

    def pack(self) -> Any:
        """As a value for msgpack."""
        return self

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From an untrusted map that `pack` made."""
        return record(cls, value, cls._KIND.name.lower())

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(self._KIND, self.pack())

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Self:
        """Decode the object that the pointer names."""
        told: Any = {"crc": ref.crc32c, "length": ref.length, "packed": cls._PACKED}
        return decode(data, cls._KIND, cls.parse, ref.key, **told)
