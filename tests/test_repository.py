"""Repositories: creating and opening them, refs, history, time travel."""

from __future__ import annotations

import ast
import inspect
import pickle
import textwrap
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Config, Repository
from zarr_manifests.error_cases import (
    ConfigError,
    FencedError,
    NotARepositoryError,
    ObjectNotFoundError,
    UnmergedForksError,
    UnsupportedStorageError,
)
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    ReadOnlyError,
    SnapshotExpiredError,
)
from zarr_manifests.repository import context_of
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities
from zarr_manifests.store import contents_of
from zarr_manifests.testing import WrappedStorage


def commit_value(repository: Repository, key: str, value: bytes, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))
    return session.commit(f"{key} = {value!r}")


def read_value(repository: Repository, key: str, version: str | None = None) -> bytes | None:
    found = repository.readonly_session(version).store.get_sync(key)
    return None if found is None else found.to_bytes()


@pytest.fixture
def repository() -> Repository:
    return zm.create(MemoryStorage())


# --- create and open -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "text", "url", "storage"])
def test_create_and_open_by_any_location(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "with space" / "repository"
    location: Any = {
        "path": folder,
        "text": str(folder),
        "url": LocalStorage(folder).url,
        "storage": LocalStorage(folder),
    }[kind]
    assert not zm.exists(location)
    repository = zm.create(location)
    commit_value(repository, "k", b"v")
    assert zm.exists(location)
    opened = zm.open(location)
    assert read_value(opened, "k") == b"v"
    assert context_of(opened).repository_id == context_of(repository).repository_id
    assert len(context_of(opened).repository_id) == 32
    assert opened.storage.url == repository.storage.url


def test_a_new_repository_has_one_empty_snapshot(repository: Repository) -> None:
    (first,) = repository.ancestry()
    assert first.message == "create repository"
    assert first.parent_id is None
    assert repository.list_branches() == {"main": first.snapshot_id}
    assert repository.list_tags() == {}
    assert [*contents_of(repository.readonly_session().store).keys_below("")] == []


def test_create_refuses_a_repository_and_anything_else(tmp_path: Path) -> None:
    zm.create(tmp_path / "a")
    with pytest.raises(AlreadyExistsError, match="there is a repository"):
        zm.create(tmp_path / "a")
    with zm.open(tmp_path / "a").transaction(message="data") as store:
        zarr.create_array(store, name="big", data=np.arange(10_000))
    with pytest.raises(AlreadyExistsError, match="there is a repository"):
        zm.create(tmp_path / "a")  # its chunks come first in a listing
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "holiday.jpg").write_bytes(b"jpeg")
    with pytest.raises(AlreadyExistsError, match=r"not empty.*holiday\.jpg"):
        zm.create(tmp_path / "b")
    with pytest.raises(AlreadyExistsError, match="not empty"):
        zm.open(tmp_path / "b", create=True)
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["holiday.jpg"]


def test_create_refuses_a_repository_that_lost_its_root(repository: Repository) -> None:
    storage = repository.storage
    commit_value(repository, "k", b"v")
    storage.delete_many(["current"])
    with pytest.raises(AlreadyExistsError, match="newest archive under 'root/'"):
        zm.create(storage)
    with pytest.raises(NotARepositoryError):
        zm.open(storage)


def test_create_goes_on_where_a_killed_create_left_off() -> None:
    storage = MemoryStorage()
    zm.create(storage)
    # A create that was killed before its swap leaves these two.
    left = [i.key for i in storage.list() if i.key.startswith(("deltas/", "snapshots/"))]
    storage.delete_many(["current", *(i.key for i in storage.list("root/"))])
    assert len(left) == 2
    repository = zm.create(storage)
    assert len([*repository.ancestry()]) == 1


