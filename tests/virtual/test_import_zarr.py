"""Zarr stores of every format, taken in by reference and by copy, against what xarray reads."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.store import contents_of


def dataset() -> xr.Dataset:
    """Packed values, a mask, times, a scalar and attributes."""
    rng = np.random.default_rng(3)
    u = rng.normal(0, 5, (7, 6, 5)).round(1)
    u[2, 3] = np.nan
    packing = {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -999}
    ds = xr.Dataset(
        {
            "u": (("time", "y", "x"), u, {"units": "m/s"}),
            "level": ((), 850.0),
            "flag": (("y", "x"), rng.integers(0, 3, (6, 5)).astype("u1")),
        },
        {"time": np.arange("2000-01-01", "2000-01-08", dtype="M8[D]").astype("M8[ns]")},
        {"title": "winds"},
    )
    ds["u"].encoding = packing | {"chunks": (2, 3, 5)}
    ds["flag"].encoding = {"chunks": (4, 2)}
    return ds


def v2(place: Path) -> None:
    dataset().to_zarr(place, zarr_format=2, consolidated=False)
    dataset().to_zarr(place, group="more/deep", zarr_format=2, consolidated=False)


def v2_slashes(place: Path) -> None:
    """`dimension_separator` "/", which xarray does not write by itself."""
    v2(place)
    for document in place.rglob(".zarray"):
        fields = json.loads(document.read_text())
        assert fields["dimension_separator"] == "."
        document.write_text(json.dumps(fields | {"dimension_separator": "/"}))
        if len(fields["shape"]) > 1:
            for chunk in [p for p in document.parent.iterdir() if p.name[0] != "."]:
                target = document.parent / chunk.name.replace(".", "/")
                target.parent.mkdir(parents=True, exist_ok=True)
                chunk.rename(target)


def v2_with_absent_chunks(place: Path) -> None:
    v2(place)
    (place / "u" / "1.0.0").unlink()
    (place / "more/deep/u" / "3.1.0").unlink()


def v2_consolidated(place: Path) -> None:
    v2(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(str(place), zarr_format=2)
    assert (place / ".zmetadata").exists()


def v3(place: Path) -> None:
    dataset().to_zarr(place, zarr_format=3, consolidated=False)
    dataset().to_zarr(place, group="more/deep", zarr_format=3, consolidated=False)


def v3_sharded(place: Path) -> None:
    ds = dataset()
    ds["u"].encoding |= {"chunks": (1, 3, 5), "shards": (4, 6, 5)}
    ds.to_zarr(place, zarr_format=3, consolidated=False)
    ds.to_zarr(place, group="more/deep", zarr_format=3, consolidated=False)


def v3_consolidated(place: Path) -> None:
    v3(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(str(place), zarr_format=3)
    assert "consolidated_metadata" in json.loads((place / "zarr.json").read_text())


SOURCES = [v2, v2_slashes, v2_with_absent_chunks, v2_consolidated, v3, v3_sharded, v3_consolidated]


@pytest.mark.parametrize("copy", [False, True], ids=["refs", "copy"])
@pytest.mark.parametrize("write", SOURCES, ids=lambda write: write.__name__)
def test_xarray_reads_what_it_reads_from_the_source(
    tmp_path: Path, write: Callable[[Path], None], *, copy: bool
) -> None:
    plain = tmp_path / "plain"
    write(plain)
    repo = zm.create(tmp_path / "repo", virtual_containers={"plain": plain})
    zm.virtual.import_zarr(repo, plain, "in/it", copy=copy)
    expected = {
        group: xr.open_zarr(plain, group=group, consolidated=False).load()
        for group in ("", "more/deep")
    }
    if copy:
        plain.rename(tmp_path / "gone")
        repo = zm.open(tmp_path / "repo")
    store = repo.readonly_session().store
    for group, ds in expected.items():
        path = f"in/it/{group}".rstrip("/")
        found = xr.open_zarr(store, group=path, consolidated=False)
        xr.testing.assert_identical(found.load(), ds)
        assert not np.isnan(ds["u"].values).all()
        refs = store.get_virtual_refs(f"{path}/u")
        stored = contents_of(store).chunks(contents_of(store).array_at(f"{path}/u"))
        assert stored is not None
        assert len(refs) == (0 if copy else len(stored.kind))
        # No key of a chunk was taken for something else.
        opaque = [p for p in contents_of(store).nodes() if p.startswith("/")]
        assert opaque == []


@pytest.mark.parametrize("write", [v2_consolidated, v3_consolidated], ids=["v2", "v3"])
def test_consolidated_metadata_is_not_taken_over(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """It would say what was there once, after an array is added or changed."""
    write(tmp_path / "plain")
    repo = zm.create(tmp_path / "repo", virtual_containers={"plain": tmp_path})
    zm.virtual.import_zarr(repo, tmp_path / "plain")
    with repo.transaction(message="add") as store:
        zarr.open_group(store)["u"].attrs["new"] = "here"
    store = repo.readonly_session().store
    assert contents_of(store).find(".zmetadata") is None
    for key in ("zarr.json", ".zgroup"):
        entry = contents_of(store).find(key)
        assert entry is None or b"consolidated" not in entry.data
    assert zarr.open_group(store, mode="r")["u"].attrs["new"] == "here"
    assert zarr.open_group(store, mode="r").attrs["title"] == "winds"


@pytest.mark.parametrize("write", [v2_consolidated, v3_consolidated], ids=["v2", "v3"])
def test_documents_that_only_consolidated_metadata_knows_are_not_left_out(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    plain = tmp_path / "plain"
    write(plain)
    for name in (".zarray", "zarr.json"):
        (plain / "flag" / name).unlink(missing_ok=True)
    repo = zm.create(tmp_path / "repo")
    with pytest.raises(InvalidArgumentError, match=r"'flag/.*consolidate it again"):
        zm.virtual.import_zarr(repo, plain)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": 3}', "{}", '{"metadata": [[]]}'])
def test_consolidated_metadata_that_is_malformed(tmp_path: Path, text: str) -> None:
    v2(tmp_path / "plain")
    (tmp_path / "plain" / ".zmetadata").write_text(text)
    repo = zm.create(tmp_path / "repo")
    with pytest.raises(InvalidArgumentError, match="zmetadata"):
        zm.virtual.import_zarr(repo, tmp_path / "plain")


def test_files_are_refused(tmp_path: Path) -> None:
    v3(tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as file:
        for path in (tmp_path / "plain").rglob("*"):
            file.write(path, path.relative_to(tmp_path / "plain"))
    repo = zm.create(tmp_path / "repo")
    with pytest.raises(UnsupportedFormatError, match=r"ZIP file.*unpack it"):
        zm.virtual.import_zarr(repo, tmp_path / "plain.zip")
    with pytest.raises(UnsupportedFormatError, match="is a file"):
        zm.virtual.import_zarr(repo, tmp_path / "plain" / "zarr.json")


def test_arrays_in_the_key_space_of_another(tmp_path: Path) -> None:
    """Each key is a chunk of the nearest array it can be one of."""
    plain = tmp_path / "plain"
    zarr.create_array(plain / "a", data=np.arange(12).reshape(3, 4), chunks=(1, 2), zarr_format=3)
    zarr.create_array(plain / "a" / "c" / "1", data=np.eye(3), chunks=(2, 2), zarr_format=2)
    (plain / "a" / "c" / "7").mkdir(parents=True)
    (plain / "a" / "c" / "7" / "0").write_bytes(b"off the grid")
    (plain / "a" / "c" / "00").write_bytes(b"not canonical")
    repo = zm.create(tmp_path / "repo", virtual_containers={"plain": plain})
    zm.virtual.import_zarr(repo, plain)
    store = repo.readonly_session().store
    assert zarr.open_array(store, path="a", mode="r")[:].tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert len(store.get_virtual_refs("a")) == 6
    nested = zarr.open_array(store, path="a/c/1", mode="r", zarr_format=2)[:]
    assert nested.tolist() == np.eye(3).tolist()
    opaque = {path[1:] for path in contents_of(store).nodes() if path.startswith("/")}
    assert opaque == {"a/c/7/0", "a/c/00"}


# --- beside what was imported ------------------------------------------------------------------


def of_v2(tmp_path: Path, path: str = "/") -> zm.Repository:
    v2(tmp_path / "source")
    containers = {"source": str(tmp_path / "source")}
    repository = zm.create(tmp_path / "repository", virtual_containers=containers)
    zm.virtual.import_zarr(repository, tmp_path / "source", path)
    return repository


def groups(repository: zm.Repository) -> set[str]:
    return set(xr.open_datatree(repository, engine="zarr_manifests").groups)


def test_what_is_written_beside_an_import_hides_nothing(tmp_path: Path) -> None:
    repository = of_v2(tmp_path)
    before = xr.open_dataset(repository, engine="zarr_manifests").load()
    mean = before[["u"]].mean("time")
    zm.write(mean, repository, message="a group of its own", group="mean/of/all")
    assert groups(repository) == {"/", "/more", "/more/deep", "/mean", "/mean/of", "/mean/of/all"}
    zm.write(before[["flag"]].rename(flag="other"), repository, message="more", mode="a")
    later = before.drop_vars(["flag", "level"]).assign_coords(
        time=before.time + np.timedelta64(7, "D")
    )
    zm.write(later, repository, message="append", append_dim="time")
    patch = later[["u"]].isel(time=slice(0, 2)) * 0
    zm.write(patch.drop_vars("time"), repository, message="patch", region={"time": slice(2, 4)})
    found = xr.open_dataset(repository, engine="zarr_manifests").load()
    assert set(found) == {*before, "other"}
    expected = xr.concat([before.u, later.u], "time")
    expected[2:4] = 0
    xr.testing.assert_allclose(found.u, expected)
    xr.testing.assert_allclose(
        xr.open_dataset(repository, engine="zarr_manifests", group="mean/of/all").u, mean.u
    )
    zm.write(mean, repository, message="all of it anew", mode="w")
    with repository.readonly_session() as session:
        assert zarr.open_group(session.store, mode="r").metadata.zarr_format == 3


def test_an_import_is_seen_from_the_groups_that_are_made_for_it(tmp_path: Path) -> None:
    repository = of_v2(tmp_path, "/from/elsewhere")
    assert {"/from/elsewhere", "/from/elsewhere/more/deep"} <= groups(repository)
    root = zarr.open_group(repository.readonly_session().store, mode="r")
    assert root["from/elsewhere/level"][()] == 850  # type: ignore[index]


def test_what_is_not_seen_from_above_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v2(tmp_path / "source")
    containers = {"source": str(tmp_path / "source")}
    repository = zm.create(tmp_path / "repository", virtual_containers=containers)
    with repository.transaction(message="newer") as store:
        zarr.create_group(store, path="newer")
    zm.virtual.import_zarr(repository, tmp_path / "source", "/newer/old")
    assert "another Zarr format than / and /newer" in caplog.text
    found = xr.open_dataset(repository, engine="zarr_manifests", group="newer/old")
    assert found.level == 850
