"""Many forks, written in other processes, become one commit: what merging them takes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import zarr
from contestants import Icechunk, Ours, fresh, use_pipeline
from runner import Case, Figure, Watch

from zarr_manifests.xarray.array_target import ArrayTarget

_ROWS, _COLUMNS = 100, 100
_WORKERS = 2


def merging(case: Case) -> Iterator[Figure]:
    """Unpickle the forks of tasks that wrote a thousand chunks each, merge them, and commit."""
    use_pipeline(case.pipeline)
    chunks, each = case.sizes["chunks"], case.sizes["a fork"]
    context = multiprocessing.get_context("spawn")
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        assert isinstance(contestant, Ours | Icechunk)
        contestant.create(inline_bytes=0)
        session = contestant.open().writable_session("main")
        zarr.create_array(
            session.store,
            name="a",
            shape=(-(-chunks // (_ROWS * _COLUMNS)), _ROWS, _COLUMNS),
            chunks=(1, 1, 1),
            dtype="i4",
            compressors=None,
        )
        session.commit("array")
        session = contestant.open().writable_session("main")
        task = partial(_task, pickle.dumps(session.fork()), each, case.pipeline)
        with context.Pool(_WORKERS) as pool:  # what tasks take is no part of the memory
            back = pool.map(task, range(chunks // each), chunksize=1)
        nbytes = sum(map(len, back))
        with Watch() as watch:
            session.merge(*map(pickle.loads, back))
            session.commit("all forks")
        array = zarr.open_array(contestant.reader(), path="a", mode="r")
        assert np.count_nonzero(array[-1]) == (chunks % (_ROWS * _COLUMNS) or _ROWS * _COLUMNS)
        yield watch.figure(extras={"B/chunk pickled": nbytes / chunks})


def _task(fork_bytes: bytes, each: int, pipeline: str, number: int) -> bytes:
    """Write that many chunks, in C order from where the task's begin, to a fork of its own."""
    use_pipeline(pipeline)
    fork = pickle.loads(fork_bytes)
    array = zarr.open_array(fork.store, path="a", mode="r+")
    target: Any = array
    if hasattr(fork.store, "_contents"):  # ours, with statistics
        target = ArrayTarget(array, statistics=True)
    at, stop = number * each, (number + 1) * each
    while at < stop:
        row, column = divmod(at, _COLUMNS)
        count = min(_COLUMNS - column, stop - at)
        rows = (stop - at) // _COLUMNS if not column else 1
        rows = max(1, min(rows, _ROWS - row % _ROWS))
        place = (
            slice(row // _ROWS, row // _ROWS + 1),
            slice(row % _ROWS, row % _ROWS + rows),
            slice(column, column + count),
        )
        target[place] = np.arange(at, at + rows * count, dtype="i4").reshape(1, rows, count) + 1
        at += rows * count
    if isinstance(target, ArrayTarget):
        target.record()
    return pickle.dumps(fork)
