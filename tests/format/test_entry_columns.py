"""What pages say about snapshots: read all at once, and refused if one of them is wrong."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.entry_columns import HistoryEntries, HistoryEntry, SnapshotPointer
from zarr_manifests.format.envelope import MAX_MS, Fields, unpack_each

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


ENTRIES = [
    entry(0, totals={}),
    entry(1, message=None, metadata={}),
    entry(2, kind=CommitKind.REWRITE, totals={"n": 3, "m": 0}),
]
PACKED = [one.pack() for one in ENTRIES]


def unpacked(packed: list[bytes]) -> list[HistoryEntry]:
    return HistoryEntries.unpack(packed).entries()


def stored() -> dict[str, Any]:
    """The columns as a page has them."""
    found = msgpack.unpackb(msgpack.packb(HistoryEntries.of(ENTRIES).pack()))
    assert isinstance(found, dict)
    return found


def parsed(columns: dict[str, Any]) -> list[HistoryEntry]:
    read = msgpack.unpackb(msgpack.packb(columns), strict_map_key=False)
    return HistoryEntries.parse(Fields(read, "history")).entries()


def test_read_back() -> None:
    assert unpacked(PACKED) == ENTRIES
    assert unpacked(PACKED[1:]) == ENTRIES[1:]
    newer = [msgpack.packb([*msgpack.unpackb(one), "a field of later versions"]) for one in PACKED]
    assert unpacked(newer) == ENTRIES
    assert [SnapshotPointer.of(pointer.ref) for pointer in POINTERS] == POINTERS
    assert parsed(stored()) == ENTRIES
    assert parsed(stored() | {"later": "versions"}) == ENTRIES
    every = HistoryEntries.of(ENTRIES)
    assert every.since(1).entries() == ENTRIES[1:]
    parts = [HistoryEntries.of(ENTRIES[:1]), HistoryEntries.of(ENTRIES[1:])]
    assert HistoryEntries.join(parts) == every
    text = "why", {"a": [2]}
    (_, second, _) = every.completed({1: text}).entries()
    assert (second.message, second.metadata) == text


SOUND = stored()
WRONG_COLUMNS: dict[str, list[Any]] = {
    "ids": [None, 1, "x", b"x", f"{SESSION}-1\n{SESSION}-1", f"{SESSION}-01", f"{SESSION}-1\n"],
    "lengths": [None, -1, 2**40 + 1, True, 1.0],
    "crcs": [None, -1, 2**32, True, 7.0],
    "at_ms": [None, -1, MAX_MS + 1, True, 1.0, "1"],
    "kinds": [None, "", "Append", b"append", 1, []],
    "messages": [b"why", 1, []],
    "metadata": [None, [], {1: 1}, {b"a": 1}],
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, one) for name in WRONG_COLUMNS for one in WRONG_COLUMNS[name]]
)
def test_one_wrong_value_of_a_column_is_found_among_others(name: str, wrong: Any) -> None:
    for at in range(3):
        forged = [*SOUND[name]]
        forged[at] = wrong
        with pytest.raises(CorruptObjectError, match="history"):
            parsed(SOUND | {name: forged})


@pytest.mark.parametrize("wrong", [-1, 2**63, True, 1.0, "1", []])
@pytest.mark.parametrize("name", ["totals", "sums"])
def test_one_wrong_number_is_found_among_others(name: str, wrong: Any) -> None:
    for at in range(3):
        forged = [None, 1, 2]
        forged[at] = wrong
        with pytest.raises(CorruptObjectError, match="history"):
            parsed(SOUND | {name: SOUND[name] | {"n": forged}})


@pytest.mark.parametrize("name", [*SOUND])
def test_a_column_of_another_length_or_type_is_refused(name: str) -> None:
    sound = SOUND[name]
    others: list[Any] = [0, "three", {"n": [1, 2]}, {"n": "one"}, {1: [1, 2, 3]}, [[]]]
    others += [sound[:-1], [*sound, sound[-1]]] if name not in {"totals", "sums", "parent"} else []
    for other in others:
        with pytest.raises(CorruptObjectError, match="history"):
            parsed(SOUND | {name: other})
    without = {key: value for key, value in SOUND.items() if key != name}
    if name == "parent":
        assert parsed(without) == ENTRIES  # the first has none
        return
    if name in {"totals", "sums"}:
        assert len(parsed(without)) == 3
        return
    with pytest.raises(CorruptObjectError, match="history"):
        parsed(without)


def test_no_entries_at_all() -> None:
    empty = {name: SOUND[name][:0] for name in SOUND if name not in {"totals", "sums", "parent"}}
    with pytest.raises(CorruptObjectError, match="history"):
        parsed(empty)
    for make in HistoryEntries.of, HistoryEntries.unpack:
        with pytest.raises(CorruptObjectError, match="history"):
            make([])


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
        assert unpacked(forged) == ENTRIES  # the first has no parent
        return
    with pytest.raises(CorruptObjectError, match="history"):
        unpacked(forged)


@pytest.mark.parametrize("wrong", [b"\x90", b"\xc0", msgpack.packb([1] * 8), msgpack.packb({})])
def test_what_is_no_entry(wrong: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="history"):
        unpacked([PACKED[0], wrong])


def test_entries_in_the_wrong_order_or_with_a_gap() -> None:
    for wrong in PACKED[::-1], PACKED[::2], [PACKED[0], *PACKED]:
        with pytest.raises(CorruptObjectError, match="not the child"):
            unpacked(wrong)
    for order in ENTRIES[::-1], ENTRIES[::2], [ENTRIES[0], *ENTRIES]:
        with pytest.raises(CorruptObjectError, match="not the child"):
            HistoryEntries.of(order)
    with pytest.raises(CorruptObjectError, match="not the child"):
        HistoryEntries.join([HistoryEntries.of(ENTRIES[2:]), HistoryEntries.of(ENTRIES[:1])])


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
