"""What is found by its key alone is read up to a bound, whatever lies there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import CorruptObjectError

MOST_BYTES = 16 << 20


def test_a_root_of_a_terabyte_is_read_up_to_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = os.pread

    def pread(fd: int, length: int, at: int) -> bytes:
        asked.append(length)
        return real(fd, length, at)

    monkeypatch.setattr(os, "pread", pread)
    repo = zm.create(tmp_path / "repo")
    with repo.transaction("main", message="an array") as store:
        zarr.create_array(store, name="a", data=np.arange(4))
    heads = repo.list_branches()
    os.truncate(tmp_path / "repo/current", 1 << 40)
    asked.clear()
    for call in (
        lambda: zm.open(tmp_path / "repo"),
        lambda: zm.open(tmp_path / "repo", create=True),
        lambda: repo.create_tag("v1", heads["main"]),
        lambda: repo.lease(heads["main"]).__enter__(),
    ):
        with pytest.raises(CorruptObjectError, match=f"more than {MOST_BYTES} bytes"):
            call()
    (problem,) = repo.verify().problems
    assert f"more than {MOST_BYTES} bytes" in str(problem)
    assert zm.recover(tmp_path / "repo").branches.keys() == heads.keys()
    assert max(asked) <= MOST_BYTES + 1
    assert zm.open(tmp_path / "repo").list_branches() == heads
