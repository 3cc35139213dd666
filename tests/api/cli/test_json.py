"""`--json`: every verb that tells something tells it to programs, too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.report import json_line


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
        "author": info.author,
        "written": info.written,
        "commit_id": info.commit_id,
        "totals": info.totals,
        "id": info.id,
        "branches": ["main"],
        "tags": ["v1"],
    }
    head = {"snapshot_id": info.id}
    assert tell("branch", url) == [{"name": "main", **head}]
    assert tell("branch", url, "new") == [{"name": "new", **head}]
    assert tell("tag", url) == [{"name": "v1", **head}]
    assert tell("tag", url, "v2", "main~1")[0]["snapshot_id"] == first["snapshot_id"]
    operations = tell("log", url, "--ops")
    assert [one["operation"] for one in operations][:2] == ["create tag", "create branch"]
    group, array = tell("tree", url)
    assert group == {"path": "/", "node_type": "group"}
    assert (array["path"], array["shape"], array["data_type"]) == ("/t", [4], "float64")
    assert array["units"] == "K"


def test_info_and_du_say_what_is_stored(url: Path) -> None:
    (found,) = tell("info", url)
    assert (found["branches"], found["tags"].keys()) == (zm.open(url).list_branches(), {"v1"})
    assert found["stored"]["snapshots"]["objects"] == 2
    assert found["nbytes"] == sum(kind["nbytes"] for kind in found["stored"].values())
    assert tell("config", "show", url)[0]["compaction"]["mode"] == "auto"
    (usage,) = tell("du", url)
    assert usage["arrays"][0]["nbytes"] > 0


def test_errors_stay_on_standard_error(url: Path) -> None:
    done = CliRunner().invoke(app, ["log", str(url), "--at", "nope", "--json"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    chunk = next((url / "snapshots").rglob("*-*/*"))
    chunk.write_bytes(b"damaged")
    (found,) = tell("verify", url, code=1)
    assert found["problems"]


def test_values_that_json_does_not_have() -> None:
    given = {"a": float("nan"), "b": [-np.inf], "c": np.array([1, 2]), "d": np.float32(1.5)}
    assert json.loads(json_line(given)) == {"a": "NaN", "b": ["-Infinity"], "c": [1, 2], "d": 1.5}
    given = {"e": "\x1b\u202e", "f": np.datetime64("2026-11-01"), "g": range(2, 5), "h": range(0)}
    assert json_line(given).isascii()
    assert json.loads(json_line(given)) == {
        "e": "\x1b\u202e", "f": "2026-11-01", "g": {"first": 2, "last": 4}, "h": None
    }  # fmt: skip
    assert io.StringIO(json_line(given)).readline() == json_line(given)
