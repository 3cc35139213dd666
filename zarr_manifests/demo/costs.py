"""Measuring what a step costs: its storage requests, bytes and seconds."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zarr_manifests.records import dataclass
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.testing import Call, CountingStorage, WrappedStorage
from zarr_manifests.testing.wrapped import received_nbytes

__all__ = ["Commit", "Cost", "JournalStorage", "Measured", "Rewrite", "measure"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Requests, bytes and seconds of an operation."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.requests + other.requests,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """An appended month.

    Parameters
    ----------
    months : int
        Months in the repository after it.
    cost : Cost
        What it cost, including the reads it needed.
    compacted : bool
        Whether it also compacted the deltas.
    """

    months: int
    cost: Cost
    compacted: bool


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of all months so far: one commit into an empty repository on the same disk."""

    months: int
    cost: Cost


@dataclass(slots=True)
class Measured:
    """The result of `measure`, after its block has ended."""

    cost: Cost


@contextmanager
def measure(storage: CountingStorage) -> Iterator[Measured]:
    """Measure what the block does on that storage.

    Examples
    --------
    >>> from zarr_manifests.demo.costs import measure
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from zarr_manifests.testing import CountingStorage
    >>> storage = CountingStorage(MemoryStorage())
    >>> with measure(storage) as measured:
    ...     storage.put("a", b"four")
    >>> measured.cost.requests, measured.cost.bytes_written
    (1, 4)
    """
    storage.reset()
    measured = Measured(Cost())
    start_s = SYSTEM.monotonic_s()
    yield measured
    seconds = SYSTEM.monotonic_s() - start_s
    measured.cost = Cost(storage.requests, storage.bytes_read, storage.bytes_written, seconds)


class JournalStorage(WrappedStorage):
    """Records the calls to a storage in a file, so that calls of other processes count too.

    Parameters
    ----------
    storage : Storage
        The storage the calls are passed to, which must be picklable.
    journal : Path
        The file to write to, one line per call; the processes must share its disk. Calls after it
        is removed are not recorded.

    Examples
    --------
    >>> import pickle, tempfile
    >>> from pathlib import Path
    >>> from zarr_manifests.demo.costs import JournalStorage
    >>> from zarr_manifests.storage.local import LocalStorage
    >>> with tempfile.TemporaryDirectory() as tmp:
    ...     storage = JournalStorage(LocalStorage(tmp), Path(tmp) / "journal")
    ...     storage.put("a", b"four")
    ...     pickle.loads(pickle.dumps(storage)).get("a", 0, 3)
    ...     storage.cost(seconds=0.5)
    b'fou'
    Cost(requests=2, bytes_read=3, bytes_written=4, seconds=0.5)
    """

    def __init__(self, storage: Storage, journal: Path) -> None:
        super().__init__(storage)
        self._journal = journal
        journal.touch()

    def cost(self, seconds: float) -> Cost:
        """The cost of all recorded calls, which took so many seconds."""
        calls = [line.split() for line in self._journal.read_text(encoding="ascii").splitlines()]
        received, sent = (sum(int(call[i]) for call in calls) for i in (0, 1))
        return Cost(len(calls), received, sent, seconds)

    def _around[R](self, call: Call[R]) -> R:
        result = call.run()
        self._write(received_nbytes(result), call.sent_nbytes)
        return result

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        result = await run()
        self._write(received_nbytes(result), call.sent_nbytes)
        return result

    def _write(self, received: int, sent: int) -> None:
        try:
            file = os.open(self._journal, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # its owner has counted and removed it; Spark's workers end later
            return
        try:  # a short append is atomic on a local disk, even between processes
            os.write(file, f"{received} {sent}\n".encode("ascii"))
        finally:
            os.close(file)
