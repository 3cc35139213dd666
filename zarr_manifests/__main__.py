"""`python -m zarr_manifests`: the command `zarr-manifests`."""

from __future__ import annotations

from zarr_manifests.cli import app

if __name__ == "__main__":
    app(prog_name="zarr-manifests")
