"""The command line says what the library says, and changes what it is told to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from cli_calls import call, lines
from zarr_manifests.repository import resolved
from zarr_manifests.store import workspace_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A repository with three commits, a branch and a tag."""
    path = tmp_path / "repository"
    repo = zm.create(path)
    repo.create_tag("empty")
    with repo.transaction("main", message="make the hierarchy") as store:
        root = zarr.create_group(store)
        root.create_array(
            "air/temperature",
            shape=(4, 6),
            chunks=(2, 3),
            dtype="f4",
            dimension_names=("time", "x"),
            attributes={"units": "K"},
        )
        root.create_array("depth", shape=(), dtype="i2")
    with repo.transaction("main", message="fill half of it") as store:
        zarr.open_array(store, path="air/temperature")[:2] = np.ones((2, 6), "f4")
    repo.create_branch("trial")
    with repo.transaction("trial", message="fill\nall of it") as store:
        zarr.open_array(store, path="air/temperature")[2:] = np.ones((2, 6), "f4")
    return str(path)


# --- log -----------------------------------------------------------------------------------------


def test_log_is_limited_and_says_so(url: str) -> None:
    assert "older" in lines("log", url, "-n", 1)[-1]
    assert "older" not in lines("log", url, "-n", 3)[-1]
    assert lines("log", url, "-n", 0) == lines("log", url)
    assert "older" in lines("log", url, "--ops", "-n", 1)[-1]


# --- info ----------------------------------------------------------------------------------------


