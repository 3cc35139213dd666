"""`--json`: every verb that tells something tells it to programs, too."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from cli_verbs import VERBS
from zarr_manifests import reports
from zarr_manifests.cli import app
from zarr_manifests.cli.as_json import json_line
from zarr_manifests.cli.log import snapshot_record
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.checking import StorageReport
from zarr_manifests.versions import RefName

SILENT = {
    "config set": "it says nothing",
    "config apply": "it says nothing",
    "config schema": "it prints JSON anyway",
    "demo": "it plays a scene, for people",
    "serve": "it says where it listens, and then runs",
}


def test_every_verb_that_tells_something_has_it() -> None:
    without = {
        verb
        for verb, command in VERBS.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without <= SILENT.keys()


def tell(*words: object, code: int = 0) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == code, done.output
    assert done.stderr == ""
    return [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]


@pytest.fixture
def url(tmp_path: Path) -> Path:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="make t", metadata={"by": b"\x01"}) as store:
        zarr.create_array(
            store, name="t", data=np.arange(4.0), chunks=(2,), attributes={"units": "K"}
        )
    repo.create_tag("v1")
    return tmp_path / "repository"


def names(report: type) -> set[str]:
    """The keys due: the attributes of the report."""
    found = {name for name, one in vars(report).items() if isinstance(one, property)}
    return {field.name for field in fields(report)} | found


@pytest.mark.slow
def test_reports_are_objects_with_the_names_of_their_attributes(url: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for words, report in (
        (("check", tmp_path / "here"), StorageReport),
        (("verify", url), reports.VerifyReport),
        (("compact", url, "--dry-run"), reports.CompactionReport),
        (("compact", url), reports.CompactionReport),
        (("compact", url, "--statistics"), reports.StatisticsReport),
        (("compact", url, "--packs", "--dry-run"), reports.RepackReport),
        (("recover", url, "--to", 1, "--dry-run"), reports.RestoreReport),
        (("clean", url, "--keep", 9, "--no-collect"), reports.ExpiryReport),
        (("clean", url, "--keep", 9), reports.CleanReport),
        (("clean", url, "--dry-run"), reports.CollectionReport),
        (("clone", url, tmp_path / "clone"), reports.CloneReport),
        (("export", url, tmp_path / "plain"), reports.ExportReport),
        (("du", url, "--estimate"), reports.Usage),
        (("du", url, "--array", "t"), reports.Usage),
        (("explain", url), reports.ManifestLayout),
        (("explain", url, "t"), reports.ArrayPlace),
        (("merge", url, "v1"), reports.MergeReport),
    ):
        (found,) = tell(*words)
        assert found.keys() == names(report), words
    (Path(url) / "current").unlink()
    assert tell("recover", url, "--dry-run")[0].keys() == names(reports.RecoveryReport)


def test_branches_and_tags_of_a_snapshot_are_told_apart_by_their_kind() -> None:
    (info,) = zm.create("memory://json-of-refs").ancestry()
    found = snapshot_record(info, [RefName("branch", "tag v1"), RefName("tag", "v1")])
    assert (found["branches"], found["tags"]) == (["tag v1"], ["v1"])


def test_listings_are_an_object_on_each_line(url: Path) -> None:
    repo = zm.open(url)
    newest, first = tell("log", url)
    info = next(repo.ancestry())
    assert newest == {
        "snapshot_id": info.id,
        "parent_id": first["snapshot_id"],
        "written_at": info.written_at.isoformat(),
        "kind": "append",
        "message": "make t",
        "metadata": {"by": "01"},
        "written": {name.replace("-", "_"): count for name, count in info.written.items()},
        "totals": {name.replace("-", "_"): count for name, count in info.totals.items()},
        "branches": ["main"],
        "tags": ["v1"],
    }
    head = {"snapshot_id": info.id}
    assert tell("branch", url) == [{"name": "main", **head}]
    assert tell("branch", url, "new") == [{"name": "new", **head}]
    assert tell("tag", url) == [{"name": "v1", **head}]
    assert tell("tag", url, "v2", "main~1")[0]["snapshot_id"] == first["snapshot_id"]
    assert tell("branch", url, "new", "v2", "--move", "--force") == [
        {"name": "new", "snapshot_id": first["snapshot_id"]}
    ]
    operations = tell("log", url, "--ops")
    assert [one["operation"] for one in operations][:2] == ["reset branch", "create tag"]
    assert operations[0]["before"] == info.id
    group, array = tell("tree", url, "--chunks")
    assert group == {"path": "/", "node_type": "group"}
    assert (array["path"], array["shape"], array["data_type"]) == ("/t", [4], "float64")
    assert (array["initialized_chunks"], array["total_chunks"], array["units"]) == (2, 2, "K")
    assert tell("tree", url, "--stats")[1]["statistics"]["known"] == 0


def test_info_du_explain_and_config(url: Path) -> None:
    (found,) = tell("info", url)
    assert [one["name"] for one in found["branches"]] == ["main"]
    assert found["branches"][0]["arrays"] == 1
    assert found["stored"]["snapshots"]["objects"] == 2
    assert found["config"] == tell("config", "show", url)[0]
    (usage,) = tell("du", url)
    assert usage["arrays"][0]["nbytes"] > 0
    file = Path(url).parent / "config.yaml"
    file.write_text("inline-chunk-bytes: 7\n")
    assert tell("config", "validate", file)[0]["inline-chunk-bytes"] == 7
    (planned,) = tell("explain", url, "--config", file)
    assert planned["then"]["costs"]["opening"]["requests"] >= 1


def test_errors_stay_on_standard_error(url: Path) -> None:
    done = CliRunner().invoke(app, ["log", str(url), "--at", "nope", "--json"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    chunk = next((url / "snapshots").rglob("*-*/*"))
    chunk.write_bytes(b"damaged")
    (found,) = tell("verify", url, code=1)
    assert found["problems"]


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match="nested too deeply"):
        json_line({"attributes": deep})


def test_values_that_json_does_not_have() -> None:
    given = {"a": float("nan"), "b": [-np.inf], "c": np.array([1, 2]), "d": np.float32(1.5)}
    assert json.loads(json_line(given)) == {"a": "NaN", "b": ["-Infinity"], "c": [1, 2], "d": 1.5}
    given = {"e": "\x1b\u202e", "f": np.datetime64("2026-11-01"), "g": range(2, 5), "h": range(0)}
    assert json_line(given).isascii()
    assert json.loads(json_line(given)) == {
        "e": "\x1b\u202e", "f": "2026-11-01", "g": {"first": 2, "last": 4}, "h": None
    }  # fmt: skip
    assert io.StringIO(json_line(given)).readline() == json_line(given)
