"""The test's end of the pipe to a driver."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_END_S = 60


class JobError(Exception):
    """A job raised."""


class DriverDied(Exception):  # noqa: N818 - it is what happened
    """The driver's process has ended."""


class Driver:
    """A driver that does jobs, and what it logs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def lives(self) -> bool:
        """Whether it can do jobs."""
        return self.process.poll() is None

    def run(self, job: str, **arguments: Any) -> Any:
        """What the job returns."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise DriverDied(f"{self.process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "failed" in answer:
            told = f"{answer['failed']}: {answer['said']}"
            raise JobError(told if self.lives else f"{told}\n{self._last_words()}")
        return answer["returned"]

    def end(self) -> None:
        """End it, if it lives, and close its pipes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
