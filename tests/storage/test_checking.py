"""What `check` says of places that work, and of some that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from storages import Call, WrappedStorage
from zarr_manifests.cli import app
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage import checking
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_LISTED", 30)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It may be a typing error."""
    report = checking.check(tmp_path / "absent" / "deep")
    assert report.usable_for == "nothing"
    assert report.problems[0].startswith("reading: there is no folder ")
    assert list(tmp_path.iterdir()) == []
    done = CliRunner().invoke(app, ["check", str(tmp_path / "absent")])
    assert done.exit_code == 1
    assert "there is no folder" in done.output
    assert [path.name for path in tmp_path.iterdir()] == []


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
    assert checking.check(fs.get_mapper("/check-read")).usable_for == "reading"
    with pytest.raises(InvalidArgumentError):
        checking.check(fs)  # type: ignore[arg-type]
