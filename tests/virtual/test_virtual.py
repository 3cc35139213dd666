"""Virtual chunks: set in bulk, read below containers only, noticed when their files change."""

from __future__ import annotations

import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.error_cases import UnsupportedStorageError, VirtualSourceChangedError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    NotFoundError,
    ReadOnlyError,
    StorageError,
    VirtualContainerError,
)
from zarr_manifests.ids import crc32c
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.virtual import parquet_columns
from zarr_manifests.virtual import virtual_files as files
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.locations import parse_location
from zarr_manifests.virtual.virtual_files import file_version

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


def make(store: Any, name: str = "a", shape: tuple[int, ...] = (64,), chunk: int = 1) -> Any:
    return zarr.create_array(
        store, name=name, shape=shape, chunks=(chunk,) * len(shape), dtype="u1", compressors=None
    )


def refer(store: Any, folder: Path, name: str = "a", **known: Any) -> None:
    """All 64 chunks of the two files, in shuffled order."""
    order = np.random.default_rng(0).permutation(64)
    known = {k: np.asarray(v)[order] if k == "checksums" else v for k, v in known.items()}
    store.set_virtual_refs(
        name,
        order[:, None],
        [(folder / "a.bin").as_uri(), (folder / "deep" / "b.bin").as_uri()],
        order // 32,
        order % 32,
        np.ones(64, int),
        **known,
    )


def versions(folder: Path) -> dict[str, Any]:
    found = [file_version((folder / n).stat()) for n in ("a.bin", "deep/b.bin")]
    return {
        "etags": [v.etag for v in found],
        "modified": [v.modified_ms for v in found],
        "sizes": [v.nbytes for v in found],
    }


