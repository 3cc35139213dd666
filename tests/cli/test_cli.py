"""`log`, `tree` and `info` say what the library says, and every error ends in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result
from zarr.core.buffer import cpu

import zarr_manifests as zm
from cli_verbs import VERBS
from zarr_manifests.cli import app
from zarr_manifests.repository import context_of, resolved
from zarr_manifests.store import workspace_of
from zarr_manifests.texts import bytes_text, count_text


def call(*arguments: object) -> Result:
    """Call `zarr-manifests` with these arguments, without a terminal."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(*arguments: object) -> list[str]:
    """What it prints, when it ends well."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [line.rstrip() for line in result.stdout.splitlines()]


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


def test_log_shows_every_snapshot_newest_first(url: str) -> None:
    history = list(zm.open(url).ancestry())
    shown = lines("log", url)
    assert [line.split()[0] for line in shown[::2]] == [info.snapshot_id for info in history]
    assert [info.kind in line for info, line in zip(history, shown[::2], strict=True)] == [True] * 3
    assert shown[0].endswith("(main)")
    assert shown[1].startswith("    fill half of it  [2 chunks, ")
    assert shown[3] == "    make the hierarchy"
    assert shown[4].endswith("(tag empty)")


def test_log_of_a_branch_a_tag_and_a_snapshot(url: str) -> None:
    assert lines("log", url, "--at", "trial")[1].startswith("    fill\\nall of it  [2 chunks")
    assert lines("log", url, "--at", "empty")[1:] == ["    create repository"]
    parent = list(zm.open(url).ancestry())[1].snapshot_id
    older = lines("log", url, "--at", parent)
    assert (older[0].split()[0], len(older)) == (parent, 4)


def test_log_is_limited_and_says_so(url: str) -> None:
    assert lines("log", url, "-n", 1)[2:] == ["... and older ones: -n 10 shows more, -n 0 all"]
    assert len(lines("log", url, "-n", 3)) == 6, "nothing is left out, so nothing is said"
    assert lines("log", url, "-n", 0) == lines("log", url)
    assert lines("log", url, "-n", 2**64) == lines("log", url)
    *_, older = lines("log", url, "--ops", "-n", 1)
    assert older == "... and older ones: -n 10 shows more, -n 0 all"
    assert lines("log", url, "--ops", "--limit", 2**64) == lines("log", url, "--ops")


# --- tree ----------------------------------------------------------------------------------------


def test_tree_shows_the_hierarchy(url: str) -> None:
    snapshot, header, *shown = lines("tree", url)
    assert snapshot == zm.open(url).list_branches()["main"]
    assert header.split() == ["dimensions", "type", "chunk", "units"]
    assert [line[:19].rstrip() for line in shown] == [
        "/",
        "├── air",
        "│   └── temperature",
        "└── depth",
    ]
    assert shown[2].split()[3:] == ["(time:", "4,", "x:", "6)", "float32", "2", "x", "3", "K"]
    assert shown[3].split()[2:] == ["()", "int16", "scalar"]


def test_tree_counts_chunks_when_asked(url: str) -> None:
    def counted(*refs: str) -> str:
        return lines("tree", url, "--chunks", *refs)[4].split()[-3]

    assert counted() == "2/4"
    assert counted("trial") == "4/4"
    table = lines("tree", url, "--chunks")
    assert table[5].split()[-3:] == ["0/1", "0", "B"]


def test_tree_says_which_arrays_have_statistics(url: str) -> None:
    def told(*refs: str) -> list[str]:
        return [" ".join(line.split()[-4:]) for line in lines("tree", url, "--stats", *refs)[4:]]

    assert told() == ["2 x 3 none", "int16 scalar no chunks"]
    table = lines("compact", url, "--statistics")
    assert table[0].split() == ["array", "chunks", "measured"]
    assert [line.split() for line in table[1:]] == [
        ["/air/temperature", "2", "2"],
        ["/depth", "0", "0"],
    ]
    assert told()[0] == "all of 2 chunks"
    of_one = lines("compact", url, "--statistics", "--array", "/air/temperature")
    assert [line.split()[1:] for line in of_one[1:]] == [["2", "0"]]
    assert told("trial")[0].endswith("none")
    both = call("tree", url, "--stats", "--chunks")
    assert both.exit_code == 2
    assert "not both" in both.stderr


def test_tree_of_format_2(url: str) -> None:
    session = zm.open(url).writable_session("main")
    group = zarr.create_group(session.store, path="old", zarr_format=2)
    group.create_array("height", shape=(4,), dtype="f4", attributes={"units": "m"})
    group.create_array("pairs", shape=(2,), dtype=[("x", "i4"), ("y", "f8")])
    session.store.set_sync("old/pairs/.zattrs", cpu.Buffer.from_bytes(b"{"))
    session.commit("format 2")
    shown = lines("tree", url)
    assert any("height" in line and "<f4" in line and line.endswith(" m") for line in shown)
    assert any("pairs" in line and "structured" in line for line in shown)


def test_tree_of_nothing(url: str) -> None:
    assert lines("tree", url, "empty")[1:] == ["(empty)"]


def test_names_and_units_cannot_reach_the_terminal_as_anything_but_text(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    with repo.transaction("main", message="\x1b[31mred\x07") as store:
        group = zarr.create_group(store)
        group.create_array(
            "[bold]a\x1b[2J", shape=(1,), dtype="f8", attributes={"units": "\x1b]0;title\x07"}
        )
    text = call("tree", tmp_path).stdout + call("log", tmp_path).stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]a\\x1b[2J" in text
    assert "\\x1b[31mred" in text


# --- info ----------------------------------------------------------------------------------------


def test_info_adds_up(url: str) -> None:
    repo = zm.open(url)
    shown = lines("info", url)
    facts = dict(line.split(maxsplit=1) for line in shown[:3])
    assert facts == {
        "repository": repo.storage.url,
        "id": context_of(repo).repository_id,
        "format": "1",
    }
    heads = {line.split()[1]: line.split() for line in shown if line.startswith(("branch", "tag"))}
    assert heads["main"][2:] == [repo.list_branches()["main"], "2", "2"]
    assert heads["trial"][2:] == [repo.list_branches()["trial"], "2", "3"]
    assert heads["empty"][2:] == [repo.list_tags()["empty"], "0", "0"]
    stored = list(repo.storage.list())
    assert shown[-1].split()[1:] == [
        str(len(stored)),
        *bytes_text(sum(info.nbytes for info in stored)).split(),
    ]
    assert any("fill half of it [" in line for line in shown)
    assert any("max-delta-count: 50" in line for line in shown)
    kinds = [line.split()[0] for line in shown if line]
    assert kinds.index("branch") < kinds.index("tag") < kinds.index("config")


def test_metadata_is_set_shown_and_part_of_info(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    metadata = "config", "metadata", tmp_path
    assert lines(*metadata) == []
    assert lines(*metadata, "title=winds: 10 m", 'grid={"lat": 0.25}', "n=3") == []
    expected = {"title": "winds: 10 m", "grid": {"lat": 0.25}, "n": 3}
    assert repo.metadata() == expected
    assert lines(*metadata, "title=no", "day=2026-11-01") == []
    expected |= {"title": "no", "day": "2026-11-01"}
    assert repo.metadata() == expected
    shown = ["title: no", 'grid: {"lat": 0.25}', "n: 3", "day: 2026-11-01"]
    assert sorted(lines(*metadata)) == sorted(shown)
    told = [line.split(maxsplit=1) for line in lines("info", tmp_path)]
    assert sorted(line[1] for line in told if line[:1] == ["metadata"]) == sorted(shown)
    assert json.loads(*lines(*metadata, "--json")) == expected
    assert json.loads(*lines("info", tmp_path, "--json"))["metadata"] == expected
    repo.metadata({"\x1b[31m": "\x1b[31mred"})
    assert "\x1b" not in "".join(lines(*metadata) + lines("info", tmp_path))
    assert json.loads(*lines(*metadata, "--replace", "n=4", "--json")) == {"n": 4}
    assert repo.metadata() == {"n": 4}


def test_info_of_very_many_refs_is_short(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    for number in range(25):
        repo.create_tag(f"v{number}")
    shown = lines("info", tmp_path)
    assert sum(line.startswith("tag ") for line in shown) == 19
    assert "... and 6 more" in shown


# --- du, diff, branch, tag -----------------------------------------------------------------------


def test_du_counts_what_each_array_refers_to(url: str) -> None:
    usage = zm.open(url).du()
    snapshot, header, *shown = lines("du", url)
    assert snapshot == usage.snapshot_id
    more = ["more", "chunks", "more", "bytes"]
    assert header.split() == ["chunks", "of", "inline", "native", "virtual", "bytes", *more]
    nbytes = usage["/air/temperature"].nbytes
    size = bytes_text(nbytes).split()
    kinds = [*size, "0", "B", "0", "B", *size]
    assert shown[0].split() == ["/air/temperature", "2", "4", *kinds, "2", *size]
    assert shown[1].split()[:2] == ["/depth", "0"]
    assert shown[2].split()[:2] == ["all", "2"]
    assert lines("du", url, "trial")[2].split()[1] == "4"


def test_du_of_one_array_says_how_far_it_is_filled(url: str) -> None:
    _, header, shown, _ = lines("du", url, "--array", "air/temperature")
    assert header.split()[:3] == ["chunks", "of", "bytes"]
    assert shown.split()[:3] == ["/air/temperature", "2", "4"]
    lost = call("du", url, "--array", "lost")
    assert lost.exit_code == 1
    assert "there is no array '/lost'; there are: /air/temperature, /depth" in lost.stderr


def test_du_and_log_show_what_snapshots_say_themselves(url: str) -> None:
    repository = zm.open(url)
    total = repository.du(estimate=True).total
    assert total.nbytes is not None
    snapshot, header, *shown = lines("du", url, "--estimate")
    assert snapshot == repository.du(estimate=True).snapshot_id
    assert header.split() == ["chunks", "of", "bytes", "more", "chunks", "more", "bytes"]
    size = bytes_text(total.nbytes)
    assert shown[0].split() == ["/air/temperature", "2", "4", *size.split(), "2", *size.split()]
    assert shown[2].split()[:2] == ["all", "2"]
    assert lines("log", url)[1].endswith(f"; in all 2 chunks, {size}]")
    repository.compact(mode="full")
    session = zm.open(url).writable_session()  # which has read no manifest
    zarr.open_array(session.store, path="air/temperature")[:2] = np.full((2, 6), 3, "f4")
    session.commit("overwrite")
    chunks = zm.open(url).du(estimate=True).total.chunks
    shown = lines("du", url, "--estimate")
    assert shown[2].split()[:3] == ["/air/temperature", "<=", str(chunks)]
    assert shown[-1].startswith("<= at most")
    assert f"in all at most {chunks} chunks, at most " in lines("log", url)[1]


def test_diff_lists_nodes_and_chunks(url: str) -> None:
    assert lines("diff", url, "main", "trial") == ["  /air/temperature: 2 chunks overwritten"]
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
        "  /water/temperature: 2 chunks overwritten",
    ]
    logged = lines("diff", url, "main", moved, "--log", "--coordinates")
    trial = list(repo.ancestry(moved))[1].snapshot_id
    assert logged[:4] == [
        trial,
        "  /air/temperature: 2 chunks overwritten",
        "    overwrite (1, 0)",
        "    overwrite (1, 1)",
    ]
    assert logged[4:7] == [moved, "+ /new", "- /depth"]
    failed = call("diff", url, moved, "main")
    assert (failed.exit_code, failed.stdout) == (2, "")
    assert "give the older snapshot first, or --direct" in failed.stderr


def test_diff_as_json_is_what_the_library_yields(url: str) -> None:
    repo = zm.open(url)
    session = repo.writable_session("trial")
    zarr.open_array(session.store, path="air/temperature").resize((2, 9))
    workspace_of(session.store).delete_below("depth/")
    session.move("air", "water")
    session.commit("cut off")
    for options, mode in (((), "net"), (("--log",), "log")):
        found = [
            json.loads(line)
            for line in lines("diff", url, "empty", "trial", "--json", "--coordinates", *options)
        ]
        expected: list[dict[str, Any]] = []
        for change in repo.changes("empty", "trial", mode):
            record = {"path": change.path, "operation": str(change.operation)}
            optional = {
                "snapshot_id": change.snapshot_id,
                "moved_from": change.moved_from,
                "fields": json.loads(json.dumps(change.fields)) or None,
                "grid_shape": change.grid_shape and list(change.grid_shape),
                "chunks": len(change.coordinates) or None,
                "coordinates": change.coordinates.tolist() or None,
            }
            expected.append(record | {k: v for k, v in optional.items() if v is not None})
        assert found == expected
    assert {"move", "truncate", "delete"} <= {record["operation"] for record in found}
    counts = [json.loads(line) for line in lines("diff", url, "empty", "trial", "--json")]
    assert all("coordinates" not in record for record in counts)


@pytest.mark.parametrize("verb", ["branch", "tag"])
def test_refs_are_listed_made_and_deleted(verb: str, url: str) -> None:
    repo = zm.open(url)
    names = repo.list_branches if verb == "branch" else repo.list_tags
    before = names()
    assert dict(map(str.split, lines(verb, url))) == before
    main, trial = (repo.list_branches()[name] for name in ("main", "trial"))
    assert lines(verb, url, "one") == lines(verb, url, "two", trial) == []
    assert names() == {**before, "one": main, "two": trial}
    assert lines(verb, url, "three", "trial") == []
    assert names().pop("three") == trial
    assert lines(verb, url, "three", "-d") == []
    assert lines(verb, url, "one", "--delete") == []
    assert names() == {**before, "two": trial}
    for wrong in (("--delete",), ("two", main, "--delete")):
        failed = call(verb, url, *wrong)
        assert (failed.exit_code, failed.stdout) == (2, "")
    assert call(verb, url, "two").exit_code == 1
    assert call(verb, url, "nope", "-d").exit_code == 1


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


# --- errors and usage ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["log", "tree", "info", "du", "branch", "tag"])
def test_no_repository_is_one_line(verb: str, tmp_path: Path) -> None:
    result = call(verb, tmp_path / "nothing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no repository at file://")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("verb", ["log", "tree", "info", "du", "branch", "tag"])
def test_a_damaged_repository_is_one_line(verb: str, url: str) -> None:
    current = Path(url) / "current"
    current.write_bytes(current.read_bytes()[:-1])
    result = call(verb, url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "current" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_letter_is_one_option_everywhere_and_n_the_limit() -> None:
    meanings: dict[str, set[str]] = {}
    for command in VERBS.values():
        for option in command.params:
            *_, letter = sorted(option.opts, key=len, reverse=True)
            if len(letter) == 2:
                meanings.setdefault(letter, set()).add(max(option.opts, key=len))
            assert "--limit" not in option.opts or letter == "-n"
    assert meanings["-n"] == {"--limit"}
    assert {letter for letter, found in meanings.items() if len(found) > 1} == set()


@pytest.mark.parametrize("arguments", [["nope"], ["log"], ["log", "x", "-n", "-1"], ["tree", "-z"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_version_is_that_of_the_package() -> None:
    assert lines("--version") == [f"zarr-manifests {zm.__version__}"]


def test_every_verb_explains_itself() -> None:
    overview = call("--help")
    for verb in ("demo", "log", "tree", "info", "du", "diff", "branch", "tag"):
        assert verb in overview.stdout
        assert call(verb, "-h").exit_code == 0


# --- as a program --------------------------------------------------------------------------------


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zarr_manifests", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_it_runs_as_a_program_and_in_a_pipe(url: str) -> None:
    done = program("log", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == lines("log", url)
    failed = program("tree", url, "nope")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: ")


@pytest.mark.slow
def test_an_output_without_unicode_is_no_error(url: str) -> None:
    done = program("tree", url, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "temperature" in done.stdout


def test_help_does_not_wait_for_heavy_packages() -> None:
    code = "import sys, typer, zarr_manifests.cli as cli; "
    code += "[*typer.main.get_command(cli.app).commands.values()]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "zarr_manifests.cli.demo" in done.stdout.split()
    heavy = {"pyspark", "matplotlib", "xarray", "pandas", "dask", "zarr_manifests.demo"}
    assert heavy.isdisjoint(done.stdout.split())


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (20 * 10**18, "20000 PB"),
    ],
)
def test_bytes_as_text(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_counts_as_text() -> None:
    assert [count_text(n, "chunk") for n in (0, 1, 2000)] == ["0 chunks", "1 chunk", "2,000 chunks"]


# --- maintenance ---------------------------------------------------------------------------------


def test_dead_bytes_are_counted_and_moved_away_from(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    repo = zm.create(path, {"inline-chunk-bytes": 0})
    with repo.transaction(message="a pack of four chunks") as store:
        array = zarr.create_array(store, name="a", shape=(400,), chunks=(100,), dtype="u1",
                                  compressors=None)  # fmt: skip
        array[:] = 1
    with repo.transaction(message="one of them stays") as store:
        zarr.open_array(store, path="a")[:300] = 2
    told = [" ".join(line.split()) for line in lines("compact", path, "--packs", "--dry-run")]
    assert told == [
        "number bytes",
        "objects with chunks 2 700 B",
        "mostly dead packs 1 400 B",
        "chunks to be moved 1 100 B",
        "dead bytes of these packs 300 B",
        "nothing was written (--dry-run)",
    ]
    assert len(list(repo.ancestry())) == 3
    done = lines("compact", path, "--packs", "--branch", "main", "--min-live", "0.5")
    assert done[3].split() == ["chunks", "moved", "1", "100", "B"]
    assert done[-2].split() == ["packs", "written", "1"]
    assert done[-1] == next(iter(repo.ancestry())).snapshot_id
    assert call("compact", path, "--packs", "--branch", "other").exit_code == 1


def test_refs_are_brought_back_and_what_would_be_is_told_before(url: str) -> None:
    repo = zm.open(url)
    version = next(repo.ops_log()).version
    head = repo.list_branches()["main"]
    repo.create_tag("later")
    repo.delete_branch("trial")
    told = lines("recover", url, "--to", version, "--dry-run")
    (trial,) = (one.snapshot_id for one in repo.ops_log() if one.version == version)
    assert [line.split() for line in told[:-1]] == [
        ["what", "name", "was", "would", "be"],
        ["branch", "trial", "not", "there", trial],
        ["tag", "later", head, "not", "there"],
    ]
    assert told[-1] == f"branches and tags would be those of version {version} again"
    assert "later" in repo.list_tags()
    assert lines("recover", url, "--to", version)[1:-1] == told[1:-1]
    assert repo.list_branches()["trial"] == trial
    after = next(repo.ops_log()).version
    repo.create_branch("more")
    repo.delete_branch("more")
    assert lines("recover", url, "--to", after) == [
        f"branches and tags are those of version {after} again; `log --ops` lists this, too"
    ]


@pytest.mark.slow
def test_a_repository_is_made_small_checked_and_brought_back(url: str) -> None:
    only = "clean", url, "--keep", "1", "--no-collect"
    assert lines(*only, "--dry-run")[0].split()[:3] == ["branch", "would", "expire"]
    assert [line.split() for line in lines(*only)[1:]] == [
        ["main", "2", "1"],
        ["trial", "3", "1"],
    ]
    assert lines("clean", url, "--grace", "0s", "--dry-run")[0].split()[:2] == ["would", "delete"]
    assert "kept" in lines("clean", url, "--grace", "0")[-1]
    assert lines("compact", url, "--packs")[-1] == "there was nothing to move"
    assert lines("verify", url)[-1].startswith("sound: ")
    header, newest, _ = lines("log", url, "--ops", "--limit", "1")
    assert header.split() == ["version", "when", "who", "what", "ref", "snapshot"]
    version, *_ = newest.split()
    assert call("recover", url, "--to", 1).exit_code == 1
    assert call("recover", url, "--to", 10**6).exit_code == 2
    assert call("recover", url).exit_code == 2
    head = next(zm.open(url).ancestry()).snapshot_id
    (Path(url) / "current").write_bytes(b"damaged")
    refused = call("verify", url)
    assert refused.exit_code == 1
    assert "zarr-manifests recover" in refused.stderr
    (Path(url) / "current").unlink()
    told = lines("recover", url, "--dry-run")
    assert told[1].split() == ["main", head]
    assert told[-1].startswith(f"would take version {version}; the root would be version ")
    done = lines("recover", url)
    assert done[:-1] == told[:-1]
    assert done[-1].startswith(f"took version {version}; the root is now version ")
    chunk = next((Path(url) / "snapshots").rglob("*-*/*"))
    chunk.write_bytes(b"damaged")
    found = call("verify", url)
    assert found.exit_code == 1
    assert "problem" in found.stdout


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
    assert left("--keep", "2", "--no-collect") == 2
    assert left("--keep", "config") == 1


@pytest.mark.parametrize("place", ["fill_value", "data_type", "endian"])
def test_a_document_that_zarr_refuses_is_an_error_without_escapes(
    tmp_path: Path, place: str
) -> None:
    evil = "\x1b[2Jall is well"
    repo = zm.create(tmp_path)
    for value in (1, 2):
        with repo.transaction(message=f"{value}") as store:
            if value == 1:
                zarr.create_array(store, name="a", shape=(1,), chunks=(1,), dtype="i4")
                document = json.loads(store.get_sync("a/zarr.json").to_bytes())
                given = {"bytes": {"endian": evil}} if place == "endian" else {}
                codecs = [{"name": name, "configuration": made} for name, made in given.items()]
                document |= {"codecs": codecs} if given else {place: evil}
                store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(json.dumps(document).encode()))
            store.set_sync("a/c/0", cpu.Buffer.from_bytes(bytes(3) + bytes([value])))
    for words, code in (
        (["diff", tmp_path, "main~1", "main", "--values"], 2),
        (["cat", tmp_path, "a"], 2),
        (["compact", tmp_path, "--statistics"], 0),
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
    assert lines("diff", tmp_path, "main~1", "--direct", "--coordinates")[1:] == told[1:]
    for words in (("show",), ("diff", "main~1"), ("diff", "main~1", "--direct")):
        (found,) = lines(words[0], tmp_path, *words[1:], "--json")
        record = json.loads(found)
        (change,) = record["changes"] if words == ("show",) else [record]
        assert change["fields"] == {"attributes.units": ["K\x1b[2J", "degC"]}


def test_commits_name_their_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZARR_MANIFESTS_WHO")
    repo = zm.create(tmp_path)
    with repo.transaction(message="first") as store:
        zarr.create_group(store, path="g")
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "the nightly job\x1b[2J")
    with repo.transaction(message="second") as store:
        zarr.create_group(store, path="h")
    with repo.transaction(message="third", metadata={"author": "grace"}) as store:
        zarr.create_group(store, path="i")
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", "")
    repo.revert("main")
    authors = [info.author for info in repo.ancestry()]
    assert authors[:3] == ["", "grace", "the nightly job\x1b[2J"]
    assert "author" not in next(repo.ancestry()).metadata
    assert re.fullmatch("[^@]+@.+", authors[3])
    assert authors[4] == ""  # of who makes a repository the log tells
    said = "\n".join(lines("log", tmp_path))
    assert "by grace" in said
    assert "by the nightly job\\x1b[2J" in said
    assert "the nightly job\\x1b[2J" in "\n".join(lines("log", tmp_path, "--ops"))
    assert lines("show", tmp_path, "main~1")[0].endswith("  by grace")
    (found,) = lines("show", tmp_path, "main~1", "--json")
    assert json.loads(found)["metadata"] == {"author": "grace"}
