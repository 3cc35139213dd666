"""Suggestions for unknown names, and what they cost."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from hashlib import sha256

import pytest

import zarr_manifests as zm
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.texts import near_names

NAMES = [f"hindcasts/{i:06d}-{sha256(b'%d' % i).hexdigest()}" for i in range(15_000)]


class Comparing(difflib.SequenceMatcher):
    compared = 0

    def ratio(self) -> float:
        Comparing.compared += 1
        return super().ratio()


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difflib, "SequenceMatcher", Comparing)
    Comparing.compared = 0


@pytest.mark.parametrize("typo", [lambda s: s[:-3] + s[-2:], lambda s: s[:20] + "x" + s[20:]])
def test_among_thousands_few_are_compared(typo: Callable[[str], str]) -> None:
    for name in NAMES[::1_500]:
        assert near_names(typo(name), NAMES) == [name]
    assert Comparing.compared <= 10 * 10


def test_among_a_few_all_are_compared() -> None:
    known = ["max-delta-count", "interval-commits", "size-ratio"]
    assert near_names("interval_commit", known) == ["interval-commits"]
    assert near_names("ratio-size", known, cutoff=0.4) == ["size-ratio"]
    assert near_names("nothing", known) == near_names("nothing", []) == []


def test_a_very_long_name_is_compared_with_none() -> None:
    assert near_names("x" * 10_000, ["x" * 9_999, *NAMES]) == []
    assert Comparing.compared == 0


def test_an_unknown_version_among_thousands_costs_few_comparisons_and_requests() -> None:
    repo = zm.create(MemoryStorage())
    for name in NAMES[:300]:
        repo.create_tag(name)
    before = repo.metrics().requests
    with pytest.raises(zm.errors.NotFoundError, match=f"near it is tag '{NAMES[7]}'"):
        repo.readonly_session(NAMES[7][:-1])
    assert Comparing.compared <= 10
    assert repo.metrics().requests - before <= 3
