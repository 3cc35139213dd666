"""The envelope and the reader of fields, apart from what lies in them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from zarr_manifests.format import envelope
from zarr_manifests.format.blobs import BlobRef, with_copies
from zarr_manifests.format.envelope import (
    Fields,
    ObjectKind,
    crc_of,
    decode,
    encode,
    pack,
    unpack,
    unpack_but,
)
from zarr_manifests.ids import crc32c

KEY = f"deltas/{1:012d}-{'ab' * 12}/0"


def read(data: bytes, **pointer: Any) -> Any:
    return decode(data, ObjectKind.DELTA, lambda fields: fields.value, "where", **pointer)


def test_layout() -> None:
    data = encode(ObjectKind.DELTA, {"a": 1})
    assert data[:8] == b"\x89ZMF\r\n\x1a\n"
    assert data[12:16] == bytes([1, ObjectKind.DELTA, 0, 0])
    assert data[16:24] == (4).to_bytes(8, "little")
    assert data[24:] == b"\x81\xa1a\x01"
    assert crc_of(data) == int.from_bytes(data[8:12], "little")
    assert read(data) == {"a": 1}


def test_compressed_where_that_makes_it_smaller() -> None:
    data = encode(ObjectKind.DELTA, {"a": bytes(10_000)})
    assert data[14] == 1
    assert len(data) < 200
    assert read(data) == {"a": bytes(10_000)}


def test_what_would_expand_too_far_is_stored_as_it_is_and_refused_compressed() -> None:
    """Up to 1 MiB anything goes; beyond that a payload is at most 64 times its bytes."""
    for nbytes, codec in ((1 << 20) - 8, 1), ((1 << 20) - 7, 0):
        data = encode(ObjectKind.DELTA, {"a": bytes(nbytes)})
        assert int.from_bytes(data[16:24], "little") == nbytes + 8
        assert data[14] == codec
        assert read(data) == {"a": bytes(nbytes)}
    packed = zstandard.ZstdCompressor().compress(data[24:])
    covered = data[12:14] + b"\1\0" + data[16:24] + packed
    bomb = data[:8] + crc32c(covered).to_bytes(4, "little") + covered
    with pytest.raises(CorruptObjectError, match=f"{len(packed)} bytes cannot hold a payload"):
        read(bomb)
    padded = encode(ObjectKind.DELTA, {"a": bytes(nbytes) + os.urandom(20_000)})
    assert padded[14] == 1  # its bytes allow for what it becomes
    assert len(read(padded)["a"]) == nbytes + 20_000


def test_pointers_tell_length_and_checksum() -> None:
    data = encode(ObjectKind.DELTA, {"a": 1})
    assert read(data, crc=crc_of(data), length=len(data)) == {"a": 1}
    with pytest.raises(CorruptObjectError, match=r"where: 28 bytes, but its pointer says 29"):
        read(data, length=len(data) + 1)
    with pytest.raises(CorruptObjectError, match="not the object its pointer names"):
        read(data, crc=crc_of(data) ^ 1)


def test_checksums_differ_from_message_to_message() -> None:
    """A checksum at the end of what it covers would make them all equal."""
    assert len({crc_of(encode(ObjectKind.DELTA, {"a": i})) for i in range(100)}) == 100


def test_newer_version_is_told_before_the_checksum_is_looked_at() -> None:
    data = bytearray(encode(ObjectKind.DELTA, {"a": 1}))
    data[12] = 7
    with pytest.raises(
        UnsupportedFormatError, match=r"where: written in format 7.*up to 1; upgrade the package"
    ):
        read(bytes(data))


def test_values_that_refuse_to_be_built_mean_a_corrupt_object() -> None:
    def parse(fields: Fields) -> None:
        raise InvalidArgumentError("no")

    with pytest.raises(CorruptObjectError, match="where: no"):
        decode(encode(ObjectKind.DELTA, {}), ObjectKind.DELTA, parse, "where")


def test_an_object_beyond_what_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no commit than one that nobody can open."""
    monkeypatch.setattr(envelope, "MAX_PAYLOAD_BYTES", 100)
    read(encode(ObjectKind.DELTA, {"a": bytes(90)}))
    with pytest.raises(InvalidArgumentError, match="several steps"):
        encode(ObjectKind.DELTA, {"a": bytes(100)})


@pytest.mark.parametrize(
    "data", [b"", b"\x81", b"\xc1", b"\x00\x00", b"\x81\x90\x00", b"\xa1\xff", b"\x81\x80\x00"]
)
def test_what_is_not_msgpack(data: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="not msgpack"):
        unpack(data)


