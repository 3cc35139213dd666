"""Requests to an object store, repeated for a while if that may help.

Invariant: a request is repeated only by `repeated` and `ask`, so whoever sends one that must not be
repeated uses `answer`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.object_clients import (
    LARGE_BYTES,
    Endpoint,
    calling,
    generation,
    library,
)
from zarr_manifests.storage.object_errors import Failure, failure_of, storage_error
from zarr_manifests.storage.object_gate import Gate
from zarr_manifests.storage.object_proof import Proof
from zarr_manifests.storage.object_redirects import refused_host

__all__ = ["Requests"]


class Requests:
    """Sends the requests of one storage.

    Parameters
    ----------
    place : Endpoint
        The store and prefix.
    proof : Proof
        Knows the endpoint that all clients use.
    """

    def __init__(self, place: Endpoint, proof: Proof) -> None:
        self._place, self._proof = place, proof
        self._clients: dict[tuple[int, bool, bool], Any] = {}
        self._making = ForkSafeLock()
        limit = dict(place.options).get("concurrency")
        self._limit = limit if isinstance(limit, int) else 0
        self._gates: dict[int, Gate] = {}

    def _gate(self) -> Gate:
        """The gate of this process: a forked child's is its own."""
        return self._gates.setdefault(generation(), Gate(self._limit))

    def client(self, nbytes: int | None = None, *, singly: bool = False) -> Any:
        """The client of this process for a body of that size; None for an unknown size.

        With `singly` it deletes each object by a request, for servers that know no other.
        """
        at = generation(), nbytes is not None and nbytes > LARGE_BYTES, singly
        client = self._clients.get(at)
        if client is None:
            # To make one takes milliseconds, so threads that begin together share it.
            with self._making:
                client = self._clients.get(at)
                if client is None:
                    client = self._place.client(self._proof.endpoint, large=at[1], singly=singly)
                    self._clients[at] = client
        return client

    def ask(self, doing: str, key: str, call: Callable[[], Any]) -> Any:
        """Return what the call returns; errors are raised outside the client's, so not chained."""
        found = self.repeated(call)
        if isinstance(found, Failure):
            raise storage_error(found, doing, key, self._place.url)
        return found

    def repeated(self, call: Callable[[], Any]) -> Any:
        """Like `answer`, repeated for a while if the failure may be temporary.

        Only for calls that may be repeated. It makes at least two attempts, since waiting for the
        first answer may have taken all the time.
        """
        patience = self._place.patience
        until_s = SYSTEM.monotonic_s() + patience.tries_s
        for attempt in itertools.count():
            found = self.answer(call)
            late = attempt > 0 and SYSTEM.monotonic_s() > until_s
            if late or attempt == patience.tries or not self.is_passing(found):
                break
            SYSTEM.sleep(SYSTEM.jitter(patience.wait_s(attempt)))
        return found

    def answer(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns, or the `Failure` it ended with."""
        with calling(), self._gate().entered() if self._limit else contextlib.nullcontext():
            try:
                return call()
            except (InvalidArgumentError, UnsupportedStorageError):
                raise
            except library().errors as error:
                return _failure(error)

    async def answer_async(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return what the call returns, or the `Failure` it ended with."""
        gate = self._gate().entered_async() if self._limit else contextlib.nullcontext()
        with calling():
            try:
                async with gate:
                    return await call()
            except (InvalidArgumentError, UnsupportedStorageError):
                raise
            except library().errors as error:
                return _failure(error)

    def is_passing(self, found: Any) -> bool:
        """Whether the answer was lost, or another request to the same object was running.

        The client itself retries if the store reports an error or cannot be reached.
        """
        return isinstance(found, Failure) and (found.is_lost or self.is_contended(found))

    def is_contended(self, found: Any) -> bool:
        """Whether another request to the same object was running: a 409 on S3."""
        return isinstance(found, Failure) and found.status == 409 and self._place.kind == "s3"


def _failure(error: BaseException) -> Failure:
    found = failure_of(error)
    if found.kind == "redirected" and not found.host:
        return replace(found, host=refused_host())
    return found
