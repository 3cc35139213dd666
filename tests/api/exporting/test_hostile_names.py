"""Exports of repositories whose names would lead out of the folder or the archive."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer.cpu import Buffer

import zarr_manifests as zm
from hostile_names import hostile_repository, unchecked
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
    VirtualContainerError,
)

FORMATS = ("zarr", "kerchunk", "icechunk")
each_format = pytest.mark.parametrize("format_", FORMATS)
each_name = pytest.mark.parametrize("name", ["../../x", "a/../b", "..", "/abs", "a\0b"])


def export(folder: Path, format_: str) -> None:
    """Export three folders down, so that there is room to climb."""
    dest = folder / "u" / "v" / "w" / "out"
    zm.export(
        zm.open(folder / "repository").readonly_session(),
        dest,
        format_,  # type: ignore[arg-type]
    )


def is_untouched(folder: Path) -> bool:
    """Whether there are no files but those of the repository, and of a destination left empty."""
    found = {path for path in folder.rglob("*") if path.is_file()}
    mine = (folder / "repository", folder / "u" / "v" / "w" / "out")
    return all(any(path.is_relative_to(own) for own in mine) for path in found)


@each_format
@each_name
def test_a_name_that_leads_elsewhere_is_damage(tmp_path: Path, name: str, format_: str) -> None:
    hostile_repository(tmp_path / "repository", name)
    with pytest.raises(CorruptObjectError, match=r"the name .* is refused"):
        export(tmp_path, format_)
    assert not (tmp_path / "u").exists()


@each_format
@each_name
def test_an_export_refuses_such_a_name_whoever_lets_it_pass(
    tmp_path: Path, name: str, format_: str
) -> None:
    hostile_repository(tmp_path / "repository", f"{name}/zarr.json")
    refused = (InvalidArgumentError, UnsupportedFormatError)  # icechunk takes no opaque entry
    with unchecked(), pytest.raises(refused):
        export(tmp_path, format_)
    assert is_untouched(tmp_path)


@pytest.mark.parametrize("data", [b"base64:eyJhIjoxfQ==", b"\xff\xfe"])
def test_a_document_in_a_kerchunk_file_is_the_stored_one(tmp_path: Path, data: bytes) -> None:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="a group") as store:
        for key, value in ((".zgroup", b'{"zarr_format": 2}'), (".zattrs", data)):
            store.set_sync(key, Buffer.from_bytes(value))
    zm.export(repo.readonly_session(), tmp_path / "refs.json", "kerchunk")
    refs = json.loads((tmp_path / "refs.json").read_text())["refs"]
    kind, _, text = refs[".zattrs"].partition(":")
    assert (kind, base64.b64decode(text)) == ("base64", data)


@pytest.mark.parametrize("way", ["no container", "link"])
def test_an_export_refers_to_nothing_that_may_not_be_read(tmp_path: Path, way: str) -> None:
    """Who reads the export would read there, without having been asked."""
    inside, outside = tmp_path / "raw", tmp_path / "secret"
    inside.mkdir()
    outside.write_bytes(b"1234")
    (inside / "day").symlink_to(outside)
    there = inside / "day" if way == "link" else outside
    with zm.create(tmp_path / "repository").transaction(message="refer") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(4,), dtype="u1", compressors=None)
        at = {"index": [[0]], "source": [0], "offset": [0], "length": [4]}
        store.set_virtual_refs("a", locations=[there.as_uri()], **at)
    repo = zm.open(tmp_path / "repository", virtual_containers={"raw": inside})
    with pytest.raises(VirtualContainerError):
        zm.export(repo.readonly_session(), tmp_path / "out", "kerchunk")
    assert not (tmp_path / "out").exists()


def test_an_export_refers_to_no_chunk_that_is_a_link(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", data=np.random.default_rng(1).random(2000))
    (tmp_path / "secret").write_bytes(bytes(20_000))
    chunks = (tmp_path / "repository" / "chunks").rglob("*")
    (chunk,) = (path for path in chunks if path.is_file())
    chunk.unlink()
    chunk.symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match="is a symbolic link"):
        zm.export(repo.readonly_session(), tmp_path / "out", "kerchunk")
