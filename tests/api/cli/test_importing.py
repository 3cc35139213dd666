"""`zarr-manifests import`: what the methods of a repository import, from the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from typer.testing import CliRunner
from zarr.storage import LocalStore

import zarr_manifests as zm
from zarr_manifests.cli import app


def call(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "repo"


def values(repo: Path, path: str, **places: Path) -> list[int]:
    opened = zm.open(repo, virtual_containers=places)
    return np.asarray(zarr.open_array(opened.readonly_session().store, path=path)[:]).tolist()


def test_a_zarr_store(repo: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.zarr"
    zarr.create_array(LocalStore(plain), name="u", data=np.arange(3), chunks=(1,))
    made = call("import", "zarr", repo, plain, "--path", "/old", "-m", "take it in").strip()
    assert next(zm.open(repo).ancestry()).snapshot_id == made
    assert values(repo, "old/u", plain=plain) == [0, 1, 2]
    assert "with --authorize" in call("cat", repo, "old/u", code=1)
    assert "[0 1 2]" in call("cat", repo, "old/u", "--authorize")
    saved = zm.open(repo).config.to_dict()["virtual-containers"]
    call("config", "set", repo, "virtual-containers=[]")
    said = call("cat", repo, "old/u", "--authorize", code=1)
    assert "open it with --authorize, after `config set` of virtual-containers, if" in said
    call("config", "set", repo, f"virtual-containers={json.dumps(saved)}")
    assert "[0 1 2]" in call("cat", repo, "old/u", "--authorize")
    assert zm.open(repo).config.virtual_containers[0].name == "plain-zarr"
    call("import", "zarr", repo, plain, "--path", "/copied", "--copy")
    assert values(repo, "copied/u") == [0, 1, 2]
    assert "exists already" in call("import", "zarr", repo, plain, "--path", "/old", code=1)


def test_kerchunk_references(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(4)))
    document = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|u1", "order": "C",
        "compressor": None, "filters": None, "fill_value": 0,
    }  # fmt: skip
    refs = {"a/.zarray": json.dumps(document), "a/0": [str(tmp_path / "bytes"), 0, 4]}
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    words = ("import", "kerchunk", repo, tmp_path / "refs.json", "--container", f"b={tmp_path}")
    call(*words)
    assert values(repo, "a", b=tmp_path) == [0, 1, 2, 3]
    call(*words, code=1)
    call(*words, "--replace")
    assert "each name once" in call(*words, "--container", "b=x", code=2)


def test_files_are_imported_each_once(repo: Path, tmp_path: Path) -> None:
    paths = []
    for hour in range(3):
        time = np.array([f"2024-01-01T0{hour}"], "M8[ns]")
        ds = xr.Dataset({"t": ("time", [float(hour)]), "u": ("time", [0])}, {"time": time})
        paths.append(tmp_path / f"{hour}.nc")
        ds.to_netcdf(paths[-1], engine="scipy", unlimited_dims=["time"])
    said = call("import", "netcdf", repo, *paths[:2], "--variable", "t", "-m", "two hours")
    assert said.startswith("2 files added, in 1 commit")
    found = json.loads(call("import", "netcdf", repo, *paths, "--variable", "t", "--json"))
    assert ([Path(f["url"]).name for f in found["added"]], found["unchanged"]) == (["2.nc"], 2)
    read = xr.open_dataset(repo, engine="zarr_manifests")
    assert (read.t.values.tolist(), list(read)) == ([0, 1, 2], ["t"])
    (tmp_path / "no.nc").write_text("nothing")
    wrong = "import", "netcdf", repo, tmp_path / "no.nc", "--variable", "t"
    assert "no.nc: it is empty, or no netCDF or HDF5 file" in call(*wrong, code=2)
    (tmp_path / "more.nc").write_bytes(paths[0].read_bytes())
    assert "Give --skip to leave such files out: " in call(*wrong, tmp_path / "more.nc", code=2)
    assert "1 left out" in call(*wrong, "--skip")


GOLDEN = Path(__file__).parents[1] / "virtual/icechunk_golden/format-2"


def test_an_icechunk_repository(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDEN, tmp_path / "source")
    words = ("import", "icechunk", repo, tmp_path / "source")
    place = ("--container", f"source={tmp_path / 'source'}")
    shown = call(*words, *place)
    opened = zm.open(repo)
    assert all(f"{name}  {head}" in shown for name, head in opened.list_branches().items())
    monkeypatch.setitem(sys.modules, "icechunk", None)
    assert 'pip install "zarr-manifests[icechunk]"' in call(*words, code=2)
