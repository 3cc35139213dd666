"""Writers of one machine take turns, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage


def test_a_compaction_that_was_stopped_does_not_stop_all_others(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "r", {"compaction": {"max-delta-count": 3}})
    turn = LocalStorage(tmp_path / "r").turn("compaction")
    assert turn.take()
    for row in range(20):
        with repository.transaction(message=f"row {row}") as store:
            zarr.create_group(store, path=f"g{row}")
    assert any(info.kind == "rewrite" for info in repository.ancestry())
    turn.end()


def made(place: Any, **config: Any) -> Repository:
    repository = zm.create(place, {"compaction": {"max-delta-count": 1000}, **config})
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(64, 8), chunks=(1, 8), dtype="u1")
    session.commit("array")
    return repository


def put(repository: Repository, row: int, value: int = 1) -> None:
    with repository.transaction(message=f"row {row}") as store:
        zarr.open_array(store, path="a")[row] = value


class _Watched:
    """A runtime whose sleeps are counted, and move its clock; `asleep` is called in the first."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []
        self.asleep: list[Any] = []

    def runtime(self) -> Runtime:
        return replace(
            SYSTEM, sleep=self._sleep, monotonic_s=lambda: sum(self.slept_s), jitter=lambda s: s
        )

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        while self.asleep:
            self.asleep.pop()()


def test_who_waits_asks_often(tmp_path: Path) -> None:
    made(tmp_path / "r")
    holder = LocalStorage(tmp_path / "r").turn("swap")
    assert holder.take()
    watched = _Watched()
    watched.asleep = [holder.end]
    put(zm.open(tmp_path / "r", runtime=watched.runtime()), 3)
    assert len(watched.slept_s) == 1
    assert watched.slept_s[0] < 0.005
