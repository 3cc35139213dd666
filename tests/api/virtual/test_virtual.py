"""Virtual chunks: set in bulk, read below containers only, noticed when their files change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    StorageError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.virtual.containers import Containers

DATA = np.arange(64, dtype="u1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A container with two files of 32 chunks of one byte each."""
    folder = tmp_path / "archive"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(DATA[:32].tobytes())
    (folder / "deep" / "b.bin").write_bytes(DATA[32:].tobytes())
    return folder


@pytest.fixture
def repo(folder: Path, tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"archive": folder})


def make(store: Any, chunk: int = 1) -> Any:
    return zarr.create_array(
        store, name="a", shape=(64,), chunks=(chunk,), dtype="u1", compressors=None
    )


def refer(store: Any, folder: Path) -> None:
    """All 64 chunks of the two files, in shuffled order."""
    order = np.random.default_rng(0).permutation(64)
    urls = [(folder / "a.bin").as_uri(), (folder / "deep" / "b.bin").as_uri()]
    store.set_virtual_refs("a", order[:, None], urls, order // 32, order % 32, np.ones(64, int))


@pytest.mark.parametrize("given", [["s3://era5-pds"], "s3://era5-pds", [zm.VirtualContainer("/")]])
def test_containers_without_names_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="virtual containers have names"):
        zm.create("memory://unnamed", virtual_containers=given)


def test_links_and_climbing_do_not_leave_the_container(
    repo: zm.Repository, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"\x07")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "in").symlink_to(folder / "deep" / "b.bin")
    (tmp_path / "archive-of-others").write_bytes(b"\x07")
    session = repo.writable_session()
    a = make(session.store)
    paths = ["out", "up/secret", "up/archive/../secret"]
    paths += ["../secret", "deep/../../secret", "%2e%2e/secret"]
    beside = (tmp_path / "archive-of-others").as_uri()
    for url in (beside, *(f"{folder.as_uri()}/{path}" for path in paths)):
        session.store.set_virtual_refs("a", [[0]], [url], [0], [0], [1])
        with pytest.raises(VirtualContainerError):
            a[0]
    session.store.set_virtual_refs("a", [[0]], [(folder / "in").as_uri()], [0], [1], [1])
    assert a[0] == 33


