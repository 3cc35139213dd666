"""Packs written in the background, by a few threads, while an event loop goes on.

Invariants:

- A pack is taken back exactly once, after its write has ended, and settled by whoever takes it:
  nothing here touches a change set, and no thread that writes a pack waits for a lock.
- Up to `MOST` writes run while nobody waits. A thread that begins another waits for an
  earlier one.
- If no thread can be started for a write, it counts as not begun, and nobody waits for it.
- An error is kept for whoever takes the pack back. The pack's chunks are still staged then.
- A forked child has none of its parent's threads. It forgets their writes; the chunks are staged in
  the child as well.

Not thread-safe except `Flight.wait`: the workspace's lock is held during calls.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from zarr_manifests.engine.edit.packs import Pack
from zarr_manifests.runtime import Runtime, handed_over
from zarr_manifests.storage import Storage

MOST: Final = 4
"""Packs under way at once; a disk that is slow for a moment keeps nobody waiting so."""


class Flight:
    """A pack that is being written.

    Attributes
    ----------
    pack : Pack
        The pack.
    error : BaseException or None
        Why it could not be written, once its write has ended.
    """

    def __init__(self, pack: Pack, storage: Storage) -> None:
        self.pack = pack
        self.error: BaseException | None = None
        self._storage = storage
        self._ended = threading.Event()

    def run(self) -> None:
        """Write it, not durably, and never raise."""
        try:
            self.pack.write(self._storage, durable=False)
        except BaseException as error:  # noqa: BLE001 - raised where the pack is taken back
            self.error = error
        finally:
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether its write has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the end of its write."""
        self._ended.wait()


class PackWrites:
    """The packs of one session that are being written."""

    def __init__(self, storage: Storage, runtime: Runtime) -> None:
        self._storage, self._runtime = storage, runtime
        self._flights: list[Flight] = []
        self._pid = os.getpid()

    @property
    def pays(self) -> bool:
        """Whether a write takes so long that a thread of its own is worth while.

        In memory it does not; and from far away it is an event loop that waits for it.
        """
        able = self._storage.capabilities
        return able.inline and able.durable

    @property
    def some_ended(self) -> bool:
        """Whether there is a pack to take back."""
        return bool(self._flights) and any(flight.ended for flight in self._mine())

    def begin(self, pack: Pack) -> Flight | None:
        """Begin to write a pack; what to wait for first, if too many are under way.

        Raises
        ------
        RuntimeError
            If there is no thread for it, as when the interpreter exits; it is not begun then.
        """
        flight, flights = Flight(pack, self._storage), self._mine()
        flights.append(flight)
        try:
            self._runtime.background(handed_over(flight.run))
        except RuntimeError:
            flights.remove(flight)
            raise
        return flights[0] if len(flights) > MOST else None

    def take(self, *, all_of_them: bool = False) -> list[Flight]:
        """Take back the packs whose writes have ended; or all, waiting for them."""
        flights = self._mine()
        for flight in flights if all_of_them else ():
            flight.wait()
        taken = [flight for flight in flights if flight.ended]
        self._flights = [flight for flight in flights if flight not in taken]
        return taken

    def _mine(self) -> list[Flight]:
        if self._pid != os.getpid():
            self._flights, self._pid = [], os.getpid()
        return self._flights
