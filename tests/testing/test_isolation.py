"""Histories made by hand, each of which breaks one rule, and the same without the break."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from zarr_manifests.testing import Access, Transaction, check_isolation

START = ("s0", "")


def r(key: str, value: Hashable = None) -> Access:
    return Access("read", key, value)


def w(key: str, value: Hashable) -> Access:
    return Access("write", key, value)


def committed(name: str, began: str, *operations: Access, **options: Any) -> Transaction:
    """One whose snapshot is called as it is, with an s."""
    return Transaction(name, began, operations, "committed", f"s{name}", **options)


def other(outcome: Any, name: str, began: str, *operations: Access) -> Transaction:
    return Transaction(name, began, operations, outcome)


def history(*names: str) -> list[tuple[str, str]]:
    return [START, *((f"s{name}", name) for name in names)]


def kinds(transactions: list[Transaction], places: list[tuple[str, str]]) -> list[str]:
    return [violation.kind for violation in check_isolation(transactions, places)]


def test_one_after_the_other_is_fine() -> None:
    one = committed("1", "s0", r("x"), w("x", 1), r("x", 1), w("x", 2), w("y", 3), client="a")
    two = committed("2", "s1", r("x", 2), r("y", 3), w("x", 4), client="a", serializable=True)
    reader = other("reader", "3", "s1", r("x", 2), r("z"))
    assert check_isolation([one, two, reader], history("1", "2")) == []


def test_disjoint_writers_side_by_side_are_fine() -> None:
    writers = [committed(n, "s0", r(n), w(n, n), serializable=True) for n in ("1", "2", "3")]
    assert kinds(writers, history("3", "1", "2")) == []


def test_an_acknowledged_commit_that_is_not_there() -> None:
    one = committed("1", "s0", w("x", 1))
    assert kinds([one], [START]) == ["lost"]
    assert kinds([one], [START, ("another", "1")]) == ["lost"]
    assert kinds([one], history("1")) == []


def test_a_commit_that_is_there_twice() -> None:
    one = committed("1", "s0", w("x", 1))
    assert kinds([one], [*history("1"), ("again", "1")]) == ["duplicate"]


@pytest.mark.parametrize(
    ("outcome", "found"), [("refused", ["refused"]), ("reader", ["refused"]), ("unknown", [])]
)
def test_a_refused_commit_that_is_there(outcome: str, found: list[str]) -> None:
    assert kinds([other(outcome, "1", "s0", w("x", 1))], history("1")) == found
    assert kinds([other(outcome, "1", "s0", w("x", 1))], [START]) == []


def test_not_reading_what_one_wrote() -> None:
    assert kinds([committed("1", "s0", w("x", 1), r("x"))], history("1")) == ["internal"]


def test_g1a_reading_what_was_never_committed() -> None:
    one = other("refused", "1", "s0", w("x", 1))
    two = committed("2", "s0", r("x", 1), w("y", 1))
    assert kinds([one, two], history("2")) == ["G1a"]
    assert kinds([two], history("2")) == ["G1a"]  # nor written by anybody


def test_g1b_reading_what_was_written_over() -> None:
    one = committed("1", "s0", w("x", 1), w("x", 2))
    two = committed("2", "s1", r("x", 1), w("y", 1))
    assert kinds([one, two], history("1", "2")) == ["G1b"]


def test_g1c_reading_from_each_other() -> None:
    one = committed("1", "s0", w("x", 1), r("y", 2))
    two = committed("2", "s0", r("x", 1), w("y", 2))
    # Each has also read what was committed after it began.
    assert kinds([one, two], history("1", "2")) == ["G-SIa", "G-SIa", "G1c"]


def test_a_lost_update() -> None:
    one = committed("1", "s0", r("x"), w("x", 1))
    two = committed("2", "s0", r("x"), w("x", 2))
    assert kinds([one, two], history("1", "2")) == ["G-SIa"]
    assert kinds([one, committed("2", "s1", r("x", 1), w("x", 2))], history("1", "2")) == []


def test_a_blind_overwrite_of_what_came_meanwhile() -> None:
    one, two = committed("1", "s0", w("x", 1)), committed("2", "s0", w("x", 2))
    assert kinds([one, two], history("1", "2")) == ["G-SIa"]


def test_reading_what_came_after_the_begin() -> None:
    one = committed("1", "s0", w("x", 1))
    assert kinds([one, committed("2", "s0", r("x", 1), w("y", 1))], history("1", "2")) == ["G-SIa"]


def test_missing_what_came_before_the_begin() -> None:
    one = committed("1", "s0", w("x", 1))
    two = committed("2", "s1", r("x"), w("y", 1))
    assert kinds([one, two], history("1", "2")) == ["G-SIb"]


def test_half_a_commit() -> None:
    one = committed("1", "s0", w("x", 1), w("y", 1))
    reader = other("reader", "2", "s1", r("x", 1), r("y"))
    assert kinds([one, reader], history("1")) == ["G-SIb", "G2"]


def test_two_reads_of_one_key_that_differ() -> None:
    one = committed("1", "s0", w("x", 1))
    reader = other("reader", "2", "s0", r("x"), r("x", 1))
    assert "G-SIa" in kinds([one, reader], history("1"))


@pytest.mark.parametrize(
    ("serializable", "found"),
    [((False, False), []), ((True, False), []), ((False, True), []), ((True, True), ["G2"])],
)
def test_write_skew(serializable: tuple[bool, bool], found: list[str]) -> None:
    """Which of the two comes second decides, and that is the one whose `rw` leads back."""
    one = committed("1", "s0", r("x"), w("y", 1), serializable=serializable[0])
    two = committed("2", "s0", r("y"), w("x", 2), serializable=serializable[1])
    assert kinds([one, two], history("1", "2")) == found


def test_a_longer_cycle_of_serializable_ones() -> None:
    one = committed("1", "s0", r("x"), w("y", 1), serializable=True)
    two = committed("2", "s0", r("y"), w("z", 2), serializable=True)
    three = committed("3", "s0", r("z"), w("x", 3), serializable=True)
    found = check_isolation([one, two, three], history("1", "2", "3"))
    assert [violation.kind for violation in found] == ["G2"]
    assert sorted(found[0].transactions) == ["1", "2", "3"]
    assert kinds([one, two], history("2", "1")) == []  # the reader of y came first


def test_a_client_that_goes_back_in_time() -> None:
    one = committed("1", "s0", w("x", 1), client="a")
    for client, found in (("a", ["order"]), ("b", [])):
        two = committed("2", "s0", w("y", 1), client=client)
        assert kinds([one, two], history("1", "2")) == found


def test_deletions_are_versions_like_others() -> None:
    one = committed("1", "s0", w("x", 1))
    two = committed("2", "s1", r("x", 1), w("x", None))
    three = committed("3", "s2", r("x"), w("x", 3))
    assert kinds([one, two, three], history("1", "2", "3")) == []
    late = other("reader", "4", "s3", r("x"))
    assert kinds([one, two, three, late], history("1", "2", "3")) == ["G-SIb"]


def test_what_cannot_be_checked_is_refused() -> None:
    one = committed("1", "s0")
    with pytest.raises(ValueError, match="same name"):
        check_isolation([one, one], history("1"))
    with pytest.raises(ValueError, match="not in history"):
        check_isolation([committed("1", "s9")], history("1"))
