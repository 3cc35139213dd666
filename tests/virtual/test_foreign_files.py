"""Folders of somebody else: links that lead out of them, and files that are none."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, StorageError


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Ends a test that hangs; threads that wait for a pipe cannot be ended."""
    over = threading.Timer(120, os._exit, [3])
    over.start()
    yield
    over.cancel()


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repository")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Zarr store of format 2."""
    place = tmp_path / "plain"
    group = zarr.create_group(place, zarr_format=2, attributes={"title": "winds"})
    group.create_array("t", data=np.arange(1.0, 5.0), chunks=(2,))
    return place


def commits(repo: zm.Repository) -> int:
    return len(list(repo.ancestry()))


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", [".zattrs", "t/.zarray", "t/.zattrs", "t/0", "t/extra"])
def test_links_that_leave_a_store_are_refused(
    repo: zm.Repository, plain: Path, tmp_path: Path, name: str, copy: bool
) -> None:
    (tmp_path / "credentials").write_text('{"token": "secret"}')
    (plain / name).unlink(missing_ok=True)
    (plain / name).symlink_to(tmp_path / "credentials")
    with pytest.raises(InvalidArgumentError, match=f"'{name}'.*leads out of the store") as caught:
        zm.virtual.import_zarr(repo, plain, copy=copy)
    assert "secret" not in str(caught.value)
    assert commits(repo) == 1
    assert not any(
        b"secret" in path.read_bytes() for path in (tmp_path / "repository").rglob("*/*/*")
    )


def test_links_within_a_store_are_followed(
    repo: zm.Repository, plain: Path, tmp_path: Path
) -> None:
    for name in (".zattrs", "t/0"):
        (plain / name).rename(plain / f"{name}-kept")
        (plain / name).symlink_to(plain / f"{name}-kept")
    (tmp_path / "link").symlink_to(plain)  # and the store itself may be one
    zm.virtual.import_zarr(repo, tmp_path / "link", copy=True)
    group = zarr.open_group(repo.readonly_session().store, mode="r")
    assert group.attrs["title"] == "winds"
    assert list(group["t"][:]) == [1, 2, 3, 4]


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", [".zattrs", ".zgroup", "t/.zarray", "t/0", "t/extra"])
@pytest.mark.parametrize("odd", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_files_of_a_store_that_are_none_are_refused_at_once(
    repo: zm.Repository, plain: Path, name: str, odd: Callable[[Path], None], copy: bool
) -> None:
    (plain / name).unlink(missing_ok=True)
    odd(plain / name)
    with pytest.raises((StorageError, InvalidArgumentError), match=name):
        zm.virtual.import_zarr(repo, plain, copy=copy)
    assert commits(repo) == 1


def test_references_that_are_no_file_are_refused_at_once(
    repo: zm.Repository, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "refs.json")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("refs.json", "endless"):
        with pytest.raises(StorageError, match="not a regular file"):
            zm.virtual.import_kerchunk(repo, tmp_path / name)
    (tmp_path / "true.json").write_text('{".zgroup": {"zarr_format": 2}}')
    (tmp_path / "link.json").symlink_to(tmp_path / "true.json")  # what was asked for
    zm.virtual.import_kerchunk(repo, tmp_path / "link.json")
    assert commits(repo) == 2


@pytest.mark.parametrize("name", [".zmetadata", "a/refs.0.parq"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_files_of_a_folder_of_references(
    repo: zm.Repository, tmp_path: Path, name: str, kind: str
) -> None:
    pytest.importorskip("pyarrow", reason="reads references in parquet files")
    folder = tmp_path / "refs"
    (folder / "a").mkdir(parents=True)
    array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "u1", "compressor": None}
    array |= {"filters": None, "fill_value": 0, "order": "C"}
    (folder / ".zmetadata").write_text(
        json.dumps({"metadata": {"a/.zarray": array}, "record_size": 1})
    )
    (tmp_path / "outside").write_text("secret")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "outside")
    with pytest.raises(ManifestsError, match=name) as caught:
        zm.virtual.import_kerchunk(repo, folder)
    assert "secret" not in str(caught.value)
    assert commits(repo) == 1


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_a_virtual_file_that_is_none_is_an_error_at_once(tmp_path: Path, kind: int) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    repo = zm.create(tmp_path / "repository", virtual_containers={"raw": raw})
    file = raw / "a"
    file.write_bytes(b"\x07")
    with repo.transaction(message="refer") as store:
        zarr.create_array(store, name="t", data=np.ones(1, "u1"), compressors=None)
        store.set_virtual_refs("t", [[0]], [file.as_uri()], [0], [0], [1])
    file.unlink()
    os.mknod(file, kind | 0o644)
    with pytest.raises(StorageError, match="not a file"):
        zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
