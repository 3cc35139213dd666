"""VirtualiZarr's virtual datasets: written by reference, appended, and read as by xarray."""

from __future__ import annotations

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
from virtualizarr.parsers import HDFParser

import zarr_manifests as zm
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
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


ENCODING: dict[str, dict[str, Any]] = {
    "t": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -1},
    "p": {"chunksizes": (2, 3)},
}
ENCODING["t"] |= {"chunksizes": (2, 6), "zlib": True}


def saved(folder: Path, number: int, hours: int = HOURS, **changed: Any) -> Path:
    path = folder / f"day-{number}.nc"
    encoding: Any = ENCODING | {"t": ENCODING["t"] | changed}
    day(number, hours).to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return path


def opened(path: Path, loadable: tuple[str, ...] = ("time", "x", "height")) -> Any:
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    return virtualizarr.open_virtual_dataset(
        path.as_uri(), registry=registry, parser=HDFParser(), loadable_variables=list(loadable)
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


def test_everything_virtual_and_in_a_group(repo: zm.Repository, tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    vds = opened(path, loadable=())
    zm.virtual.write(vds, repo, group="a/b")
    xr.testing.assert_identical(read(repo, "a/b"), expect(path))
    with pytest.raises(AlreadyExistsError, match="mode='w' to replace"):
        zm.virtual.write(vds, repo, group="a/b")
    with repo.transaction(message="attributes that are replaced, too") as store:
        zarr.open_group(store, path="a/b").attrs["of"] = "the old"
    zm.virtual.write(vds[["t"]], repo, group="a/b", mode="w")
    assert set(read(repo, "a/b").data_vars) == {"t"}
    assert "of" not in read(repo, "a/b").attrs
    with pytest.raises(InvalidArgumentError, match="encoding names p"):
        zm.write(vds[["p"]], repo, group="c", encoding={"p": {"chunks": (1, 6)}})
    zm.virtual.write(vds[["p"]], repo, group="a/b", mode="a")
    assert set(read(repo, "a/b").data_vars) == {"t", "p"}


def test_a_tree_and_a_region(repo: zm.Repository, tmp_path: Path) -> None:
    first, second = saved(tmp_path, 0), saved(tmp_path, 1)
    tree = xr.DataTree.from_dict({"/a": opened(first), "/b/inner": opened(second)})
    session = repo.writable_session()
    assert zm.virtual.write(tree, session) is None
    session.commit("a tree")
    xr.testing.assert_equal(read(repo, "b/inner"), expect(second))
    part = opened(second)[["t"]].drop_vars(["time", "x", "height"])
    zm.virtual.write(part, repo, group="a", region={"time": slice(0, 4)})
    np.testing.assert_array_equal(read(repo, "a")["t"], expect(second)["t"])
    np.testing.assert_array_equal(read(repo, "a")["p"], expect(first)["p"])
    zm.virtual.write(opened(second), repo, group="a", append_dim="time")
    with pytest.raises(InvalidArgumentError, match="partly by each of two files"):
        zm.virtual.write(part, repo, group="a", region={"time": slice(1, 5)})


def test_chunks_that_are_absent_or_inline(repo: zm.Repository, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(8)))
    there = {"path": (tmp_path / "a.bin").as_uri(), "offset": 4, "length": 4}
    inline = {"path": "", "offset": 0, "length": 4, "data": b"abcd"}
    made = zarr.create_array(
        {}, shape=(12,), chunks=(4,), dtype="u1", compressors=None, fill_value=9
    )

    def referring(entries: Any) -> xr.Dataset:
        chunks = ChunkManifest(entries, shape=(3,))
        return xr.Dataset({"v": ("x", ManifestArray(made.metadata, chunks))})

    def values() -> Any:
        store = repo.readonly_session().store
        assert len(store.get_virtual_refs("v")) == 1
        return zarr.open_array(store, path="v", mode="r")[:].tolist()

    zm.virtual.write(referring({"0": there, "2": inline}), repo)
    assert values() == [4, 5, 6, 7, 9, 9, 9, 9, *b"abcd"]
    # What a region does not have is unset.
    zm.virtual.write(referring({"1": there}), repo, region={"x": slice(0, 12)})
    assert values() == [9, 9, 9, 9, 4, 5, 6, 7, 9, 9, 9, 9]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"chunksizes": (4, 6)}, "/t has the chunk_grid"),
        ({"dtype": "i4"}, "/t has the data_type"),
        ({"scale_factor": 0.1}, "/t has the scale_factor"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    repo: zm.Repository, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    zm.virtual.write(opened(saved(tmp_path, 0)), repo)
    before = repo.list_branches()
    with pytest.raises(InvalidArgumentError, match=said):
        zm.virtual.write(opened(saved(tmp_path, 1, **changed)), repo, append_dim="time")
    assert repo.list_branches() == before


def test_files_that_end_within_a_chunk_are_not_appended_to(
    repo: zm.Repository, tmp_path: Path
) -> None:
    zm.virtual.write(opened(saved(tmp_path, 0, hours=3)), repo)
    with pytest.raises(InvalidArgumentError, match="chunks have 2"):
        zm.virtual.write(opened(saved(tmp_path, 1)), repo, append_dim="time")


@pytest.mark.parametrize("hours", [2, 3])
def test_files_do_not_begin_within_a_chunk_that_others_have_begun(
    repo: zm.Repository, tmp_path: Path, hours: int
) -> None:
    """Nor are they copied into the repository instead."""
    for number in range(2):
        line = xr.Dataset({"u": ("time", np.arange(4.0) + 4 * number)})
        line.to_netcdf(tmp_path / f"{number}.nc", encoding={"u": {"chunksizes": (2,)}})
    zm.virtual.write(opened(tmp_path / "0.nc", ()), repo)
    session = repo.writable_session(append_dim="time")
    zm.virtual.write(opened(tmp_path / "1.nc", ()), session, append_dim="time")
    others = np.arange(hours) - 9.0
    zm.write(xr.Dataset({"u": ("time", others)}), repo, append_dim="time")
    if hours % 2:
        with pytest.raises(ConflictError, match="within a chunk of 2: copy them there"):
            session.commit("files")
        assert read(repo)["u"].values.tolist() == [0, 1, 2, 3, *others]
    else:
        session.commit("files")
        assert read(repo)["u"].values.tolist() == [0, 1, 2, 3, *others, 4, 5, 6, 7]
        assert repo.readonly_session().store.get_virtual_refs("u").offset.size == 4


def test_a_file_is_not_appended_twice(repo: zm.Repository, tmp_path: Path) -> None:
    zm.write(opened(saved(tmp_path, 0)), repo)  # which knows virtual variables too
    later = opened(saved(tmp_path, 1), ("time",))
    zm.virtual.write(later, repo, append_dim="time")
    with pytest.raises(AlreadyExistsError, match="of 'time' are there already"):
        zm.virtual.write(later, repo, append_dim="time")
    for existing in ("skip", "replace"):  # rows of files cannot be chosen
        with pytest.raises(InvalidArgumentError, match="leave those rows out"):
            zm.write(later, repo, append_dim="time", on_existing=existing)
    xr.testing.assert_equal(read(repo), expect(saved(tmp_path, 0), saved(tmp_path, 1)))


def test_labels_that_are_not_loaded_are_not_appended_by(
    repo: zm.Repository, tmp_path: Path
) -> None:
    """Or the same file would be appended twice, and the labels be unsorted."""
    path = saved(tmp_path, 0)
    zm.virtual.write(opened(path, ()), repo, append_dim="time")  # the first, so it only creates
    before = repo.list_branches()
    for again in (opened(path, ()), opened(path, ("x",))):
        with pytest.raises(InvalidArgumentError, match=r"with loadable_variables=\['time', ...\]"):
            zm.virtual.write(again, repo, append_dim="time", check=False)
    with pytest.raises(AlreadyExistsError, match="of a virtual dataset, leave those rows out"):
        zm.virtual.write(opened(path), repo, append_dim="time")
    assert repo.list_branches() == before
    zm.virtual.write(opened(saved(tmp_path, 1)), repo, append_dim="time")
    xr.testing.assert_equal(read(repo), expect(path, saved(tmp_path, 1)))


def test_other_labels_are_refused(repo: zm.Repository, tmp_path: Path) -> None:
    zm.virtual.write(opened(saved(tmp_path, 0)), repo)
    other = opened(saved(tmp_path, 1)).assign_coords(x=np.arange(6.0) + 1)
    with pytest.raises(InvalidArgumentError, match="values of 'x' differ"):
        zm.virtual.write(other, repo, append_dim="time")
    with pytest.raises(NotFoundError, match="/new/p"):
        zm.virtual.write(other[["p"]], repo, group="new", mode="r+")


def test_what_is_noted_of_files(repo: zm.Repository, tmp_path: Path) -> None:
    vds = opened(saved(tmp_path, 0))[["t"]]
    outside = zm.create(tmp_path / "outside")
    for known, has in ((repo, (True, False, False)), (outside, (False, False, True))):
        zm.virtual.write(vds, known)
        refs = known.readonly_session().store.get_virtual_refs("t")
        found = refs.etags[0] is not None, refs.modified[0] >= 0, refs.unchanged_since[0] >= 0
        assert found == has
    with repo.transaction(message="note nothing") as store:
        refs = store.get_virtual_refs("t")
        store.set_virtual_refs(
            "t", refs.index, refs.locations, refs.source, refs.offset, refs.length
        )
        assert not store.get_virtual_refs("t").guarded.any()
