"""What is loaded when: importing the package, and asking for help, load no library."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOADED = """
import sys
{code}
print(sorted(name for name in sys.modules if name.startswith({names})))
"""

_CALL = """
sys.argv = ['zarr-manifests', '{}']
from zarr_manifests.__main__ import main
try: main()
except SystemExit: pass
"""


def loaded(code: str, *names: str) -> list[str]:
    """The modules with names that begin so that a new process has loaded after this code."""
    command = [sys.executable, "-c", _LOADED.format(code=code, names=names)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(eval(found.splitlines()[-1]))  # noqa: S307 - a list of texts


@pytest.mark.parametrize(
    ("code", "due"),
    [
        ("import zarr_manifests", []),
        ("import zarr_manifests as zm; zm.storage.Storage; zm.Repository", ["numpy"]),
        ("from zarr_manifests import write", ["numpy", "xarray", "zarr"]),
        (_CALL.format("--help"), ["typer"]),
    ],
)
def test_only_what_is_used_is_loaded(code: str, due: list[str]) -> None:
    heavy = {"numpy", "typer", "xarray", "zarr"}
    assert sorted(heavy & {*loaded(code, *heavy)}) == due