def test_metadata_is_part_of_info(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    expected = {"title": "winds: 10 m", "grid": {"lat": 0.25}, "n": 3}
    repo.metadata(expected)
    told = [line.split(maxsplit=1) for line in lines("info", tmp_path)]
    at = told.index(["metadata", "(3)"])
    assert sorted(told[at + 1 : at + 4]) == [
        ["grid", "lat: 0.25"], ["n", "3"], ["title", "winds: 10 m"]
    ]  # fmt: skip
    assert json.loads(*lines("info", tmp_path, "--json"))["metadata"] == expected
    repo.metadata({"\x1b[31m": "\x1b[31mred"})
    assert "\x1b" not in "".join(lines("info", tmp_path))


@pytest.mark.parametrize("kind", ["zarr", "kerchunk", "icechunk", "netcdf"])
def test_an_import_of_what_is_not_there_makes_no_repository(kind: str, tmp_path: Path) -> None:
    failed = call("import", kind, tmp_path / "new", tmp_path / "missing")
    assert (failed.exit_code, f"there is no {tmp_path / 'missing'}" in failed.stderr) == (1, True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "a.zip").touch()
    assert "(with --copy" in call("import", "zarr", tmp_path / "new", tmp_path / "a.zip").stderr


def test_where_no_repository_is_the_verb_that_makes_one_is_named(tmp_path: Path) -> None:
    failed = call("log", tmp_path / "new")
    assert "make one by `import`" in failed.stderr


def test_versions_that_are_not_there_name_the_verbs_that_list_them(url: str) -> None:
    said = "`zarr-manifests branch`, `zarr-manifests tag` and `zarr-manifests log` list them"
    assert said in call("tree", url, "nosuch").stderr


# --- du, diff, branch, tag -----------------------------------------------------------------------


def test_du_says_each_number_once(url: str) -> None:
    told = "\n".join(lines("du", url))
    assert "total        2 chunks" in told
    assert not re.search(r"^(chunks|bytes|exact) ", told, re.MULTILINE)
    assert "exact" not in told


def test_diff_lists_nodes_and_chunks(url: str) -> None:
    assert lines("diff", url, "main", "trial") == ["  /air/temperature: 2 chunks: (1, 0), (1, 1)"]
    assert lines("diff", url, "main", "main") == ["no changes"]
    repo = zm.open(url)
    session = repo.writable_session("trial")
    session.move("air", "water")
    zarr.create_group(session.store, path="new")
    workspace_of(session.store).delete_below("depth/")
    moved = session.commit("move")
    assert lines("diff", url, "main", moved) == [
        "+ /new",
        "- /depth",
        "> /air to /water",
        "  /water/temperature: 2 chunks: (1, 0), (1, 1)",
    ]
    failed = call("diff", url, moved, "main")
    assert (failed.exit_code, failed.stdout) == (2, "")
    assert "--direct" in failed.stderr


def test_a_branch_is_moved(url: str) -> None:
    repo = zm.open(url)
    main, trial = (repo.list_branches()[name] for name in ("main", "trial"))
    empty = repo.list_tags()["empty"]
    refused = call("branch", url, "trial", "empty", "--move")
    assert refused.exit_code == 2
    assert f"pass --expected {trial}, or --force" in refused.stderr
    stale = call("branch", url, "trial", "empty", "--move", "--expected", main)
    assert stale.exit_code == 1
    assert repo.list_branches()["trial"] == trial
    done = lines("branch", url, "trial", "empty", "--move", "--expected", trial[13:25])
    assert done == [f"trial is at {empty}"]
    assert repo.list_branches()["trial"] == empty
    lines("branch", url, "trial", main, "--move")  # nothing is dropped
    assert lines("branch", url, "trial", "main~1", "--move", "--force") == [
        f"trial is at {resolved(repo, 'main~1')}"
    ]
    assert call("branch", url, "nope", "main", "--move").exit_code == 1
    assert "nope" not in repo.list_branches()


# --- maintenance ---------------------------------------------------------------------------------


def test_refs_are_brought_back_and_what_would_be_is_told_before(url: str) -> None:
    repo = zm.open(url)
    version = next(repo.ops_log()).version
    head = repo.list_branches()["main"]
    repo.create_tag("later")
    repo.delete_branch("trial")
    told = lines("recover", url, "--to", version, "--dry-run")
    (trial,) = (one.snapshot_id for one in repo.ops_log() if one.version == version)
    assert told[:-1] == [
        f"branch trial was not there, would be {trial}",
        f"tag later was {head}, would be not there",
    ]
    assert "later" in repo.list_tags()
    done = lines("recover", url, "--to", version)
    assert done[:-1] == [line.replace("would be", "is now") for line in told[:-1]]
    assert repo.list_branches()["trial"] == trial
    assert "later" not in repo.list_tags()


def test_what_a_place_is_good_for_is_said_in_words(tmp_path: Path) -> None:
    told = [line.split() for line in lines("check", tmp_path)]
    assert ["usable", "for", "everything"] in told
    nowhere = call("check", tmp_path / "nowhere")
    assert nowhere.exit_code == 1
    assert "make it, or correct the path" in nowhere.stdout
    assert "StorageReport" not in nowhere.stdout


def test_clean_expires_only_what_it_is_told_to(tmp_path: Path) -> None:
    repo = zm.create(tmp_path, {"snapshots": {"keep-last": 1}})
    for name in ("air", "sea", "ice"):
        with repo.transaction(message=f"make {name}") as store:
            zarr.create_group(store, path=name)

    def left(*words: str) -> int:
        lines("clean", tmp_path, *words)
        return len(list(repo.ancestry()))

    assert left() == left("--keep", "30d") == left("--keep", "config", "--dry-run") == 4
    assert left("--keep", "3") == 3
    assert left("--keep", "2") == 2
    files = sorted(tmp_path.rglob("*"))
    assert left("--grace", "0", "--dry-run") == 2
    assert sorted(tmp_path.rglob("*")) == files
    assert left("--grace", "0") == 2
    assert sorted(tmp_path.rglob("*")) != files
    assert left("--keep", "config") == 1
    assert "nor an age such as 30d, nor config" in call("clean", tmp_path, "--keep", "many").stderr
    assert (
        "a number from 1 on, or an age as 30d, not 0" in call("clean", tmp_path, "--keep", 0).stderr
    )
    repo.save_config({"snapshots": {"keep-last": None}})
    assert "give --keep a number or an age" in call("clean", tmp_path, "--keep", "config").stderr
    assert "`recover --to` goes back" in call("recover", tmp_path).stderr
    assert "if the root is lost, `recover`" in call("log", tmp_path.with_name("no")).stderr


@pytest.mark.parametrize("place", ["fill_value", "data_type"])
def test_a_document_that_zarr_refuses_is_an_error_without_escapes(
    tmp_path: Path, place: str
) -> None:
    evil = "\x1b[2Jall is well"
    repo = zm.create(tmp_path)
    for value in (1, 2):
        with repo.transaction(message=f"{value}") as store:
            if value == 1:
                zarr.create_array(store, name="a", shape=(1,), chunks=(1,), dtype="i4")
                document = json.loads(store.get_sync("a/zarr.json").to_bytes()) | {place: evil}
                store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(json.dumps(document).encode()))
            store.set_sync("a/c/0", cpu.Buffer.from_bytes(bytes(3) + bytes([value])))
    for words, code in (
        (["diff", tmp_path, "main~1", "main", "--values"], 2),
        (["cat", tmp_path, "a"], 2),
        (["compact", tmp_path, "--mode", "statistics"], 0),
    ):
        done = call(*words)
        assert done.exit_code == code, done.output
        assert "\x1b" not in done.output
        assert code == 0 or "/a cannot be decoded" in done.output