def test_open_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError, match=r"no repository at .*nothing.*'current'"):
        zm.open(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        zm.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("winds.nc", r"a netCDF file lies there, and no repository: `zm\.virtual\.write` refers"),
        ("WINDS.H5", r"a netCDF file lies there"),
        (
            "winds.grib2",
            r"a GRIB file.*`zm\.virtual\.import_kerchunk` refers.*`zm\.write`",
        ),
        ("winds.csv", r"make one with zm\.create, or check the path"),
    ],
)
def test_open_says_how_to_import_files(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / name
    file.write_bytes(b"data")
    with pytest.raises(NotARepositoryError, match=said):
        zm.open(file)
    in_folder = said.replace("a netCDF file", "a folder with netCDF files")
    with pytest.raises(NotARepositoryError, match=in_folder.replace("a GRIB file", "GRIB files")):
        zm.open(tmp_path / "files")


def test_open_makes_one_if_asked_to_and_opens_it_afterwards(tmp_path: Path) -> None:
    first = zm.open(tmp_path / "r", {"compaction": {"max-delta-count": 7}}, create=True)
    second = zm.open(tmp_path / "r", create=True)
    assert context_of(first).repository_id == context_of(second).repository_id
    assert second.config.compaction.max_delta_count == 7


def test_racing_creates_have_one_winner() -> None:
    storage = MemoryStorage()
    outcomes: list[object] = []

    def create() -> None:
        try:
            outcomes.append(context_of(zm.create(storage)).repository_id)
        except AlreadyExistsError as error:
            outcomes.append(error)

    SYSTEM.parallel([create] * 8)
    winners = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert winners == [context_of(zm.open(storage)).repository_id]
    assert len(outcomes) == 8


def test_racing_processes_that_may_create_all_open_the_same() -> None:
    storage = MemoryStorage()
    found = SYSTEM.parallel([lambda: context_of(zm.open(storage, create=True)).repository_id] * 8)
    assert len(set(found)) == 1


class _WithoutSwap(WrappedStorage):
    @property
    def capabilities(self) -> Capabilities:
        return replace(self.storage.capabilities, cas=False)


def test_storage_that_cannot_swap_is_read_only() -> None:
    storage = MemoryStorage()
    with pytest.raises(UnsupportedStorageError, match="compare-and-swap"):
        zm.create(_WithoutSwap(storage))
    commit_value(zm.create(storage), "k", b"v")
    repository = zm.open(_WithoutSwap(storage))
    assert read_value(repository, "k") == b"v"
    with pytest.raises(UnsupportedStorageError, match="read-only"):
        repository.writable_session("main")


def test_pickled_repository_opens_the_same_place(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "r", {"compaction": {"max-delta-count": 9}})
    commit_value(repository, "k", b"v")
    again = pickle.loads(pickle.dumps(repository))
    assert context_of(again).repository_id == context_of(repository).repository_id
    assert again.config == repository.config
    assert read_value(again, "k") == b"v"


# --- configuration ---------------------------------------------------------------------------


def test_configuration_is_saved_and_overlaid_when_opened() -> None:
    storage = MemoryStorage()
    saved = Config.from_dict({"inline-chunk-bytes": 7, "compaction": {"max-delta-count": 8}})
    zm.create(storage, saved)
    assert zm.open(storage).config == saved
    overlaid = zm.open(storage, {"compaction": {"max-delta-count": 9}})
    assert overlaid.config == saved.overlaid({"compaction": {"max-delta-count": 9}})
    replaced = zm.open(storage, Config(inline_chunk_bytes=3))
    assert replaced.config == Config(inline_chunk_bytes=3)
    assert zm.open(storage).config == saved


@pytest.mark.parametrize("name", ["create", "open", "open or create"])
def test_unknown_option_is_refused_before_anything_is_written(name: str) -> None:
    storage = MemoryStorage()
    if name == "open":
        zm.create(storage)
    before = [*storage.list()]
    make = partial(zm.open, create=True) if name == "open or create" else getattr(zm, name)
    with pytest.raises(ConfigError, match="compression: unknown option"):
        make(storage, {"compression": "zip", "compaction": {"max-delta-count": 0}})
    assert [*storage.list()] == before


# --- branches and tags -----------------------------------------------------------------------


def test_branches(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    two = commit_value(repository, "k", b"2")
    repository.create_branch("side", one)
    repository.create_branch("top")
    assert repository.list_branches() == {"main": two, "side": one, "top": two}
    assert read_value(repository, "k", "side") == b"1"
    three = commit_value(repository, "k", b"3", branch="side")
    assert repository.list_branches() == {"main": two, "side": three, "top": two}
    assert read_value(repository, "k") == b"2"
    assert [i.snapshot_id for i in repository.ancestry("side")][:2] == [three, one]
    repository.reset_branch("main", three, force=True)
    assert read_value(repository, "k") == b"3"
    repository.delete_branch("side")
    assert repository.list_branches() == {"main": three, "top": two}


def test_a_reset_that_drops_commits_has_to_be_asked_for(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    repository.create_branch("side", one)
    two = commit_value(repository, "k", b"2")
    with pytest.raises(InvalidArgumentError, match=rf"main.*{two}.*expected='{two}'.*force"):
        repository.reset_branch("main", one)
    aside = commit_value(repository, "k", b"aside", branch="side")
    with pytest.raises(InvalidArgumentError, match="not a descendant"):
        repository.reset_branch("main", aside)
    assert repository.list_branches()["main"] == two
    repository.reset_branch("main", two)
    repository.reset_branch("main", one, expected=two)
    assert repository.list_branches()["main"] == one
    repository.reset_branch("main", aside)  # nothing is dropped
    repository.reset_branch("main", one, force=True)
    assert repository.list_branches()["main"] == one


@pytest.mark.parametrize("beside", [False, True])
def test_a_reset_from_an_expected_head_drops_no_commit_that_came_meanwhile(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    one = commit_value(repository, "k", b"1")
    two = commit_value(repository, "k", b"2")
    other, made, cas = zm.open(repository.storage), list[str](), MemoryStorage.cas

    def late(storage: MemoryStorage, *args: Any, **options: Any) -> Any:
        if not made:  # between what the reset has read and its swap
            made.append("")
            made[0] = commit_value(other, "k", b"3")
        return cas(storage, *args, **options)

    if beside:
        monkeypatch.setattr(MemoryStorage, "cas", late)
    else:
        made.append(commit_value(other, "k", b"3"))
    with pytest.raises(ConflictError, match=f"not at {two} any more"):
        repository.reset_branch("main", one, expected=two)
    three = made[0]
    assert zm.open(repository.storage).list_branches()["main"] == three
    with pytest.raises(ConflictError):  # also if nothing would be dropped
        repository.reset_branch("main", three, expected=two)
    with pytest.raises(InvalidArgumentError, match="not a snapshot id"):
        repository.reset_branch("main", one, expected="main")


def test_branch_refusals_name_what_is_wrong(repository: Repository) -> None:
    repository.create_branch("side")
    with pytest.raises(AlreadyExistsError, match="'side' exists"):
        repository.create_branch("side")
    with pytest.raises(NotFoundError, match=r"no branch 'nope'.*main, side"):
        repository.delete_branch("nope")
    with pytest.raises(NotFoundError, match="no branch 'nope'"):
        repository.reset_branch("nope", repository.list_branches()["main"])
    with pytest.raises(InvalidArgumentError, match="'main' cannot be deleted"):
        repository.delete_branch("main")
    for session in (repository.readonly_session, repository.writable_session):
        with pytest.raises(NotFoundError, match="no branch 'nope'"):
            session("nope")
        with pytest.raises(NotFoundError, match="no branch ''"):
            session("")


@pytest.mark.parametrize(
    "name",
    [
        *("", "/x", "-x", ".x", "a b", "ä", "x" * 256, "a\n", "a:b", None, 3),
        *("a/..", "a//b", "a/", "/a", ".", "..", "a/./b", "a/../b", "a/.", "../a"),
    ],
)
def test_ref_names_that_are_refused(repository: Repository, name: Any) -> None:
    with pytest.raises((InvalidArgumentError, TypeError)):
        repository.create_branch(name)
    with pytest.raises((InvalidArgumentError, TypeError)):
        repository.create_tag(name)
    assert list(repository.list_branches()) == ["main"]


@pytest.mark.parametrize("name", ["v1.0", "a/b", "_x", "0", "x" * 255, "A-b_c.d/e"])
def test_ref_names_that_are_taken(repository: Repository, name: str) -> None:
    repository.create_branch(name)
    repository.create_tag(name)
    assert name in repository.list_branches()
    assert name in repository.list_tags()


def test_tags(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    repository.create_tag("v1")
    two = commit_value(repository, "k", b"2")
    repository.create_tag("v2", two)
    assert repository.list_tags() == {"v1": one, "v2": two}
    assert read_value(repository, "k", "v1") == b"1"
    assert next(i.snapshot_id for i in repository.ancestry("v1")) == one
    with pytest.raises(AlreadyExistsError, match="tags do not move: choose another name"):
        repository.create_tag("v1")
    repository.delete_tag("v1")
    assert repository.list_tags() == {"v2": two}
    with pytest.raises(NotFoundError, match=r"no tag 'v1'.*v2"):
        repository.readonly_session("refs/tags/v1")
    with pytest.raises(NotFoundError, match="no tag 'v1'"):
        repository.delete_tag("v1")


def test_the_name_of_a_deleted_tag_is_never_used_again(repository: Repository) -> None:
    repository.create_tag("v1")
    repository.delete_tag("v1")
    for _ in range(40):  # beyond the tail of the log
        repository.create_branch("b")
        repository.delete_branch("b")
    with pytest.raises(AlreadyExistsError, match="never used again"):
        zm.open(repository.storage).create_tag("v1")
    repository.create_branch("v1")  # a branch may have it


def test_refs_point_only_to_snapshots_that_are_there(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    two = commit_value(repository, "k", b"2")
    repository.reset_branch("main", one, force=True)
    assert read_value(repository, "k", two) == b"2"
    for make in (repository.create_branch, repository.create_tag):
        make("left", two)  # it is not collected
    repository.delete_branch("left")
    repository.delete_tag("left")
    repository.garbage_collect(timedelta(0))
    for make in (repository.create_branch, repository.create_tag, repository.reset_branch):
        name = "main" if make == repository.reset_branch else "new"
        with pytest.raises(SnapshotExpiredError, match=r"it never was, or has\s+expired"):
            make(name, two)
        with pytest.raises(NotFoundError, match=r"no branch '../../etc/passwd'"):
            make(name, "../../etc/passwd")


def test_a_tag_keeps_its_snapshot_in_history(repository: Repository) -> None:
    one = commit_value(repository, "k", b"1")
    two = commit_value(repository, "k", b"2")
    repository.create_tag("kept", two)
    repository.reset_branch("main", one, force=True)
    repository.create_branch("back", two)
    assert read_value(repository, "k", "back") == b"2"


def test_refs_keep_working_after_a_fold() -> None:
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 2}})
    ids = [commit_value(repository, "k", bytes([i])) for i in range(7)]
    repository.create_branch("old", ids[2])
    repository.create_tag("older", ids[0])
    commit_value(repository, "k", b"new", branch="old")
    assert read_value(repository, "k", "old") == b"new"
    assert read_value(repository, "k", "older") == bytes([0])
    assert read_value(repository, "k") == bytes([6])


def test_many_refs_and_operations(repository: Repository) -> None:
    """More than fits in the tail of the log, from two handles that take turns."""
    other = zm.open(repository.storage)
    for i in range(50):
        (repository, other)[i % 2].create_tag(f"t{i}")
    assert sorted(repository.list_tags()) == sorted(f"t{i}" for i in range(50))
    assert commit_value(other, "k", b"1") == repository.list_branches()["main"]


# --- reading by time, snapshot, tag ----------------------------------------------------------


def _clock(times: list[int]) -> Runtime:
    return replace(SYSTEM, now_ms=lambda: times[0])


def test_a_branch_at_a_time() -> None:
    times = [1_000_000]
    repository = zm.create(MemoryStorage(), runtime=_clock(times))
    for i, at in enumerate((2_000_000, 3_000_000, 4_000_000)):
        times[0] = at
        commit_value(repository, "k", bytes([i]))

    def at(ms: int) -> datetime:
        return datetime.fromtimestamp(ms / 1000, UTC)

    assert read_value(repository, "k", f"main@{at(2_000_000)}") == b"\0"
    assert read_value(repository, "k", f"main@{at(2_999_999)}") == b"\0"
    assert read_value(repository, "k", f"main@{at(3_000_000)}") == b"\1"
    assert read_value(repository, "k", f"main@{at(9_000_000)}") == b"\2"
    assert read_value(repository, "k", f"main@{at(1_500_000)}") is None
    assert read_value(repository, "k", f"main@{at(3_500_000)}") == b"\1"
    assert read_value(repository, "k", f"main@{at(3_500_000).replace(tzinfo=None)}") == b"\1"
    shifted = at(3_500_000).astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert read_value(repository, "k", f"main@{shifted}") == b"\1"
    with pytest.raises(NotFoundError, match="no snapshot from 1970"):
        repository.readonly_session(f"main@{at(999_999)}")
    assert [info.written_at for info in repository.ancestry()] == [
        at(4_000_000),
        at(3_000_000),
        at(2_000_000),
        at(1_000_000),
    ]


def test_unknown_snapshots(repository: Repository) -> None:
    missing = f"{5:012d}-{'0' * 24}-3"
    calls: list[Callable[[], object]] = [
        lambda: repository.readonly_session(missing),
        lambda: repository.ancestry(missing),
        lambda: repository.diff(missing, repository.list_branches()["main"]),
    ]
    for call in calls:
        with pytest.raises(SnapshotExpiredError, match=f"{missing} is not in memory://"):
            call()


def test_a_readonly_session_is_stable_while_others_commit() -> None:
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 3}})
    for i in range(4):
        commit_value(repository, f"k{i}", bytes([i]))
    session = repository.readonly_session("main")
    for i in range(10):
        commit_value(repository, "k0", b"new")
        commit_value(repository, f"more{i}", b"x")
        assert sorted(contents_of(session.store).keys_below("")) == ["k0", "k1", "k2", "k3"]
        found = session.store.get_sync("k0")
        assert found is not None
        assert found.to_bytes() == b"\0"


