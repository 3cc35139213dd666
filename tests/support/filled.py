"""A repository of one array, which each commit fills with a number, and a clock that is set."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
from in_order import in_order
from zarr_manifests import Repository, Session
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

NOW = timedelta(0)
CONFIG: dict[str, Any] = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}


class Clock:
    """A clock that is set by hand, and what is due by it."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self.due: list[Callable[[], None]] = []

    def advance(self, by: timedelta) -> None:
        self.ms += int(by.total_seconds() * 1000)

    def later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        self.due.append(call)
        return lambda: None

    def beat(self) -> None:
        """Do what is due next."""
        self.due.pop()()


def runtime_of(clock: Clock | None) -> Runtime:
    """Everything in order, by that clock."""
    if clock is None:
        return in_order()
    now: dict[str, Any] = {"now_ms": lambda: clock.ms, "monotonic_s": lambda: clock.ms / 1000}
    return in_order(**now, later=clock.later)


def opened(storage: Storage, clock: Clock | None = None) -> Repository:
    return zm.open(storage, runtime=runtime_of(clock))


def make(storage: Storage, clock: Clock | None = None, **compaction: Any) -> Repository:
    """With an array `a` of four chunks, each an object, that is filled with 1."""
    config = {**CONFIG, "compaction": compaction or {"mode": "manual"}}
    repository = zm.create(storage, config, runtime=runtime_of(clock))
    with repository.transaction(message="make a") as store:
        zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    return repository


def write(session: Session, value: int, where: slice = slice(None)) -> Session:
    zarr.open_array(session.store, path="a")[where] = value
    return session


def fill(
    repository: Repository, value: int, branch: str = "main", where: slice = slice(None)
) -> str:
    return write(repository.writable_session(branch), value, where).commit(f"fill {value}")


def read(place: Repository | Session, version: str = "main") -> list[int]:
    session = place if isinstance(place, Session) else place.readonly_session(version)
    values = np.asarray(zarr.open_array(session.store, path="a", mode="r")[:])
    return [int(value) for value in values]


def line(repository: Repository) -> list[str]:
    """The ids of the history, the newest first."""
    return [info.snapshot_id for info in repository.ancestry()]
