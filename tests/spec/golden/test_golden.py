"""The golden repositories: nobody has changed them, and both readers find what is in them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from inside import context_of
from specified import reader
from zarr_manifests.engine.roots import Roots
from zarr_manifests.engine.zones import read_pages, zones_of
from zarr_manifests.errors import VirtualContainerError, VirtualSourceChangedError
from zarr_manifests.format.chunk_table import InlineRef, NativeRef, VirtualRef
from zarr_manifests.format.manifest import NodeKind
from zarr_manifests.format.zone_maps import NO_SUM
from zarr_manifests.planning.meaning import valid
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.store import ManifestStore, contents_of

HERE = Path(__file__).parent
V1 = HERE / "v1"
NAMES = ["tiny", "chunks", "arrays", "history", "pages", "protocols", "blocks", "nodes", "zones"]
NAMES.append("described")
MODIFIED_NS = 1_700_000_000_123_000_000

each = pytest.mark.parametrize("name", NAMES)


def expected_of(name: str) -> dict[str, Any]:
    return json.loads((V1 / name / "expected.json").read_text(encoding="utf-8"))


def read_by_specification(folder: Path, *, copies: bool = True) -> Any:
    return reader.Reader(
        lambda key: (folder / "repo" / key).read_bytes(),
        copies=copies,
        get_file=lambda file: (folder / "files" / file[1]).read_bytes(),
    )


@pytest.fixture
def copied(name: str, tmp_path: Path) -> Path:
    """A copy of a golden repository, its files as old as they were."""
    folder = tmp_path / name
    shutil.copytree(V1 / name, folder)
    for path in folder.glob("files/**/*.bin"):
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    return folder


def opened(folder: Path) -> zm.Repository:
    files = folder / "files"
    containers = {"files": files} if files.exists() else None
    return zm.open(folder / "repo", virtual_containers=containers)


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex() if len(value) < 1000 else sha256(value)
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- unchanged -------------------------------------------------------------------------------


def test_the_files_are_those_that_were_made() -> None:
    listed = (V1 / "SHA256SUMS").read_text(encoding="utf-8")
    found = [
        f"{sha256(path.read_bytes())}  {path.relative_to(V1).as_posix()}\n"
        for path in sorted(V1.rglob("*"))
        if path.is_file() and path.name != "SHA256SUMS" and not path.name.startswith(".")
    ]
    assert "".join(found) == listed
    assert {line.split("  ")[1].split("/")[0] for line in listed.splitlines()} == {*NAMES}


# --- read ------------------------------------------------------------------------------------


@each
def test_the_independent_reader_finds_what_is_expected(name: str) -> None:
    expected = expected_of(name)
    found = read_by_specification(V1 / name, copies=name != "protocols")
    heads, branches = found.heads(), found.branches()
    assert heads.keys() == expected["refs"].keys()
    for ref, ids in expected["refs"].items():
        floor = branches.get(ref, {}).get("floor")
        line = dict(found.history(heads[ref], floor))
        assert [*line] == ids
        assert [entry["snapshot"][0] for entry in found.told(line[ids[0]], floor)] == ids[1:]
        for snapshot_id, fields in line.items():
            due = expected["snapshots"][snapshot_id]
            same = ("message", "kind", "sequence")
            assert {name: fields[name] for name in same} == {name: due[name] for name in same}
            assert (found.marks(fields), fields.get("merged")) == (due["marks"], due["merged"])
            assert checksums(found, fields) == due["values"]
    assert plain(found.leases()) == expected["root"]["leases"]


def checksums(found: Any, snapshot: Any) -> dict[str, str | None]:
    """Of all values that the independent reader finds; None of those that lie elsewhere."""
    return {
        key: None if reader.is_url(place) else sha256(found.bytes_at(place))
        for key, place in found.places(snapshot).items()
    }


def test_both_readers_find_the_same_zone_maps(tmp_path: Path) -> None:
    expected = expected_of("zones")
    found = read_by_specification(V1 / "zones")
    shutil.copytree(V1 / "zones", tmp_path / "zones")
    repo = opened(tmp_path / "zones")
    for name, branch in found.branches().items():
        snapshot = found.snapshot(expected["refs"][name][0])
        assert plain(found.zones(snapshot, branch.get("index"))) == expected["zones"][name]
        assert zones_of_package(repo, name) == expected["zones"][name]


def zones_of_package(repo: zm.Repository, branch: str) -> dict[str, Any]:
    """What all entries that count say, by key of chunk, as the expected listing has it."""
    found: dict[str, Any] = {}
    contents, context = contents_of(repo.readonly_session(branch).store), context_of(repo)
    for path, node in contents.view.nodes.items():
        if node.array is None:
            continue
        known = zones_of(context, contents.view, [node.node_id], branch)
        tables, pages = [*known.recent_of(node.node_id)], known.pages(node.node_id)
        if pages is not None:
            tables += read_pages(context, pages, range(len(pages.pages))).values()
        for zones in tables:
            for row in np.flatnonzero(valid(zones, contents.chunks(node))).tolist():
                key = node.array.chunk_keys.encode(tuple(zones.coords()[row].tolist()))
                of = zones.bounds
                ends = [of.low[row].item(), of.high[row].item()] if of.bounded[row] else [None] * 2
                total = of.sums[row].item()
                total = None if total != total or total == NO_SUM else total
                rest = [int(of.missing[row]), int(of.nan[row]), total, int(of.clip[row])]
                said = plain([zones.meaning, *ends, *rest])
                told = found.setdefault(f"{path}/{key}", [])
                told += [said] if said not in told else []
    return found


@each
def test_the_package_finds_what_is_expected(name: str, copied: Path) -> None:
    expected = expected_of(name)
    repo = opened(copied)
    index = expected["root"]["branches"]["main"]["index"]
    # That of one repository is of a kind to come, and so nothing that can be read here.
    unknown = [index["k"]] if name == "protocols" else []
    assert [problem.key for problem in repo.verify().problems] == unknown
    assert plain(repo.metadata()) == expected.get("metadata", {})
    heads = repo.list_branches() | repo.list_tags()
    assert heads == {ref: ids[0] for ref, ids in expected["refs"].items()}
    for branch in repo.list_branches():
        ids = expected["refs"][branch]
        assert [info.snapshot_id for info in repo.ancestry(branch)][: len(ids)] == ids
    for snapshot_id, due in expected["snapshots"].items():
        store = repo.readonly_session(snapshot_id).store
        assert dict(places(store)) == due["chunks"]
        assert values_of(store, due) == due["values"]


def places(store: ManifestStore) -> Iterator[tuple[str, Any]]:
    """Where each chunk is, by key, as the expected listing has it."""
    view = contents_of(store).view
    for path, node in view.nodes.items():
        table = view.chunks(node.node_id)
        for coords, ref in () if table is None else table.refs():
            if node.kind is NodeKind.OPAQUE:
                key = path[1:]
            else:
                assert node.array is not None
                key = f"{path}/{node.array.chunk_keys.encode(coords)}"
            assert view.lookup(node.node_id, coords) == ref
            match ref:
                case InlineRef(data):
                    yield key, plain(data)
                case NativeRef(_, _, offset, length, crc):
                    yield key, [ref.key, offset, length, crc]
                case VirtualRef(at, offset, length, crc):
                    file = [at.container, at.path, at.etag, at.modified_ms, at.nbytes]
                    yield key, [file, offset, length, crc]


def values_of(store: ManifestStore, due: dict[str, Any]) -> dict[str, str | None]:
    """Checksum of each value; None where there is no authorisation to read it."""
    prototype = default_buffer_prototype()

    async def read() -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        async for key in store.list():
            place = due["chunks"].get(key)
            if isinstance(place, list) and isinstance(place[0], list):
                if not place[0][0]:
                    with pytest.raises(VirtualContainerError):
                        await store.get(key, prototype)
                    found[key] = None
                    continue
                if place[0][2] is not None:  # no file system gives it that etag again
                    with pytest.raises(VirtualSourceChangedError, match="etag"):
                        await store.get(key, prototype)
                    found[key] = due["values"][key]
                    continue
            value = await store.get(key, prototype)
            assert value is not None
            found[key] = sha256(value.to_bytes())
        return found

    return asyncio.run(read())


# --- written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunks", "history", "pages", "protocols", "nodes", "zones"])
def test_it_opens_for_writing(name: str, copied: Path) -> None:
    before = Roots(LocalStorage(copied / "repo"), SYSTEM).read().root
    expected = expected_of(name)
    repo = opened(copied)
    with repo.transaction("main", message="one more") as store:
        buffer = default_buffer_prototype().buffer
        store.set_sync("written.txt", buffer.from_bytes(b"written" * 200))
    head = repo.list_branches()["main"]
    old = expected["snapshots"][expected["refs"]["main"][0]]
    due = old["values"] | {"written.txt": sha256(b"written" * 200)}
    found = read_by_specification(copied)
    snapshot = found.follow(found.heads()["main"], reader.SNAPSHOT)
    assert checksums(found, snapshot) == due
    assert snapshot["sequence"] == old["sequence"] + 1
    assert found.marks(snapshot) == old["marks"]
    assert "merged" not in snapshot
    store = opened(copied).readonly_session(head).store
    assert values_of(store, old) == due
    after = Roots(LocalStorage(copied / "repo"), SYSTEM).read().root
    kept = ("fence", "epochs", "collected", "leases", "pages")
    kept += ("deleted", "features", "metadata")
    assert [getattr(after, f) for f in kept] == [getattr(before, f) for f in kept]
    own = ("epoch", "floor", "index")
    old_main, new_main = before.branches["main"], after.branches["main"]
    assert [getattr(new_main, f) for f in own] == [getattr(old_main, f) for f in own]
