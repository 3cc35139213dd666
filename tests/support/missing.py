"""What a test needs that may not be on this machine: a server, a browser, a program."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test that asks, saying what is missing; with `CI` set, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (with CI set, nothing may be missing)")
    pytest.skip(what)
