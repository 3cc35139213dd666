"""Stores that the caller has opened: obstore's, zarr's and fsspec's."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, StorageError
from zarr_manifests.repository import context_of
from zarr_manifests.storage import from_fsspec, from_obstore, fsspec_writer
from zarr_manifests.storage.fsspec_files import FsspecFiles
from zarr_manifests.storage.fsspec_proven import Conditions
from zarr_manifests.storage.fsspec_writer import SingleWriter
from zarr_manifests.storage.local import LocalStorage

stores = pytest.importorskip("obstore.store")
fsspec = pytest.importorskip("fsspec")

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_writer, "_SETTLE_S", 0)


def _client(endpoint: str, prefix: str = "prefix", **options: Any) -> Any:
    http = {"allow_http": True}
    return stores.S3Store(
        "bucket", prefix=prefix, endpoint=endpoint, client_options=http, **options
    )


def _folder() -> tuple[Any, str]:
    return fsspec.filesystem("memory"), f"/own-{next(_numbers)}"


# --- where a storage is taken --------------------------------------------------------------------


def test_a_store_is_taken_where_a_storage_is(small_store: Any) -> None:
    client = _client(small_store.endpoint)
    repo = zm.create(client)
    with repo.transaction(message="a group") as store:
        zarr.create_group(store, path="a")
    for location in (client, from_obstore(client), zarr.storage.ObjectStore(client)):
        there = zm.open(location)
        assert context_of(there).repository_id == context_of(repo).repository_id
        with there.transaction(message="another") as store:
            zarr.open_group(store, path="a").attrs["n"] = 1
    with pytest.raises(InvalidArgumentError, match="storage_options"):
        zm.open(client, storage_options={"region": "x"})
    with pytest.raises(InvalidArgumentError, match="a Group is not a location"):
        zm.open(zarr.create_group({}))


def test_a_read_only_store_of_zarr_stays_read_only(small_store: Any) -> None:
    client = _client(small_store.endpoint)
    zm.create(client)
    before = small_store.objects["bucket/prefix/current"]
    there = zm.open(zarr.storage.ObjectStore(client, read_only=True))
    copy = pickle.loads(pickle.dumps(there.storage))
    assert not copy.capabilities.cas
    calls: list[Callable[[], object]] = [
        lambda: there.create_tag("t"),
        lambda: copy.put("a", b""),
        lambda: copy.create("a", b""),
        lambda: copy.delete_many(["current"]),
    ]
    for call in calls:
        with pytest.raises(ManifestsError):
            call()
    assert small_store.objects["bucket/prefix/current"] == before
    assert "bucket/prefix/a" not in small_store.objects


# --- secrets ---------------------------------------------------------------------------------


def _texts(storage: Any) -> str:
    said = [repr(storage), storage.url, str(vars(storage))]
    for call in (lambda: storage.get("a"), lambda: pickle.dumps(storage)):
        with pytest.raises(StorageError) as caught:
            call()
        said += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    return " ".join(said)


def test_secrets_of_a_client_are_not_pickled() -> None:
    secrets = {"access_key_id": "PLANTEDid", "secret_access_key": "PLANTEDsecret"}
    storage = from_obstore(_client("http://127.0.0.1:1", **secrets))
    assert "PLANTED" not in f"{storage!r} {storage.url} {vars(storage)}"
    with pytest.raises(StorageError) as caught:
        pickle.dumps(storage)
    assert "PLANTED" not in str(caught.value)


class _Leaking(fsspec.AbstractFileSystem):
    protocol = "leaking"

    def cat_file(self, path: str, **_: Any) -> bytes:
        raise OSError(f"https://host/{path}?signature=PLANTED")


def test_secrets_of_a_filesystem_are_told_to_nobody() -> None:
    for options in ({"key": "PLANTED"}, {"client_kwargs": {"aws_session_token": "PLANTED"}}):
        storage = from_fsspec(_Leaking(**options), "bucket/x")
        assert "PLANTED" not in _texts(storage)
    for path in ("https://PLANTED@host/x", "https://host/x?token=PLANTED"):
        with pytest.raises(InvalidArgumentError) as caught:
            from_fsspec(_Leaking(), path)
        assert "PLANTED" not in str(caught.value)


# --- what fsspec may do ----------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match", ""])
def test_a_race_is_held_before_the_first_conditional_write(small_store: Any, ignored: str) -> None:
    s3fs = pytest.importorskip("s3fs")
    Conditions._proven.clear()
    small_store.heeds.discard(ignored)
    fs = s3fs.S3FileSystem(endpoint_url=small_store.endpoint)
    storage = from_fsspec(fs, "bucket/prefix", "proven")
    assert storage.capabilities.cas
    if ignored:
        for call in (lambda: zm.create(storage), lambda: storage.create("a", b"")):
            with pytest.raises(UnsupportedStorageError, match=f"all succeeded with {ignored}"):
                call()
        assert not storage.capabilities.cas
    else:
        assert storage.create("a", b"1")
        assert from_fsspec(fs, "bucket/prefix", "proven").create("b", b"1")
    raced = [r for r in small_store.requests if r.startswith("PUT") and "/.race-" in r]
    assert len(raced) == (16 if ignored == "If-None-Match" else 32), "once, then it is known"
    assert not any("/.race-" in name for name in small_store.objects)


# --- a single writer -------------------------------------------------------------------------


class _Clock:
    """The time of the machine and of two writers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.meanwhile: Callable[[], object] = lambda: None
        runtime = fsspec_writer.SYSTEM
        clock = type(
            "Clock",
            (),
            {
                "now_ms": lambda _: int(self.now_s * 1000),
                "monotonic_s": lambda _: self.now_s,
                "sleep": lambda _, seconds: self.meanwhile(),
                "who": lambda _: "somebody@here",
                "random_bytes": lambda _, n: runtime.random_bytes(n),
            },
        )()
        monkeypatch.setattr(fsspec_writer, "SYSTEM", clock)