# --- history ---------------------------------------------------------------------------------


def test_ancestry_tells_who_did_what(repository: Repository) -> None:
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    array[:] = [1, 2, 3, 4]
    first = session.commit("values", metadata={"author": "x", "n": [1, {"y": 2.5}]})
    array = zarr.open_array(session.store, path="a")
    array.resize((8,))
    array[4:] = 5
    session.commit("append")
    zarr.open_array(session.store, path="a")[:2] = 9
    session.commit("overwrite")
    zarr.open_array(session.store, path="a").update_attributes({"units": "m"})
    session.commit("attributes")
    session.store.delete_sync("a/c/0")
    session.commit("delete")
    infos = [*repository.ancestry()]
    assert [(i.message, i.kind) for i in infos] == [
        ("delete", "delete"),
        ("attributes", "metadata"),
        ("overwrite", "overwrite"),
        ("append", "append"),
        ("values", "append"),
        ("create repository", "metadata"),
    ]
    assert infos[4].snapshot_id == first
    assert infos[4].metadata == {"author": "x", "n": [1, {"y": 2.5}]}
    assert infos[4].written["refs-set"] == 2
    assert infos[0].written["refs-unset"] == 1
    assert [i.parent_id for i in infos[:-1]] == [i.snapshot_id for i in infos[1:]]


