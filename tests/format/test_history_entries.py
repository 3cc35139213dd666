"""What pages say about snapshots: read all at once, and refused if one of them is wrong."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.envelope import MAX_MS, unpack_each
from zarr_manifests.format.history_pages import HistoryEntry, SnapshotPointer

SESSION = "000000000001-" + "ab" * 12
POINTERS = [SnapshotPointer(f"{SESSION}-{i}", 100 + i, 7 * i) for i in range(3)]


def entry(at: int, **fields: Any) -> HistoryEntry:
    parent = POINTERS[at - 1] if at else None
    made = HistoryEntry(
        POINTERS[at],
        parent,
        at,
        bytes(16),
        CommitKind.APPEND,
        "why",
        {"a": [1]},
        {"n": 1},
        {"s": 2},
    )
    return made._replace(**fields)


ENTRIES = [entry(0), entry(1, message=None, metadata={}), entry(2, kind=CommitKind.REWRITE)]
PACKED = [one.pack() for one in ENTRIES]


def test_read_back() -> None:
    assert HistoryEntry.parse_all(PACKED) == ENTRIES
    assert HistoryEntry.parse_all(PACKED[1:]) == ENTRIES[1:]
    assert HistoryEntry.parse_all([]) == []
    newer = [msgpack.packb([*msgpack.unpackb(one), "a field of later versions"]) for one in PACKED]
    assert HistoryEntry.parse_all(newer) == ENTRIES
    assert [SnapshotPointer.of(pointer.ref) for pointer in POINTERS] == POINTERS


WRONG: dict[int, list[Any]] = {
    0: [None, 1, [], ["x", 1, 1], [f"{SESSION}-1", 1], [f"{SESSION}-1", 1, 1, 1],
        [f"{SESSION}-1", -1, 1], [f"{SESSION}-1", 2**40 + 1, 1], [f"{SESSION}-1", 101, 2**32],
        [f"{SESSION}-1", 101, 7.0], [f"{SESSION}-1", True, 7], [b"", 101, 7]],
    1: [None, 1, [f"{SESSION}-1", 2**40 + 1, 7], ["x", 100, 1], {}],
    2: [-1, MAX_MS + 1, True, 1.0, "1", None],
    3: [b"", bytes(17), "0" * 16, None],
    4: ["", "Append", b"append", None, 1, []],
    5: [b"why", 1, []],
    6: [None, [], {1: 1}, {b"a": 1}],
    7: [None, [], {1: 1}, {"n": -1}, {"n": 2**63}, {"n": True}, {"n": 1.0}],
    8: [None, [], {1: 1}, {"n": -1}, {"n": 2**63}, {"n": True}, {"n": "1"}],
}  # fmt: skip


@pytest.mark.parametrize(("at", "wrong"), [(at, one) for at in WRONG for one in WRONG[at]])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_wrong_value_is_found_among_others(number: int, at: int, wrong: Any) -> None:
    forged = [*PACKED]
    fields = msgpack.unpackb(PACKED[number])
    fields[at] = wrong
    forged[number] = msgpack.packb(fields)
    if at == 1 and wrong is WRONG[1][0] and number == 0:
        assert HistoryEntry.parse_all(forged) == ENTRIES  # the first has no parent
        return
    with pytest.raises(CorruptObjectError, match="history"):
        HistoryEntry.parse_all(forged)


@pytest.mark.parametrize("wrong", [b"\x90", b"\xc0", msgpack.packb([1] * 8), msgpack.packb({})])
def test_what_is_no_entry(wrong: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="history"):
        HistoryEntry.parse_all([PACKED[0], wrong])


def test_entries_in_the_wrong_order_or_with_a_gap() -> None:
    for wrong in PACKED[::-1], PACKED[::2], [PACKED[0], *PACKED]:
        with pytest.raises(CorruptObjectError, match="not the child"):
            HistoryEntry.parse_all(wrong)


@pytest.mark.parametrize(
    "items",
    [
        [b"\x01", b""],
        [b"", b"\x01"],
        [b"\x01\x02"],
        [b"\x01\x02", b"\x03"],
        [b"\x92\x01", b"\x02"],  # a list that goes on in the next item
        [b"\x92\x01", b"\x02", b"\x03"],
        [b"\x01", b"\xc1"],
        [b"\x01", b"\xdd\xff\xff\xff\xff\x01"],
        [b"\x01", b"\xa1\xff"],
        [b"\x91" * 2000 + b"\x01"],
        [b"\x01", b"\x91" * 60_000 + b"\x01"],
        [b"\x01", b"\xdd\x00\x01\x38\x80" + b"\x90" * 80_000],
    ],
)
def test_each_item_is_one_value(items: list[bytes]) -> None:
    with pytest.raises(CorruptObjectError):
        unpack_each(items)
    assert unpack_each([b"\x01", b"\xa1a", b"\x91\x02"]) == [1, "a", [2]]
