"""VirtualiZarr's datasets of netCDF files in a folder, on a web server and in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import virtualizarr
import xarray as xr
import zarr
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import HTTPStore, LocalStore, S3Store
from virtualizarr.parsers import HDFParser, NetCDF3Parser

import zarr_manifests as zm
from s3_server import ObjectServer
from zarr_manifests.error_cases import VirtualSourceChangedError
from zarr_manifests.storage.memory import MemoryStorage

PLACES = ["file", "http", "s3"]
PACKED: dict[str, Any] = {
    "dtype": "i2",
    "scale_factor": 0.01,
    "add_offset": 280.0,
    "_FillValue": -1,
}
CHUNKED: dict[str, Any] = {"chunksizes": (2, 3), "zlib": True, "shuffle": True}


def weather(seed: int) -> xr.Dataset:
    """Packed and plain values with a hole, times and a scalar coordinate."""
    rng = np.random.default_rng(seed)
    t = 280 + rng.random((4, 6)).round(2)
    t[0, 0] = np.nan
    time = np.datetime64("2026-01-01T00", "ns") + np.arange(4) * np.timedelta64(6, "h")
    return xr.Dataset(
        {
            "t": (("time", "x"), t, {"units": "K"}),
            "p": (("time", "x"), rng.integers(0, 99, (4, 6)).astype("i4")),
        },
        {"time": time, "x": np.arange(6.0), "height": ((), 2.0)},
        {"title": "weather"},
    )


class Place:
    """Where files are put, and how VirtualiZarr and a repository reach them."""

    def __init__(self, scheme: str, folder: Path, server: ObjectServer) -> None:
        self.folder, self.scheme = folder, scheme
        web = f"{server.endpoint}/{server.bucket}"
        at = f"virtual/{folder.name}"
        self.bucket = S3Store(server.bucket, prefix=at)
        self.url = {
            "file": folder.as_uri(),
            "http": f"{web}/{at}",
            "s3": f"s3://{server.bucket}/{at}",
        }[scheme]
        self.registry = ObjectStoreRegistry(
            {
                "file://": LocalStore(),
                web: HTTPStore(web, client_options={"allow_http": True}),
                f"s3://{server.bucket}": S3Store(server.bucket),
            }
        )

    def put(self, path: Path) -> str:
        """Put the file there; its URL."""
        if self.scheme != "file":
            obstore.put(self.bucket, path.name, path.read_bytes())
        return f"{self.url}/{path.name}"

    def repository(self) -> zm.Repository:
        here = (
            zm.VirtualContainer(self.url, allow_local=True) if self.scheme == "http" else self.url
        )
        places: dict[str, Any] = {"files": here}
        return zm.create(MemoryStorage(), virtual_containers=places)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, object_server: ObjectServer) -> Place:
    return Place(request.param, tmp_path, object_server)


def read(repo: zm.Repository, group: str | None = None) -> xr.Dataset:
    store = repo.readonly_session().store
    return xr.open_zarr(store, group=group, consolidated=False, chunks=None).load()


def test_netcdf_4(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "new.nc"
    for number, group in enumerate((None, "deep/er")):
        weather(number).to_netcdf(
            path,
            engine="h5netcdf",
            group=group,
            mode="a" if group else "w",
            encoding={"t": PACKED | CHUNKED, "p": {"chunksizes": (4, 2)}},
        )
    url, repo = place.put(path), place.repository()
    for group in (None, "deep/er"):
        vds = virtualizarr.open_virtual_dataset(
            url,
            registry=place.registry,
            parser=HDFParser(group=group),
            loadable_variables=["time"],
        )
        zm.virtual.write(vds, repo, group=group, mode="a")
        expected = xr.open_dataset(path, engine="h5netcdf", group=group).load()
        xr.testing.assert_equal(read(repo, group), expected)
        store = repo.readonly_session().store
        refs = store.get_virtual_refs("t" if group is None else f"{group}/t")
        assert len(refs) == 4
        assert refs.locations == (url,)
        assert refs.guarded.all()
    array = zarr.open_array(repo.readonly_session().store, path="t", mode="r")
    assert (array.dtype, array.chunks) == (np.dtype("i2"), (2, 3))
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    place.put(path)
    with pytest.raises(VirtualSourceChangedError):
        read(repo)


def test_netcdf_3(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "old.nc"
    weather(3).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT", encoding={"t": PACKED})
    url, repo = place.put(path), place.repository()
    vds = virtualizarr.open_virtual_dataset(
        url, registry=place.registry, parser=NetCDF3Parser(), loadable_variables=["time"]
    )
    zm.virtual.write(vds, repo)
    xr.testing.assert_equal(read(repo), xr.open_dataset(path, engine="scipy").load())
    assert repo.readonly_session().store.get_virtual_refs("t").locations == (url,)
