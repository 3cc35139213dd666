"""Trouble for tasks and drivers: failures, kills and waits, amid rows or at calls of a storage.

What befalls is counted over all processes: each that comes by takes a ticket, a file in a folder.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from storages.wrapped import Call, WrappedStorage
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import Storage, from_url

type Troubles = Sequence[Mapping[str, Any]]
"""Troubles as JSON has them."""

DRIVER = "ZARR_MANIFESTS_TEST_DRIVER"
"""The environment variable with the driver's process id."""
_EXECUTOR = "CoarseGrainedExecutorBackend"


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, at which calls of a storage, and how often.

    `what` is `fail`, `wait`, `kill executor` or `kill driver`; `after` is after the call's effect.
    A process whose executor or driver was killed does nothing more, and ends when Spark ends it.
    The first `skip` calls that match go well, and so do all after `times` more.
    """

    what: str
    tickets: str
    where: str = "task"
    op: str = "create"
    key: str = "chunks/*"
    after: bool = False
    skip: int = 0
    times: int = 1

    def befalls(self, op: str, key: str, *, after: bool) -> bool:
        """Whether a call matches."""
        here = "driver" if TaskContext.get() is None else "task"
        wanted = (self.where, self.op, self.after)
        return (here, op, after) == wanted and fnmatch.fnmatch(key, self.key)

    def strike(self) -> None:
        """Do it, if it is its turn."""
        if not self.skip <= self._ticket() < self.skip + self.times:
            return
        if self.what == "fail":
            raise StorageError("trouble that the test has made")
        if self.what == "kill executor":
            os.kill(_executor(), signal.SIGKILL)
            signal.pause()
        elif self.what == "kill driver":
            os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # until Spark ends it

    def _ticket(self) -> int:
        folder = Path(self.tickets)
        folder.mkdir(parents=True, exist_ok=True)
        for number in count():
            try:
                (folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            return number
        raise AssertionError


class TroubledStorage(WrappedStorage):
    """A storage some of whose calls go wrong, in whatever process they are made."""

    def __init__(self, storage: Storage, troubles: tuple[Trouble, ...]) -> None:
        super().__init__(storage)
        self._troubles = troubles

    def _strike(self, op: str, key: str, *, after: bool) -> None:
        for trouble in self._troubles:
            if trouble.befalls(op, key, after=after):
                trouble.strike()

    def _around[R](self, call: Call[R]) -> R:
        self._strike(call.op, call.key, after=False)
        result = call.run()
        self._strike(call.op, call.key, after=True)
        return result

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        self._strike(call.op, call.key, after=False)
        result = await run()
        self._strike(call.op, call.key, after=True)
        return result


def storage_at(url: str, troubles: Troubles) -> Storage:
    """The storage; with troubles, if there are any."""
    storage = from_url(url)
    if not troubles:
        return storage
    return TroubledStorage(storage, tuple(Trouble(**each) for each in troubles))


def troubled(frame: DataFrame, troubles: Troubles) -> DataFrame:
    """The rows; before each batch of them, each trouble strikes if it is its turn."""
    made = [Trouble(**each) for each in troubles]

    def strikes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for trouble in made:
                trouble.strike()
            yield batch

    return frame.mapInArrow(strikes, frame.schema) if made else frame


def _executor() -> int:
    """The id of the executor that the process of this task belongs to."""
    process = os.getppid()
    while process > 1:
        if _EXECUTOR in Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8"):
            return process
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        process = int(status.rpartition(")")[2].split()[1])
    raise AssertionError("this task runs in no executor that could be killed")
