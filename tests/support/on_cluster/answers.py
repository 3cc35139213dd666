"""The test's end of the pipe to a driver."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class JobError(Exception):
    """A job raised."""


class DriverDied(Exception):  # noqa: N818 - it is what happened
    """The driver's process has ended."""


class Driver:
    """A driver that does jobs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, job: str, **arguments: Any) -> Any:
        """What the job returns."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise DriverDied(self.process.wait())
        answer = json.loads(line)
        if "failed" in answer:
            raise JobError(f"{answer['failed']}: {answer['said']}")
        return answer["returned"]