def test_every_method_hands_over_to_what_does_it() -> None:
    assert Repository.__bases__ == (object,)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(Repository))).body
    assert isinstance(tree, ast.ClassDef)
    lengths = {
        method.name: len(method.body) - (ast.get_docstring(method) is not None)
        for method in tree.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    }
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > 5} == {}


def test_diff(repository: Repository) -> None:
    session = repository.writable_session("main")
    for name in ("kept", "resized", "doomed", "remade"):
        array = zarr.create_array(session.store, name=name, shape=(4, 2), chunks=(2, 2), dtype="i4")
        array[:] = 1
    start = session.commit("four arrays")
    zarr.open_array(session.store, path="kept")[2:] = 5
    session.commit("a chunk")
    group = zarr.open_group(session.store)
    group["resized"].resize((6, 2))  # type: ignore[union-attr]
    del group["doomed"]
    del group["remade"]
    session.commit("metadata")
    zarr.create_array(session.store, name="remade", shape=(2,), chunks=(2,), dtype="i4")
    zarr.create_group(session.store, path="made")
    session.store.set_sync("notes.txt", cpu.Buffer.from_bytes(b"x"))
    end = session.commit("more")
    diff = repository.diff(start, end)
    assert diff.created == ("/made", "/notes.txt", "/remade")
    assert diff.deleted == ("/doomed", "/remade")
    assert diff.updated == ("/resized",)
    np.testing.assert_array_equal(diff.chunks["/kept"], [[1, 0]])
    assert set(diff.chunks) == {"/kept", "/notes.txt"}
    assert repository.diff(end, end).chunks == {}
    with pytest.raises(InvalidArgumentError, match="not an ancestor"):
        repository.diff(end, start)
    repository.create_tag("four", start)
    assert repository.diff("four", "main").deleted == diff.deleted
    assert repository.diff("four", "main").created == diff.created
    with pytest.raises(NotFoundError, match=r"no branch .*, nor a tag or snapshot"):
        repository.diff("four", "five")


