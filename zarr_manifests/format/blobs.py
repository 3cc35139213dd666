"""Pointers from one metadata object to another.

A `BlobRef` is key, length and crc32c of an immutable object, and may carry a copy of its bytes.
Invariant: the copy is a cache, never the only home of the bytes; dropping it changes nothing but
the number of requests. `with_copies` spends a parent's budget of bytes on its pointers in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.envelope import Fields, crc_of
from zarr_manifests.ids import session_of

__all__ = ["PARENT_COPY_BYTES", "ROOT_COPY_BYTES", "BlobRef", "with_copies"]

PARENT_COPY_BYTES: Final = 8 * 1024
ROOT_COPY_BYTES: Final = 16 * 1024
_MOST_BYTES: Final = 2**40


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where an immutable metadata object is, and what its bytes must be.

    Parameters
    ----------
    key : str
        `<kind>/<session>/<n>` below the repository.
    length : int
        Bytes of the whole object.
    crc32c : int
        The checksum in its envelope.
    copy : bytes, optional
        The object's bytes, when they travel with the pointer.

    Raises
    ------
    InvalidArgumentError
        If the key is not one of a session's object, or a number or the copy is not what can be.
    """

    key: str
    length: int
    crc32c: int
    copy: bytes | None = None

    def __post_init__(self) -> None:
        session_of(self.key)
        sound = 0 <= self.length <= _MOST_BYTES and 0 <= self.crc32c < 2**32
        sound = sound and type(self.length) is type(self.crc32c) is int
        if not sound or (self.copy is not None and len(self.copy) != self.length):
            raise InvalidArgumentError(f"a pointer to {self.key} with numbers that cannot be")

    @classmethod
    def to(cls, key: str, data: bytes) -> BlobRef:
        """The pointer to an encoded object that lies at `key`."""
        return cls(key, len(data), crc_of(data))

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
        """The pointer in the field of that name, None if there is none."""
        if not fields.has(name):
            return None
        return cls.parse(Fields(fields.value[name], f"{fields.where}.{name}"))

    @classmethod
    def parse_due(cls, fields: Fields, name: str) -> BlobRef:
        """The pointer in the field of that name."""
        ref = cls.parse_optional(fields, name)
        if ref is None:
            raise CorruptObjectError(f"{fields.where}.{name}: a pointer is due")
        return ref


def with_copies(
    refs: Sequence[BlobRef], known: Mapping[str, bytes], budget_bytes: int
) -> list[BlobRef]:
    """The same pointers, with copies of the bytes that are known, first come, while they fit."""
    out = []
    for ref in refs:
        data = known.get(ref.key, ref.copy)
        if data is not None and len(data) <= budget_bytes:
            budget_bytes -= len(data)
            out.append(ref if data == ref.copy else replace(ref, copy=data))
        else:
            out.append(ref.bare())
    return out
