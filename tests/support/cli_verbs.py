"""The verbs of the command line, by name: `log`, `config set`."""

from __future__ import annotations

from typing import Any

import typer

from zarr_manifests.cli import app

__all__ = ["VERBS", "WITH_URL"]


def _verbs(group: Any, above: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = (*above, name)
        deeper = hasattr(command, "commands")
        found |= _verbs(command, inner) if deeper else {" ".join(inner): command}
    return found


VERBS = _verbs(typer.main.get_command(app))
"""The command of each verb."""
WITH_URL = {
    verb: command
    for verb, command in VERBS.items()
    if any(parameter.name == "url" for parameter in command.params)
}
"""The verbs that take a URL."""