def test_a_link_put_there_while_it_is_opened_is_refused(
    repo: zm.Repository, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.bin").write_bytes(DATA.tobytes())
    session = repo.writable_session()
    a = make(session.store)
    refer(session.store, folder)
    resolve = os.path.realpath

    def swapped(path: str, **kwargs: Any) -> str:
        found = resolve(path, **kwargs)
        if found.endswith("b.bin"):
            (folder / "deep").rename(tmp_path / "was-deep")
            (folder / "deep").symlink_to(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(os.path, "realpath", swapped)
    with pytest.raises(VirtualContainerError, match="link"):
        a[40]


def test_short_missing_damaged_and_odd_files(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store, chunk=4)
    url = (folder / "a.bin").as_uri()

    def at(location: str, offset: int, **known: Any) -> None:
        session.store.set_virtual_refs("a", [[0]], [location], [0], [offset], [4], **known)

    for offset in (30, 2**60):
        at(url, offset)
        with pytest.raises(CorruptObjectError, match="beyond the end"):
            a[0]
    at(url, 0, checksums=[7])
    with pytest.raises(CorruptObjectError, match="checksum"):
        a[0]
    for gone in ("gone.bin", "a.bin/below"):
        at(f"{folder.as_uri()}/{gone}", 0)
        with pytest.raises(MissingChunkError, match="not there"):
            a[0]
    os.mkfifo(folder / "pipe")
    for odd in ("deep", "pipe"):
        at(f"{folder.as_uri()}/{odd}", 0)
        with pytest.raises(StorageError, match="cannot be read"):
            a[0]
    at(url, 0)
    assert a[:4].tolist() == [0, 1, 2, 3]


def test_files_in_memory(tmp_path: Path) -> None:
    files = MemoryStorage("virtual-memory")
    files.put("in/a.bin", DATA.tobytes())
    repo = zm.create(tmp_path / "repo", virtual_containers={"m": "memory://virtual-memory/in"})
    session = repo.writable_session()
    a = make(session.store, chunk=32)
    info, token = files.head("in/a.bin"), files.get_tagged("in/a.bin").token
    session.store.set_virtual_refs(
        "a", [[0], [1]], ["memory://virtual-memory/in/a.bin"], [0, 0], [0, 32], [32, 32],
        etags=[token], modified=np.array([info.modified_ms], "datetime64[ms]"), sizes=[64],
    )  # fmt: skip
    assert session.store.get_virtual_refs("a").modified.tolist() == [info.modified_ms]
    np.testing.assert_array_equal(a[:], DATA)
    files.put("in/a.bin", DATA.tobytes())
    with pytest.raises(VirtualSourceChangedError, match="etag"):
        a[:]
    files.delete_many(["in/a.bin"])
    with pytest.raises(MissingChunkError):
        a[:]


# --- folders of somebody else -----------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Zarr store of format 2."""
    place = tmp_path / "plain"
    group = zarr.create_group(place, zarr_format=2, attributes={"title": "winds"})
    group.create_array("t", data=np.arange(1.0, 5.0), chunks=(2,))
    return place


def commits(repo: zm.Repository) -> int:
    return len(list(repo.ancestry()))


@pytest.mark.parametrize(
    ("name", "copy"),
    [("t/.zarray", True), ("t/0", False), ("t/0", True), ("t/extra", False)],
)
def test_links_in_a_store_are_refused(
    repo: zm.Repository, plain: Path, tmp_path: Path, name: str, copy: bool
) -> None:
    (tmp_path / "credentials").write_text('{"token": "secret"}')
    (plain / name).unlink(missing_ok=True)
    (plain / name).symlink_to(tmp_path / "credentials")
    with pytest.raises(InvalidArgumentError, match=f"'{name}'.*symbolic link") as caught:
        zm.virtual.import_zarr(repo, plain, copy=copy)
    assert "secret" not in str(caught.value)
    assert commits(repo) == 1
    stored = (tmp_path / "repo").rglob("*")
    assert not any(b"secret" in path.read_bytes() for path in stored if path.is_file())


def test_a_store_may_be_a_link_and_no_folder_in_it(
    repo: zm.Repository, plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(plain)
    zm.virtual.import_zarr(repo, tmp_path / "link", copy=True)
    group = zarr.open_group(repo.readonly_session().store, mode="r")
    assert group.attrs["title"] == "winds"
    assert list(group["t"][:]) == [1, 2, 3, 4]
    (plain / "u").symlink_to(plain / "t")
    with pytest.raises(InvalidArgumentError, match=r"'u' in .* is a symbolic link"):
        zm.virtual.import_zarr(repo, plain, "again", copy=True)


@pytest.mark.parametrize("copy", [False, True])
def test_a_mapper_of_fsspec_is_a_place(repo: zm.Repository, plain: Path, copy: bool) -> None:
    mapper = fsspec.get_mapper(str(plain))
    zm.virtual.import_zarr(repo, mapper, copy=copy)
    assert zarr.open_group(repo.readonly_session().store, mode="r").attrs["title"] == "winds"
    with pytest.raises(InvalidArgumentError, match="a dict is not a location"):
        zm.virtual.import_zarr(repo, {}, "again", copy=copy)  # type: ignore[arg-type]


def test_documents_that_are_listed_have_to_be_there(repo: zm.Repository, plain: Path) -> None:
    zarr.consolidate_metadata(plain, zarr_format=2)
    (plain / "t" / ".zarray").unlink()
    with pytest.raises(InvalidArgumentError, match=r"lists 't/\.zarray', which does not exist"):
        zm.virtual.import_zarr(repo, plain)
    assert commits(repo) == 1


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "odd", "copy"),
    [(".zattrs", os.mkfifo, False), ("t/0", os.mkfifo, True), ("t/0", device, False)],
)
def test_files_of_a_store_that_are_none_are_refused_at_once(
    repo: zm.Repository, plain: Path, name: str, odd: Callable[[Path], None], copy: bool
) -> None:
    (plain / name).unlink(missing_ok=True)
    odd(plain / name)
    with pytest.raises((StorageError, InvalidArgumentError), match=name):
        zm.virtual.import_zarr(repo, plain, copy=copy)
    assert commits(repo) == 1


@pytest.mark.parametrize(
    "url", ["https://host/a?X-Amz-Signature=PLANTED", "s3://a:PLANTED@bucket/a", "gs://b/a#PLANTED"]
)
def test_a_location_with_a_secret_is_not_written(repo: zm.Repository, url: str) -> None:
    array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "u1", "order": "C"}
    array |= {"compressor": None, "filters": None, "fill_value": 0}
    with pytest.raises(InvalidArgumentError, match="location with a") as caught:
        zm.virtual.import_kerchunk(repo, {"a/.zarray": array, "a/0": [url, 0, 1]})
    assert "PLANTED" not in str(caught.value)
    assert commits(repo) == 1


def test_references_that_are_no_file_are_refused_at_once(
    repo: zm.Repository, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "refs.json")
    device(tmp_path / "endless")
    for name in ("refs.json", "endless"):
        with pytest.raises(StorageError, match="not a regular file"):
            zm.virtual.import_kerchunk(repo, tmp_path / name)
    (tmp_path / "true.json").write_text('{".zgroup": {"zarr_format": 2}}')
    (tmp_path / "link.json").symlink_to(tmp_path / "true.json")  # what was asked for
    zm.virtual.import_kerchunk(repo, tmp_path / "link.json")
    assert commits(repo) == 2


@pytest.mark.parametrize(
    ("name", "pipe"), [(".zmetadata", True), (".zmetadata", False), ("a/refs.0.parq", False)]
)
def test_files_of_a_folder_of_references(
    repo: zm.Repository, tmp_path: Path, name: str, pipe: bool
) -> None:
    folder = tmp_path / "refs"
    (folder / "a").mkdir(parents=True)
    array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "u1", "order": "C"}
    array |= {"compressor": None, "filters": None, "fill_value": 0}
    document = {"metadata": {"a/.zarray": array}, "record_size": 1}
    (folder / ".zmetadata").write_text(json.dumps(document))
    (tmp_path / "outside").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    if pipe:
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ManifestsError, match=name) as caught:
        zm.virtual.import_kerchunk(repo, folder)
    assert "secret" not in str(caught.value)
    assert commits(repo) == 1


def test_a_location_that_climbs_or_has_no_root_is_refused() -> None:
    containers = Containers.of({"raw": "s3://bucket/raw"})
    for wrong in ("s3://b/../x", "s3:///x", "s3://b/x/..", "https:///x", "virtual://raw/../x", 5):
        with pytest.raises(InvalidArgumentError):
            containers.locate(wrong)
