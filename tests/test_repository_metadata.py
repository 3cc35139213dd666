"""Metadata of the repository as a whole, and what every commit is configured to say."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.root import METADATA
from zarr_manifests.repository import build_index, resolved
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing.wrapped import Call, WrappedStorage

ABOUT = {"title": "reanalysis", "contacts": ["a@example.org"], "grid": {"lat": 0.25, "n": None}}


def group(repo: Repository, name: str, **metadata: Any) -> str:
    session = repo.writable_session()
    zarr.create_group(session.store, path=name)
    return session.commit(f"make {name}", metadata or None)


def test_it_is_set_replaced_and_updated() -> None:
    repo = zm.create(MemoryStorage())
    assert repo.metadata() == {}
    assert METADATA not in root_of(repo).features
    repo.metadata({})
    assert METADATA not in root_of(repo).features
    repo.metadata(ABOUT, replace=True)
    assert METADATA in root_of(repo).features
    assert repo.metadata() == zm.open(repo.storage).metadata() == ABOUT
    told = repo.metadata()
    told["contacts"].append("nobody")
    told["more"] = 1
    assert repo.metadata() == ABOUT
    assert repo.metadata({"title": "other", "n": np.int64(3)}) == repo.metadata()
    assert repo.metadata() == ABOUT | {"title": "other", "n": 3}
    repo.metadata({"n": 4}, replace=True)
    assert repo.metadata() == {"n": 4}
    repo.metadata({}, replace=True)
    assert repo.metadata() == {}
    operations = [one.operation for one in repo.ops_log()]
    assert operations == ["set metadata"] * 5 + ["create"]
    assert [info.message for info in repo.ancestry()] == ["create repository"]


def cloned(repo: Repository) -> Repository:
    zm.clone(repo, "memory://metadata-of-a-clone")
    return zm.open("memory://metadata-of-a-clone")


def recovered(repo: Repository) -> Repository:
    repo.storage.put("current", b"damaged")
    zm.recover(repo.storage)
    return zm.open(repo.storage)


LATER: dict[str, Callable[[Repository], object]] = {
    "commit": lambda repo: group(repo, "later"),
    "compact": lambda repo: repo.compact(mode="full"),
    "expire": lambda repo: repo.expire_snapshots(keep_last=1),
    "collect": lambda repo: repo.garbage_collect(timedelta(0)),
    "reset": lambda repo: repo.reset_branch("main", "main~1", force=True),
    "restore": lambda repo: zm.recover(repo, 1),
    "config": lambda repo: repo.save_config({"commits": {"mode": "rewrite"}}),
    "index": build_index,
    "pickle": lambda repo: pickle.loads(pickle.dumps(repo)),
    "clone": cloned,
    "recover": recovered,
}


@pytest.mark.parametrize("what", LATER)
def test_it_survives_all_that_is_done_later(what: str) -> None:
    repo = zm.create("memory://metadata-survives-" + what)
    group(repo, "air")
    repo.metadata(ABOUT, replace=True)
    group(repo, "sea")
    found = LATER[what](repo)
    assert zm.open(repo.storage).metadata() == ABOUT
    if isinstance(found, Repository):
        assert found.metadata() == ABOUT
        assert found.verify().ok


def test_a_clone_takes_over_what_is_set_later(tmp_path: Path) -> None:
    repo = zm.create(MemoryStorage())
    zm.clone(repo, tmp_path / "clone")
    clone = zm.open(tmp_path / "clone")
    assert METADATA not in root_of(clone).features
    clone.metadata({"here": 1}, replace=True)
    repo.metadata(ABOUT, replace=True)
    zm.clone(repo, tmp_path / "clone")
    assert clone.metadata() == {"here": 1, **ABOUT}
    version = root_of(clone).version
    zm.clone(repo, tmp_path / "clone")  # nothing is new
    assert root_of(clone).version == version


def test_two_updates_at_once_are_both_kept() -> None:
    storage = MemoryStorage()

    class Between(WrappedStorage):
        others = 2

        def _around[R](self, call: Call[R]) -> R:
            if call.op == "cas" and self.others:
                self.others -= 1
                zm.open(storage).metadata({f"other {self.others}": 1, "both": "o"})
            return call.run()

    zm.create(storage)
    mine = zm.open(Between(storage)).metadata({"mine": 1, "both": "mine"})
    assert mine == {"other 0": 1, "other 1": 1, "mine": 1, "both": "mine"}
    assert zm.open(storage).metadata() == mine


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("a", 1)], "repository metadata is a map"),
        ({"a": object()}, "repository metadata must be made of"),
        ({1: 2}, "names in repository metadata must be strings"),
        ({"a": "x" * 20_000}, "would take 20,0.. bytes, and 16,384 are allowed"),
    ],
)
def test_what_cannot_be_kept_is_refused(metadata: Any, message: str) -> None:
    repo = zm.create(MemoryStorage())
    repo.metadata(ABOUT, replace=True)
    for change in (partial(repo.metadata, replace=True), repo.metadata):
        with pytest.raises(InvalidArgumentError, match=message):
            change(metadata)
    assert repo.metadata() == ABOUT


def test_the_root_has_room_beside_the_largest() -> None:
    """Refs go to pages as without metadata, and no page is made because of it."""
    repo = zm.create(MemoryStorage())
    repo.metadata({"a": "x" * 16_000}, replace=True)
    group(repo, "air")
    assert not root_of(repo).pages
    for number in range(110):
        repo.create_tag(f"{number:x}{np.random.default_rng(number).bytes(100).hex()}")
    assert root_of(repo).pages
    assert len(repo.list_tags()) == 110
    assert repo.metadata() == {"a": "x" * 16_000}


# --- what every commit says ----------------------------------------------------------------------


def test_every_commit_gets_what_is_configured_and_its_own_comes_first() -> None:
    storage = "memory://metadata-of-commits"
    zm.create(storage)
    about = {"host": "node7", "run": 5, "test": True}
    repo = zm.open(storage, {"commits": {"metadata": about}})
    first = group(repo, "air")
    own = group(repo, "sea", run=6, why="again")
    with repo.transaction(metadata={"host": "here"}) as store:
        zarr.create_group(store, path="ice")
    repo.revert(own)
    session = repo.writable_session()
    session.commit("empty", allow_empty=True)
    session.amend("better words")
    repo.create_branch("side", first)
    with repo.transaction("side", message="on the side") as store:
        zarr.create_group(store, path="side")
    merged = repo.merge("side").source
    picked = resolved(repo, "main~1")
    found = {info.message: dict(info.metadata) for info in repo.ancestry()}
    assert found["make air"] == found["better words"] == about
    assert found["make sea"] == {"host": "node7", "run": 6, "test": True, "why": "again"}
    assert found["change /ice"] == about | {"host": "here"}
    assert found["create repository"] == {}
    assert about | {"merged-from": merged} in found.values()
    assert any(about | {"reverts": own} == one for one in found.values())
    assert picked
    assert pickle.loads(pickle.dumps(repo)).config.commits.metadata == tuple(about.items())
    session = zm.open(storage).writable_session()  # it was not saved
    zarr.create_group(session.store, path="plain")
    session.commit("plain")
    assert dict(next(repo.ancestry()).metadata) == {}


def test_it_can_be_saved_and_a_name_removed() -> None:
    storage = MemoryStorage()
    repo = zm.create(storage)
    assert "metadata" not in repo.config.to_dict()["commits"]
    repo.save_config({"commits": {"metadata": {"institution": "here", "run": 1}}})
    group(zm.open(storage), "air")
    assert dict(next(repo.ancestry()).metadata) == {"institution": "here", "run": 1}
    repo.save_config({"commits": {"metadata": {"run": None, "more": 0.5}}})
    again = zm.open(storage)
    assert again.config.commits == zm.config.Commits(
        metadata=(("institution", "here"), ("more", 0.5))
    )
    assert zm.Config.from_yaml(again.config.to_yaml()) == again.config


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([1], "expected names and their values"),
        ({"a": [1]}, r"commits\.metadata\.a: expected a text, a finite number"),
        ({"a": float("nan")}, "a finite number"),
        ({"a": 2**70}, "a finite number"),
        ({"": 1}, "no name of 1 to 255"),
        ({"\ud800": 1}, "no name of 1 to 255|unknown"),
        ({5: 1}, "no name of 1 to 255"),
        ({f"n{i}": i for i in range(65)}, "65 names, at most 64"),
    ],
)
def test_what_no_commit_can_say_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zm.create(MemoryStorage(), {"commits": {"metadata": metadata}})
