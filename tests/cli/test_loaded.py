"""What is loaded when: importing the package, and asking the command for help, load no library."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOADED = """
import sys
{code}
print(sorted({{"zarr", "numpy", "xarray", "typer"}} & sys.modules.keys()))
"""
_CALL = """
sys.argv = ['zarr-manifests', '{}']
from zarr_manifests.__main__ import main
try: main()
except SystemExit: pass
"""


def loaded(code: str) -> list[str]:
    """The heavy libraries that a new process has loaded after this code."""
    command = [sys.executable, "-c", _LOADED.format(code=code)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(eval(found.splitlines()[-1]))  # noqa: S307 - a list of texts


@pytest.mark.parametrize(
    ("code", "due"),
    [
        ("import zarr_manifests", []),
        ("import zarr_manifests as zm; zm.errors.ManifestsError, dir(zm)", []),
        ("import zarr_manifests as zm; zm.storage.MemoryStorage; zm.Repository", ["numpy", "zarr"]),
        ("from zarr_manifests import write", ["numpy", "xarray", "zarr"]),
        (_CALL.format("--version"), []),
        (_CALL.format("--help"), ["typer"]),
        (_CALL.format("log', '--help"), ["typer"]),
    ],
)
def test_only_what_is_used_is_loaded(code: str, due: list[str]) -> None:
    assert loaded(code) == due


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import zarr_manifests as zm

    with pytest.raises(AttributeError, match="no attribute 'Repositori'"):
        _ = zm.Repositori  # type: ignore[attr-defined]
    assert {*zm.__all__} <= {*dir(zm)}