def test_a_stored_ref_of_no_bytes_is_refused(
    repo: zm.Repository, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting one is refused, but another writer may have stored it."""
    checked = parquet_columns._column

    def lax(name: str, values: Any, n: int, least: int, most: int) -> Any:
        return checked(name, values, n, least if name != "length" else 0, most)

    monkeypatch.setattr(parquet_columns, "_column", lax)
    session = repo.writable_session()
    make(session.store)
    location = (folder / "a.bin").as_uri()
    session.store.set_virtual_refs("a", [[0], [1], [2]], [location], [0] * 3, [0, 1, 2], [1, 0, 1])
    session.commit("as another writer would")
    reader = repo.readonly_session()
    a = zarr.open_array(reader.store, path="a", mode="r")
    assert a[0] == DATA[0]
    for read in (lambda: a[1], lambda: a[:3], lambda: list(reader.read_chunks("a"))):
        with pytest.raises(CorruptObjectError, match="no bytes"):
            read()


# --- setting and giving back -----------------------------------------------------------------


def test_what_is_set_is_read_before_and_after_the_commit(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    refer(session.store, folder, **versions(folder), checksums=[crc32c(bytes([i])) for i in DATA])
    np.testing.assert_array_equal(a[:], DATA)
    assert session.status().chunks == {"/a": 64}
    session.commit("refer to files elsewhere")
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:], DATA)
    refs = repo.readonly_session().store.get_virtual_refs("/a")
    assert refs.locations == ((folder / "a.bin").as_uri(), (folder / "deep" / "b.bin").as_uri())
    np.testing.assert_array_equal(refs.index[:, 0], np.arange(64))
    np.testing.assert_array_equal(refs.source, np.arange(64) // 32)
    np.testing.assert_array_equal(refs.offset, np.arange(64) % 32)
    np.testing.assert_array_equal(refs.length, 1)
    np.testing.assert_array_equal(refs.checksums, [crc32c(bytes([i])) for i in DATA])
    known = versions(folder)
    assert refs.etags == tuple(known["etags"])
    assert refs.modified.tolist() == known["modified"]
    assert refs.sizes.tolist() == known["sizes"]
    # Given back as they came, they are the same again.
    again = repo.writable_session()
    make(again.store, "again")
    again.store.set_virtual_refs(
        "again", *(getattr(refs, n) for n in ("index", "locations", "source", "offset", "length")),
        etags=refs.etags, modified=refs.modified, sizes=refs.sizes, checksums=refs.checksums,
    )  # fmt: skip
    np.testing.assert_array_equal(zarr.open_array(again.store, path="again")[:], DATA)


def test_the_repository_speaks_of_the_container_and_not_of_its_place(
    repo: zm.Repository, folder: Path, tmp_path: Path
) -> None:
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder, sizes=[32, 32])
    there = zm.open(tmp_path / "repo").readonly_session().store
    assert there.get_virtual_refs("a").locations == (
        "virtual://archive/a.bin",
        "virtual://archive/deep/b.bin",
    )
    folder.rename(tmp_path / "moved")
    moved = zm.open(
        tmp_path / "repo", virtual_containers={"archive": (tmp_path / "moved").as_uri()}
    )
    np.testing.assert_array_equal(
        zarr.open_array(moved.readonly_session().store, path="a")[:], DATA
    )


def test_single_chunks_are_written_over_and_under_refs(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    a[:4] = 200  # under
    refer(session.store, folder)
    np.testing.assert_array_equal(a[:], DATA)
    a[1] = 201  # over
    a[2] = 202
    session.store.set_virtual_refs("a", [[2]], [(folder / "a.bin").as_uri()], [0], [31], [1])
    session.store.delete_sync("a/c/3")
    expected = DATA.copy()
    expected[1:4] = 201, 31, 0
    np.testing.assert_array_equal(a[:], expected)
    assert session.status().chunks == {"/a": 64}
    session.commit("mixed")
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:], expected)
    assert len(session.store.get_virtual_refs("a")) == 62


def test_a_shrink_cuts_refs_off_for_good(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    refer(session.store, folder)
    a.resize((40,))
    a.resize((64,))
    expected = np.where(np.arange(64) < 40, DATA, 0)
    np.testing.assert_array_equal(a[:], expected)
    session.commit("cut")
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:], expected)


def test_deleted_arrays_leave_no_refs(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    make(session.store)
    refer(session.store, folder)
    del zarr.open_group(session.store)["a"]
    assert not session.status() or "/a" not in session.status().chunks
    make(session.store)
    assert len(session.store.get_virtual_refs("a")) == 0


def test_refs_of_another_session_conflict_chunk_by_chunk(repo: zm.Repository, folder: Path) -> None:
    with repo.transaction(message="array") as store:
        make(store)
    one, two = repo.writable_session(), repo.writable_session()
    url = [(folder / "a.bin").as_uri()]
    one.store.set_virtual_refs("a", [[0], [1]], url, [0, 0], [5, 6], [1, 1])
    two.store.set_virtual_refs("a", [[2], [1]], url, [0, 0], [7, 7], [1, 1])
    one.commit("first")
    with pytest.raises(ConflictError) as caught:
        two.commit("second")
    assert caught.value.conflicts[0].chunks == ((1,),)


def test_many_small_calls_stay_few_tables(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    url = [(folder / "a.bin").as_uri()]
    for i in range(32):
        session.store.set_virtual_refs("a", [[i]], url, [0], [i], [1])
    ((tables),) = contents_of(session.store).changes.tables.values()
    assert len(tables) <= 5
    np.testing.assert_array_equal(a[:32], DATA[:32])


def test_refs_of_an_array_without_axes(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store, shape=())
    index = np.zeros((1, 0), int)
    session.store.set_virtual_refs("a", index, [(folder / "a.bin").as_uri()], [0], [9], [1])
    assert a[()] == 9
    with pytest.raises(InvalidArgumentError, match="twice"):
        session.store.set_virtual_refs(
            "a", np.zeros((2, 0), int), [(folder / "a.bin").as_uri()], [0, 0], [9, 8], [1, 1]
        )


def test_no_python_work_for_each_ref(repo: zm.Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refs of single rows are made neither when 100,000 are set nor when they are committed."""
    from zarr_manifests.format import chunk_table

    n = 100_000
    session = repo.writable_session()
    make(session.store, shape=(n,))
    made: list[object] = []
    monkeypatch.setattr(chunk_table, "VirtualRef", lambda *args: made.append(args))
    order = np.random.default_rng(0).permutation(n)
    session.store.set_virtual_refs(
        "a",
        order[:, None],
        [f"virtual://archive/{i}.nc" for i in range(100)],
        order % 100,
        order,
        np.ones(n, int),
    )
    session.commit("many")
    assert len(session.store.get_virtual_refs("a")) == n
    assert made == []


# --- arguments -------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "index": [[0], [1]],
    "locations": ["virtual://archive/a.bin"],
    "source": [0, 0],
    "offset": [0, 1],
    "length": [1, 1],
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"index": [[0], [64]]}, "grid"),
        ({"index": [[0], [-1]]}, "grid"),
        ({"index": [[1], [1]]}, "twice"),
        ({"index": [0, 1]}, "shape"),
        ({"index": [[0, 1], [0, 2]]}, "shape"),
        ({"index": [[0.0], [1.0]]}, "whole"),
        ({"index": [[0]]}, "shape"),
        ({"source": [0, 1]}, "source"),
        ({"source": [0, -1]}, "source"),
        ({"source": [[0, 0]]}, "source"),
        ({"source": 0}, "source"),
        ({"offset": [0, -1]}, "offset"),
        ({"offset": np.array([0, 2**63], np.uint64)}, "offset"),
        ({"offset": [0]}, "offset"),
        ({"index": [[0], [0, 1]]}, "index"),
        ({"locations": ["file:///\ud800"]}, "Unicode"),
        ({"length": [-1, 1]}, "length"),
        ({"length": [0, 1]}, "length"),
        ({"length": [2**50, 1]}, "length"),
        ({"length": ["1", "2"]}, "length"),
        ({"locations": []}, "source"),
        ({"locations": "file:///a"}, "sequence"),
        ({"locations": ["a.bin"]}, "URL"),
        ({"locations": [7]}, "URL"),
        ({"locations": ["file://host/a.bin"]}, "absolute path"),
        ({"locations": ["file:///a%zz"]}, "escapes"),
        ({"locations": ["file:///a%00"]}, "zero"),
        ({"locations": ["file:///a%ff"]}, "Unicode"),
        ({"locations": ["memory:///a"]}, "name"),
        ({"locations": ["memory://m/../a"]}, "refused"),
        ({"locations": ["virtual://archive/../a"]}, "refused"),
        ({"locations": ["virtual://archive/"]}, "refused"),
        ({"locations": ["virtual://archive//a"]}, "refused"),
        ({"locations": ["virtual:///a"]}, "container name"),
        ({"locations": ["virtual://archive/\ud800"]}, "refused"),
        ({"etags": []}, "etags"),
        ({"etags": ["a\0b"]}, "etags"),
        ({"etags": [5]}, "etags"),
        ({"modified": [1, 2]}, "modified"),
        ({"modified": [-2]}, "modified"),
        ({"sizes": [1.5]}, "sizes"),
        ({"checksums": [1, 2**32]}, "checksums"),
        ({"checksums": [1]}, "checksums"),
    ],
)
def test_arguments_that_are_refused(
    repo: zm.Repository, changes: dict[str, Any], match: str
) -> None:
    store = repo.writable_session().store
    make(store)
    with pytest.raises(InvalidArgumentError, match=match):
        store.set_virtual_refs("a", **(GOOD | changes))
    assert len(store.get_virtual_refs("a")) == 0
    store.set_virtual_refs("a", **GOOD)
    assert len(store.get_virtual_refs("a")) == 2


