"""VirtualiZarr's virtual datasets: written by reference, appended, and read as by xarray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtualizarr
import xarray as xr
import zarr
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore
from virtualizarr.manifests import ChunkManifest, ManifestArray
from virtualizarr.parsers import HDFParser, NetCDF3Parser

import zarr_manifests as zm
from zarr_manifests.error_cases import VirtualSourceChangedError
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    VirtualContainerError,
)

HOURS = 4


def day(number: int, hours: int = HOURS) -> xr.Dataset:
    """A day of weather, packed, with a scalar coordinate and times that numpy does not have."""
    rng = np.random.default_rng(number)
    time = xr.Variable(
        "time",
        np.arange(hours) + 24.0 * number,
        {"units": "hours since 0001-01-01", "calendar": "noleap"},
    )
    return xr.Dataset(
        {
            "t": (("time", "x"), 280 + rng.random((hours, 6)).round(2)),
            "p": (("time", "x"), rng.integers(0, 99, (hours, 6)).astype("i4"), {"units": "Pa"}),
        },
        {"time": time, "x": np.arange(6.0), "height": ((), 2.0)},
        {"title": "weather"},
    )


ENCODING = {
    "t": {
        "dtype": "i2",
        "scale_factor": 0.01,
        "add_offset": 280.0,
        "_FillValue": -1,
        "chunksizes": (2, 6),
        "zlib": True,
    },
    "p": {"chunksizes": (2, 3)},
}


def saved(folder: Path, number: int, **options: Any) -> Path:
    path = folder / f"day-{number}.nc"
    encoding: Any = ENCODING | options.pop("encoding", {})
    day(number, **options).to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return path


def opened(path: Path, **options: Any) -> Any:
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    parser = options.pop("parser", None) or HDFParser()
    loadable: Any = options.pop("loadable_variables", ["time", "x", "height"])
    return virtualizarr.open_virtual_dataset(
        path.as_uri(), registry=registry, parser=parser, loadable_variables=loadable, **options
    )


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"files": tmp_path})


def read(repo: zm.Repository, group: str | None = None) -> xr.Dataset:
    store = repo.readonly_session().store
    return xr.open_zarr(store, group=group, consolidated=False, chunks=None).load()


def expect(*paths: Path) -> xr.Dataset:
    found = [xr.open_dataset(path, engine="h5netcdf").load() for path in paths]
    return xr.concat(
        found, "time", data_vars="minimal", coords="minimal", compat="override", join="override"
    )


def test_a_dataset_writes_itself(repo: zm.Repository, tmp_path: Path) -> None:
    days = [saved(tmp_path, number) for number in range(2)]
    for path in days:
        opened(path).zm.write(repo, append_dim="time", message=path.stem)
    assert [info.message for info in repo.ancestry()][:2] == ["day-1", "day-0"]
    xr.testing.assert_identical(read(repo).drop_attrs(), expect(*days).drop_attrs())
    opened(days[0]).zm.write(repo, group="again")
    tree = xr.DataTree.from_dict({"/more": opened(days[1])})
    tree.zm.write(repo, group="tree")
    assert read(repo, "tree/more").equals(read(repo).isel(time=slice(HOURS, None)))


def test_datasets_offer_to_write_themselves_without_another_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (xr.Dataset, xr.DataTree):
        monkeypatch.delattr(kind, "zm")
    monkeypatch.delattr(zm, "create", raising=False)
    place = "memory://offered"
    repo = zm.create(place)
    xr.Dataset({"a": ("x", [1])}).zm.write(repo, message="one")
    xr.DataTree(xr.Dataset({"b": ("x", [2])})).zm.write(repo, group="b", message="another")
    assert [info.message for info in repo.ancestry()][:2] == ["another", "one"]


def test_the_function_is_found_without_another_import() -> None:
    script = "import zarr_manifests as zm; print(zm.virtual.write.__name__)"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "write_virtual\n", found.stderr


def test_days_are_appended_one_by_one(repo: zm.Repository, tmp_path: Path) -> None:
    days = [saved(tmp_path, number) for number in range(3)]
    for path in days:
        zm.virtual.write(opened(path), repo, append_dim="time", message=path.stem)
    assert [info.message for info in repo.ancestry()][:3] == ["day-2", "day-1", "day-0"]
    xr.testing.assert_identical(read(repo).drop_attrs(), expect(*days).drop_attrs())
    store = repo.readonly_session().store
    refs = store.get_virtual_refs("t")
    assert len(refs) == 6
    assert len(refs.locations) == 3
    assert refs.guarded.all()
    days[1].write_bytes(bytes(days[1].stat().st_size))
    with pytest.raises(VirtualSourceChangedError):
        zarr.open_array(store, path="t", mode="r")[4:8]


def test_everything_virtual_and_in_a_group(repo: zm.Repository, tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    vds = opened(path, loadable_variables=[])
    zm.virtual.write(vds, repo, group="a/b", checksums=True)
    xr.testing.assert_identical(read(repo, "a/b"), expect(path))
    refs = repo.readonly_session().store.get_virtual_refs("a/b/p")
    assert (refs.checksums >= 0).all()
    with pytest.raises(AlreadyExistsError, match="mode='w' to replace it"):
        zm.virtual.write(vds, repo, group="a/b")
    zm.virtual.write(vds[["t"]], repo, group="a/b", mode="w")
    assert set(read(repo, "a/b").data_vars) == {"t"}
    zm.virtual.write(vds[["p"]], repo, group="a/b", mode="a")
    assert set(read(repo, "a/b").data_vars) == {"t", "p"}


def test_a_tree_and_a_region(repo: zm.Repository, tmp_path: Path) -> None:
    first, second = saved(tmp_path, 0), saved(tmp_path, 1)
    tree = xr.DataTree.from_dict({"/a": opened(first), "/b/inner": opened(second)})
    session = repo.writable_session()
    assert zm.virtual.write(tree, session.store) is None
    session.commit("a tree")
    xr.testing.assert_equal(read(repo, "b/inner"), expect(second))
    part = opened(second)[["t"]].drop_vars(["time", "x", "height"])
    zm.virtual.write(part, repo, group="a", region={"time": slice(0, 4)})
    np.testing.assert_array_equal(read(repo, "a")["t"], expect(second)["t"])
    np.testing.assert_array_equal(read(repo, "a")["p"], expect(first)["p"])
    zm.virtual.write(opened(second), repo, group="a", append_dim="time")
    with pytest.raises(InvalidArgumentError, match="partly by each of two files"):
        zm.virtual.write(part, repo, group="a", region={"time": slice(1, 5)})


def test_a_region_is_found_by_its_coordinates(repo: zm.Repository, tmp_path: Path) -> None:
    days = [saved(tmp_path, number) for number in range(3)]
    for path in days:
        zm.virtual.write(opened(path), repo, append_dim="time")
    before = read(repo)
    changed = day(1).assign(t=day(5)["t"])
    path = tmp_path / "again.nc"
    changed.to_netcdf(path, engine="h5netcdf", encoding=ENCODING)
    part = opened(path)[["t"]].drop_vars("height")
    zm.virtual.write(part, repo, region="auto")
    np.testing.assert_array_equal(read(repo)["t"][HOURS : 2 * HOURS], read_file(path)["t"])
    np.testing.assert_array_equal(read(repo)["t"][:HOURS], before["t"][:HOURS])
    same = opened(days[1])[["t"]].drop_vars(["height", "x"])
    zm.virtual.write(same, repo, region={"time": "auto"})
    xr.testing.assert_identical(read(repo), before)
    other = saved(tmp_path, 7)
    with pytest.raises(InvalidArgumentError, match="Not all values of coordinate 'time'"):
        zm.virtual.write(opened(other)[["t"]].drop_vars("height"), repo, region="auto")
    virtual = opened(days[1], loadable_variables=["x"])[["t"]]
    with pytest.raises(NotImplementedError, match="loadable_variables"):
        zm.virtual.write(virtual, repo, region="auto")
    with pytest.raises(NotFoundError, match=r"'/empty' .* has no arrays that a region"):
        zm.virtual.write(part, repo, group="empty", region="auto")
    for wrong in ("all", {"time": "all"}):
        with pytest.raises((InvalidArgumentError, TypeError), match="region"):
            zm.virtual.write(part, repo, region=wrong)  # type: ignore[arg-type]


def read_file(path: Path) -> xr.Dataset:
    return xr.open_dataset(path, engine="h5netcdf").load()


def references(tmp_path: Path, chunks: int) -> xr.Variable:
    """Two bytes for each chunk but the absent last one, of 9 where there is none."""
    path = tmp_path / "bytes.bin"
    if not path.exists():
        path.write_bytes(bytes(range(8)))
    made = zarr.create_array(
        {}, shape=(4,), chunks=(2,), dtype="u1", compressors=None, filters=None, fill_value=9
    )
    entries = {
        str(i): {"path": f"file://{path}", "offset": 2 * i, "length": 2} for i in range(chunks)
    }
    return xr.Variable("x", ManifestArray(made.metadata, ChunkManifest(entries, shape=(2,))))


def test_a_chunk_that_a_region_does_not_have_is_unset(repo: zm.Repository, tmp_path: Path) -> None:
    zm.virtual.write(xr.Dataset({"w": references(tmp_path, 2)}), repo)
    one = xr.Dataset({"w": references(tmp_path, 1)})
    with pytest.raises(ValueError, match=r"not in Dataset dimensions, got .*'y'"):
        zm.virtual.write(one, repo, region={"y": slice(0, 2)})
    for _ in range(2):
        zm.virtual.write(one, repo, region={"x": slice(0, 4)})
        array = zarr.open_array(repo.readonly_session().store, path="w", mode="r")
        assert array[:].tolist() == [0, 1, 9, 9]


TIMES = np.array(["2000-01-01", "2000-01-02", "2000-01-03", "2000-01-04"], "M8[ns]")
DAYS = {"units": "days since 2000-01-01", "dtype": "i8"}
PACKED = {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -999}


@pytest.mark.parametrize(
    ("first", "encoding", "then"),
    [
        (TIMES, DAYS, TIMES + np.timedelta64(6, "h")),
        (np.arange(4, dtype="i2"), {}, [np.nan, 1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0, 4.0], PACKED, [1.0, 2.0, 1e6, 3.0]),
        (["a", "bb", "c", "d"], {}, ["a", "bb", "c", "longer"]),
        (np.arange(4, dtype="i2"), {}, [1, 2, 3, 70_000]),
        (np.arange(4, dtype="u2"), {}, [1, -2, 3, 4]),
        (np.arange(4, dtype="i2"), {}, [1.0, 2.5, 3.0, 4.0]),
    ],
)
def test_values_that_the_array_cannot_hold_are_refused(
    repo: zm.Repository, tmp_path: Path, first: Any, encoding: dict[str, Any], then: Any
) -> None:
    own = xr.Variable("x", first, {}, encoding)
    zm.virtual.write(xr.Dataset({"w": references(tmp_path, 2), "v": own}), repo)
    before = repo.list_branches()
    more = xr.Dataset({"w": references(tmp_path, 2), "v": ("x", then)})
    with pytest.raises(
        ValueError, match=r"values of 'v' do not fit|Mismatched dtypes for variable v"
    ):
        zm.virtual.write(more, repo, append_dim="x")
    assert repo.list_branches() == before


@pytest.mark.parametrize(
    ("first", "encoding", "then"),
    [
        (TIMES, DAYS, TIMES + np.timedelta64(4, "D")),
        (TIMES, DAYS, np.array(["2000-01-05", "NaT", "2000-01-07", "2000-01-08"], "M8[ns]")),
        ([1.0, 2.0, 3.0, 4.0], PACKED, [1.0, np.nan, 0.3, 4.0]),
        ([1.0, 2.0, 3.0, 4.0], {"_FillValue": -1.0}, [1.0, np.nan, 3.0, 4.0]),
        ([1.0, 2.0, 3.0, 4.0], {"dtype": "f4"}, [1.0, 0.5, np.nan, 4.0]),
        (["a", "bb", "c", "d"], {}, ["a", "bb", "c", ""]),
        ([True, False, True, True], {}, [False, False, True, False]),
        (np.arange(4, dtype="i2"), {}, [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_values_are_appended_as_the_array_stores_them(
    repo: zm.Repository, tmp_path: Path, first: Any, encoding: dict[str, Any], then: Any
) -> None:
    own = xr.Variable("x", first, {}, encoding)
    zm.virtual.write(xr.Dataset({"w": references(tmp_path, 2), "v": own}), repo)
    more = xr.Dataset({"w": references(tmp_path, 2), "v": ("x", then)})
    zm.virtual.write(more, repo, append_dim="x")
    found = read(repo)["v"].values
    wanted = np.concatenate([np.asarray(first), np.asarray(then)])
    same = (found == wanted) | ((found != found) & (wanted != wanted))
    assert (same | np.isclose(found, wanted) if own.dtype == "f8" else same).all()


def test_netcdf_3_is_written(repo: zm.Repository, tmp_path: Path) -> None:
    path = tmp_path / "old.nc"
    day(0).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")
    zm.virtual.write(opened(path, parser=NetCDF3Parser(), loadable_variables=["time"]), repo)
    xr.testing.assert_equal(read(repo), xr.open_dataset(path, engine="scipy").load())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoding": {"t": ENCODING["t"] | {"chunksizes": (4, 6)}}}, "/t has another chunk_grid"),
        ({"encoding": {"t": ENCODING["t"] | {"dtype": "i4"}}}, "/t has another data_type"),
        ({"encoding": {"t": ENCODING["t"] | {"zlib": False}}}, "/t has another codecs"),
        ({"encoding": {"t": ENCODING["t"] | {"scale_factor": 0.1}}}, "/t has the scale_factor"),
        ({"hours": 3}, "chunks have 2 there"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    repo: zm.Repository, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    hours = change.pop("hours", HOURS)
    first = saved(tmp_path, 0, hours=hours)
    zm.virtual.write(opened(first), repo)
    before = repo.list_branches()
    with pytest.raises(InvalidArgumentError, match=said):
        zm.virtual.write(opened(saved(tmp_path, 1, **change)), repo, append_dim="time")
    assert repo.list_branches() == before


def test_other_labels_are_refused(repo: zm.Repository, tmp_path: Path) -> None:
    zm.virtual.write(opened(saved(tmp_path, 0)), repo)
    other = opened(saved(tmp_path, 1)).assign_coords(x=np.arange(6.0) + 1)
    with pytest.raises(InvalidArgumentError, match="values of 'x' differ"):
        zm.virtual.write(other, repo, append_dim="time")
    with pytest.raises(NotFoundError, match="no array /new/p"):
        zm.virtual.write(other[["p"]], repo, group="new", mode="r+")
    for wrong in (
        {"mode": "x"},
        {"mode": "a-"},
        {"validate": "x"},
        {"mode": "w", "append_dim": "time"},
    ):
        with pytest.raises(InvalidArgumentError):
            zm.virtual.write(other, repo, **wrong)


def test_what_is_noted_of_files(repo: zm.Repository, tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    vds = opened(path)[["t"]]
    outside = zm.create(tmp_path / "outside")
    for known, validate, has in (
        (repo, "etag", (True, False, False)),
        (repo, "modified", (False, True, False)),
        (repo, "none", (False, False, False)),
        (outside, "auto", (False, False, True)),
    ):
        zm.virtual.write(vds, known, mode="w", validate=validate)
        refs = known.readonly_session().store.get_virtual_refs("t")
        found = refs.etags[0] is not None, refs.modified[0] >= 0, refs.unchanged_since[0] >= 0
        assert found == has
    with pytest.raises(VirtualContainerError, match="below no container"):
        zm.virtual.write(vds, outside, mode="w", validate="etag")


def test_write_says_where_to_go(repo: zm.Repository, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"zarr_manifests\.virtual\.write"):
        zm.write(opened(saved(tmp_path, 0)), repo, message="no")


def test_chunks_that_are_absent_or_inline(repo: zm.Repository, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(8)))
    entries: Any = {
        "0": {"path": (tmp_path / "a.bin").as_uri(), "offset": 4, "length": 4},
        "2": {"path": "", "offset": 0, "length": 4, "data": b"abcd"},
    }
    made = zarr.create_array(
        {}, shape=(12,), chunks=(4,), dtype="u1", compressors=None, fill_value=9
    )
    array = ManifestArray(metadata=made.metadata, chunkmanifest=ChunkManifest(entries, shape=(3,)))
    zm.virtual.write(xr.Dataset({"v": ("x", array)}), repo)
    found = zarr.open_array(repo.readonly_session().store, path="v", mode="r")[:]
    assert found.tolist() == [4, 5, 6, 7, 9, 9, 9, 9, *b"abcd"]
    assert len(repo.readonly_session().store.get_virtual_refs("v")) == 1


@pytest.mark.parametrize("loadable", [["t", "time", "x", "height"], ["time", "x"], []])
def test_attributes_are_those_of_the_dataset(
    repo: zm.Repository, tmp_path: Path, loadable: list[str]
) -> None:
    """A group has its title, and its scalar coordinate stays one."""
    days = [saved(tmp_path, number) for number in range(2)]
    for path in days:
        vds = opened(path, loadable_variables=loadable)
        zm.virtual.write(vds, repo, append_dim="time")
        found = read(repo)
        assert found.attrs == {"title": "weather"}
        assert set(found.coords) == {"time", "x", "height"}
    xr.testing.assert_allclose(found.drop_attrs(), expect(*days).drop_attrs())


def test_references_do_not_leave_other_arrays_shorter(repo: zm.Repository, tmp_path: Path) -> None:
    zm.virtual.write(opened(saved(tmp_path, 0)), repo)
    more = opened(saved(tmp_path, 1))
    with pytest.raises(InvalidArgumentError, match="'p' would be left shorter"):
        zm.virtual.write(more.drop_vars("p"), repo, append_dim="time")


def test_loaded_values_are_read_back_as_they_are(repo: zm.Repository, tmp_path: Path) -> None:
    own = xr.Variable("x", [1.0, 2.0, 1e6, 3.0], {}, PACKED)
    vds = xr.Dataset({"w": references(tmp_path, 2), "v": own})
    with pytest.raises(InvalidArgumentError, match="values of 'v' do not fit their encoding"):
        zm.virtual.write(vds, repo)
    assert len(list(repo.ancestry())) == 1
    zm.virtual.write(vds, repo, check=False)


def test_references_do_not_mix_with_zarr_2(repo: zm.Repository, tmp_path: Path) -> None:
    with repo.transaction(message="Zarr 2") as store:
        zarr.create_group(store, path="old", zarr_format=2)
    with pytest.raises(InvalidArgumentError, match="/old is of Zarr format 2"):
        zm.virtual.write(xr.Dataset({"w": references(tmp_path, 2)}), repo, group="old", mode="a")
