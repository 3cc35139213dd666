"""The options of the data source, which are checked before Spark or storage is needed."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.spark.options import OPTIONS, read_options, write_options
from zarr_manifests.spark.plan import ReadOptions


@pytest.mark.parametrize(
    ("name", "text", "argument", "value"),
    [
        ("group", "/era5", "group", "/era5"),
        ("variables", "u", "variables", ["u"]),
        ("variables", " u , v", "variables", ["u", "v"]),
        ("variables", '["wind, eastward", "v"]', "variables", ["wind, eastward", "v"]),
        ("version", "main@{2024-02-29}", "version", "main@{2024-02-29}"),
        ("branch", "main", "version", "main"),
        ("where", "depth > 4000", "where", "depth > 4000"),
        ("ranges", '{"lat": [-30, null]}', "ranges", {"lat": (-30, None)}),
        (
            "ranges",
            '{"lat": [[1, 2], 4], "t": "2024"}',
            "ranges",
            {"lat": [(1, 2), 4], "t": ["2024"]},
        ),
        ("on-empty", "error", "on_empty", "error"),
        ("decode-times", "False", "decode_times", False),
        ("broadcast", "true", "broadcast", True),
        ("nan", "DROP", "nan", "drop"),
        ("target-rows", "1000", "target_rows", 1000),
        ("max-tasks", "10", "max_tasks", 10),
        ("layout", "chunk", "layout", "chunk"),
        ("starting-snapshot", "monday", "starting_snapshot", "monday"),
        ("max-commits-per-trigger", "5", "max_commits", 5),
        ("max-bytes-per-trigger", "1000000", "max_bytes", 1_000_000),
        ("streaming-overwrite-mode", "Added-Only", "overwrite_mode", "added-only"),
        ("keep-for", "36h", "keep_for", timedelta(hours=36)),
        ("lease", "2h", "lease", timedelta(hours=2)),
        ("lease", "None", "lease", None),
        ("virtual-containers", '{"era5": "/e"}', "virtual_containers", {"era5": "/e"}),
        ("authorize", "era5,raw", "authorize", ["era5", "raw"]),
    ],
)
def test_an_option_is_an_argument(name: str, text: str, argument: str, value: Any) -> None:
    assert read_options({"path": "winds", name: text}) == ("winds", {argument: value})
    assert read_options({"PATH": "winds", name.upper(): text}) == ("winds", {argument: value})


def test_incremental_reads_take_two_snapshots() -> None:
    given = {"path": "w", "start-snapshot-id": "A", "end-snapshot-id": "B"}
    assert read_options(given) == ("w", {"start": "A", "end": "B"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("versoin", "version"),
        ("brnach", "branch"),
        ("variable", "variables"),
        ("targetRows", "target-rows"),
        ("end-snapshot", "end-snapshot-id"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"is unknown: did you mean {nearest}\?"):
        read_options({"path": "w", name: "x"})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_options({"path": "w", "header": "true"})
    assert all(name in str(raised.value) for name in OPTIONS)


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("nan", "zero", "expected null, keep or drop"),
        ("layout", "wide", "expected long or chunk"),
        ("target-rows", "0", "whole number from 1 on"),
        ("target-rows", "1e6", "whole number from 1 on"),
        ("max-tasks", "-1", "whole number from 1 on"),
        ("max-tasks", "٣", "whole number from 1 on"),
        ("max-tasks", "9" * 5000, "whole number from 1 on"),
        ("ranges", "lat: 3", "not JSON"),
        ("ranges", "[1, 2]", "expected a JSON object"),
        ("ranges", "[" * 100_000, "not JSON"),
        ("variables", "u,,v", "it is empty"),
        ("variables", "[1]", "expected names"),
        ("variables", "[]", "expected names"),
        ("group", " ", "it is empty"),
        ("decode-times", "no", "expected true or false"),
    ],
)
def test_an_impossible_value_says_what_is_expected(name: str, text: str, advice: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_options({"path": "w", name: text})
    assert f"option {name!r} cannot be" in str(raised.value)
    assert advice in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "names",
    [
        ("start-snapshot-id", "version"),
        ("start-snapshot-id", "branch"),
        ("end-snapshot-id", "version"),
    ],
)
def test_contradicting_options_are_both_named(names: tuple[str, str]) -> None:
    given = dict.fromkeys(names, "2024-01-01")
    with pytest.raises(InvalidArgumentError, match="contradict each other") as raised:
        read_options({"path": "w", **given})
    assert all(name in str(raised.value) for name in names)


def test_a_view_reads_its_version_and_is_written_to_its_branch() -> None:
    given = {"path": "w", "branch": "dev", "version": "v1"}
    assert read_options(given)[1] == {"version": "v1"}


def test_an_end_needs_a_start() -> None:
    with pytest.raises(InvalidArgumentError, match="needs start-snapshot-id"):
        read_options({"path": "w", "end-snapshot-id": "B"})


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_options({"nan": "zero", "brnach": "x", "start-snapshot-id": "a", "branch": "b"})
    said = str(raised.value)
    for part in (
        "no location",
        "'nan' cannot be",
        "did you mean branch",
        "start-snapshot-id and branch",
    ):
        assert part in said


def test_whatever_read_can_be_told_has_an_option() -> None:
    arguments = {option.argument for option in OPTIONS.values()}
    assert {field.name for field in dataclasses.fields(ReadOptions)} <= arguments


def test_options_of_the_storage_have_a_prefix() -> None:
    given = {
        "path": "s3://bucket/winds",
        "storage.region": "eu-west-1",
        "Storage.Anonymous": "true",
        "dims": "time",
    }
    due = {"region": "eu-west-1", "anonymous": True}
    assert read_options(given) == ("s3://bucket/winds", {"storage_options": due})
    location, arguments = write_options(given)
    assert (location, arguments) == (
        "s3://bucket/winds",
        {"dims": ["time"], "storage_options": due},
    )


def test_faults_of_storage_options_are_told_with_the_others() -> None:
    given = {
        "path": "s3://bucket/winds",
        "storage.regoin": "eu-west-1",
        "storage.secret_access_key": "geheim",
        "tga": "v1",
    }
    with pytest.raises(InvalidArgumentError) as error:
        read_options(given)
    for said in ("storage.regoin: unknown", "storage.secret_access_key: a secret", "'tga'"):
        assert said in str(error.value)
    assert "geheim" not in str(error.value)