def test_diff_across_a_fold() -> None:
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 2}})
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(9,), chunks=(1,), dtype="u1")
    assert array.nchunks == 9
    start = session.commit("array")
    for i in range(7):
        session.store.set_sync(f"a/c/{i}", cpu.Buffer.from_bytes(bytes([i])))
        end = session.commit(f"chunk {i}")
    assert any(info.kind == "rewrite" for info in repository.ancestry())
    diff = repository.diff(start, end)
    np.testing.assert_array_equal(diff.chunks["/a"], [[i] for i in range(7)])
    assert (diff.created, diff.updated, diff.deleted) == ((), (), ())


# --- transactions ----------------------------------------------------------------------------


def test_transaction_commits_at_the_end_of_the_block(repository: Repository) -> None:
    with repository.transaction("main", message="both", metadata={"by": "me"}) as store:
        store.set_sync("a", cpu.Buffer.from_bytes(b"1"))
        store.set_sync("b", cpu.Buffer.from_bytes(b"2"))
        assert read_value(repository, "a") is None
    assert (read_value(repository, "a"), read_value(repository, "b")) == (b"1", b"2")
    info = next(repository.ancestry())
    assert (info.message, info.metadata) == ("both", {"by": "me"})


def test_transaction_that_raises_commits_nothing(repository: Repository) -> None:
    def fail() -> None:
        with repository.transaction("main", message="never") as store:
            store.set_sync("a", cpu.Buffer.from_bytes(b"1"))
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        fail()
    assert read_value(repository, "a") is None
    assert len([*repository.ancestry()]) == 1


