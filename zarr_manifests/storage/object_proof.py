"""Whether a store heeds the conditions of a write, without which commits could be lost.

A server may take the conditions and ignore them. Unless its provider promises that it does not, it
is tried before the first conditional write of a process, and what was found holds for all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.storage.object_clients import Place

__all__ = ["Proof"]


class Proof:
    """Whether a store heeds conditions; found out once in a process, for each place.

    Parameters
    ----------
    place : Place
        Where the store is.
    """

    _made: ClassVar[dict[tuple[Place, str | None], str]] = {}
    _lock: ClassVar = ForkSafeLock()

    def __init__(self, place: Place) -> None:
        self._place = place

    @cached_property
    def endpoint(self) -> str | None:
        """The endpoint when it was first asked for, whatever the environment says later."""
        return self._place.endpoint()

    @property
    def _name(self) -> tuple[Place, str | None]:
        return self._place, self.endpoint

    @property
    def _is_promised(self) -> bool:
        """Whether the provider says so itself."""
        endpoint = self.endpoint
        if self._place.kind == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
            return False
        host = (endpoint or "").partition("://")[2].partition("/")[0].partition(":")[0]
        return endpoint is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    @property
    def due(self) -> bool:
        """Whether it is neither promised nor found out."""
        return not self._is_promised and self._name not in self._made

    @property
    def failed(self) -> str:
        """What the store takes no notice of; empty if nothing is known."""
        if self._place.kind == "http":
            return "any condition"
        return self._made.get(self._name, "")

    def make(self, find_out: Callable[[], str]) -> None:
        """Find it out: the call names what is not heeded; an error proves nothing."""
        with self._lock:  # who comes second waits for the first
            if self.due:
                self._made[self._name] = find_out()
