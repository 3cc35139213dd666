"""`zarr-manifests export` writes what the library writes, and says so."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result
from zarr.core.buffer.cpu import Buffer as CPUBuffer

import zarr_manifests as zm
from zarr_manifests.cli import app


def call(*arguments: object) -> Result:
    """Call `zarr-manifests export` with these arguments, without a terminal."""
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def url(tmp_path: Path) -> Path:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="first") as store:
        zarr.create_array(store, name="g/a", data=np.zeros(4, "i2"), chunks=(2,), compressors=None)
    repo.create_tag("v1")
    with repo.transaction(message="second") as store:
        zarr.open_array(store, path="g/a")[:] = np.arange(4) + 300
    return tmp_path / "repository"


def test_formats_refs_and_paths(url: Path, tmp_path: Path) -> None:
    done = call(url, tmp_path / "plain.zarr", "--path", "/g")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{tmp_path / 'plain.zarr'}: 1 array; 2 chunks (8 B)"]
    group = zarr.open_group(tmp_path / "plain.zarr", mode="r")
    np.testing.assert_array_equal(group["a"], [300, 301, 302, 303])
    done = call(url, tmp_path / "plain.zarr", "v1", "--overwrite")
    assert done.exit_code == 0, done.stderr
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "plain.zarr/g/a", mode="r"), [0] * 4)
    done = call(url, tmp_path / "plain.zip", "--format", "zip")
    assert done.exit_code == 0, done.stderr
    assert zipfile.is_zipfile(tmp_path / "plain.zip")
    done = call(url, tmp_path / "r.json", "-f", "kerchunk", "--no-copy", "--tag", "kept")
    assert done.exit_code == 0, done.stderr
    assert "the tag kept keeps what is referred to" in done.stdout
    assert set(zm.open(url).list_tags()) == {"v1", "kept"}


def test_attributes_that_are_no_json_are_exported_as_they_are(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="format 2") as store:
        root = zarr.create_group(store, zarr_format=2)
        root.create_array("a", data=np.arange(4), chunks=(2,))
        root.create_array("sound/b", data=np.arange(4), chunks=(2,))
        store.set_sync("a/.zattrs", CPUBuffer.from_bytes(b"no JSON"))
    done = call(tmp_path / "repository", tmp_path / "plain.zarr")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (tmp_path / "plain.zarr/a/.zattrs").read_bytes() == b"no JSON"
    assert not (tmp_path / "plain.zarr/.zmetadata").exists()
    found = zarr.open_consolidated(tmp_path / "plain.zarr", path="sound", zarr_format=2)
    np.testing.assert_array_equal(found["b"], np.arange(4))


def test_errors_end_in_one_line(url: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    for code, arguments in (
        (1, (tmp_path / "taken",)),
        (1, (tmp_path / "taken", "--overwrite")),
        (1, (tmp_path / "new", "--path", "absent")),
        (1, (tmp_path / "new", "absent")),
        (2, (tmp_path / "new", "--format", "zrr")),
        (2, (tmp_path / "new", "--no-copy")),
        (2, (url / "new",)),
        (2, (tmp_path / "new", "--to-option", "nope=1")),
    ):
        done = call(url, *arguments)
        assert done.exit_code in (code, 2), (arguments, done.output)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()
