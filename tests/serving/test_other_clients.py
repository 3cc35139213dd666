"""Clients that know nothing of this package: zarrita on node, GDAL by rasterio.

`make servers` installs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from missing import missing
from served import get, serving
from zarr_manifests.repository import resolved

pytestmark = pytest.mark.servers

NODE_MODULES = Path(__file__).parents[2] / ".servers" / "node_modules"

READ = """
import * as zarr from "zarrita";
const [url, ...paths] = process.argv.slice(2);
const root = zarr.root(new zarr.FetchStore(url));
const found = {};
for (const path of paths) {
  try {
    const array = await zarr.open(root.resolve(path), { kind: "array" });
    const { data, shape } = await zarr.get(array);
    found[path] = { shape, data: Array.from(data, Number) };
  } catch (error) {
    found[path] = { error: String(error) };
  }
}
console.log(JSON.stringify(found));
"""
READ_TIFF = """
import json, sys, warnings
import rasterio
warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
found = {}
for name in sys.argv[1:]:
    with rasterio.open(name) as dataset:
        band = dataset.read(1).tolist() if dataset.count else None
        found[name] = {"subdatasets": dataset.subdatasets, "band": band}
print(json.dumps(found))
"""


def run(command: list[str], **options: Any) -> Any:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(name: str) -> tuple[zm.Repository, np.ndarray]:
    values = np.arange(60, dtype="f4").reshape(6, 10) / 4
    repo = zm.create(f"memory://{name}", {"inline-chunk-bytes": 0})
    with repo.transaction(message="arrays") as store:
        root = zarr.create_group(store)
        one: dict[str, Any] = {"shape": (6, 10), "dtype": "f4", "dimension_names": ("y", "x")}
        root.create_array("plain", chunks=(2, 5), **one)[:] = values
        root.create_array("bare", chunks=(3, 10), compressors=None, **one)[:] = values
        root.create_array("sharded", chunks=(2, 5), shards=(4, 10), **one)[:] = values
        root.create_array("holes", chunks=(2, 5), fill_value=-1, **one)[:2] = values[:2]
        air = root.create_group("air")
        for path in ("t", "high/t"):
            air.create_array(path, chunks=(2, 5), **one)[:] = values
        days = np.stack([values - 1, values])
        air.create_array("days", shape=days.shape, chunks=(1, 2, 5), dtype="f4")[:] = days
        ds = xr.Dataset({"t": (("y", "x"), values)})
        ds.to_zarr(store, group="two", zarr_format=2, consolidated=False)
    return repo, values


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, np.ndarray]]:
    repo, values = written("served-clients")
    with serving(repo) as url:
        yield f"{url}/zarr/{resolved(repo, 'main')}", values


def expected(values: np.ndarray, path: str) -> np.ndarray:
    holes = np.where(np.arange(6)[:, None] < 2, values, -1)
    return holes if path == "holes" else values


def test_zarrita_reads_snapshots(served: tuple[str, np.ndarray], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (NODE_MODULES / "zarrita").exists():
        missing("zarrita is not there: `make servers` installs it")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = tmp_path / "read.mjs"
    script.write_text(READ, encoding="utf-8")
    url, values = served
    paths = ["plain", "bare", "sharded", "holes", "two/t"]
    found = run([str(node), str(script), url, *paths, "nothing"])
    for path in paths:
        assert found[path].get("error") is None, path
        shape = found[path]["shape"]
        np.testing.assert_array_equal(
            np.reshape(found[path]["data"], shape), expected(values, path), path
        )
    assert "NotFound" in found["nothing"]["error"] or "not found" in found["nothing"]["error"]


def by_rasterio(*datasets: str) -> dict[str, Any]:
    if importlib.util.find_spec("rasterio") is None:
        missing("rasterio is not installed: `make servers` installs it")
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    found: dict[str, Any] = run([sys.executable, "-c", READ_TIFF, *datasets], env=environment)
    return found


def test_rasterio_reads_arrays_without_shards(served: tuple[str, np.ndarray]) -> None:
    url, values = served
    wanted = {f'ZARR:"/vsicurl/{url}/{path}"': path for path in ("plain", "bare", "holes", "air/t")}
    # An array in a group below the URL, and one position along its first dimension. GDAL does not
    # find its way through a store of both formats, such as this one, from the root.
    within = {"air": ("t", "high/t", "days:1"), "two": ("t",)}
    for group, paths in within.items():
        wanted |= {f'ZARR:"/vsicurl/{url}/{group}":/{path}': f"{group}/{path}" for path in paths}
    read = by_rasterio(*wanted)
    assert read.keys() == wanted.keys()
    for dataset, found in read.items():
        np.testing.assert_array_equal(found["band"], expected(values, wanted[dataset]), dataset)


def test_rasterio_finds_the_arrays_of_a_group(served: tuple[str, np.ndarray]) -> None:
    group = f'ZARR:"/vsicurl/{served[0]}/air"'
    (found,) = by_rasterio(group).values()
    assert found["subdatasets"] == [f"{group}:/{path}" for path in ("days", "t", "high/t")]


def test_a_damaged_chunk_is_an_error_in_zarrita(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (NODE_MODULES / "zarrita").exists():
        missing("zarrita is not there: `make servers` installs it")
    repo = zm.create(tmp_path / "r", {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    with repo.transaction(message="one chunk") as store:
        zarr.create_array(store, name="a", shape=(400,), chunks=(400,), dtype="f8")[:] = 1
    (file,) = (tmp_path / "r" / "chunks").rglob("[0-9]")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = tmp_path / "read.mjs"
    script.write_text(READ, encoding="utf-8")
    with serving(repo) as url:
        assert get(url, "/zarr/main/a/c/0").status == 500
        found = run([str(node), str(script), f"{url}/zarr/main", "a"])
    assert "500" in found["a"]["error"]
