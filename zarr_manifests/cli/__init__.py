"""The command `zarr-manifests`: one module a verb.

What every verb keeps: an error of this package is one line on standard error and exit code 1
(2 for a command that cannot be meant), never a traceback; what is printed needs no terminal; a
verb imports what only it needs when it runs, so that the help is there at once.
"""

from __future__ import annotations

from zarr_manifests.cli.app import app

__all__ = ["app"]
