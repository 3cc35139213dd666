"""The command `zarr-manifests`: one module a verb.

All verbs keep these rules. An error of this package is one line on standard error and exit code 1
(2 for an invalid command), never a traceback. Output needs no terminal. A verb imports what only it
needs when it runs, so that the help appears at once.
"""

from __future__ import annotations

from zarr_manifests.cli.app import app

__all__ = ["app"]
