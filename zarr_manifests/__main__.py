"""`python -m zarr_manifests`: the command `zarr-manifests`."""

from __future__ import annotations


def main() -> None:
    """Run the command."""
    from zarr_manifests.cli import app

    app(prog_name="zarr-manifests")


if __name__ == "__main__":
    main()
