"""Testing whether a store respects conditional writes, without which commits could be lost.

A server may accept the conditions and ignore them. Unless its provider promises to respect them,
the store is tested before the first conditional write of a process, and the result is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.storage.object_clients import Endpoint

__all__ = ["Proof"]


class Proof:
    """Whether a store respects conditions, determined once per process and place.

    Parameters
    ----------
    place : Endpoint
        The store.
    """

    _made: ClassVar[dict[tuple[Endpoint, str | None], str]] = {}
    _lock: ClassVar = ForkSafeLock()

    def __init__(self, place: Endpoint) -> None:
        self._place = place

    @cached_property
    def endpoint(self) -> str | None:
        """The endpoint as it was on first use, even if the environment changes later."""
        return self._place.endpoint()

    @property
    def _name(self) -> tuple[Endpoint, str | None]:
        return self._place, self.endpoint

    @property
    def _is_promised(self) -> bool:
        """Whether the provider promises it."""
        if self._place.own is not None:
            return False
        endpoint = self.endpoint
        if self._place.kind == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
            return False
        host = (endpoint or "").partition("://")[2].partition("/")[0].partition(":")[0]
        return endpoint is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    @property
    def due(self) -> bool:
        """Whether it is neither promised nor tested yet."""
        return not self._is_promised and self._name not in self._made

    @property
    def failed(self) -> str:
        """The condition that the store ignores; empty if none is known."""
        if self._place.kind == "http":
            return "any condition"
        return self._made.get(self._name, "")

    def make(self, find_out: Callable[[], str]) -> None:
        """Run the test: `find_out` returns the ignored condition; an error decides nothing."""
        with self._lock:  # a second caller waits for the first
            if self.due:
                self._made[self._name] = find_out()
