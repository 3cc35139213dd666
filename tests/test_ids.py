"""Names and checksums."""

from __future__ import annotations

import random

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests import ids
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.ids import (
    crc32c,
    is_session_id,
    new_session_id,
    object_key,
    session_of,
    session_start,
    snapshot_id_of,
    snapshot_key,
)


def test_crc32c_is_that_of_the_standard() -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(memoryview(b"xx" + b"\xff" * 32)[2:]) == 0x62A8AB43


@pytest.mark.parametrize("nbytes", [65535, 65536, 65537, 2**20 + 1])
@pytest.mark.parametrize("aside", [False, True])
def test_crc32c_of_many_bytes_is_the_same_with_and_without_the_library(
    nbytes: int, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(nbytes).randbytes(nbytes + 3)
    due = [google_crc32c.value(data), google_crc32c.value(data[3:])]
    if aside:
        monkeypatch.setattr(ids, "_crc32c_at", None)
    assert [crc32c(data), crc32c(memoryview(data)[3:])] == due


def test_crc32c_of_many_bytes_lets_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    true = ids._crc32c_at
    assert true is not None

    def noted(address: int, nbytes: int) -> int:
        called.append(nbytes)
        return true(address, nbytes)

    monkeypatch.setattr(ids, "_crc32c_at", noted)
    crc32c(bytes(65535))
    crc32c(bytes(65536))
    assert called == [65536]


@given(st.integers(0, 10**12 - 1), st.binary(min_size=12, max_size=12), st.integers(0, 10**9 - 1))
def test_names_lead_back_to_what_they_were_made_of(start: int, random: bytes, n: int) -> None:
    session = new_session_id(start, random)
    assert is_session_id(session)
    assert session_start(session) == start
    key = object_key("snapshots", session, n)
    assert session_of(key) == session
    assert snapshot_key(snapshot_id_of(key)) == key


def test_sessions_sort_by_their_start() -> None:
    ids = [new_session_id(start, bytes(12)) for start in (0, 9, 10, 99, 100, 10**11)]
    assert ids == sorted(ids)


@pytest.mark.parametrize(("start", "random"), [(-1, bytes(12)), (10**12, bytes(12)), (1, b"x")])
def test_sessions_that_cannot_be(start: int, random: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        new_session_id(start, random)


GOOD = f"{1:012d}-" + "ab" * 12


@pytest.mark.parametrize(
    "key",
    [
        "",
        "current",
        GOOD,
        f"deltas/{GOOD}",
        f"deltas/{GOOD}/",
        f"deltas/{GOOD}/x",
        f"deltas/{GOOD}/1/2",
        f"deltas/{GOOD.upper()}/1",
        f"deltas/{GOOD}\n/1",
        f"../deltas/{GOOD}/1",
        "deltas/../1",
    ],
)
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not the key of an object"):
        session_of(key)


@pytest.mark.parametrize(
    "text", ["", "main", GOOD, GOOD + "-", GOOD + "-x", f"{GOOD}-1\n", f"../{GOOD}-1", "x" * 9999]
)
def test_snapshot_ids_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a snapshot id") as caught:
        snapshot_key(text)
    assert len(str(caught.value)) < 250
