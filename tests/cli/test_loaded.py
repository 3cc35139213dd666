"""What is loaded when.

Importing the package, and asking the command for help, load no library. Reading loads what reading
needs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zarr

import zarr_manifests as zm

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
        ("import zarr_manifests as zm; zm.errors.ManifestsError, dir(zm)", []),
        ("import zarr_manifests as zm; zm.storage.Storage; zm.Repository", ["numpy"]),
        ("from zarr_manifests import write", ["numpy", "xarray", "zarr"]),
        (_CALL.format("--version"), []),
        (_CALL.format("--help"), ["typer"]),
        (_CALL.format("log', '--help"), ["typer"]),
    ],
)
def test_only_what_is_used_is_loaded(code: str, due: list[str]) -> None:
    heavy = {"numpy", "typer", "xarray", "zarr"}
    assert sorted(heavy & {*loaded(code, *heavy)}) == due


def test_the_log_is_shown_without_zarr(tmp_path: Path) -> None:
    url = str(tmp_path / "r")
    zm.create(url)
    slow = {"asyncio", "dask", "numcodecs", "pandas", "pyarrow", "xarray", "yaml", "zarr"}
    found = {*loaded(_CALL.format(f"log', '{url}"), *slow)}
    assert found & {*slow, "zarr_manifests.cli.demo"} == set()
    assert "zarr_manifests.cli.log" in found


_READ = """
import zarr, zarr_manifests as zm
store = zm.open({url!r}).readonly_session("main").store
assert zarr.open_array(store, path="a", mode="r")[0] == 7
"""
_FOR_OTHERS = {
    "commits": "writers",
    "exporting.": "exports",
    "importing": "imports of other formats",
    "engine.commit.": "writers",
    "engine.compact.": "maintenance",
    "engine.upkeep.": "maintenance",
    "engine.history.changed_cells": "questions about the history",
    "engine.history.changes_between": "questions about the history",
    "engine.history.compare": "questions about the history",
    "picturing": "pictures",
    "planning.conflict.decide": "writers",
    "planning.layout.closure": "maintenance",
    "planning.zones.where": "selections by value",
    "selecting.": "selections by value",
    "spark": "Spark",
    "storage.fsspec": "storages elsewhere",
    "storage.object_store": "storages elsewhere",
    "storage.object_clients": "storages elsewhere",
    "virtual.icechunk": "imports of other formats",
    "virtual.kerchunk": "imports of other formats",
    "virtual.references": "imports of other formats",
    "xarray": "datasets",
}
"""The modules, by the beginnings of their names, that reading an array does not need."""


@pytest.mark.slow
def test_opening_a_repository_and_reading_a_chunk_loads_what_reading_needs(tmp_path: Path) -> None:
    url = str(tmp_path / "r")
    repository = zm.create(url)
    with repository.transaction("main", message="values") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    found = loaded(_READ.format(url=url), "zarr_manifests.")
    names = {name.removeprefix("zarr_manifests.") for name in found}
    assert {name for name in names if name.startswith(tuple(_FOR_OTHERS))} == set()
    assert "engine.snapshot.view" in names
    assert len(names) < 176, "more modules than before: does reading need the new ones?"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import zarr_manifests as zm

    with pytest.raises(AttributeError, match="no attribute 'Repositori'"):
        _ = zm.Repositori  # type: ignore[attr-defined]
    assert {*zm.__all__} <= {*dir(zm)}
