"""`show`, `log PATH`, `revert`, `cherry-pick`, `merge`, `mv`, `cat` and `diff --values`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from cli_calls import call, lines, objects


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
    assert rest == [f"parent  {info.parent_id}", "  /air/t: 2 chunks: (0, 0), (0, 1)"]
    assert r"source  a\ntest" in lines("show", url, "main~1")
    assert lines("show", url, "main~2")[-1].endswith("it is the first")
    (found,) = objects("show", url, "trial")
    assert (found["snapshot_id"], found["branches"], found["tags"]) == (info.id, ["trial"], [])
    assert found["changes"]["chunks"] == {"/air/t": [[0, 0], [0, 1]]}


def messages(*arguments: object) -> list[str]:
    return [one["message"] for one in objects("log", *arguments)]


def test_log_of_a_path_has_what_changed_there(url: Path) -> None:
    assert messages(url, "depth") == ["fill the depth", "make it"]
    assert messages(url, "/air", "--at", "trial") == ["correct a row", "make it"]
    lines("mv", url, "air", "sky", "-m", "rename")
    repo = zm.open(url)
    with repo.transaction(message="later") as store:
        zarr.open_array(store, path="sky/t")[3] = 1
    assert messages(url, "sky/t") == ["later", "rename"]
    assert "'/nope'" in call("log", url, "nope").stderr
    assert messages(url, "air/t") == ["make it"]
    repo.expire_snapshots(2)
    assert messages(url, "sky/t") == ["later"]


def test_diff_between_branches_and_of_values(url: Path) -> None:
    assert lines("diff", url, "main", "trial") == ["  /air/t: 2 chunks: (0, 0), (0, 1)"]
    assert lines("diff", url, "main", "trial", "--direct") == [
        "  /air/t: 2 chunks: (0, 0), (0, 1)",
        "  /depth: 2 chunks: (0,), (1,)",
    ]
    assert lines("diff", url, "main~1", "trial", "--values") == [
        "  /air/t: 2 chunks: (0, 0), (0, 1)",
        "    6 changed cells by 95 to 100, as stored",
        "    (0, 0): 3 cells",
        "    (0, 1): 3 cells",
    ]
    (found,) = objects("diff", url, "main~1", "trial", "--values")
    assert (found["chunks"], found["cells"]) == ({"/air/t": [[0, 0], [0, 1]]}, {"/air/t": [3, 3]})
    assert found["steps"] == {"/air/t": [95, 100]}
    assert lines("diff", url, "trial", "trial", "--values") == ["no changes"]
    with zm.open(url).transaction(message="one more") as store:
        zarr.create_group(store, path="new")
    assert lines("diff", url, "main~1", "main", "--values") == ["+ /new"]


def test_diff_of_values_after_an_append_tells_of_it(url: Path) -> None:
    """And of arrays that are cut, and of each that has changed, with an object for each."""
    with zm.open(url).transaction(message="grow one, cut the other") as store:
        t, depth = (zarr.open_array(store, path=path) for path in ("air/t", "depth"))
        t.resize((t.shape[0] + 2, t.shape[1]))
        t[-1] = 7
        depth.resize((1,))
    told = lines("diff", url, "main~1", "main", "--values")
    assert told == [
        "~ /air/t",
        "    shape: (4, 6) to (6, 6)",
        "~ /depth",
        "    shape: (4,) to (1,)",
    ]
    found = objects("diff", url, "main~1", "main", "--values")
    assert [one["updated"] for one in found] == [["/air/t"], ["/depth"]]


def test_errors_name_what_there_is_and_options_of_the_command_line(url: Path) -> None:
    taken = call("mv", url, "air", "depth").stderr
    assert "/depth is there already; delete it first" in taken
    assert "`recover --to`" in call("recover", url).stderr


def test_values_of_packed_arrays_are_told_as_stored(url: Path) -> None:
    """And not with a unit that they only have once they are decoded."""
    packing = {"units": "K", "scale_factor": 0.005, "add_offset": 280.0}
    with zm.open(url).transaction(message="pack") as store:
        how: Any = {"shape": (2,), "chunks": (2,), "dtype": "i2", "attributes": packing}
        zarr.create_array(store, name="packed", **how)[:] = [-7073, 551]
    with zm.open(url).transaction(message="warm by 5 K") as store:
        zarr.open_array(store, path="packed")[0] = -6073
    head, _, row = lines("cat", url, "packed")
    assert (head, row) == ("/packed (2) int16 as stored", "[-6073   551]")
    told = str(zm.open(url).diff("main~1", "main", "packed", values=True))
    assert told.endswith("1 changed cell by 1000 to 1000, as stored")


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
    for wrong in ("9", "0,0,0", "x", "::0"):
        refused = call("cat", url, "air/t", wrong)
        assert (refused.exit_code, refused.stdout) == (2, ""), wrong
    large = call("cat", url, "air/t", ":", "--limit", 5)
    assert "selects 24 values" in large.stderr


# --- changing --------------------------------------------------------------------------------


def test_revert_and_cherry_pick(url: Path) -> None:
    (picked,) = lines("cherry-pick", url, "trial", "-m", "take it")
    assert values(url)[:2] == [100, 100]
    assert next(zm.open(url).ancestry()).message == "take it"
    (undone,) = objects("revert", url, picked[13:21])
    assert values(url)[:2] == [0, 1]
    assert next(zm.open(url).ancestry()).id == undone["snapshot_id"]
    assert call("revert", url, "main~9").exit_code == 1


def test_merge_reports_and_merges(url: Path) -> None:
    (said,) = lines("merge", url, "trial", "--dry-run")
    assert said.startswith("would bring 1 commit of ")
    assert values(url)[0] == 0
    (report,) = objects("merge", url, "trial", "-m", "merged")
    assert (report["commits"], report["fast_forward"], report["merges"]) == (1, False, True)
    assert values(url)[0] == 100
    assert values(url, "depth") == [7, 7, 7, 7]
    assert "has all changes of" in lines("merge", url, "trial")[0]


def test_conflicts_of_a_merge_are_all_told(url: Path) -> None:
    repo = zm.open(url)
    with repo.transaction(message="on main") as store:
        zarr.open_array(store, path="air/t")[:2] = -1
    dry = call("merge", url, "trial", "--dry-run")
    assert dry.exit_code == 1
    dry = call("merge", url, "trial", "--dry-run", "--json")
    (conflict,) = json.loads(dry.stdout)["conflicts"]
    assert (conflict["path"], conflict["kind"]) == ("/air/t", "chunk")
    assert conflict["chunks"] == [[0, 0], [0, 1]]
    failed = call("merge", url, "trial")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "/air/t: chunks [(0, 0), (0, 1)]" in failed.stderr
    assert "brought 1 commit" in lines("merge", url, "trial", "--policy", "theirs")[0]
    assert values(url)[0] == 100


def test_show_of_the_oldest_commit_that_is_left(url: Path) -> None:
    repo = zm.open(url)
    repo.delete_branch("trial")
    repo.expire_snapshots(1)
    repo.garbage_collect(timedelta(0))
    assert lines("show", url)[-1].endswith("the commit before has expired")
    assert objects("show", url)[0]["changes"] is None
