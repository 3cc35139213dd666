"""Exports of repositories whose names would lead out of the folder or the archive."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import zarr_manifests as zm
from hostile_names import NAMES, hostile_repository, unchecked
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, UnsupportedFormatError

FORMATS = {"zarr": True, "zip": True, "kerchunk": False, "icechunk": True}
each_format = pytest.mark.parametrize("format_", FORMATS)
each_name = pytest.mark.parametrize("name", NAMES)


def export(folder: Path, format_: str) -> None:
    """Export three folders down, so that there is room to climb."""
    dest = folder / "u" / "v" / "w" / "out"
    zm.Repository.open(folder / "repository").readonly_session().export(
        dest,
        format_,  # type: ignore[arg-type]
        FORMATS[format_],
    )


def is_untouched(folder: Path) -> bool:
    """Whether there are no files but those of the repository, and of a destination left empty."""
    found = {path for path in folder.rglob("*") if path.is_file()}
    mine = (folder / "repository", folder / "u" / "v" / "w" / "out")
    return all(any(path.is_relative_to(own) for own in mine) for path in found)


@each_format
@each_name
@pytest.mark.parametrize("end", ["", "/zarr.json"], ids=["opaque", "group"])
def test_a_name_that_leads_elsewhere_is_damage(
    tmp_path: Path, name: str, end: str, format_: str
) -> None:
    hostile_repository(tmp_path / "repository", name + end)
    with pytest.raises(CorruptObjectError, match=r"the name .* is refused"):
        export(tmp_path, format_)
    assert not (tmp_path / "u").exists()


@each_format
@each_name
def test_an_export_refuses_such_a_name_whoever_lets_it_pass(
    tmp_path: Path, name: str, format_: str
) -> None:
    hostile_repository(tmp_path / "repository", f"{name}/zarr.json")
    refused = (InvalidArgumentError, UnsupportedFormatError)  # icechunk takes no opaque entry
    with unchecked(), pytest.raises(refused):
        export(tmp_path, format_)
    assert is_untouched(tmp_path)


@pytest.mark.parametrize("name", ["..\\..\\x", "a\\b", "C:/x", "C:x"])
def test_a_name_that_leads_elsewhere_on_windows_gets_in_no_zip(tmp_path: Path, name: str) -> None:
    hostile_repository(tmp_path / "repository", name)
    with pytest.raises(InvalidArgumentError, match="name of a file in a ZIP"):
        export(tmp_path, "zip")
    assert not (tmp_path / "u" / "v" / "w" / "out").exists()
    export(tmp_path, "zarr")
    assert (tmp_path / "u" / "v" / "w" / "out" / name).read_bytes() == b"of somebody else"


def test_a_name_with_a_colon_gets_in_a_zip(tmp_path: Path) -> None:
    hostile_repository(tmp_path / "repository", "ab:c")
    export(tmp_path, "zip")
    with zipfile.ZipFile(tmp_path / "u" / "v" / "w" / "out") as archive:
        assert archive.namelist() == ["ab:c", "zarr.json"]