@pytest.mark.slow
def test_many_locations_are_placed_as_single_ones_are() -> None:
    places = {
        "data": "s3://b/data",
        "inner": "s3://b/data/in",
        "disk": "/data/x",
        "web": "https://h",
    }
    containers = Containers.of(places)
    starts = ["s3://b", "s3://b/data", "s3a://b/data/in", "file:///data/x", "https://H:443/a%20b"]
    starts += [
        "file:///tmp//x/./y",
        "memory://m",
        "virtual://data/x",
        "s3:/",
        "s3://-",
        "s3://b//c",
    ]
    names = ["a.nc", "in", "x", "..", ".", "", ".a", "a b", "%41", "a?b", "a#b", "-", "a" * 250]
    names += ["in/x", "in/x/y", "y=1/x", "a~b", "a@b:c,+", "\u00e9", "x/../y", "%2e%2e/x", "\udc80"]
    urls = [f"{start}/{name}" for start in starts for name in names]
    expected = {url: outcome(containers.locate, url) for url in urls}
    some = [url for url in urls if isinstance(expected[url], tuple)]
    assert len(some) > 80
    for url in urls:
        for other in (url, *some):
            found = outcome(located, containers, [other, url])
            known = expected[url]
            assert found == ([expected[other], known] if isinstance(known, tuple) else known), url
    many = [f"s3://b/data/{i}.nc" for i in range(40_000)] + some + ["s3://b/data/in/1", "s3://b/x"]
    assert located(containers, many) == [containers.locate(url) for url in many]


