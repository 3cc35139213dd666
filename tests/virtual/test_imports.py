"""Plain Zarr stores and kerchunk references, taken in without copying."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard
from zarr.storage import LocalStore

import zarr_manifests as zm
from zarr_manifests.error_cases import UnsupportedStorageError, VirtualSourceChangedError
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedFormatError,
    VirtualContainerError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

DATA = np.arange(48, dtype="f4").reshape(6, 8)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Zarr store: compressed, sharded, without axes, with a chunk that is absent, nested."""
    root = zarr.create_group(LocalStore(tmp_path / "plain"), attributes={"title": "winds"})
    root.create_array("t", shape=(6, 8), chunks=(2, 8), dtype="f4")[:4] = DATA[:4]
    group = root.create_group("more/deep")
    group.create_array("sharded", data=DATA, chunks=(2, 2), shards=(4, 4))
    group.create_array("scalar", data=np.array(7.0))
    group.create_array("empty", shape=(3,), dtype="i4")
    (tmp_path / "plain" / "notes.txt").write_bytes(b"kept as they are")
    return tmp_path / "plain"


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"here": tmp_path})


def check(repo: zm.Repository, path: str = "") -> None:
    root = zarr.open_group(repo.readonly_session().store, mode="r", path=path)
    assert root.attrs["title"] == "winds"
    np.testing.assert_array_equal(root["t"][:4], DATA[:4])
    np.testing.assert_array_equal(root["t"][4:], 0)
    np.testing.assert_array_equal(root["more/deep/sharded"][:], DATA)
    np.testing.assert_array_equal(root["more/deep/sharded"][1:3, 5], DATA[1:3, 5])
    assert root["more/deep/scalar"][()] == 7
    np.testing.assert_array_equal(root["more/deep/empty"][:], 0)


def chunk_bytes(repo: zm.Repository) -> int:
    return sum(info.nbytes for info in repo.storage.list("chunks/"))


def test_a_zarr_store_is_taken_in_without_its_bytes(repo: zm.Repository, plain: Path) -> None:
    snapshot_id = zm.virtual.import_zarr(repo, plain, message="take it in")
    (info, _) = repo.ancestry()
    assert (info.snapshot_id, info.message) == (snapshot_id, "take it in")
    check(repo)
    assert chunk_bytes(repo) == 0
    store = repo.readonly_session().store
    refs = store.get_virtual_refs("t")
    assert refs.locations == tuple((plain / "t/c" / f"{i}/0").as_uri() for i in range(2))
    assert refs.sizes.tolist() == refs.length.tolist()
    assert contents_of(store).find("notes.txt") is not None


def test_a_zarr_store_is_copied(repo: zm.Repository, plain: Path, tmp_path: Path) -> None:
    zm.virtual.import_zarr(repo, plain.as_uri(), "/a/b", copy=True)
    plain.rename(tmp_path / "gone")
    check(zm.open(tmp_path / "repo"), "a/b")
    assert len(repo.readonly_session().store.get_virtual_refs("a/b/t")) == 0
    assert set(zarr.open_group(repo.readonly_session().store, mode="r")) == {"a"}


def test_what_was_taken_in_is_read_with_its_container_only(
    repo: zm.Repository, plain: Path, tmp_path: Path
) -> None:
    zm.virtual.import_zarr(repo, plain)
    with pytest.raises(VirtualContainerError, match="'here'"):
        check(zm.open(tmp_path / "repo"))
    file = plain / "t" / "c" / "0" / "0"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 5_000_000))
    with pytest.raises(VirtualSourceChangedError):
        check(repo)


def test_nothing_that_is_there_is_changed(repo: zm.Repository, plain: Path) -> None:
    with repo.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(1,), dtype="i1")
    for path in ("/", "a", "/a/"):
        with pytest.raises(AlreadyExistsError, match="exists already"):
            zm.virtual.import_zarr(repo, plain, path)
    with pytest.raises(InvalidArgumentError, match="is an array"):
        zm.virtual.import_zarr(repo, plain, "a/b")
    assert len(list(repo.ancestry())) == 2
    zm.virtual.import_zarr(repo, plain, "b")
    check(repo, "b")


