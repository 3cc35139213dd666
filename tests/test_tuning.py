"""Options of Zarr that suit this store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.codec_pipeline import BatchedCodecPipeline

import zarr_manifests as zm
from zarr_manifests.bulk.pipeline import BulkCodecPipeline
from zarr_manifests.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    zarr.config.reset()


def pipeline_of_a_new_array() -> object:
    store = zm.create(f"memory://tuning-{np.random.default_rng().integers(2**60)}")
    session = store.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i4")
    array[:] = range(8)
    assert array[:].tolist() == list(range(8))
    return type(array.async_array.codec_pipeline)


def test_arrays_use_the_bulk_pipeline_until_the_end_of_the_block() -> None:
    with zm.tune_zarr():
        assert pipeline_of_a_new_array() is BulkCodecPipeline
        assert zarr.config.get("async.concurrency") == 64
    assert pipeline_of_a_new_array() is BatchedCodecPipeline
    assert zarr.config.get("async.concurrency") == 10


def test_what_was_set_before_comes_back() -> None:
    with zarr.config.set({"async.concurrency": 7}):
        with zm.tune_zarr(concurrency=3):
            assert zarr.config.get("async.concurrency") == 3
        assert zarr.config.get("async.concurrency") == 7


def test_without_a_block_it_stays() -> None:
    zm.tune_zarr(concurrency=5)
    assert zarr.config.get("async.concurrency") == 5


@pytest.mark.parametrize("number", [0, -1, math.nan, 2.5, Decimal("NaN"), True])
def test_what_is_no_number_of_chunks_is_refused(number: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="concurrency must be an integer of at least 1"):
        zm.tune_zarr(concurrency=number)
    assert zarr.config.get("async.concurrency") == 10


def test_threads_are_set_if_asked_for() -> None:
    before = zarr.config.get("codec_pipeline.max_workers", None)
    with zm.tune_zarr(threads=1):
        assert zarr.config.get("codec_pipeline.max_workers") == 1
        assert pipeline_of_a_new_array() is BulkCodecPipeline
    with zm.tune_zarr():
        assert zarr.config.get("codec_pipeline.max_workers", None) == before


@pytest.mark.parametrize("number", [0, math.nan, Decimal("NaN")])
def test_what_is_no_number_of_threads_is_refused(number: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="threads must be an integer of at least 1, not"):
        zm.tune_zarr(threads=number)
