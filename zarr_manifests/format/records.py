"""Maps on disk, described by tables of their fields; objects that hold one, and pointers to these.

A line of a table names a field on disk, the attribute it is read to and written from, and how it is
stored. Fields are written and read in the order of the lines. Invariant: a value is built through
its constructor, so readers check what writers check.

A `BlobRef` is the key, length and crc32c of an immutable object, or of a block in one. It may carry
a copy of its bytes, which saves a request. Invariant: the object also exists at its key, so copies
can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Self

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.envelope import Fields, ObjectKind, are, crc_of, decode, encode
from zarr_manifests.grid import Box
from zarr_manifests.ids import session_of

PARENT_COPY_BYTES: Final = 8 * 1024
ROOT_COPY_BYTES: Final = 16 * 1024
MOST_BLOB_BYTES: Final = 2**40


@dataclass(frozen=True, slots=True)
class BlobRef:
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


class Record:
    """A value that is a map on disk."""

    __slots__ = ()
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


class MetadataObject(Record):
    """A record that is an immutable object of its own."""

    __slots__ = ()
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