def located(containers: Containers, urls: list[str]) -> list[tuple[str, str]]:
    names, numbers, paths = containers.locate_all(urls)
    assert len(set(names)) == len(names)
    return [(names[at], path) for at, path in zip(numbers.tolist(), paths, strict=True)]


def outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except zm.errors.ManifestsError as error:
        return type(error)


@pytest.mark.parametrize("inner", [False, True])
def test_files_of_one_folder_are_not_parsed_one_by_one(
    inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"data": "s3://b/data", **({"inner": "s3://b/data/2000"} if inner else {})}
    containers, parsed = Containers.of(places), list[object]()

    def parse(url: object) -> tuple[str, str]:
        parsed.append(url)
        return parse_location(url)

    monkeypatch.setattr("zarr_manifests.virtual.containers.parse_location", parse)
    urls = [f"s3://b/data/{year}/{day}.nc" for year in range(2000, 2100) for day in range(365)]
    found = located(containers, urls)
    assert {name for name, _ in found} == set(places)
    assert found[-1] == ("data", "2099/364.nc")
    assert len(parsed) < 200


def test_secrets_and_unknown_schemes_are_refused(repo: zm.Repository) -> None:
    store = repo.writable_session().store
    make(store)
    for url in ("file://me:pw1@host/a", "s3://key:pw1@bucket/a"):
        with pytest.raises(InvalidArgumentError, match="password") as caught:
            store.set_virtual_refs("a", **(GOOD | {"locations": [url]}))
        assert "pw1" not in str(caught.value)
    with pytest.raises(UnsupportedStorageError, match="ftp"):
        store.set_virtual_refs("a", **(GOOD | {"locations": ["ftp://bucket/a"]}))
    with pytest.raises(NotFoundError, match="/a"):
        store.set_virtual_refs("b", **GOOD)
    with pytest.raises(ReadOnlyError):
        repo.readonly_session().store.set_virtual_refs("a", **GOOD)


