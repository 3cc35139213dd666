"""Suggestions for unknown names, and what they cost."""

from __future__ import annotations

import difflib
from hashlib import sha256

import pytest

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


def test_a_very_long_name_is_compared_with_none() -> None:
    assert near_names("x" * 10_000, ["x" * 9_999, *NAMES]) == []
    assert Comparing.compared == 0
