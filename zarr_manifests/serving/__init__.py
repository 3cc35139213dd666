"""Serving a repository over HTTP: any snapshot as plain Zarr, and pages to look at it.

Invariants: nothing is written; a response about a snapshot's id never changes; a chunk that is
referenced and cannot be had whole is an error of the server, never "not found"; the memory that
requests take is bounded, however many there are and however large the chunks.
"""

from __future__ import annotations

from zarr_manifests.ondemand import need

need(__name__, "serve", "starlette", "uvicorn", "jinja2", "xarray")

from zarr_manifests.serving.application import create_app  # noqa: E402 - after the check above

__all__ = ["create_app"]
