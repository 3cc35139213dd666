"""Spark's processes ask for credentials themselves, and its plans hold no secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.sql import SparkSession

import accounts
import zarr_manifests as zm
from zarr_manifests import spark as zms
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark import maintenance
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.storage.memory import MemoryStorage

pytestmark = pytest.mark.spark

DS = xr.Dataset({"t": (("x",), np.arange(6.0))}, {"x": np.arange(6)})
ENTRANCES: dict[str, Callable[..., Any]] = {
    "read": zms.read,
    "changes": lambda spark, at, **how: zms.changes(spark, at, None, **how),
    "metadata_table": lambda spark, at, **how: zms.metadata_table(spark, at, "arrays", **how),
    "explain_pruning": zms.explain_pruning,
    "ingest": lambda spark, at, **how: zms.ingest(spark, ["a"], at, append_dim="x", **how),
    "write_dataset": lambda spark, at, **how: zms.write_dataset(
        DS, at, spark=spark, message="write", **how
    ),
    "write_dataframe": lambda spark, at, **how: zms.write_dataframe(
        spark.range(1), at, "t", dims=["x"], append_dim="x", **how
    ),
    "foreach_batch": lambda _, at, **how: zms.foreach_batch(at, "t", dims=["x"], **how),
    "verify": maintenance.verify,
    "garbage_collect": maintenance.garbage_collect,
    "compact": maintenance.compact,
    "compute_statistics": maintenance.compute_statistics,
    "rewrite_chunks": lambda spark, at, **how: maintenance.rewrite_chunks(spark, at, "t", **how),
}


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_options_reach_the_storage(spark: SparkSession, entrance: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="regoin: unknown storage option"):
        entrance(spark, "s3://bucket/winds", storage_options={"regoin": "eu-west-1"})
    repo = zm.create(MemoryStorage())
    with pytest.raises(InvalidArgumentError, match="a repository was given, which is open already"):
        entrance(spark, repo, storage_options={"region": "eu-west-1"})


def test_tasks_ask_for_credentials_and_plans_hold_none(
    spark: SparkSession, small_store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    spark.sparkContext.addPyFile(accounts.__file__)
    requests: list[Any] = []
    small_store.faults.append(requests.append)
    options: dict[str, Any] = {
        "credentials": accounts.alice,
        "endpoint": small_store.endpoint,
        "allow_http": True,
        "region": "eu-west-1",
    }
    at = "s3a://bucket/winds"
    zms.write_dataset(DS.chunk(x=2), at, spark=spark, message="write", storage_options=options)
    frame = zms.read(spark, at, "t", storage_options=options)
    assert frame.count() == 6
    texts = {f"storage.{name}": str(value) for name, value in options.items()}
    texts["storage.credentials"] = "accounts:alice"
    zms.register(spark)
    source = spark.read.format("zarr_manifests").options(**texts)
    loaded = source.load(at)
    assert loaded.count() == 6
    loaded.createOrReplaceTempView("rows")
    more = loaded.where("x < 2").selectExpr("x", "t + 1 AS t")
    (
        more.write.format("zarr_manifests")
        .options(**texts, dims="x", region='{"x": [0, 1]}', missing="keep")
        .mode("overwrite")
        .save(at)
    )
    repo = zm.open(at, storage_options=options)
    assert repo.readonly_session().store is not None
    DS.to_netcdf(tmp_path / "0.nc", engine="scipy")
    files, place = [tmp_path / "0.nc"], "s3a://bucket/files"
    zms.ingest(spark, files, place, append_dim="x", storage_options=options)
    ingested: Any = zm.open(place, storage_options=options)
    xr.testing.assert_equal(xr.load_dataset(ingested, engine="zarr_manifests"), DS)
    said = [
        frame._jdf.queryExecution().toString(),
        loaded._jdf.queryExecution().toString(),
        cloudpickle.dumps(plan_read(repo, ReadOptions(variables="t"), SparkFacts())).decode(
            "latin-1"
        ),
        *(data.decode("latin-1") for data in small_store.objects.values()),
        str(spark.sparkContext.getConf().getAll()),
    ]
    assert [text for text in said if accounts.SECRET in text] == []
    seen = {r.headers["Authorization"].partition("Credential=")[2][:6] for r in requests}
    assert seen == {"ALICE/"}


def test_tasks_read_virtual_chunks_elsewhere(
    spark: SparkSession, small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository is Alice's, the files that it refers to are Bob's; no secret is told."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    spark.sparkContext.addPyFile(accounts.__file__)
    requests: list[Any] = []
    small_store.faults.append(requests.append)
    there = {"endpoint": small_store.endpoint, "allow_http": True, "region": "eu-west-1"}
    raw = zm.VirtualContainer("s3://raw", credentials=accounts.bob, **there)
    options = {"credentials": accounts.alice, **there}
    small_store.objects["raw/a.bin"] = np.arange(12, dtype="<i4").tobytes()
    at = "s3://bucket/refs"
    repo = zm.create(at, virtual_containers={"raw": raw}, storage_options=options)
    with repo.transaction(message="refer") as store:
        zarr.create_array(
            store, name="v", shape=(12,), chunks=(4,), dtype="<i4", compressors=None,
            dimension_names=["x"],
        )  # fmt: skip
        where = [[0], [1], [2]], ["virtual://raw/a.bin"], [0] * 3, [0, 16, 32], [16] * 3
        store.set_virtual_refs("v", *where)
    frame = zms.read(spark, repo, "v")
    assert sorted(row.v for row in frame.collect()) == list(range(12))
    whose: dict[str, set[str]] = {"raw": set(), "bucket": set()}
    for request in requests:
        who = request.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        whose[request.path.split("/")[1]].add(who)
    assert whose == {"raw": {"BOB"}, "bucket": {"ALICE"}}
    plan = plan_read(repo, ReadOptions(variables="v"), SparkFacts())
    said = [
        frame._jdf.queryExecution().toString(),
        cloudpickle.dumps(plan).decode("latin-1"),
        *(data.decode("latin-1") for data in small_store.objects.values()),
        str(spark.sparkContext.getConf().getAll()),
    ]
    assert [text for text in said if accounts.SECRET in text] == []
