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


@pytest.mark.parametrize("aside", [False, True])
def test_crc32c_of_many_bytes_is_the_same_with_and_without_the_library(
    aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if aside:
        monkeypatch.setattr(ids, "_crc32c_at", None)
    for nbytes in (65535, 65537, 2**20 + 1):
        data = random.Random(nbytes).randbytes(nbytes + 3)
        due = [google_crc32c.value(data), google_crc32c.value(data[3:])]
        assert [crc32c(data), crc32c(memoryview(data)[3:])] == due


@given(st.integers(0, 10**12 - 1), st.binary(min_size=12, max_size=12), st.integers(0, 10**9 - 1))
def test_names_lead_back_to_what_they_were_made_of(start: int, random: bytes, n: int) -> None:
    session = new_session_id(start, random)
    assert is_session_id(session)
    assert session_start(session) == start
    key = object_key("snapshots", session, n)
    assert session_of(key) == session
    assert snapshot_key(snapshot_id_of(key)) == key
    for wrong in (f"../{key}", f"{key}/..", key.replace("-", "/")):
        with pytest.raises(InvalidArgumentError):
            session_of(wrong)
