"""The requests that find out whether a store respects conditions.

One object, `.probe`, is created, created again and replaced on an ETag that no object has. The
first two requests can be sent early, together and beside others: where the store refuses one of
them because the object exists, it respects that condition. Otherwise the second one is sent again,
once the object is there for sure, beside the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.object_errors import Failure, storage_error
from zarr_manifests.storage.object_requests import Requests

__all__ = ["PROOF_KEY", "Trial"]

PROOF_KEY: Final = ".probe"  # not a valid key, so it is no object and never listed
_PROOF: Final = (
    b"Here it was tried whether this store heeds conditions. Leave it: it saves a request.\n"
)
_NO_SUCH_ETAG: Final = '"00000000000000000000000000000000"'


class Trial:
    """Tries the conditions of one place.

    Parameters
    ----------
    requests : Requests
        Sends the requests.
    put : callable
        `put(key, data, mode)` writes an object; a mode is `"create"` or a condition.
    stale : Callable[[str], Any]
        The condition that an object still has that ETag.
    url : str
        Names the place in errors.
    """

    def __init__(
        self,
        requests: Requests,
        put: Callable[[str, bytes, Any], Any],
        stale: Callable[[str], Any],
        url: str,
    ) -> None:
        self._requests, self._put, self._stale, self._url = requests, put, stale, url
        self._is_made: bool | None = None  # by the last `begin`; None if that is not known
        self.creates_once = False
        """Whether the store has refused to create the probe because it exists."""

    def begin(self) -> None:
        """Make the probe if it is not there. A failure decides nothing: `ignored` begins again."""
        found = SYSTEM.parallel([self._create, self._create])
        there = [self._is_there(one) for one in found]
        if all(there) or not all(isinstance(one, Failure) for one in found):
            self._is_made = not all(there)
        self.creates_once = any(there)

    def withdraw(self, delete: Callable[[str], None]) -> None:
        """Delete the probe if `begin` has made it."""
        is_made, self._is_made = self._is_made, None
        if is_made:
            delete(PROOF_KEY)

    def ignored(self) -> str:
        """The header that the store ignores; empty if it respects them."""
        if self._is_made is None:
            found = self._create()
            if isinstance(found, Failure) and self._takes_no(found, "exists"):
                return "If-None-Match"
            self._is_made = not isinstance(found, Failure)
        is_made, self._is_made = self._is_made, None
        mode = self._stale(_NO_SUCH_ETAG)
        swap = partial(self._requests.repeated, partial(self._put, PROOF_KEY, _PROOF, mode))
        unsure = is_made and not self.creates_once
        calls: list[Callable[[], Any]] = [swap, *[self._create] * unsure]
        swapped, *again = SYSTEM.parallel(calls)
        if again and self._takes_no(again[0], "exists"):
            return "If-None-Match"
        # It is absent if another process has made it, and has withdrawn it since.
        return "If-Match" if self._takes_no(swapped, "exists", "changed", "absent") else ""

    def _create(self) -> Any:
        return self._requests.repeated(partial(self._put, PROOF_KEY, _PROOF, "create"))

    def _is_there(self, found: Any) -> bool:
        exists = isinstance(found, Failure) and found.kind == "exists"
        return exists and not self._requests.is_contended(found)

    def _takes_no(self, found: Any, *refusals: str) -> bool:
        """Whether the store has done what the condition forbids, or does not know conditions."""
        if not isinstance(found, Failure) or found.status == 501:
            return True
        if found.kind not in refusals or self._requests.is_contended(found):
            raise storage_error(found, "write", PROOF_KEY, self._url)
        return False
