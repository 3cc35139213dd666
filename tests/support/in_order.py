"""A runtime that makes calls in the same order each time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from zarr_manifests.runtime import SYSTEM, Runtime, one_by_one


def in_order(**given: Any) -> Runtime:
    """Return a runtime with one thread, without waiting and timers; else like `SYSTEM`.

    A commit then makes its calls in the same order each time, so a fault at a certain call always
    hits the same one.

    Parameters
    ----------
    **given
        Fields of `Runtime` to replace.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from in_order import in_order
    >>> runtime = in_order(now_ms=lambda: 1_700_000_000_000)
    >>> repo = zm.create(MemoryStorage(), runtime=runtime)
    >>> [info.written_at.isoformat() for info in repo.ancestry()]
    ['2023-11-14T22:13:20+00:00']
    """
    fixed: dict[str, Any] = {
        "jitter": lambda limit_s: 0.0,
        "sleep": lambda seconds: None,
        "parallel": one_by_one,
        "later": lambda delay_s, call: lambda: None,
    }
    return replace(SYSTEM, **{**fixed, **given})
