"""A disk that fails: `EIO` at every call to the system that an operation makes below a repository.

The calls of `os` and `fcntl` stand in for the system, so reads, listings, locks and looks are among
them, which the disks of `storages` do not see.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from msgspec.structs import replace

import zarr_manifests as zm
from inside import close_files
from zarr_manifests.errors import CommitOutcomeUnknownError, ManifestsError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage

CALLS = (
    "open", "pread", "preadv", "write", "fsync", "link", "rename", "unlink", "mkdir", "rmdir",
    "scandir", "stat", "lstat", "fstat", "truncate",
)  # fmt: skip
RUNTIME = replace(SYSTEM, sleep=lambda _: None)


def _callers() -> Iterator[tuple[str, int]]:
    """The innermost lines of the package that led here."""
    frame = sys._getframe(2)
    found = 0
    while frame is not None and found < 2:
        if "/zarr_manifests/" in frame.f_code.co_filename:
            found += 1
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


class FailingDisk:
    """Fails at one of the calls below a folder, or at it and all after it."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = str(place)
        self.armed = False
        self.made = 0
        self.fail_at = 0
        self.for_good = False
        self.first: dict[tuple[object, ...], int] = {}
        """Where each different call came first, told by who made it."""
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr(fcntl, "flock", self._failing(fcntl.flock))

    def _failing(self, true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if self.armed and self._is_ours(given[0], options.get("dir_fd")):
                self.made += 1
                self.first.setdefault((true, *_callers()), self.made)
                if self.made == self.fail_at or (self.for_good and self.made > self.fail_at):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return true(*given, **options)

        return call

    def _is_ours(self, what: object, dir_fd: int | None) -> bool:
        if dir_fd is None and isinstance(what, str | Path):
            return str(what).startswith(self.place)
        fd = dir_fd if dir_fd is not None else what if isinstance(what, int) else None
        if fd is None:
            fd = what.fileno() if hasattr(what, "fileno") else None
        return fd is not None and str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(self.place)

    @contextmanager
    def failing(self, at: int, *, for_good: bool) -> Iterator[None]:
        close_files()
        self.made, self.fail_at, self.for_good, self.armed = 0, at, for_good, True
        try:
            yield
        finally:
            self.armed = False
            close_files()


def commit(repo: zm.Repository) -> None:
    with repo.transaction(message="new") as store:
        zarr.open_array(store, path="t")[:] = np.arange(64) + 100
        zarr.open_array(store, path="big")[:] = 9


def read(repo: zm.Repository) -> None:
    assert values(repo) == "old"


def values(repo: zm.Repository) -> str:
    """Whether all values are the old ones or all the new ones."""
    store = repo.readonly_session("main").store
    t = zarr.open_array(store, path="t", mode="r")[:]
    big = zarr.open_array(store, path="big", mode="r")[:]
    for name, first, all_big in (("old", 1, 7), ("new", 100, 9)):
        if np.array_equal(t, np.arange(64) + first) and (big == all_big).all():
            return name
    raise AssertionError(f"a mixture: {t}, {big}")


@pytest.fixture
def seeded(tmp_path: Path) -> Path:
    """A repository of chunks in packs and of their own."""
    place = tmp_path / "seeded"
    repo = zm.create(place, zm.Config(inline_chunk_bytes=0))
    for first, all_big in ((0, 5), (1, 7)):
        with repo.transaction(message="old") as store:
            shape = {"compressors": None, "overwrite": True}
            zarr.create_array(store, name="t", data=np.arange(64) + first, chunks=(32,), **shape)
            zarr.create_array(
                store, name="big", data=np.full(40_000, all_big), chunks=(40_000,), **shape
            )
    return place


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="the system does not say which file is read"
)
@pytest.mark.parametrize(
    ("operation", "for_good"),
    [(commit, False), (commit, True), (read, False)],
)
def test_a_disk_that_fails_at_any_call(
    seeded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: Callable[[zm.Repository], None],
    for_good: bool,
) -> None:
    """Clear errors, nothing wrong is read, and what was acknowledged is there afterwards."""
    place = tmp_path / "repository"
    disk = FailingDisk(place, monkeypatch)
    shutil.copytree(seeded, place)
    with disk.failing(0, for_good=False):
        operation(zm.open(LocalStorage(place), runtime=RUNTIME))
    due, refused = sorted(disk.first.values()), 0
    assert len(due) > 10
    for at in due:
        shutil.rmtree(place)
        shutil.copytree(seeded, place)
        failure: ManifestsError | None = None
        with disk.failing(at, for_good=for_good):
            try:
                operation(zm.open(LocalStorage(place), runtime=RUNTIME))
            except ManifestsError as error:
                failure = error
        repo = zm.open(place)
        found = values(repo)
        if operation is not commit:
            assert found == "old"
        elif failure is None:
            assert found == "new"
        elif not isinstance(failure, CommitOutcomeUnknownError):
            assert found == "old", f"{disk.made}: {failure}"
        refused += failure is not None
    assert refused > 2
