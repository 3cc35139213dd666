"""Rows that tasks leave for a commit in another process.

A data source's tasks get rows in any order, and cannot know where new labels go. So each task
stores its rows as they are, in a fork of a session that never commits, and reports where they are.
The process that commits reads them back piece by piece. Invariant: no snapshot refers to spooled
rows, so the next collection that is due removes them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork

__all__ = ["Spool", "SpooledRows", "labels_of", "spool_rows"]

_SEGMENT_BYTES: Final = 16 * 1024**2


class Spool:
    """Named pieces of rows in a fork of a session.

    Parameters
    ----------
    fork : Fork
        The fork; nobody may merge it.
    """

    def __init__(self, fork: Fork) -> None:
        self._store = fork.store

    def put_batches(self, name: str, batches: Sequence[pa.RecordBatch]) -> None:
        """Store rows under a name."""
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        buffer = default_buffer_prototype().buffer.from_bytes(sink.getvalue())
        self._store.set_sync(f"spool/{name}", buffer)

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """The rows of that name.

        Raises
        ------
        FencedError
            If a collection of garbage has removed them, since its grace is shorter than the write.
        """
        found = self._store.get_sync(f"spool/{name}")
        assert found is not None
        with pa.ipc.open_stream(found.to_bytes()) as reader:
            yield from reader


@dataclass(frozen=True, slots=True)
class SpooledRows:
    """The rows that a task has spooled.

    Parameters
    ----------
    fork : Fork
        The fork that has them.
    segments : int
        The number of pieces.
    rows : int
        The number of rows.
    labels : mapping of str to Array
        By column that was asked for, its distinct values.
    """

    fork: Fork
    segments: int
    rows: int
    labels: dict[str, pa.Array]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; a piece at a time is in memory."""
        spool = Spool(self.fork)
        for number in range(self.segments):
            yield from spool.batches(str(number))


def spool_rows(
    repository: Repository, branch: str, batches: Iterable[pa.RecordBatch], columns: Sequence[str]
) -> SpooledRows:
    """Spool the rows of a task; note the distinct values of the columns."""
    with repository.writable_session(branch) as session:
        fork = session.fork()
    spool = Spool(fork)
    labels: dict[str, pa.Array] = {}
    waiting: list[pa.RecordBatch] = []
    nbytes = segments = rows = 0

    def put() -> None:
        nonlocal nbytes, segments
        if waiting:
            spool.put_batches(str(segments), waiting)
            nbytes, segments = 0, segments + 1
            waiting.clear()

    for batch in batches:
        if not batch.num_rows:
            continue
        for name in columns:
            new = pc.unique(batch.column(name))
            known = labels.get(name)
            labels[name] = new if known is None else pc.unique(pa.concat_arrays([known, new]))
        waiting.append(batch)
        nbytes, rows = nbytes + batch.nbytes, rows + batch.num_rows
        if nbytes >= _SEGMENT_BYTES:
            put()
    put()
    return SpooledRows(fork, segments, rows, labels)


def labels_of(spooled: Iterable[SpooledRows], column: str, kind: pa.DataType) -> pa.Array:
    """The distinct values of a column in all rows."""
    parts = [one.labels[column].cast(kind) for one in spooled if one.rows]
    return pc.unique(pa.concat_arrays(parts)) if parts else pa.array([], kind)
