"""Files of every format that `ingest` knows, copied and referred to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from raw_files import FIRST, SHAPE, day, days, grib_values, save, save_grib
from tasks_here import run_here
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind
from zarr_manifests.spark import ingest

SPARK: Any = None


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


@pytest.mark.parametrize("virtual", [False, True], ids=["copy", "virtual"])
@pytest.mark.parametrize("kind", ["netcdf", "hdf5", "zarr"])
def test_compressed_and_packed_files(tmp_path: Path, kind: str, virtual: bool) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    files = [save(kind, day(number), raw / f"{number}") for number in range(3)]
    repo = zm.create(tmp_path / "r", virtual_containers={"raw": raw})
    how: Any = {"append_dim": "time", "open": kind, "virtual": virtual}
    ingest(SPARK, files[:2], repo, **how)
    report = ingest(SPARK, files, repo, **how)
    assert (len(report.added), report.unchanged) == (1, 2)
    assert ingest(SPARK, files, repo, **how).snapshot_ids == ()
    found = xr.open_dataset(repo, engine="zarr_manifests")
    xr.testing.assert_equal(found.load(), days(3))
    assert found.t.encoding["scale_factor"] == 0.5
    refs = repo.readonly_session().chunk_refs("t")
    assert len(refs) == 6 * 2 * 2
    kinds = {ChunkKind(each).name for each in refs.kind}
    assert (kinds == {"VIRTUAL"}) == virtual
    assert repo.verify().ok


@pytest.mark.parametrize("kind", ["netcdf", "hdf5"])
def test_a_difference_of_a_netcdf4_file_is_named(tmp_path: Path, kind: Any) -> None:
    files = [save(kind, day(0), tmp_path / "0.nc"), tmp_path / "1.nc"]
    other = day(1)
    other.t.attrs["units"] = "degC"
    save(kind, other, files[1])
    with pytest.raises(zm.errors.InvalidArgumentError, match=r"1\.nc: 't' has units 'degC'"):
        ingest(SPARK, files, tmp_path / "r", append_dim="time", open=kind)
    files[1].write_bytes(files[1].read_bytes()[:2000])
    with pytest.raises(zm.errors.InvalidArgumentError, match=r"1\.nc: OSError"):
        ingest(SPARK, files, tmp_path / "r", append_dim="time", open=kind)


def test_a_function_opens_a_group_of_an_hdf5_file(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.h5" for number in range(2)]
    for number, file in enumerate(files):
        day(number).to_netcdf(file, engine="h5netcdf", group="inner")

    def inner(path: str) -> xr.Dataset:
        return xr.open_dataset(path, engine="h5netcdf", group="inner")

    ingest(SPARK, files, tmp_path / "r", append_dim="time", open=inner)
    how: Any = {"append_dim": "time", "open": "hdf5", "open_options": {"group": "inner"}}
    ingest(SPARK, files, tmp_path / "s", **how)
    for place in (tmp_path / "r", tmp_path / "s"):
        xr.testing.assert_equal(xr.load_dataset(place, engine="zarr_manifests"), days(2))


# --- GRIB ------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [False, True], ids=["copy", "virtual"])
@pytest.mark.parametrize("shape", [(3, 4), SHAPE], ids=["small", "large"])
def test_grib_messages(tmp_path: Path, shape: tuple[int, int], virtual: bool) -> None:
    """Kerchunk copies the values of a small message; each file is one row."""
    raw = tmp_path / "raw"
    raw.mkdir()
    names = ("2t", "2d")
    files = [save_grib(raw / f"{number}", number, shape, names) for number in range(3)]
    repo = zm.create(tmp_path / "r", virtual_containers={"raw": raw})
    how: Any = {"append_dim": "time", "open": "grib", "virtual": virtual}
    ingest(SPARK, files[:2], repo, **how)
    assert len(ingest(SPARK, files, repo, **how).added) == 1
    assert ingest(SPARK, files, repo, **how).snapshot_ids == ()
    found = xr.load_dataset(repo, engine="zarr_manifests")
    expected = np.stack([grib_values(number, shape) for number in range(3)])
    np.testing.assert_allclose(found.t2m, expected)
    np.testing.assert_allclose(found.d2m, expected + 1)
    noons = FIRST + np.arange(3) * np.timedelta64(1, "D") + np.timedelta64(12, "h")
    assert (found.time.values == noons).all()
    assert (found.valid_time.values == noons).all()
    assert found.latitude.values.tolist() == list(range(shape[0]))[::-1]
    assert repo.verify().ok
    assert len([*raw.iterdir()]) == 3  # cfgrib has left no index beside them


def test_several_messages_of_a_variable_need_a_function(tmp_path: Path) -> None:
    file = save_grib(tmp_path / "0", 0, SHAPE, ("2t", "2t"))
    repo = zm.create(tmp_path / "r", virtual_containers={"raw": tmp_path})
    with pytest.raises(zm.errors.InvalidArgumentError, match="several messages of 't2m'"):
        ingest(SPARK, [file], repo, append_dim="time", open="grib", virtual=True)
