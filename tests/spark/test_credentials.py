"""Spark's processes ask for credentials themselves, and its plans hold no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.sql import DataFrame, SparkSession

import accounts
import zarr_manifests as zm
from zarr_manifests import spark as zms
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read

DS = xr.Dataset({"t": (("x",), np.arange(6.0))}, {"x": np.arange(6)})


@pytest.fixture
def there(spark: SparkSession, small_store: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a store for which nothing in the environment has credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    spark.sparkContext.addPyFile(accounts.__file__)
    return {"endpoint": small_store.endpoint, "allow_http": True, "region": "eu-west-1"}


@pytest.fixture
def whose(small_store: Any) -> dict[str, set[str]]:
    """Who has asked, by bucket."""
    asked: dict[str, set[str]] = {}

    def note(request: Any) -> None:
        who = request.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        asked.setdefault(request.path.split("/")[1], set()).add(who)

    small_store.faults.append(note)
    return asked


def no_secret_is_told(
    spark: SparkSession, small_store: Any, capsys: pytest.CaptureFixture[str], *frames: DataFrame
) -> None:
    for frame in frames:
        frame.explain(extended=True)
    objects = [data.decode("latin-1") for data in small_store.objects.values()]
    said = [capsys.readouterr().out, *objects, str(spark.sparkContext.getConf().getAll())]
    assert said[0].count("Physical Plan") == len(frames)
    assert [text for text in said if accounts.SECRET in text] == []


def test_tasks_ask_for_credentials_and_plans_hold_none(
    spark: SparkSession,
    small_store: Any,
    there: dict[str, Any],
    whose: dict[str, set[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = {"credentials": accounts.alice, **there}
    at = "s3a://bucket/winds"
    zms.write_dataset(DS.chunk(x=2), at, spark=spark, message="write", storage_options=options)
    frame = zms.read(spark, at, "t", storage_options=options)
    assert frame.count() == 6
    texts = {f"storage.{name}": str(value) for name, value in there.items()}
    texts["storage.credentials"] = "accounts:alice"
    zms.register(spark)
    loaded = spark.read.format("zarr_manifests").options(**texts).load(at)
    more = loaded.where("x < 2").selectExpr("x", "t + 1 AS t")
    sink = more.write.format("zarr_manifests").mode("overwrite")
    sink.options(**texts, dims="x", region='{"x": [0, 1]}', missing="keep").save(at)
    again = zms.read(spark, at, "t", storage_options=options)
    assert sorted(row.t for row in again.collect()) == [1, 2, 2, 3, 4, 5]
    DS.to_netcdf(tmp_path / "0.nc", engine="scipy")
    files, place = [tmp_path / "0.nc"], "s3a://bucket/files"
    zms.ingest(spark, files, place, append_dim="x", storage_options=options)
    ingested: Any = zm.open(place, storage_options=options)
    xr.testing.assert_equal(xr.load_dataset(ingested, engine="zarr_manifests"), DS)
    job = plan_read(zm.open(at, storage_options=options), ReadOptions(), SparkFacts())
    assert accounts.SECRET not in cloudpickle.dumps(job).decode("latin-1")
    no_secret_is_told(spark, small_store, capsys, frame, loaded)
    assert whose == {"bucket": {"ALICE"}}


def test_tasks_read_virtual_chunks_elsewhere(
    spark: SparkSession,
    small_store: Any,
    there: dict[str, Any],
    whose: dict[str, set[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The repository is Alice's, the files that it refers to are Bob's; no secret is told."""
    raw = zm.VirtualContainer("s3://raw", credentials=accounts.bob, **there)
    small_store.objects["raw/a.bin"] = np.arange(12, dtype="<i4").tobytes()
    options = {"credentials": accounts.alice, **there}
    repo = zm.create("s3://bucket/refs", virtual_containers={"raw": raw}, storage_options=options)
    with repo.transaction(message="refer") as store:
        how = {"shape": (12,), "chunks": (4,), "dtype": "<i4", "compressors": None}
        zarr.create_array(store, name="v", dimension_names=["x"], **how)
        where = [[0], [1], [2]], ["virtual://raw/a.bin"], [0] * 3, [0, 16, 32], [16] * 3
        store.set_virtual_refs("v", *where)
    frame = zms.read(spark, repo, "v")
    assert sorted(row.v for row in frame.collect()) == list(range(12))
    assert whose == {"raw": {"BOB"}, "bucket": {"ALICE"}}
    job = plan_read(repo, ReadOptions(variables="v"), SparkFacts())
    assert accounts.SECRET not in cloudpickle.dumps(job).decode("latin-1")
    no_secret_is_told(spark, small_store, capsys, frame)