@pytest.mark.parametrize(
    ("containers", "error"),
    [
        ({"a/b": "file:///data"}, InvalidArgumentError),
        ({"": "file:///data"}, InvalidArgumentError),
        ({"a": "file://me:pw1@host/data"}, InvalidArgumentError),
        ({"a": "file://host/data"}, InvalidArgumentError),
        ({"a": "a\ud800"}, InvalidArgumentError),
        ({"a": "memory://\ud800"}, InvalidArgumentError),
        ({"a": "ftp://bucket"}, UnsupportedStorageError),
        ({"a": 5}, InvalidArgumentError),
    ],
)
def test_containers_that_are_refused(containers: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        zm.create("memory://refused-containers", virtual_containers=containers)
    assert "pw1" not in str(caught.value)
    assert not zm.exists("memory://refused-containers")


def test_no_refs_change_nothing(repo: zm.Repository) -> None:
    with repo.transaction(message="array") as store:
        make(store)
    session = repo.writable_session()
    none = np.zeros(0, int)
    session.store.set_virtual_refs("a", none.reshape(0, 1), [], none, none, none)
    assert not session.status()


# --- reading ---------------------------------------------------------------------------------


def read_one(repo: zm.Repository) -> int:
    return int(zarr.open_array(repo.readonly_session().store, path="a")[0])


def test_without_its_container_nothing_is_touched(
    repo: zm.Repository, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder)
    other = {"other": folder, "archives": folder}

    def touched(*_: object, **__: object) -> None:
        pytest.fail("a file was touched")

    monkeypatch.setattr(files, "_open", touched)
    for containers in ({}, other):
        closed = zm.open(tmp_path / "repo", virtual_containers=containers)
        with pytest.raises(PermissionError, match="'archive'") as caught:
            read_one(closed)
        assert isinstance(caught.value, VirtualContainerError)
        assert closed.readonly_session().store.get_virtual_refs("a").sizes.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("file:///data/winds.zarr/time/c/0", "file:///data/winds.zarr"),
        ("file:///data/winds.zarr/deep/er/u/0.0.0", "file:///data/winds.zarr"),
        ("file:///data/winds.zarr/c", "file:///data/winds.zarr"),
        ("file:///data/winds/time/c/0", "file:///data/winds"),
        ("file:///data/winds/u/c/10/0/2", "file:///data/winds"),
        ("file:///data/winds/u/c.0.1", "file:///data/winds"),
        ("file:///data/winds/scalar/c", "file:///data/winds"),
        ("file:///data/winds/u/0.1.20", "file:///data/winds"),
        ("file:///data/winds/u/0/1", "file:///data/winds"),
        ("file:///data/winds/deep/u/0", "file:///data/winds/deep"),
        ("memory://winds/time/c/0", "memory://winds"),
        ("memory://winds/time/0", "memory://winds"),
        ("file:///data/2020/winds-01.nc", "file:///data/2020"),
        ("file:///data/2020/01", "file:///data/2020"),
        ("file:///data/c/winds.nc", "file:///data/c"),
        ("file:///u/0", "file:///u"),  # never all there is
        ("memory://winds/0", "memory://winds"),
    ],
)
def test_the_hint_names_the_store_that_a_chunk_is_of(file: str, folder: str) -> None:
    source = Containers().source_at(file)
    with pytest.raises(VirtualContainerError, match=rf"'{re.escape(folder)}'}} if you trust it"):
        Containers().resolve(source)
    held = Containers.of({"any": folder})
    assert held.resolve(source)[1].url == file


def test_the_hint_of_an_imported_store_opens_all_of_it(tmp_path: Path) -> None:
    plain = xr.Dataset({"t": ("time", np.arange(4.0))}, {"time": np.arange(4)})
    plain.to_zarr(tmp_path / "plain", consolidated=False)
    zm.virtual.import_zarr(zm.create(tmp_path / "repo"), tmp_path / "plain", "imported")
    open_it = partial(xr.open_dataset, tmp_path / "repo", engine="zarr_manifests", group="imported")
    with pytest.raises(VirtualContainerError) as caught:
        open_it()
    hint = str(caught.value).split("{<a name>: '")[1].split("'}")[0]
    assert hint == (tmp_path / "plain").as_uri()
    repo = zm.open(tmp_path / "repo", virtual_containers={"plain": hint})
    found = xr.open_dataset(repo, engine="zarr_manifests", group="imported")
    assert found.load().equals(plain)


