"""`python -m zarr_manifests`: the command `zarr-manifests`."""

from __future__ import annotations

import sys

from zarr_manifests import __version__


def main() -> None:
    """Run the command."""
    if sys.argv[1:] == ["--version"]:  # at once, without the libraries of the others
        sys.stdout.write(f"zarr-manifests {__version__}\n")
        return
    from zarr_manifests.cli import app

    app(prog_name="zarr-manifests")


if __name__ == "__main__":
    main()
