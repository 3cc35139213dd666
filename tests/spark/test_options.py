"""The options of the data source, which are checked before Spark or storage is needed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark.data_source import read_options, write_options


def test_options_are_arguments_in_any_case() -> None:
    given = {
        "path": "winds",
        "variables": "wind, v",
        "branch": "main",
        "where": "depth > 4000",
        "decode-times": "False",
        "nan": "DROP",
        "target-rows": "1000",
        "lease": "None",
        "virtual-containers": '{"era5": "/e"}',
        "authorize": "era5, raw",
    }
    due = {
        "variables": ["wind", "v"],
        "version": "main",
        "where": "depth > 4000",
        "decode_times": False,
        "nan": "drop",
        "target_rows": 1000,
        "lease": None,
        "virtual_containers": {"era5": "/e"},
        "authorize": ["era5", "raw"],
    }
    assert read_options(given) == ("winds", due)
    assert read_options({name.upper(): text for name, text in given.items()}) == ("winds", due)
    written = {"path": "w", "region": '{"lat": [-30, null], "t": "2024"}'}
    assert write_options(written) == ("w", {"region": {"lat": (-30, None), "t": "2024"}})
    stream = {
        "max-commits-per-trigger": "5",
        "streaming-overwrite-mode": "Added-Only",
        "keep-for": "36h",
    }
    due = {
        "max_commits_per_trigger": 5,
        "streaming_overwrite_mode": "added-only",
        "keep_for": timedelta(hours=36),
    }
    assert read_options({"path": "w", **stream}) == ("w", due)
    added = {"path": "w", "start-snapshot-id": "A", "end-snapshot-id": "B"}
    assert read_options(added) == ("w", {"start_snapshot_id": "A", "end_snapshot_id": "B"})


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("nan", "zero", "expected null, keep or drop"),
        ("max-tasks", "9" * 5000, "whole number from 1 on"),
        ("region", "{" * 100_000, "not JSON"),
        ("variables", "u,,v", "it is empty"),
        ("decode-times", "no", "expected true or false"),
    ],
)
def test_an_impossible_value_says_what_is_expected(name: str, text: str, advice: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"option '{name}' cannot be.*{advice}") as told:
        read_options({"path": "w", name: text})
    assert len(str(told.value)) < 300


def test_all_faults_are_told_at_once_without_secrets() -> None:
    given = {
        "path": "s3://bucket/winds",
        "nan": "zero",
        "brnach": "x",
        "start-snapshot-id": "a",
        "branch": "b",
        "storage.regoin": "eu-west-1",
        "storage.secret_access_key": "geheim",
    }
    with pytest.raises(InvalidArgumentError) as raised:
        read_options(given)
    said = str(raised.value)
    for part in (
        "'nan' cannot be",
        "did you mean branch",
        "start-snapshot-id and branch",
        "storage.regoin: unknown",
        "storage.secret_access_key: a secret",
    ):
        assert part in said
    assert "geheim" not in said


def test_options_of_the_storage_have_a_prefix() -> None:
    given = {"path": "s3://b/winds", "storage.region": "eu-west-1", "Storage.Anonymous": "true"}
    due = {"region": "eu-west-1", "anonymous": True}
    assert read_options(given | {"dims": "time"}) == ("s3://b/winds", {"storage_options": due})
    written = {"dims": ["time"], "storage_options": due}
    assert write_options(given | {"dims": "time"}) == ("s3://b/winds", written)


def test_a_write_takes_no_option_that_says_what_to_read() -> None:
    given = {"path": "w", "dims": "time", "append-dim": "time", "where": "u > 1", "layout": "long"}
    with pytest.raises(InvalidArgumentError, match="does not take where and layout"):
        write_options(given)
