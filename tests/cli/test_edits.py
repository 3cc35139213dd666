"""`show`, `log PATH`, `revert`, `cherry-pick`, `merge`, `mv`, `cat` and `diff --values`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.repository import resolved


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(*arguments: object) -> list[str]:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def objects(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(*arguments, "--json")]


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """`air/t` on main, which `trial` corrects; main has moved on in another array."""
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="make it", metadata={"source": "a\ntest"}) as store:
        root = zarr.create_group(store)
        t = root.create_array(
            "air/t", shape=(4, 6), chunks=(2, 3), dtype="f4", dimension_names=("time", "x"),
            attributes={"units": "K"},
        )  # fmt: skip
        t[:] = np.arange(24).reshape(4, 6)
        root.create_array("depth", shape=(4,), chunks=(2,), dtype="i2")
    repo.create_branch("trial")
    with repo.transaction("trial", message="correct a row") as store:
        zarr.open_array(store, path="air/t")[0] = 100
    with repo.transaction(message="fill the depth") as store:
        zarr.open_array(store, path="depth")[:] = 7
    return tmp_path / "repository"


def values(url: Path, path: str = "air/t", version: str = "main") -> list[float]:
    store = zm.open(url).readonly_session(version).store
    return np.asarray(zarr.open_array(store, path=path, mode="r")[:]).ravel().tolist()


# --- looking ---------------------------------------------------------------------------------


def test_show_says_what_a_commit_is_and_did(url: Path) -> None:
    first, message, *rest = lines("show", url, "trial")
    info = next(zm.open(url).ancestry("trial"))
    assert first.startswith(info.snapshot_id)
    assert first.endswith("(trial)")
    assert message.startswith("    correct a row  [2 chunks")
    assert rest == [f"parent  {info.parent_id}", "  /air/t: 2 chunks overwritten"]
    assert 'source  "a\\ntest"' in lines("show", url, "main~1")
    assert lines("show", url, "main~2")[-1] == "no changes"
    assert "    overwrite (0, 1)" in lines("show", url, "trial", "--coordinates")
    (found,) = objects("show", url, "trial")
    assert (found["snapshot_id"], found["branches"], found["tags"]) == (info.id, ["trial"], [])
    assert found["changes"] == [
        {"path": "/air/t", "operation": "overwrite", "snapshot_id": info.id, "chunks": 2}
    ]


def test_show_of_the_oldest_commit_that_is_left(url: Path) -> None:
    repo = zm.open(url)
    repo.delete_branch("trial")
    repo.expire_snapshots(1)
    repo.garbage_collect(timedelta(0))
    assert lines("show", url)[-1].endswith("the commit before has expired")
    assert objects("show", url)[0]["changes"] is None


def messages(*arguments: object) -> list[str]:
    return [one["message"] for one in objects("log", *arguments)]


def test_log_of_a_path_follows_it_through_moves(url: Path) -> None:
    assert messages(url, "depth") == ["fill the depth", "make it"]
    assert messages(url, "/air", "--at", "trial") == ["correct a row", "make it"]
    lines("mv", url, "air", "sky", "-m", "rename")
    repo = zm.open(url)
    with repo.transaction(message="later") as store:
        zarr.open_array(store, path="sky/t")[3] = 1
    assert messages(url, "sky/t") == ["later", "rename", "make it"]
    assert messages(url, "sky") == ["later", "rename", "make it"]
    assert messages(url, "depth", "--since", "main~3") == ["fill the depth"]
    assert messages(url, "/")[:2] == ["later", "rename"]
    nope = call("log", url, "nope")
    assert (nope.exit_code, nope.stdout) == (1, "")
    assert "'/nope'" in nope.stderr
    repo.expire_snapshots(3)
    assert messages(url, "sky/t") == ["later", "rename"]


def test_log_since_a_time_or_a_version(url: Path) -> None:
    repo = zm.open(url)
    _, made, oldest = repo.ancestry()
    assert messages(url, "--since", made.id) == ["fill the depth"]
    assert messages(url, "--since", "trial") == ["fill the depth"]
    assert messages(url, "--at", "trial", "--since", "main") == ["correct a row"]
    assert len(messages(url, "--since", oldest.written_at.date())) == 3
    assert lines("log", url, "--since", "2999-01-01") == ["no such commits"]
    assert call("log", url, "--since", "nope").exit_code == 1


def test_log_in_one_line_has_short_ids_that_are_versions(url: Path) -> None:
    shown = lines("log", url, "--oneline")
    repo = zm.open(url)
    assert [line.partition(" ")[2] for line in shown][1:] == ["make it", "create repository"]
    assert shown[0].endswith(" (main) fill the depth")
    for line, info in zip(shown, repo.ancestry(), strict=True):
        assert resolved(repo, line.split()[0]) == info.snapshot_id


def test_diff_between_branches_and_of_values(url: Path) -> None:
    assert lines("diff", url, "main", "trial") == ["  /air/t: 2 chunks: (0, 0), (0, 1)"]
    assert lines("diff", url, "main", "trial", "--direct") == [
        "  /air/t: 2 chunks: (0, 0), (0, 1)",
        "  /depth: 2 chunks: (0,), (1,)",
    ]
    (found,) = objects("diff", url, "main", "trial", "--coordinates")
    assert found == {
        "path": "/air/t", "operation": "change", "chunks": 2, "coordinates": [[0, 0], [0, 1]]
    }  # fmt: skip
    assert lines("diff", url, "main~1", "trial", "--values") == [
        "/air/t: 6 changed cells in 2 chunks",
        "  by 95 to 100, on average by 97.5",
        "    (0, 0): 3 cells",
        "    (0, 1): 3 cells",
    ]
    (found,) = objects("diff", url, "main~1", "trial", "--values", "--array", "air/t")
    assert (found["path"], found["cells"], found["mean"]) == ("/air/t", 6, 97.5)
    assert (found["chunks"], found["counts"]) == ([[0, 0], [0, 1]], [3, 3])
    assert lines("diff", url, "main", "main", "--values") == ["no changes"]
    assert call("mv", url, "air", "sky", "--branch", "trial").exit_code == 0
    moved = lines("diff", url, "main~1", "trial", "--values")
    assert moved[0] == "/sky/t: 6 changed cells in 2 chunks"
    assert lines("diff", url, "main~1", "trial", "--values", "--array", "air/t") == moved
    assert call("diff", url, "main", "trial", "--array", "air/t").exit_code == 2
    assert call("diff", url, "main", "trial", "--values", "--array", "nope").exit_code == 1


def test_cat_prints_a_corner_or_an_index(url: Path) -> None:
    head, where, *rows = lines("cat", url, "air/t")
    assert head == "/air/t (time: 4, x: 6) float32 K"
    assert where == "[0:4, 0:6]"
    assert rows[0].split() == ["[[", "0.", "1.", "2.", "3.", "4.", "5.]"]
    assert lines("cat", url, "air/t", "0, :2", "--at", "trial")[1:] == [
        "[0:1, 0:2]",
        "[[100. 100.]]",
    ]
    found = json.loads(*lines("cat", url, "/air/t", "--json", "--", "-1,::2"))
    assert (found["values"], found["start"], found["step"]) == ([[18, 20, 22]], [3, 0], [1, 2])
    assert objects("cat", url, "air/t", "...,1")[0]["values"] == [[1], [7], [13], [19]]
    assert objects("cat", url, "air/t", "-n", 4)[0]["values"] == [[0, 1], [6, 7]]
    for wrong in ("9", "0,0,0", "x", "::0", "1.5", "...,...", ":,"):
        refused = call("cat", url, "air/t", wrong)
        assert (refused.exit_code, refused.stdout) == (2, ""), wrong
    large = call("cat", url, "air/t", ":", "--limit", 5)
    assert "selects 24 values" in large.stderr
    group = call("cat", url, "air")
    assert group.exit_code == 1
    assert "there are: /air/t, /depth" in group.stderr


def test_cat_of_odd_arrays(url: Path) -> None:
    repo = zm.open(url)
    with repo.transaction(message="odd") as store:
        zarr.create_array(store, name="scalar", shape=(), dtype="f8")[...] = np.nan
        zarr.create_array(store, name="none", shape=(0, 3), chunks=(1, 1), dtype="i4")
        zarr.create_array(store, name="days", shape=(1,), dtype="datetime64[D]")
        zarr.create_array(store, name="text", shape=(1,), dtype="<U9")[:] = "\x1b[31m"
        zarr.create_array(store, name="large", shape=(50, 400, 900), chunks=(1, 9, 9), dtype="i1")
    assert objects("cat", url, "scalar")[0]["values"] == "NaN"
    assert objects("cat", url, "none")[0]["values"] == []
    assert objects("cat", url, "days")[0]["values"] == ["NaT"]
    assert "\x1b" not in call("cat", url, "text").stdout
    assert np.shape(objects("cat", url, "large")[0]["values"]) == (1, 8, 8)


# --- changing --------------------------------------------------------------------------------


def test_revert_and_cherry_pick(url: Path) -> None:
    (picked,) = lines("cherry-pick", url, "trial", "-m", "take it")
    assert values(url)[:2] == [100, 100]
    assert next(zm.open(url).ancestry()).message == "take it"
    (undone,) = objects("revert", url, picked[13:21])
    assert values(url)[:2] == [0, 1]
    assert next(zm.open(url).ancestry()).id == undone["snapshot_id"]
    assert call("revert", url, "main~9").exit_code == 1
    assert call("cherry-pick", url, "main~9").exit_code == 1


def test_merge_reports_and_merges(url: Path) -> None:
    (said,) = lines("merge", url, "trial", "--dry-run")
    assert said.startswith("would bring 1 commit of ")
    assert values(url)[0] == 0
    (report,) = objects("merge", url, "trial", "-m", "merged")
    assert (report["commits"], report["fast_forward"], report["merges"]) == (1, False, True)
    assert values(url)[0] == 100
    assert values(url, "depth") == [7, 7, 7, 7]
    assert "has all changes of" in lines("merge", url, "trial")[0]
    assert objects("merge", url, "main", "--into", "trial", "--no-ff")[0]["fast_forward"] is False


def test_conflicts_of_a_merge_are_all_told(url: Path) -> None:
    repo = zm.open(url)
    with repo.transaction(message="on main") as store:
        zarr.open_array(store, path="air/t")[:2] = -1
    dry = call("merge", url, "trial", "--dry-run")
    assert dry.exit_code == 1
    assert "cannot be merged into main" in dry.stdout
    dry = call("merge", url, "trial", "--dry-run", "--json")
    (conflict,) = json.loads(dry.stdout)["conflicts"]
    assert (conflict["path"], conflict["kind"]) == ("/air/t", "chunk")
    assert conflict["chunks"] == [[0, 0], [0, 1]]
    failed = call("merge", url, "trial")
    assert (failed.exit_code, failed.stdout) == (1, "")
    first, second = failed.stderr.splitlines()
    assert first.startswith("error: 'trial' cannot be merged")
    assert second.startswith("  /air/t: chunks [(0, 0), (0, 1)]")
    assert "brought 1 commit" in lines("merge", url, "trial", "--policy", "theirs")[0]
    assert values(url)[0] == 100


def test_mv(url: Path) -> None:
    (made,) = lines("mv", url, "/air/t", "temperature")
    repo = zm.open(url)
    assert next(repo.ancestry()).id == made
    assert next(repo.ancestry()).message == "move /air/t to temperature"
    assert values(url, "temperature")[5] == 5
    assert lines("diff", url, "main~1") == ["> /air/t to /temperature"]
    assert call("mv", url, "nope", "x").exit_code == 1
    assert call("mv", url, "air", "depth").exit_code == 1
