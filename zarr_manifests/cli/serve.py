"""`zarr-manifests serve`: a repository over HTTP, to look at and to read as plain Zarr."""

from __future__ import annotations

from typing import Annotated

import typer

from zarr_manifests.cli.arguments import Authorize, Options, Url, open_at, several
from zarr_manifests.cli.console import say
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text

__all__ = ["run"]

_Host = Annotated[
    str, typer.Option("--host", help="Listen here; only this machine can reach 127.0.0.1.")
]
_Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Listen on this port; 0 for a free one.")
]
_Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ZARR_MANIFESTS_TOKEN",
        help="What readers must give, as password or bearer token.",
        show_default=False,
    ),
]
_Origins = Annotated[
    list[str] | None,
    several(
        "--origin",
        text="Let web pages of this origin read, such as https://viewer.example, or * for all",
    ),
]


def run(
    url: Url,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    token: _Token = None,
    origin: _Origins = None,
    authorize: Authorize = False,
    option: Options = None,
) -> None:
    """Serve a repository over HTTP: pages to look at it, and any snapshot as plain Zarr."""
    try:
        from zarr_manifests.serving.application import serve
    except ImportError as error:
        raise InvalidArgumentError(str(error)) from error
    repo = open_at(url, option, authorize)

    def started(at: str) -> None:
        say(f"serving {plain_text(url)} at {at}/")
        from zarr_manifests.repository import resolved

        say(f"main as Zarr, as it is now: {at}/zarr/{resolved(repo, 'main')}")
        say("press Ctrl-C to stop")

    serve(repo, host, port, token=token, origins=origin or (), started=started)
