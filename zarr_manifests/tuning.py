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


def tune_zarr(*, concurrency: int = 64) -> AbstractContextManager[Any]:
    """Set the options of Zarr that suit this store, for the whole process.

    They are set when it is called. As a context manager it takes them back at the end.

    - `codec_pipeline.path`: the fused pipeline, which reads, decodes and places each chunk on one
      thread, without an event loop between. Repositories on a local disk and in memory are read
      by it in about half of the time, as chunks are small.
    - `async.concurrency`: how many chunks of an array are asked for at once where the storage is
      remote. Zarr's 10 leaves a connection idle most of the time.

    Parameters
    ----------
    concurrency : int, default 64
        Chunks at once. Each that is under way takes memory for its bytes.

    Returns
    -------
    context manager
        Gives the options back as they were; leaving it alone keeps them.

    Raises
    ------
    InvalidArgumentError
        If the concurrency is less than one.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> with zm.tune_zarr(concurrency=32):
    ...     zarr.config.get("async.concurrency")
    32
    >>> zarr.config.get("async.concurrency")
    10
    """
    if concurrency < 1:
        raise InvalidArgumentError(f"{concurrency} chunks at once are none; say 1 or more")
    options = {"codec_pipeline.path": _FUSED, "async.concurrency": concurrency}
    changed: AbstractContextManager[Any] = zarr.config.set(options)
    return changed