def test_transaction_without_changes_makes_no_commit(repository: Repository) -> None:
    with repository.transaction("main", message="nothing") as store:
        assert store.get_sync("a") is None
    assert len([*repository.ancestry()]) == 1


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_transaction_does_not_leave_out_what_pickled_copies_wrote(tmp_path: Path) -> None:
    """Also where the block itself has changed nothing."""
    repository = zm.create(tmp_path / "r")

    def write_in_a_copy() -> None:
        with repository.transaction("main", message="in a copy") as store:
            copy = pickle.loads(pickle.dumps(store))
            copy.set_sync("a", cpu.Buffer.from_bytes(b"1" * 1000))

    with pytest.raises(UnmergedForksError):
        write_in_a_copy()


def test_readonly_session_cannot_commit(repository: Repository) -> None:
    session = repository.readonly_session("main")
    for call in (
        lambda: session.commit("x"),
        session.discard_changes,
        session.fork,
        lambda: session.merge(repository.writable_session("main").fork()),
    ):
        with pytest.raises(ReadOnlyError, match="writable_session"):
            call()


def test_a_location_that_is_none_is_refused() -> None:
    with pytest.raises((InvalidArgumentError, ObjectNotFoundError, UnsupportedStorageError)):
        zm.open("ftp://host/place")


