"""The envelope, and records, apart from what lies in them."""

from __future__ import annotations

import random
import threading
from typing import Any

import msgspec
import pytest
import zstandard

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format import records
from zarr_manifests.format.records import (
    MAX_ROOT_BYTES,
    ObjectKind,
    Record,
    decode,
    decompress,
    encode,
    expanded_at_most,
    pack,
    record,
    unpack,
    unpack_but,
)


def test_an_object_beyond_what_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no commit than one that nobody can open."""
    monkeypatch.setattr(records, "MAX_PAYLOAD_BYTES", 100)
    data = encode(ObjectKind.DELTA, {"a": bytes(90)})
    assert decode(data, ObjectKind.DELTA, dict, "where") == {"a": bytes(90)}
    with pytest.raises(InvalidArgumentError, match="several steps"):
        encode(ObjectKind.DELTA, {"a": bytes(100)})


def test_a_root_beyond_what_is_read_is_not_written() -> None:
    with pytest.raises(InvalidArgumentError, match="larger than readers accept"):
        encode(ObjectKind.ROOT, {"a": random.Random(1).randbytes(MAX_ROOT_BYTES)})


def test_few_bytes_cannot_fill_memory() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(CorruptObjectError, match="cannot hold"):
        decompress(bomb, expanded_at_most(bomb), 1 << 26)


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


@pytest.mark.parametrize("empty", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_there_is_at_most_one_list_or_map_for_some_bytes(empty: bytes) -> None:
    def listed(count: int) -> bytes:
        return b"\xdd" + count.to_bytes(4, "big") + empty * count

    assert len(unpack(listed(60_000))) == 60_000
    with pytest.raises(CorruptObjectError, match="too many lists and maps"):
        unpack(listed(70_000))


def test_only_one_thread_at_a_time_uses_a_type_of_record_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """msgspec has crashed where two did."""

    class New(Record, frozen=True):
        number: int = 0

    other = threading.Thread(target=record, args=(New, {}, "new"))
    waited: list[bool] = []

    def first(value: Any, kind: Any, **options: Any) -> Any:
        if value is None and not waited:
            other.start()
            other.join(0.1)
            waited.append(other.is_alive())
        return msgspec.convert(value, kind, **options)

    monkeypatch.setattr("zarr_manifests.format.records.convert", first)
    assert record(New, {"number": 7}, "new") == New(7)
    other.join()
    assert waited == [True]