def test_a_location_below_no_container_needs_one_that_holds_it(
    folder: Path, tmp_path: Path
) -> None:
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder)
    for prefix in ({}, {"x": folder / "deep"}, {"x": f"{folder}s"}):
        with pytest.raises(VirtualContainerError, match=folder.as_uri()):
            read_one(zm.open(tmp_path / "repo", virtual_containers=prefix))
    for held in (folder, tmp_path, "/", f"{folder}/deep/../"):
        opened = zm.open(tmp_path / "repo", virtual_containers={"any": held})
        assert read_one(opened) == 0


def test_links_and_climbing_do_not_leave_the_container(
    repo: zm.Repository, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"\x07")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "in").symlink_to(folder / "deep" / "b.bin")
    session = repo.writable_session()
    a = make(session.store)
    for path in ("out", "up/secret", "up/archive/../secret"):
        url = f"{folder.as_uri()}/{path}"
        session.store.set_virtual_refs("a", [[0]], [url], [0], [0], [1])
        with pytest.raises(VirtualContainerError):
            a[0]
    for climbing in ("../secret", "deep/../../secret", "%2e%2e/secret"):
        url = f"{folder.as_uri()}/{climbing}"
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


@pytest.mark.parametrize("known", ["etags", "modified", "sizes"])
def test_a_file_that_changed_is_an_error(repo: zm.Repository, folder: Path, known: str) -> None:
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder, **{known: versions(folder)[known]})
    assert read_one(repo) == 0
    was = (folder / "a.bin").stat()
    (folder / "a.bin").write_bytes(bytes(64 if known == "sizes" else 32))
    os.utime(folder / "a.bin", ns=(was.st_atime_ns, was.st_mtime_ns + 2_000_000))
    with pytest.raises(VirtualSourceChangedError, match=r"a\.bin has changed"):
        read_one(repo)


def test_a_local_file_must_not_have_changed_since_a_time(repo: zm.Repository, folder: Path) -> None:
    changed_ms = versions(folder)["modified"]
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder, unchanged_since=changed_ms)
    assert read_one(repo) == 0
    was = (folder / "a.bin").stat()
    os.utime(folder / "a.bin", ns=(was.st_atime_ns, was.st_mtime_ns + 1_000_000))
    with pytest.raises(VirtualSourceChangedError, match="at most"):
        read_one(repo)
    os.utime(folder / "a.bin", ns=(was.st_atime_ns, was.st_mtime_ns - 1_000_000))
    assert read_one(repo) == 0


def test_short_missing_damaged_and_odd_files(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store, chunk=4)
    url = (folder / "a.bin").as_uri()

    def at(location: str, offset: int, **known: Any) -> None:
        session.store.set_virtual_refs("a", [[0]], [location], [0], [offset], [4], **known)

    at(url, 30)
    with pytest.raises(CorruptObjectError, match="ends at byte 32"):
        a[0]
    at(url, 2**60)
    with pytest.raises(CorruptObjectError, match="ends at byte 32"):
        a[0]
    at(url, 0, checksums=[7])
    with pytest.raises(CorruptObjectError, match="checksum"):
        a[0]
    for gone in ("gone.bin", "a.bin/below", "gone/a.bin"):
        at(f"{folder.as_uri()}/{gone}", 0)
        with pytest.raises(MissingChunkError, match="not there"):
            a[0]
    at(f"{folder.as_uri()}/deep", 0)
    with pytest.raises(StorageError, match="not a file"):
        a[0]
    os.mkfifo(folder / "pipe")
    at(f"{folder.as_uri()}/pipe", 0)
    with pytest.raises(StorageError, match="not a file"):
        a[0]
    at(url, 0)
    assert a[:4].tolist() == [0, 1, 2, 3]


async def test_files_in_memory(tmp_path: Path) -> None:
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
    reader = contents_of(session.store).reader
    ref = contents_of(session.store).find("a/c/1")
    assert ref is not None
    assert await reader.read_async(ref, 3, 2) == DATA[35:37].tobytes()
    files.put("in/a.bin", DATA.tobytes())
    with pytest.raises(VirtualSourceChangedError, match="etag"):
        a[:]
    files.delete_many(["in/a.bin"])
    with pytest.raises(MissingChunkError):
        a[:]


