"""The daily job of the guide, as cron runs it: in processes of their own, with its exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm

PAGE = (Path(__file__).parents[1] / "docs/guide/daily-job.md").read_text("utf-8")
DONE, AGAIN = 0, 75


class Cron:
    """A home with the page's script in jobs/daily.py, and the page's crontab."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.url = home / "daily-t2m"
        (home / "jobs").mkdir()
        (home / "bin").mkdir()
        self.program("python", f'exec {sys.executable} -W error "$@"')
        self.program("zarr-manifests", f'exec {sys.executable} -m zarr_manifests "$@"')
        self.program("mail", f'echo "$*" >> {home}/mailed')
        table = re.search(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        assert table
        lines = [line.split(maxsplit=5) for line in table[1].splitlines()]
        assert all(re.fullmatch(r"[\d*/,-]+", field) for line in lines for field in line[:5])
        # There the repository is an absolute path; the script of the page makes it in the home.
        self.daily, self.weekly = (line[5].replace("/data/", "~/") for line in lines)

    def program(self, name: str, body: str) -> None:
        file = self.home / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        file.chmod(0o755)

    def script(self, arrived: str, *changes: tuple[str, str]) -> None:
        """Install the script, with data until this day; the job asks for those until yesterday."""
        found = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        assert found
        code = found[1]
        for old, new in (
            ("def fetch", f"ARRIVED = date.fromisoformat({arrived!r})\n\n\ndef fetch"),
            *changes,
        ):
            assert code.count(old) == 1
            code = code.replace(old, new)
        (self.home / "jobs" / "daily.py").write_text(code, "utf-8")

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=self.home,
            env={**os.environ, "HOME": str(self.home), "PATH": f"{self.home}/bin:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        process = self.start(command)
        _, said = process.communicate()
        return process.returncode, said

    @property
    def mailed(self) -> list[str]:
        file = self.home / "mailed"
        return file.read_text("utf-8").splitlines() if file.exists() else []

    def days(self, **version: str) -> list[str]:
        times = xr.open_dataset(str(self.url), engine="zarr_manifests", **version).time.values
        return [str(day) for day in times.astype("datetime64[D]")]

    @property
    def messages(self) -> list[str]:
        """Those of the commits since the repository was made, oldest first."""
        return [info.message for info in zm.open(self.url).ancestry()][-2::-1]


@pytest.fixture
def cron(tmp_path: Path) -> Cron:
    return Cron(tmp_path)


SCRIPT = "python ~/jobs/daily.py"


@pytest.mark.sweep
def test_cron_is_quiet_until_a_person_should_look(cron: Cron) -> None:
    cron.script("2024-02-01")
    assert cron.daily.startswith(SCRIPT)
    code, said = cron.run(cron.daily)
    assert (code, cron.mailed) == (DONE, []), said
    assert said == "no data of 2024-02-02 yet\n"
    assert cron.days() == ["2024-01-30", "2024-01-31", "2024-02-01"]

    cron.script("2024-02-02", ("np.linspace(89, -89, 90)", "np.linspace(88, -88, 90)"))
    before = cron.messages
    code, said = cron.run(cron.daily)
    assert (code, cron.mailed) == (DONE, ["-s daily.py failed you@example.org"])
    assert "lat" in said.splitlines()[-1]
    assert cron.messages == before


@pytest.mark.sweep
def test_a_storage_that_fails_is_tried_again_without_a_mail(cron: Cron) -> None:
    cron.script("2024-01-31")
    cron.run(SCRIPT)
    cron.script("2024-02-01")

    code, said = cron.run(f"ulimit -f 0; {SCRIPT}")  # no file may get a byte
    assert code == AGAIN, said
    assert "2024-02-02" not in said
    assert cron.messages == ["2024-01-30", "2024-01-31"]

    look = "    times = xr.open_dataset("
    cron.script("2024-02-01", (look, f'    raise errors.StorageError("no answer")\n{look}'))
    code, said = cron.run(cron.daily)
    assert (code, cron.mailed, said) == (DONE, [], "no answer\n")
    cron.script("2024-02-01")
    assert cron.run(cron.daily)[0] == DONE
    assert cron.days()[-1] == "2024-02-01"


@pytest.mark.sweep
def test_two_at_once_store_each_day_once(cron: Cron) -> None:
    cron.script("2024-02-03")
    for process in [cron.start(SCRIPT) for _ in range(2)]:
        _, said = process.communicate()
        assert process.returncode == AGAIN, said
    cron.run(cron.daily)
    days = ["2024-01-30", "2024-01-31", "2024-02-01", "2024-02-02", "2024-02-03"]
    assert cron.days() == cron.messages == days
    assert cron.days(version="2024-01") == days[:2]


@pytest.mark.sweep
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_around_a_tag_loses_no_tag(cron: Cron, place: str) -> None:
    """The tag ends with the month's last day, whenever the next run comes."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    call = "            repo.create_tag(name)\n"
    lines = [call, f"            {kill}\n"]
    cron.script("2024-02-03", (call, "".join(lines if place == "after" else lines[::-1])))
    code, said = cron.run(SCRIPT)
    assert code in {-9, 137}, said
    assert cron.days() == ["2024-01-30", "2024-01-31"]
    cron.script("2024-02-03")
    cron.run(cron.daily)
    assert cron.days(version="2024-01") == ["2024-01-30", "2024-01-31"]
    assert len(cron.days()) == 5


@pytest.mark.sweep
def test_the_weekly_job_frees_space_and_keeps_the_months(cron: Cron) -> None:
    assert cron.weekly.count("zarr-manifests clean ") == 1
    cron.script("2024-02-12")
    cron.run(cron.daily)
    repo = zm.open(cron.url)
    oldest = [info.snapshot_id for info in repo.ancestry()][-3]
    command = cron.weekly.replace("--keep 100", "--keep 3")
    assert command != cron.weekly
    code, said = cron.run(command)
    assert code == DONE, said
    assert cron.days(version="2024-01") == ["2024-01-30", "2024-01-31"]
    assert len(cron.days()) == 14
    assert oldest not in [info.snapshot_id for info in zm.open(cron.url).ancestry()]
    values = xr.open_dataset(str(cron.url), engine="zarr_manifests").t2m.mean(("lat", "lon"))
    assert np.allclose(values, [280 + int(day[-2:]) / 10 for day in cron.days()], atol=0.01)
