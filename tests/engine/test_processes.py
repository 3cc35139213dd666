"""Real processes on a local disk: a kill leaves no mess, and a forked child takes nothing along."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from inside import root_of
from stored import put
from zarr_manifests import Repository
from zarr_manifests.ids import session_of
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.store import contents_of


def commit(repository: Repository, key: str, value: bytes) -> str:
    session = repository.writable_session("main")
    put(session, key, value)
    return session.commit(key)


def made(path: Path, **config: Any) -> Repository:
    repository = zm.create(path, config)
    with repository.transaction("main", message="array") as store:
        zarr.create_array(store, name="a", shape=(10_000,), chunks=(1,), dtype="u1")
    return repository


def in_child(work: Callable[[], object]) -> None:
    """Do the work in a child of plain `os.fork`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_that_share_everything_use_names_of_their_own(tmp_path: Path) -> None:
    """A child of `os.fork` has the parent's session, open files and random state."""
    repository = made(tmp_path, pack_chunk_bytes=0)
    session = repository.writable_session("main")
    put(session, "a/c/99", b"p" * 2000)

    def work(child: int) -> None:
        put(session, f"a/c/{child}", bytes([child]) * 2000)
        commit(repository, f"a/c/{50 + child}", bytes([child]) * 2000)

    for child in range(3):
        in_child(lambda child=child: work(child))
    put(session, "a/c/98", b"q" * 2000)
    chunks = [info.key for info in LocalStorage(tmp_path).list("chunks/")]
    assert len(chunks) == 8 + 3  # and each child's sign that it has written
    assert len({session_of(key) for key in chunks}) == 7
    session.commit("the parent's own", discard_unmerged=True)
    read = zm.open(tmp_path).readonly_session("main").store
    found = sorted(contents_of(read).keys_below("a/c/"))
    assert found == [f"a/c/{i}" for i in (50, 51, 52, 98, 99)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parent_the_lease(tmp_path: Path) -> None:
    repository = made(tmp_path)
    session = repository.writable_session("main", lease=60)

    def leases() -> list[str]:
        return [lease.name for lease in root_of(zm.open(tmp_path)).leases]

    before = leases()
    assert len(before) == 1
    commit(zm.open(tmp_path), "a/c/1", b"others")

    def end() -> None:
        session.discard_changes()
        session.rebase()
        session.close()

    in_child(end)
    assert leases() == before
    session.close()
    assert leases() == []
