"""What `check` says of places that work, and of some that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage import checking, from_fsspec, fsspec_writer
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Call, WrappedStorage


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_writer, "_SETTLE_S", 0)
    monkeypatch.setattr(checking, "_LISTED", 30)


def test_a_disk_can_be_used_for_everything(tmp_path: Path) -> None:
    repo = zm.create(tmp_path)
    report = checking.check(tmp_path)
    assert (report.usable_for, report.problems) == ("everything", ())
    assert min(report.latency_ms or 0, report.read_mb_per_s or 0, report.write_mb_per_s or 0) > 0
    assert report.url == repo.storage.url
    assert not list(tmp_path.glob("check-*"))
    assert repo.verify().ok


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert checking.check(tmp_path).usable_for == "everything"
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.txt"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It may be a typing error."""
    report = checking.check(tmp_path / "absent" / "deep")
    assert report.usable_for == "nothing"
    assert report.problems[0].startswith("reading: there is no folder ")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    assert checking.check(tmp_path / "file").usable_for == "nothing"
    done = CliRunner().invoke(app, ["check", str(tmp_path / "absent")])
    assert done.exit_code == 1
    assert "there is no folder" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_object_store_that_works(small_store: Any) -> None:
    report = checking.check("s3://bucket/prefix")
    assert (report.usable_for, report.problems) == ("everything", ())
    assert [name for name in small_store.objects if "/check-" in name] == []


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_read(small_store: Any, ignored: str) -> None:
    small_store.heeds.discard(ignored)
    report = checking.check("s3://bucket/prefix")
    assert report.usable_for == "reading"
    (problem,) = report.problems
    assert problem.startswith("conditions: ")
    assert f"no notice of {ignored}" in problem


def test_a_store_that_refuses_all(small_store: Any) -> None:
    small_store.refuse({"GET", "HEAD"}, 403, "AccessDenied")
    report = checking.check("s3://bucket/prefix")
    assert (report.usable_for, report.latency_ms) == ("nothing", None)
    assert report.problems[0].startswith("reading: cannot read")
    done = CliRunner().invoke(app, ["check", "s3://bucket/prefix"])
    assert done.exit_code == 1
    assert "nothing" in done.output


class _Wrong(WrappedStorage):
    """Gives other answers to one kind of call."""

    wrong = ""

    def _around(self, call: Call) -> Any:
        if call.op == self.wrong == "create":
            call.run()
            return True
        if call.op == self.wrong == "delete_many":
            return None
        found = call.run()
        if call.op == self.wrong == "get":
            return found[:-1]
        return found


@pytest.mark.parametrize(
    ("wrong", "problem", "usable"),
    [
        ("create", "conditions: 16 of 16 writers created the same object", "reading"),
        ("get", "ranges: a range came back with other bytes", "nothing"),
        ("delete_many", "deletes: ", "reading"),
    ],
)
def test_what_does_not_work_is_named(wrong: str, problem: str, usable: str) -> None:
    storage = _Wrong(MemoryStorage())
    storage.wrong = wrong
    report = checking.check(storage)
    assert report.usable_for == usable
    assert any(said.startswith(problem) for said in report.problems), report.problems


def test_filesystems_say_how_far_they_go() -> None:
    fs = fsspec.filesystem("memory")
    assert checking.check(from_fsspec(fs, "/check-read")).usable_for == "reading"
    single = checking.check(from_fsspec(fs, "/check-single", "single-writer"))
    assert single.usable_for == "writing by one process"
    with pytest.raises(InvalidArgumentError):
        checking.check(fs)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "everything" in done.output
    assert "MB/s" in done.output