def test_stores_that_are_refused(repo: zm.Repository, plain: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", plain / "t" / "c"):
        with pytest.raises(NotFoundError):
            zm.virtual.import_zarr(repo, place)
    (plain / "link").symlink_to(plain / "t")
    with pytest.raises(InvalidArgumentError, match="symbolic link"):
        zm.virtual.import_zarr(repo, plain)
    (plain / "link").unlink()
    (plain / "t" / "zarr.json").write_text("{")
    with pytest.raises(UnsupportedFormatError, match="not understood"):
        zm.virtual.import_zarr(repo, plain)
    with pytest.raises(UnsupportedStorageError, match="has no listing"):
        zm.virtual.import_zarr(repo, "https://example.org/store")
    assert len(list(repo.ancestry())) == 1


def test_a_store_in_memory(plain: Path, tmp_path: Path) -> None:
    source = MemoryStorage("plain-in-memory")
    names = [p for p in plain.rglob("*") if p.is_file()]
    for name in names:
        source.put(f"in/{name.relative_to(plain)}", name.read_bytes())
    repo = zm.create(tmp_path / "repo", virtual_containers={"m": "memory://plain-in-memory"})
    zm.virtual.import_zarr(repo, "memory://plain-in-memory/in")
    check(repo)


# --- kerchunk --------------------------------------------------------------------------------


@pytest.fixture
def kerchunk(tmp_path: Path) -> dict[str, Any]:
    """References to a file that holds one array's chunks."""
    (tmp_path / "all.bin").write_bytes(b"head" + DATA.tobytes())
    (tmp_path / "last.bin").write_bytes(DATA[4:].tobytes())
    scratch = zarr.storage.MemoryStore()
    root = zarr.create_group(scratch)
    root.create_array("t", shape=(6, 8), chunks=(2, 8), dtype="f4", compressors=None)
    root.create_array("i", shape=(2,), chunks=(1,), dtype="u1", compressors=None)
    documents = {key: value.to_bytes() for key, value in scratch._store_dict.items()}
    return {
        "version": 1,
        "templates": {"u": f"{tmp_path}/all.bin"},
        "refs": {
            "zarr.json": documents["zarr.json"].decode(),
            "t/zarr.json": json.loads(documents["t/zarr.json"]),
            "i/zarr.json": documents["i/zarr.json"].decode(),
            "t/c/0/0": ["{{u}}", 4, 64],
            "t/c/1/0": [(tmp_path / "all.bin").as_uri(), 68, 64],
            "t/c/2/0": [str(tmp_path / "last.bin")],
            "i/c/0": "base64:" + base64.b64encode(b"\xff").decode(),
            "i/c/1": "a",
        },
    }


def test_kerchunk_references(repo: zm.Repository, kerchunk: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps(kerchunk))
    zm.virtual.import_kerchunk(repo, tmp_path / "refs.json", "one")
    zm.virtual.import_kerchunk(repo, kerchunk, "two", message="two")
    kerchunk["refs"]["t/c/0/0"][0] = str(tmp_path / "all.bin")
    zm.virtual.import_kerchunk(repo, kerchunk["refs"], "three")
    for name in ("one", "two", "three"):
        root = zarr.open_group(repo.readonly_session().store, mode="r", path=name)
        np.testing.assert_array_equal(root["t"][:], DATA)
        assert root["i"][:].tolist() == [255, ord("a")]
    refs = repo.readonly_session().store.get_virtual_refs("one/t")
    assert len(refs.locations) == 2
    assert refs.sizes.tolist() == [196, 64]
    (tmp_path / "all.bin").write_bytes(bytes(500))
    with pytest.raises(VirtualSourceChangedError):
        zarr.open_array(repo.readonly_session().store, mode="r", path="one/t")[:]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"gen": [{}]}, InvalidArgumentError),
        ({"refs": []}, InvalidArgumentError),
        ({"refs": {"zarr.json": 5}}, InvalidArgumentError),
        ({"refs": {"a": ["file:///a", 1]}}, InvalidArgumentError),
        ({"refs": {"a": ["file:///a", -1, 5]}}, InvalidArgumentError),
        ({"refs": {"a": ["a.nc", 1, 5]}}, InvalidArgumentError),
        ({"refs": {"a": ["{{v}}", 1, 5]}}, InvalidArgumentError),
        ({"refs": {"a": ["{{u + 1}}", 1, 5]}}, InvalidArgumentError),
        ({"refs": {"a": ["ftp://bucket/a", 1, 5]}}, UnsupportedStorageError),
        ({"refs": {"a": "base64:!"}}, InvalidArgumentError),
        ({"refs": {"a": ["file:///a"]}}, VirtualContainerError),
        ({"refs": {"a": ["file:///a", 1, 5]}}, InvalidArgumentError),
        ({"refs": {".zarray": "{}"}}, UnsupportedFormatError),
    ],
)
def test_references_that_are_refused(
    repo: zm.Repository, kerchunk: dict[str, Any], change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        zm.virtual.import_kerchunk(repo, kerchunk | change)
    assert len(list(repo.ancestry())) == 1


@pytest.mark.parametrize(
    "key",
    ["t/c/3/0", "t/c/0/1", "t/c/00/0", "t/c/0", "t/0.0", "t/c/0/0/0", "i/c/2", "elsewhere/c/0"],
)
@pytest.mark.parametrize("inline", [False, True])
def test_a_reference_that_no_array_would_read_is_refused(
    repo: zm.Repository, kerchunk: dict[str, Any], key: str, inline: bool
) -> None:
    """It was kept as an opaque entry, and Zarr read fill value where its bytes were meant."""
    kerchunk["refs"][key] = "a" if inline else ["{{u}}", 4, 64]
    if inline and key.startswith("elsewhere"):
        zm.virtual.import_kerchunk(repo, kerchunk)  # what is below no array may be anything
        assert contents_of(repo.readonly_session().store).find(key) is not None
        return
    with pytest.raises(InvalidArgumentError, match=f"1 of the references.*the first being '{key}'"):
        zm.virtual.import_kerchunk(repo, kerchunk)
    assert len(list(repo.ancestry())) == 1


def test_the_first_of_many_such_references_are_named(
    repo: zm.Repository, kerchunk: dict[str, Any]
) -> None:
    kerchunk["refs"] |= {f"t/c/{i}/0": ["{{u}}", 4, 64] for i in range(3, 9)}
    with pytest.raises(InvalidArgumentError, match=r"6 of .*'t/c/3/0', 't/c/4/0', 't/c/5/0':"):
        zm.virtual.import_kerchunk(repo, kerchunk)


def test_files_that_hold_no_references(repo: zm.Repository, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        zm.virtual.import_kerchunk(repo, tmp_path / "refs.json")
    (tmp_path / "refs.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="JSON"):
        zm.virtual.import_kerchunk(repo, tmp_path / "refs.json")


def test_compressed_references_of_several_parts_are_read_to_their_end(tmp_path: Path) -> None:
    text = json.dumps({".zgroup": {"zarr_format": 2}, ".zattrs": {"title": "parts"}}).encode()
    path = tmp_path / "refs.json"
    for pack in (gzip.compress, zstandard.compress):
        path.write_bytes(pack(text[:30]) + pack(text[30:]))
        repo = zm.create(tmp_path / pack.__module__)
        zm.virtual.import_kerchunk(repo, path, max_bytes=2**60)
        found = zarr.open_group(repo.readonly_session().store, mode="r", zarr_format=2)
        assert dict(found.attrs) == {"title": "parts"}
    for cut in (gzip.compress(text)[:-3], gzip.compress(text) + b"more"):
        path.write_bytes(cut)
        with pytest.raises(InvalidArgumentError, match="is not JSON"):
            zm.virtual.import_kerchunk(repo, path, mode="w")
