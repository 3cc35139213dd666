"""Makes the golden icechunk repositories, and says what each of their snapshots holds.

Run it with an icechunk that writes both formats:
PYTHONPATH=tests/support python tests/api/virtual/make_icechunk.py
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import icechunk
import numpy as np
import zarr

from digests import digests

HERE = Path(__file__).parent / "icechunk_golden"
ELSEWHERE = "s3://zarr-manifests-golden/"
"""Where the virtual chunks of the repositories are said to be; nobody reads them."""


def make(version: int) -> None:
    place = HERE / f"format-{version}"
    shutil.rmtree(place, ignore_errors=True)
    config = icechunk.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = 64
    container = icechunk.VirtualChunkContainer(
        ELSEWHERE,
        icechunk.s3_store(region="us-east-1"),
        **({"name": "data"} if version == 2 else {}),
    )
    config.set_virtual_chunk_container(container)
    first = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): 2}}
    )
    config.manifest = icechunk.ManifestConfig(
        splitting=first,
        virtual_chunk_location_compression=icechunk.ManifestVirtualChunkLocationCompressionConfig(
            min_num_chunks=4
        ),
    )
    repo = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(place)), config=config, spec_version=version
    )
    repo.save_config()
    rng = np.random.default_rng(version)

    session = repo.writable_session("main")
    root = zarr.create_group(session.store, attributes={"title": "golden"})
    air = root.create_group("air")
    t = air.create_array(
        "t",
        shape=(6, 8),
        chunks=(1, 8),
        dtype="f8",
        compressors=None,
        dimension_names=["time", "x"],
    )
    t[:4] = rng.random((4, 8))
    p = air.create_array("p", shape=(40,), chunks=(10,), dtype="f8", compressors=None)
    p[:20] = rng.random(20)
    root.create_array("small", data=np.arange(4, dtype="i2"), chunks=(2,), compressors=None)
    root.create_array("scalar", data=np.array(2.5), compressors=None)
    session.commit("make it", metadata={"author": "Ada", "runs": [1, 2.5, None, True], "n": -7})
    repo.create_tag("made", repo.lookup_branch("main"))

    session = repo.writable_session("main")
    t = zarr.open_array(session.store, path="air/t", mode="r+")
    t.resize((9, 8))
    t[3:7] = rng.random((4, 8))
    zarr.open_group(session.store, mode="r+").create_array(
        "v", shape=(12,), chunks=(2,), dtype="u1", compressors=None, filters=None
    )
    for i in range(5):
        session.store.set_virtual_ref(
            f"v/c/{i}",
            f"{ELSEWHERE}bytes-{i % 2}.bin" if version == 1 or i else "vcc://data/bytes-0.bin",
            offset=2 * i,
            length=2,
            checksum=datetime(2100, 1, 1, tzinfo=UTC) if i == 3 else None,
        )
    session.commit("append, and refer to files")

    repo.create_branch("side", repo.lookup_branch("main"))
    session = repo.writable_session("side")
    session.commit("nothing at all", allow_empty=True)
    session = repo.writable_session("side")
    zarr.open_array(session.store, path="air/p", mode="r+")[20:] = 1.0
    session.commit("fill the rest of p")

    session = repo.writable_session("main")
    t = zarr.open_array(session.store, path="air/t", mode="r+")
    t.resize((3, 8))
    session.commit("shrink t")
    session = repo.writable_session("main")
    t = zarr.open_array(session.store, path="air/t", mode="r+")
    t.resize((5, 8))
    root = zarr.open_group(session.store, mode="r+")
    del root["air/p"]
    root["air"].create_array("p", data=np.ones((2, 12)), chunks=(1, 12), compressors=None)
    session.commit("grow t, and make p anew")

    if version == 2:
        session = repo.rearrange_session("main")
        session.move("/air/t", "/temperature")
        session.move("/air", "/wind")
        session.commit("move", metadata={"author": "Grace"})
        session = repo.writable_session("main")
        zarr.open_array(session.store, path="temperature", mode="r+")[0] = 5.0
        session.commit("write to what was moved")

    repo.create_branch("gone", repo.lookup_branch("side"))
    session = repo.writable_session("gone")
    zarr.open_array(session.store, path="small", mode="r+")[:] = 9
    repo.create_tag("lost", session.commit("of no branch but a tag"))
    repo.delete_branch("gone")

    expected = {}
    heads = {name: repo.lookup_branch(name) for name in repo.list_branches()}
    tags = {name: repo.lookup_tag(name) for name in repo.list_tags()}
    lineages = {}
    for snapshot in {*heads.values(), *tags.values()}:
        infos = list(repo.ancestry(snapshot_id=snapshot))
        lineages[snapshot] = [info.id for info in infos]
        for info in infos:
            store = repo.readonly_session(snapshot_id=info.id).store
            expected[info.id] = {
                "message": info.message,
                "metadata": info.metadata,
                "written": info.written_at.isoformat(),
                "keys": digests(store, but="v/c/"),
            }
    text = {"branches": heads, "tags": tags, "lineages": lineages, "snapshots": expected}
    (HERE / f"format-{version}.json").write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(place / "overwritten", ignore_errors=True)
    shutil.rmtree(place / "transactions", ignore_errors=True)


if __name__ == "__main__":
    for version in (1, 2):
        make(version)
