"""Pages to look at a repository: its history, trees, arrays and what changed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from zarr_manifests.serving.served import Served, in_url

__all__ = ["routes"]


def routes(served: Served) -> list[BaseRoute]:
    """The routes of the pages."""

    async def start(request: Request) -> Response:
        """The branches and tags, each with the URL of its snapshot."""
        branches = await served.run(served.repo.list_branches)
        tags = await served.run(served.repo.list_tags)
        lines = [
            f"{in_url(name)} {request.base_url}zarr/{snapshot_id}"
            for name, snapshot_id in {**tags, **branches}.items()
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    return [Route("/", start, name="start")]
