"""`zarr-manifests export` writes what the library writes, and says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from cli_calls import call


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
    done = call("export", url, tmp_path / "plain.zarr", "--path", "/g")
    assert (done.exit_code, done.stderr) == (0, "")
    told = [line.split() for line in done.stdout.splitlines()]
    assert ["dest", str(tmp_path / "plain.zarr")] in told
    assert ["bytes", "8", "B"] in told
    group = zarr.open_group(tmp_path / "plain.zarr", mode="r")
    np.testing.assert_array_equal(group["a"], [300, 301, 302, 303])
    done = call("export", url, tmp_path / "v1.zarr", "v1")
    assert done.exit_code == 0, done.stderr
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "v1.zarr/g/a", mode="r"), [0] * 4)
    done = call("export", url, tmp_path / "r.json", "-f", "kerchunk")
    assert done.exit_code == 0, done.stderr
    kept = f"export-{zm.open(url).list_branches()['main']}"
    assert ["tag", kept] in [line.split() for line in done.stdout.splitlines()]
    assert set(zm.open(url).list_tags()) == {"v1", kept}


def test_errors_end_in_one_line(url: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    for code, arguments in (
        (1, (tmp_path / "taken",)),
        (2, (tmp_path / "new", "--format", "zrr")),
        (2, (url / "new",)),
    ):
        done = call("export", url, *arguments)
        assert done.exit_code == code, (arguments, done.output)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()