# --- forks and pickles -----------------------------------------------------------------------


def test_pickles_carry_the_containers(repo: zm.Repository, folder: Path) -> None:
    with repo.transaction(message="refer") as store:
        make(store)
        refer(store, folder)
    assert read_one(pickle.loads(pickle.dumps(repo))) == 0
    store = pickle.loads(pickle.dumps(repo.readonly_session().store))
    assert zarr.open_array(store, path="a")[33] == 33


def test_forks_set_refs_and_are_merged_once(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    a[60] = 7
    url = [(folder / "a.bin").as_uri()]
    forks = [pickle.loads(pickle.dumps(session.fork())) for _ in range(2)]
    for k, fork in enumerate(forks):
        rows = np.arange(16) + 16 * k
        fork.store.set_virtual_refs("a", rows[:, None], url, rows * 0, rows, rows * 0 + 1)
    session.merge(*(pickle.loads(pickle.dumps(fork)) for fork in forks))
    session.merge(forks[0])
    # The same copy goes on: what it had before counts once, what is new is taken.
    forks[1].store.set_virtual_refs("a", [[16], [40]], url, [0, 0], [3, 4], [1, 1])
    session.merge(forks[1])
    expected = np.zeros(64, "u1")
    expected[:32] = DATA[:32]
    expected[[16, 40, 60]] = 3, 4, 7
    np.testing.assert_array_equal(a[:], expected)
    session.commit("merged")
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:], expected)


def test_forks_that_disagree_are_refused_whole(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    refer(session.store, folder)
    url = [(folder / "a.bin").as_uri()]
    one, two = session.fork(), session.fork()
    one.store.set_virtual_refs("a", [[0], [1]], url, [0, 0], [10, 11], [1, 1])
    two.store.set_virtual_refs("a", [[1], [2]], url, [0, 0], [12, 13], [1, 1])
    with pytest.raises(ConflictError) as caught:
        session.merge(one, two)
    assert caught.value.conflicts[0].chunks == ((1,),)
    np.testing.assert_array_equal(a[:], DATA)
    three = session.fork()
    three.store.set_virtual_refs("a", [[1], [3]], url, [0, 0], [11, 14], [1, 1])
    three.store.delete_sync("a/c/5")
    session.merge(one, three)  # the same file, offset and length for chunk 1
    assert a[:6].tolist() == [10, 11, 2, 14, 4, 0]


def test_a_fork_without_changes_to_refs_leaves_them(repo: zm.Repository, folder: Path) -> None:
    session = repo.writable_session()
    a = make(session.store)
    refer(session.store, folder)
    fork = pickle.loads(pickle.dumps(session.fork()))
    zarr.open_array(fork.store, path="a")[3] = 99
    a[4] = 98
    session.merge(pickle.loads(pickle.dumps(fork)))
    assert a[:6].tolist() == [0, 1, 2, 99, 98, 5]
    session.commit("both")
    assert zarr.open_array(session.store, path="a")[:6].tolist() == [0, 1, 2, 99, 98, 5]


def test_refs_live_through_a_fold(folder: Path, tmp_path: Path) -> None:
    repo = zm.create(
        tmp_path / "repo",
        {"compaction": {"max-delta-count": 3}},
        virtual_containers={"archive": folder},
    )
    session = repo.writable_session()
    make(session.store)
    refer(session.store, folder, **versions(folder))
    session.commit("refer")
    for value in (100, 101, 102):
        zarr.open_array(session.store, path="a")[value - 100] = value
        session.commit("over")
    assert contents_of(session.store).view.snapshot.base is not None
    a = zarr.open_array(repo.readonly_session().store, path="a")
    np.testing.assert_array_equal(a[:], np.r_[100, 101, 102, DATA[3:]])
