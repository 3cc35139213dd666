"""Zarr options that suit this store.

Zarr's defaults suit stores that can be read only through an event loop. Options apply to all stores
of the process, so they stay as they are unless `tune_zarr` is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import zarr

from zarr_manifests.bulk.pipeline import BulkCodecPipeline
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["tune_zarr"]

_BULK: Final = f"{BulkCodecPipeline.__module__}.{BulkCodecPipeline.__qualname__}"


def tune_zarr(*, concurrency: int = 64, threads: int | None = None) -> AbstractContextManager[Any]:
    """Set Zarr options that suit this store, for the whole process.

    The options take effect immediately. Used as a context manager, it restores them at the end.

    - `codec_pipeline.path`: `BulkCodecPipeline`, which takes all chunks of a request in one step.
      In other stores it works like Zarr's fused pipeline, which reads, decodes and copies each
      chunk on one thread, without an event loop.
    - `async.concurrency`: how many chunks of an array are requested at once from remote storage.
      Zarr's default of 10 leaves connections idle most of the time.
    - `codec_pipeline.max_workers`, if `threads` is given: how many threads decode the chunks of an
      array. Zarr's default is one for each processor, which helps if chunks take long to decode.
      For many chunks of a few kilobytes, one thread is two to three times as fast.

    Parameters
    ----------
    concurrency : int, default 64
        Chunks at once. Each chunk in flight takes memory for its bytes.
    threads : int, optional
        Threads of the pipeline; unchanged if not given.

    Returns
    -------
    context manager
        Restores the options on exit. Ignore it to keep them.

    Raises
    ------
    InvalidArgumentError
        If `concurrency` or `threads` is not an integer of at least 1.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> with zm.tune_zarr(concurrency=32):
    ...     zarr.config.get("async.concurrency")
    32
    >>> zarr.config.get("async.concurrency")
    10
    """
    if type(concurrency) is not int or concurrency < 1:
        raise InvalidArgumentError(
            f"concurrency must be an integer of at least 1, not {concurrency!r}"
        )
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidArgumentError(f"threads must be an integer of at least 1, not {threads!r}")
    options: dict[str, Any] = {"codec_pipeline.path": _BULK, "async.concurrency": concurrency}
    if threads is not None:
        options["codec_pipeline.max_workers"] = threads
    changed: AbstractContextManager[Any] = zarr.config.set(options)
    return changed
