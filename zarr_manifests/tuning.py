"""The options of Zarr that suit this store.

Zarr's own defaults suit stores that know neither where a chunk lies nor how to be read without an
event loop. They are left alone unless `tune_zarr` is called, since they count for all stores of
the process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import zarr

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["tune_zarr"]

_FUSED: Final = "zarr.core.codec_pipeline.FusedCodecPipeline"


def tune_zarr(*, concurrency: int = 64, threads: int | None = None) -> AbstractContextManager[Any]:
    """Set the options of Zarr that suit this store, for the whole process.

    They are set when it is called. As a context manager it takes them back at the end.

    - `codec_pipeline.path`: the fused pipeline, which reads, decodes and places each chunk on one
      thread, without an event loop between. Repositories on a local disk and in memory are read
      by it in about half of the time, as chunks are small.
    - `async.concurrency`: how many chunks of an array are asked for at once where the storage is
      remote. Zarr's 10 leaves a connection idle most of the time.
    - `codec_pipeline.max_workers`, with `threads`: how many threads the fused pipeline spreads the
      chunks of an array over. Zarr's one for each processor pays where a chunk takes long to
      decode. To hand a chunk over takes more than it takes to read one of 4 KB, so for many small
      chunks one thread is two to three times as fast.

    Parameters
    ----------
    concurrency : int, default 64
        Chunks at once. Each that is under way takes memory for its bytes.
    threads : int, optional
        Threads of the fused pipeline; as Zarr is configured if not given.

    Returns
    -------
    context manager
        Gives the options back as they were; leaving it alone keeps them.

    Raises
    ------
    InvalidArgumentError
        If there are to be less than one chunk at once, or thread.

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
        raise InvalidArgumentError(f"concurrency is a number of 1 or more, not {concurrency!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidArgumentError(f"threads is a number of 1 or more, not {threads!r}")
    options: dict[str, Any] = {"codec_pipeline.path": _FUSED, "async.concurrency": concurrency}
    if threads is not None:
        options["codec_pipeline.max_workers"] = threads
    changed: AbstractContextManager[Any] = zarr.config.set(options)
    return changed
