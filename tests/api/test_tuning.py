"""Options of Zarr that suit this store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import bulk
from zarr_manifests.bulk import BulkCodecPipeline
from zarr_manifests.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    zarr.config.reset()


@pytest.mark.parametrize("number", [0, math.nan, 2.5, True])
@pytest.mark.parametrize("option", ["concurrency", "threads"])
def test_what_is_no_number_is_refused(option: Any, number: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{option} must be an integer of at least 1"):
        zm.tune_zarr(**{option: number})
    assert zarr.config.get("async.concurrency") == 10


def test_within_its_block_new_arrays_are_read_in_bulk() -> None:
    before = zarr.config.get("codec_pipeline.max_workers", None)
    with zm.tune_zarr(threads=1):
        assert zarr.config.get("codec_pipeline.max_workers") == 1
        store = zm.create("memory://tuning").writable_session("main").store
        array = zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i4")
        assert type(array.async_array.codec_pipeline) is BulkCodecPipeline
    assert zarr.config.get("codec_pipeline.max_workers", None) == before


class EmptiedMeanwhile(dict[Any, Any]):
    """As another thread empties it, which has parsed many other documents."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found


def test_documents_that_others_drop_are_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_PARSED", EmptiedMeanwhile())
    repo = zm.create("memory://parsed-again")
    with repo.transaction(message="values") as store:
        for name in ("a", "x"):
            how: dict[str, Any] = {"chunks": (1,), "dimension_names": ["x"]}
            zarr.create_array(store, name=name, data=np.arange(3), **how)
    for _ in range(2):
        found = repo.readonly_session().chunks_where("a", "x >= 1")
        assert found.cells == ((slice(1, 3),),)
