"""Workloads of long histories: how commits age, and what is left after a collection."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import zarr
from contestants import (
    CONTESTANTS,
    Contestant,
    Icechunk,
    Ours,
    fresh,
    new_array,
    use_pipeline,
    values,
)
from distant import served
from runner import Case, Figure, Watch

_CHUNK_BYTES = 4096
_EACH = 10  # chunks a commit
_POINTS = 100  # of a curve


class _Writer:
    """Commits to one branch, one after another, by the session that is best kept or made anew."""

    def __init__(self, contestant: Contestant) -> None:
        assert isinstance(contestant, Ours | Icechunk)
        self._repository = contestant.open()
        self._session: Any = None

    def array(self) -> Any:
        """The array, to be written in the next commit."""
        # Theirs takes one commit.
        if self._session is None or getattr(self._session, "read_only", False):
            self._session = self._repository.writable_session("main")
        return zarr.open_array(self._session.store, path="a", mode="r+")

    def commit(self, message: str) -> None:
        """Commit what was written."""
        self._session.commit(message)


def _create(contestant: Contestant, chunks: int) -> None:
    contestant.create()
    store, commit = contestant.writer()
    new_array(store, values(1, _CHUNK_BYTES), chunks=chunks)
    commit()


def aging(case: Case) -> Iterator[Figure]:
    """Append some chunks and commit, thousands of times; what is due by itself is compacted.

    The figure is the median of the last tenth of the commits, beside it that of the first.
    """
    use_pipeline(case.pipeline)
    commits = case.sizes.get(f"{case.contestant}_commits", case.sizes["commits"])
    data = values(_EACH, _CHUNK_BYTES)
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        _create(contestant, 0)
        writer, taken = _Writer(contestant), []
        with Watch() as watch:
            for i in range(commits):
                start = time.perf_counter()
                array = writer.array()
                array.resize(((i + 1) * _EACH, array.shape[1]))
                array[i * _EACH :] = data
                writer.commit(f"append {i}")
                taken.append(time.perf_counter() - start)
        found = zarr.open_array(contestant.reader(), path="a", mode="r")
        assert found.shape[0] == commits * _EACH
        assert np.array_equal(found[-1], data[-1])
        yield _curve(taken, watch)


def _curve(taken: list[float], watch: Watch) -> Figure:
    tenth, step = max(1, len(taken) // 10), max(1, len(taken) // _POINTS)
    first, last = statistics.median(taken[:tenth]), statistics.median(taken[-tenth:])
    extras = {
        "commits": len(taken),
        "seconds, first tenth": first,
        "seconds, last tenth": last,
        "seconds, slowest": max(taken),
    }
    series = [statistics.median(taken[i : i + step]) for i in range(0, len(taken), step)]
    cpu_seconds = watch.cpu_seconds / len(taken)
    return Figure(last, cpu_seconds, watch.peak_bytes, extras, series)


def collecting(case: Case) -> Iterator[Figure]:
    """Expire all snapshots but the head, and collect the garbage of many commits.

    Each commit overwrites chunks of the same array. The history is made once; each round collects
    a copy of it.
    """
    use_pipeline(case.pipeline)
    commits, chunks = case.sizes["commits"], case.sizes["chunks"]
    history = case.folder / "history"
    history.mkdir()
    contestant = CONTESTANTS[case.contestant](history)
    _create(contestant, chunks)
    data, writer = values(_EACH, _CHUNK_BYTES), _Writer(contestant)
    for i in range(commits):
        at = i * _EACH % chunks
        writer.array()[at : at + _EACH] = data + i
        writer.commit(f"overwrite {i}")
    expected = zarr.open_array(contestant.reader(), path="a", mode="r")[:]
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        shutil.copytree(history / "r", contestant.folder / "r")
        objects, nbytes = _taken_by(contestant)
        with Watch() as watch:
            _collect(contestant)
        left_objects, left_bytes = _taken_by(contestant)
        found = zarr.open_array(contestant.reader(), path="a", mode="r")[:]
        assert np.array_equal(found, expected)
        assert left_objects < objects
        yield watch.figure(
            extras={
                "objects before": objects,
                "bytes before": nbytes,
                "objects left": left_objects,
                "bytes left": left_bytes,
            },
        )


def remembering(case: Case) -> Iterator[Figure]:
    """List the whole history of a repository that is far away and of which nothing is known."""
    use_pipeline(case.pipeline)
    commits = case.sizes["commits"]
    contestant = CONTESTANTS[case.contestant](case.folder)
    _create(contestant, 100)
    data, writer = values(_EACH, _CHUNK_BYTES), _Writer(contestant)
    for i in range(commits):
        at = i * _EACH % 100
        writer.array()[at : at + _EACH] = data
        writer.commit(f"overwrite {i}")
    assert isinstance(contestant, Ours | Icechunk)
    with served(case.folder / "r", case.sizes["delay_ms"]) as port:
        while True:
            contestant.forget()
            with Watch() as watch:
                repository = contestant.distant(port)
                named = {"branch": "main"} if isinstance(contestant, Icechunk) else {}
                messages = {info.message for info in repository.ancestry(**named)}
            assert {f"overwrite {i}" for i in range(commits)} <= messages
            yield watch.figure()


def _collect(contestant: Contestant) -> None:
    assert isinstance(contestant, Ours | Icechunk)
    repository = contestant.open()
    if isinstance(contestant, Ours):
        repository.expire_snapshots(keep_last=1)
        repository.garbage_collect(timedelta(0))
    else:
        now = datetime.now(UTC)
        repository.expire_snapshots(now)
        repository.garbage_collect(now)


def _taken_by(contestant: Contestant) -> tuple[int, int]:
    """How many files a repository has, and their bytes."""
    files = [path for path in (contestant.folder / "r").rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)