@pytest.mark.parametrize("name", ["my data.nc", "some data/part.nc", "x~"])
def test_no_repository_is_made_among_files_that_no_key_can_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"theirs")
    (tmp_path / ".hidden").write_bytes(b"does not count")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AlreadyExistsError, match="is not empty"):
        zm.open(tmp_path, create=True)
    assert sorted(tmp_path.rglob("*")) == before
    path.unlink()
    if path.parent != tmp_path:
        path.parent.rmdir()
    zm.create(tmp_path)


def test_what_a_recovery_would_do_can_be_asked_where_nothing_can_be_swapped() -> None:
    storage = MemoryStorage()
    zm.create(storage).create_tag("empty")
    storage.delete_many(["current"])
    with pytest.raises(UnsupportedStorageError, match="compare-and-swap"):
        zm.recover(_WithoutSwap(storage))
    told = zm.recover(_WithoutSwap(storage), dry_run=True)
    assert told.recovered == zm.recover(storage).recovered


def test_a_transaction_may_start_from_what_is_known() -> None:
    """It lands on top of what others have committed meanwhile, or conflicts with it."""
    storage = MemoryStorage()
    repo, other = zm.create(storage), zm.open(storage)
    with repo.transaction(message="two arrays") as store:
        for name in ("a", "b"):
            zarr.create_array(store, name=name, shape=(2,), chunks=(1,), dtype="i4")

    def write(repo: Repository, name: str, at: int, value: int, **how: Any) -> None:
        with repo.transaction(message=f"{name} is {value}", **how) as store:
            zarr.open_array(store, path=name)[at] = value

    write(other, "a", 0, 1)
    write(repo, "b", 0, 2, fresh=False)  # it does not know of the other commit
    messages = [info.message for info in other.ancestry(limit=2)]
    assert messages == ["b is 2", "a is 1"]
    write(repo, "b", 1, 3, fresh=False)  # its own last commit
    write(other, "b", 1, 4)
    with pytest.raises(ConflictError):
        write(repo, "b", 1, 5, fresh=False)
    write(repo, "b", 1, 5, fresh=False)  # the conflict has told it of the new head
    arrays = zarr.open_group(repo.readonly_session().store, mode="r")
    assert [list(arrays[name][:]) for name in ("a", "b")] == [[1, 0], [2, 5]]

    other.create_branch("trial")
    with repo.transaction("trial", message="on a branch it has not heard of", fresh=False) as store:
        zarr.open_array(store, path="a")[1] = 7
    other.delete_branch("trial")
    for refused in (ConflictError, NotFoundError):  # the conflict has told it
        with (
            pytest.raises(refused, match="trial"),
            repo.transaction("trial", message="gone", fresh=False) as store,
        ):
            zarr.open_array(store, path="a")[1] = 8
    other.expire_snapshots(1)
    other.garbage_collect(timedelta(0))
    with pytest.raises(FencedError):  # the collection came after the root that it knows
        write(repo, "b", 0, 9, fresh=False)
    write(repo, "b", 0, 9, fresh=False)
    assert repo.verify().ok