def test_of_two_writers_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (fs, path) = _Clock(monkeypatch), _folder()
    one, other = (SingleWriter(FsspecFiles(fs, path)) for _ in range(2))
    token = one.swap("a", b"1", None)
    with pytest.raises(StorageError, match=r"is written by somebody@here .* sign of life is 0 s"):
        other.swap("a", b"2", token)
    clock.now_s += 290
    token = one.swap("a", b"2", token)
    assert token is not None
    clock.now_s += 290
    with pytest.raises(StorageError, match="sign of life is 290 s"):
        other.create("b", b"")
    one.release()
    assert other.create("b", b"")
    with pytest.raises(StorageError, match="is written by"):
        one.write("c", b"")


def test_of_two_that_take_the_lock_at_once_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (fs, path), (_, elsewhere) = _Clock(monkeypatch), _folder(), _folder()
    SingleWriter(FsspecFiles(fs, elsewhere)).create("a", b"")
    clock.meanwhile = lambda: fs.copy(f"{elsewhere}/.writer", f"{path}/.writer")
    with pytest.raises(StorageError, match="same moment"):
        SingleWriter(FsspecFiles(fs, path)).create("a", b"")
    assert not fs.exists(f"{path}/a")


def test_who_was_silent_for_too_long_never_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (fs, path) = _Clock(monkeypatch), _folder()
    one, other = (SingleWriter(FsspecFiles(fs, path)) for _ in range(2))
    token = one.swap("a", b"1", None)
    clock.now_s += 301
    assert other.swap("a", b"2", token) is not None
    calls: list[Callable[[], object]] = [
        lambda: one.swap("a", b"3", token),
        lambda: one.create("b", b""),
        lambda: one.write("a", b""),
        lambda: one.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="has taken over"):
            call()
    clock.now_s += 1000  # the other one may have ended, which does not bring this one back
    with pytest.raises(StorageError, match="has taken over"):
        one.create("b", b"")
    assert fs.cat_file(f"{path}/a") == b"2"
    assert b'"epoch": 2' in fs.cat_file(f"{path}/.writer")


def test_other_stores_of_obstore(tmp_path: Path) -> None:
    local = from_obstore(stores.LocalStore(tmp_path))
    assert isinstance(local, LocalStorage)
    assert local.path == str(tmp_path)
    web = from_obstore(stores.HTTPStore("https://example.org/x"), url="https://shown")
    assert web.url == "https://shown"
    assert not web.capabilities.create
    for wrong in (stores.MemoryStore(), stores.LocalStore(), object()):
        with pytest.raises(InvalidArgumentError, match="cannot hold a repository"):
            from_obstore(wrong)


def test_few_filesystems_are_proven() -> None:
    with pytest.raises(UnsupportedStorageError, match=r"for s3fs and adlfs only: MemoryFile"):
        from_fsspec(*_folder(), mode="proven")
    with pytest.raises(InvalidArgumentError, match="mode 'write' is not one of"):
        from_fsspec(*_folder(), mode="write")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="path of a folder"):
        from_fsspec(fsspec.filesystem("memory"))
    with pytest.raises(InvalidArgumentError, match="a filesystem or a mapper"):
        from_fsspec(object(), "/x")


def test_a_damaged_lock_is_left_to_its_owner() -> None:
    fs, path = _folder()
    fs.pipe_file(f"{path}/.writer", b"{")
    with pytest.raises(StorageError, match=r"the lock \.writer .* is damaged"):
        from_fsspec(fs, path, "single-writer").create("a", b"")