payloads = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.one_of(st.integers(-(2**63), 2**64 - 1), st.text(max_size=4), st.binary(max_size=4)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@given(payloads, st.lists(payloads, max_size=4))
def test_items_that_stay_packed_are_the_same(
    payload: dict[str, Any], items: list[dict[str, Any]]
) -> None:
    found = unpack_but(pack(payload | {"many": items}), "many")
    assert [unpack(item) for item in found.pop("many")] == items
    payload.pop("many", None)
    assert found == payload == unpack_but(pack(payload), "many")


@pytest.mark.parametrize("size", [1, 60_000])
def test_a_map_of_which_a_list_stays_packed_may_lie_no_more_than_another(size: int) -> None:
    plain = pack({"many": [[1], [2]], "other": bytes(size), "third": [{"a": 3}]})
    assert unpack_but(plain, "many")["many"] == [b"\x91\x01", b"\x91\x02"]
    assert unpack_but(plain, "many")["third"] == [{"a": 3}]
    lies = [
        plain[:-1],
        plain + b"\x00",
        b"\x93" + plain[1:],
        plain.replace(b"\x92\x91\x01", b"\x82\x91\x01"),  # a map where the list is due
        plain.replace(b"\x92\x91\x01\x91\x02", b"\xdd\xff\xff\xff\xff"),
        b"\xdf\xff\xff\xff\xff" + plain[1:],
        pack({"many": 3, "other": bytes(size)}),
    ]
    for lie in lies:
        with pytest.raises(CorruptObjectError):
            unpack_but(lie, "many")
    many = pack({"many": [], "other": [[] for _ in range(400_000)]})
    with pytest.raises(CorruptObjectError, match="too many lists and maps"):
        unpack_but(many, "many")


def test_fields_name_what_is_wrong_and_where() -> None:
    fields = Fields({"n": -1, "t": b"x", "b": "x", "l": {}, "m": [], "x": [3]}, "root")
    calls = {
        r"root\.n: expected a number from 0 to 9, found int": lambda: fields.number("n", 9),
        r"root\.gone: expected a number .* found nothing": lambda: fields.number("gone"),
        r"root\.t: expected a string, found bytes": lambda: fields.text("t"),
        r"root\.b: expected bytes, found str": lambda: fields.binary("b"),
        r"root\.t: expected 2 bytes": lambda: fields.binary("t", 2),
        r"root\.l: expected a list, found dict": lambda: fields.items("l"),
        r"root\.m: expected a map with string keys, found list": lambda: fields.table("m"),
        r"root\.x\[0\]: expected a map, found int": lambda: fields.maps("x"),
    }
    for message, call in calls.items():
        with pytest.raises(CorruptObjectError, match=message):
            call()
    assert (fields.items("gone"), fields.table("gone"), fields.numbers("gone")) == ([], {}, ())


# --- pointers --------------------------------------------------------------------------------


def test_a_pointer_cannot_leave_the_repository() -> None:
    session = KEY.split("/")[1]
    out = [f"{kind}/{session}/0" for kind in ("..", ".", "", "deltas.", "Deltas", "a b")]
    out += [f"deltas/{session}/{n}" for n in ("", "00", "07", "-1", "٣", "1" * 10, "0\n", "..")]
    for key in ("../../etc/passwd", "/etc/passwd", f"deltas/{'..'}/0", "current", *out):
        with pytest.raises(InvalidArgumentError):
            BlobRef(key, 1, 2)
        with pytest.raises(InvalidArgumentError):
            BlobRef.parse(Fields({"k": key, "n": 1, "c": 2}, "x"))


def test_copies_are_spent_in_order_while_they_fit() -> None:
    refs = [BlobRef(f"{KEY[:-1]}{i}", n, 0) for i, n in enumerate((40, 50, 30, 20))]
    known = {ref.key: bytes(ref.length) for ref in refs}
    found = with_copies(refs, known, 100)
    assert [ref.copy is not None for ref in found] == [True, True, False, False]
    assert [ref.bare() for ref in found] == refs
    assert with_copies(found, {}, 100) == found
    assert [ref.copy for ref in with_copies(found, {}, 0)] == [None] * 4
    assert [ref.copy is not None for ref in with_copies(refs, known, 95)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_copy_of_another_length_is_refused() -> None:
    packed = BlobRef(KEY, 3, 4, b"abc").pack()
    assert BlobRef.parse(Fields(packed, "x")) == BlobRef(KEY, 3, 4, b"abc")
    with pytest.raises(CorruptObjectError, match="expected 4 bytes"):
        BlobRef.parse(Fields(packed | {"n": 4}, "x"))