def test_show_and_diff_say_which_attributes_changed(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    with repo.transaction(message="made") as store:
        zarr.create_group(store, path="g", attributes={"units": "K\x1b[2J"})
    with repo.transaction(message="changed") as store:
        zarr.open_group(store, path="g").attrs["units"] = "degC"
    told = ["~ /g", "    attributes.units: 'K\\x1b[2J' to 'degC'"]
    assert lines("show", tmp_path)[-2:] == told
    assert lines("diff", tmp_path, "main~1") == told


def test_commits_name_their_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZARR_MANIFESTS_WHO")
    repo = zm.create(tmp_path)
    with repo.transaction(message="first") as store:
        zarr.create_group(store, path="g")
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "the nightly job\x1b[2J")
    with repo.transaction(message="second") as store:
        zarr.create_group(store, path="h")
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "")
    repo.revert("main")
    authors = [info.author for info in repo.ancestry()]
    assert authors[:2] == ["", "the nightly job\x1b[2J"]
    assert re.fullmatch("[^@]+@.+", authors[2])
    assert authors[3] == ""  # of who makes a repository the log tells
    assert "by the nightly job\\x1b[2J" in "\n".join(lines("log", tmp_path))
    assert "the nightly job\\x1b[2J" in "\n".join(lines("log", tmp_path, "--ops"))


def test_dead_bytes_are_counted_and_moved_away_from(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    repo = zm.create(path, {"inline-chunk-bytes": 0})
    with repo.transaction(message="a pack of four chunks") as store:
        array = zarr.create_array(store, name="a", shape=(400,), chunks=(100,), dtype="u1",
                                  compressors=None)  # fmt: skip
        array[:] = 1
    with repo.transaction(message="one of them stays") as store:
        zarr.open_array(store, path="a")[:300] = 2
    told = [line.rsplit("  ", 1) for line in lines("compact", path, "--mode", "packs", "--dry-run")]
    assert {name.strip(): text for name, text in told} == {
        "mode": "packs", "dry run": "yes", "packs": "1", "packs bytes": "400 B",
        "chunks": "1", "chunks bytes": "100 B", "dead bytes": "300 B",
    }  # fmt: skip
    assert len(list(repo.ancestry())) == 3
    done = lines("compact", path, "--mode", "packs", "--branch", "main")
    assert done[0].split()[-1] == next(iter(repo.ancestry())).snapshot_id
    assert ["packs", "written", "1"] in [line.split() for line in done]
    assert call("compact", path, "--mode", "packs", "--branch", "other").exit_code == 1


def test_chunks_are_measured_once(url: str) -> None:
    table = lines("compact", url, "--mode", "statistics")
    assert [line.split() for line in table[-2:]] == [
        ["/air/temperature", "2", "0", "2", "yes"],
        ["/depth", "0", "0", "0", "yes"],
    ]
    again = lines("compact", url, "--mode", "statistics")
    assert again[-2].split() == ["/air/temperature", "2", "2", "0", "yes"]
