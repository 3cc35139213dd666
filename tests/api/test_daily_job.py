"""The daily job of the guide, as cron runs it: in processes of their own, with its exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

import zarr_manifests as zm

PAGE = (Path(__file__).parents[2] / "docs/guide/write-and-append.md").read_text("utf-8")
AGAIN = 75
DAYS = ["2024-01-30", "2024-01-31", "2024-02-01", "2024-02-02", "2024-02-03"]


class Job:
    """A home in which the page's script runs; data has arrived until the last of `DAYS`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.url = home / "daily-t2m"

    def start(self, *changes: tuple[str, str]) -> subprocess.Popen[bytes]:
        """Run the script, of which some texts are changed."""
        blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        (code,) = (block for block in blocks if "def fetch" in block)
        arrived = ("def fetch", f"ARRIVED = date.fromisoformat({DAYS[-1]!r})\n\n\ndef fetch")
        for old, new in (arrived, *changes):
            assert code.count(old) == 1
            code = code.replace(old, new)
        script = self.home / "daily.py"
        script.write_text(code, "utf-8")
        environment = {**os.environ, "HOME": str(self.home)}
        return subprocess.Popen([sys.executable, script], cwd=self.home, env=environment)

    def days(self, **version: str) -> list[str]:
        times = xr.open_dataset(str(self.url), engine="zarr_manifests", **version).time.values
        return [str(day) for day in times.astype("datetime64[D]")]


@pytest.mark.sweep
def test_two_at_once_store_each_day_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert [process.wait() for process in [job.start(), job.start()]] == [AGAIN, AGAIN]
    job.start().wait()
    messages = [info.message for info in zm.open(job.url).ancestry()][-2::-1]
    assert job.days() == messages == DAYS
    assert job.days(version="2024-01") == DAYS[:2]


@pytest.mark.sweep
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_around_a_tag_loses_no_tag(tmp_path: Path, place: str) -> None:
    """The tag ends with the month's last day, whenever the next run comes."""
    job = Job(tmp_path)
    kill = "            import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    call = "            repo.create_tag(name)\n"
    assert job.start((call, call + kill if place == "after" else kill + call)).wait() == -9
    assert job.days() == DAYS[:2]
    job.start().wait()
    assert job.days(version="2024-01") == DAYS[:2]
    assert job.days() == DAYS
