"""Commits without changes or words, and what the log says of amends, resets and deletions."""

from __future__ import annotations

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.repository import resolved
from zarr_manifests.storage.memory import MemoryStorage


def test_a_commit_may_be_empty_if_asked() -> None:
    repo = zm.create(MemoryStorage())
    session = repo.writable_session()
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        session.commit("nothing")
    made = session.commit("a milestone", {"why": "none"}, allow_empty=True)
    info = next(repo.ancestry())
    assert (info.id, info.message, dict(info.metadata)) == (made, "a milestone", {"why": "none"})
    assert not repo.diff("main~1", "main")


def test_a_commit_without_a_message_says_what_has_changed() -> None:
    repo = zm.create(MemoryStorage())
    session = repo.writable_session()
    for name in "abcde":
        zarr.create_group(session.store, path=name)
    session.commit()
    assert next(repo.ancestry()).message == "change /, /a, /b and 3 more"
    zarr.create_array(session.store, name="a/x", shape=(2,), chunks=(1,), dtype="i2")[:] = 1
    session.commit()
    assert next(repo.ancestry()).message == "change /a/x"
    zarr.open_array(session.store, path="a/x")[:] = 2
    session.commit()
    assert next(repo.ancestry()).message == "change /a/x"
    session.commit(allow_empty=True)
    assert next(repo.ancestry()).message == "no changes"
    with pytest.raises(InvalidArgumentError, match="needs a message"):
        session.commit(" ", allow_empty=True)


def test_the_log_tells_what_was_left() -> None:
    repo = zm.create(MemoryStorage())
    first = resolved(repo, "main")
    session = repo.writable_session()
    zarr.create_group(session.store, path="a")
    made = session.commit("make a")
    amended = session.amend("better words")
    repo.create_branch("side")
    repo.create_tag("v1")
    repo.reset_branch("main", first, force=True)
    repo.delete_branch("side")
    repo.delete_tag("v1")
    found = [(one.operation, one.ref, one.before) for one in repo.ops_log()]
    assert found[:3] == [
        ("delete tag", "v1", amended),
        ("delete branch", "side", amended),
        ("reset branch", "main", amended),
    ]
    assert ("amend metadata", "main", made) in found
    assert {before for operation, _, before in found if operation.startswith("create")} == {""}


def test_a_transaction_needs_no_message_and_may_be_empty() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction() as store:
        zarr.create_group(store, path="a")
    with repo.transaction(allow_empty=True):
        pass
    with repo.transaction(message="a milestone", metadata={"n": 1}, allow_empty=True):
        pass
    with repo.transaction():  # nothing has changed, and no commit was asked for
        pass
    found = [(info.message, dict(info.metadata)) for info in repo.ancestry(limit=3)]
    assert found == [("a milestone", {"n": 1}), ("no changes", {}), ("change /, /a", {})]
