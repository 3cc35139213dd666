"""Objects in blocks: a directory, then blocks that a reader can fetch and verify one by one.

Layout after the header of the envelope, whose codec is 2::

    24  4   length of the encoded directory
    28      the directory: a msgpack map as one zstd frame
            the blocks, one after another

A block is a byte, 0 if the rest is its payload and 1 if the rest is one zstd frame of it. The
directory has the number of `blocks`, and columns of their `length` and `crc32c`.

Invariant: the checksum of the whole object is combined from those of the directory's bytes and of
the blocks, and compared with the header and the pointer. So a verified directory covers every
block, and a block is as safe as the whole object.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.columns import Column, decode_column, encode_column
from zarr_manifests.format.envelope import (
    BLOCKS,
    CRC_FROM,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Fields,
    Header,
    ObjectKind,
    compress,
    compress_by_place,
    decompress,
    expanded_at_most,
    frame,
    pack,
    unpack,
)
from zarr_manifests.ids import crc32c, crc32c_of_all

_LENGTH = struct.Struct("<I")
_PROLOGUE_BYTES: Final = HEADER_BYTES + _LENGTH.size
_CODEC_AT: Final = 14
_MAX_BLOCKS: Final = 1 << 16
_STORED, _ZSTD = b"\0", b"\1"


def encode_blocks(kind: ObjectKind, directory: Mapping[str, Any], blocks: Sequence[bytes]) -> bytes:
    """The object's bytes; `directory` has the fields besides those of this module."""
    bodies = [_packed(block) for block in blocks]
    fields = {
        **directory,
        "blocks": len(bodies),
        "length": encode_column(np.array([len(body) for body in bodies], np.int64)),
        "crc32c": encode_column(np.array([crc32c(body) for body in bodies], np.int64)),
    }
    raw = pack(fields)
    packed = compress(raw)
    return frame(kind, BLOCKS, len(raw), b"".join((_LENGTH.pack(len(packed)), packed, *bodies)))


def _packed(block: bytes) -> bytes:
    packed = compress_by_place(block)
    smaller = len(packed) < len(block) <= expanded_at_most(packed)
    return _ZSTD + packed if smaller else _STORED + block


def is_in_blocks(head: bytes) -> bool:
    """Whether the object that begins so says that it is in blocks; nobody has verified it yet."""
    return head[_CODEC_AT : _CODEC_AT + 1] == bytes([BLOCKS])


def directory_end(head: bytes) -> int:
    """Where the directory ends in the object in blocks that begins so; not verified either."""
    if len(head) < _PROLOGUE_BYTES:
        raise CorruptObjectError("the object ends before its directory")
    (nbytes,) = _LENGTH.unpack_from(head, HEADER_BYTES)
    return _PROLOGUE_BYTES + int(nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The verified directory of an object in blocks.

    Parameters
    ----------
    fields : Fields
        All fields of the directory.
    starts, lengths, crcs : int64[n]
        Where each block begins in the object, its bytes, and their checksum.
    """

    fields: Fields
    starts: Column
    lengths: Column
    crcs: Column

    @classmethod
    def of(cls, head: bytes, kind: ObjectKind, crc: int, length: int) -> Blocks:
        """The directory at the beginning of an object of that checksum and length.

        Raises
        ------
        CorruptObjectError
            If it is damaged, incomplete, or not that of the object.
        UnsupportedFormatError
            If the object has a newer format.
        """
        header = Header.of(head)
        header.check(kind, crc)
        end = directory_end(head)
        if header.codec != BLOCKS or len(head) < end:
            raise CorruptObjectError("the directory is incomplete")
        packed = head[_PROLOGUE_BYTES:end]
        if header.nbytes > MAX_PAYLOAD_BYTES:
            raise CorruptObjectError(f"a directory of {header.nbytes} bytes is too large")
        fields = Fields(unpack(decompress(packed, header.nbytes)), "directory")
        n = fields.number("blocks", _MAX_BLOCKS)
        if not n:
            raise CorruptObjectError("the directory lists no blocks")
        lengths = decode_column(fields.value.get("length"), n, length)
        crcs = decode_column(fields.value.get("crc32c"), n, 2**32 - 1)
        ends = end + lengths.cumsum()
        if int(ends[-1]) != length:
            raise CorruptObjectError(f"the blocks end at {ends[-1]}, and the object at {length}")
        covered = head[CRC_FROM:end]
        parts = [
            (crc32c(covered), len(covered)),
            *zip(crcs.tolist(), lengths.tolist(), strict=True),
        ]
        if crc32c_of_all(parts) != header.crc32c:
            raise CorruptObjectError("the checksum does not match the directory and its blocks")
        return cls(fields, ends - lengths, lengths, crcs)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def end(self) -> int:
        """Length of the whole object."""
        return int(self.starts[-1] + self.lengths[-1])

    def range(self, number: int) -> tuple[int, int]:
        """Where the block begins in the object, and how many bytes it has."""
        return self.starts.item(number), self.lengths.item(number)

    def payload(self, number: int, data: bytes | memoryview) -> bytes | memoryview:
        """The payload of the block; `data` has its bytes.

        Raises
        ------
        CorruptObjectError
            If the bytes are not those of the block.
        """
        if len(data) != self.lengths[number] or crc32c(data) != self.crcs[number]:
            raise CorruptObjectError(f"the checksum of block {number} does not match its bytes")
        codec, body = data[:1], data[1:]
        if codec == _ZSTD:
            return decompress(body)
        if codec != _STORED:
            raise CorruptObjectError(f"block {number} has an unknown codec")
        return body
