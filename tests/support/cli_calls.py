"""Calls of `zarr-manifests` without a terminal, and what it prints."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from zarr_manifests.cli import app


def call(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)


def lines(*arguments: object) -> list[str]:
    """What it prints, when it ends well."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [line.rstrip() for line in result.stdout.splitlines()]


def objects(*arguments: object) -> list[dict[str, Any]]:
    """What it prints as JSON, an object on each line."""
    return [json.loads(line) for line in lines(*arguments, "--json")]
