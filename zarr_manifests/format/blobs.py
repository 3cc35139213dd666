"""Pointers from one metadata object to another.

A `BlobRef` is the key, length and crc32c of an immutable object. It may carry a copy of its bytes,
which saves a request. Invariant: the object also exists at its key, so copies can be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.envelope import Fields, crc_of
from zarr_manifests.ids import session_of

PARENT_COPY_BYTES: Final = 8 * 1024
ROOT_COPY_BYTES: Final = 16 * 1024
MOST_BLOB_BYTES: Final = 2**40


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Pointer to an immutable metadata object.

    Parameters
    ----------
    key : str
        `<kind>/<session>/<n>` below the repository.
    length : int
        Bytes of the whole object.
    crc32c : int
        The checksum in its envelope.
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
        ref = cls.parse_optional(fields, name)
        if ref is None:
            raise CorruptObjectError(f"{fields.where}.{name}: expected a pointer, found nothing")
        return ref


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
