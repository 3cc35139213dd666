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
from served import serving
from zarr_manifests.repository import resolved

pytestmark = pytest.mark.servers

NODE_MODULES = Path(__file__).parents[3] / ".servers" / "node_modules"

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
        found[name] = dataset.read(1).tolist()
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
        root.create_array("air/t", chunks=(2, 5), **one)[:] = values
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


def test_rasterio_reads_arrays_without_shards(served: tuple[str, np.ndarray]) -> None:
    if importlib.util.find_spec("rasterio") is None:
        missing("rasterio is not installed: `make servers` installs it")
    url, values = served
    wanted = {f'ZARR:"/vsicurl/{url}/{path}"': path for path in ("plain", "bare", "holes", "air/t")}
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    read = run([sys.executable, "-c", READ_TIFF, *wanted], env=environment)
    assert read.keys() == wanted.keys()
    for dataset, found in read.items():
        np.testing.assert_array_equal(found, expected(values, wanted[dataset]), dataset)
