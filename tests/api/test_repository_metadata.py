"""Metadata of the repository as a whole, and what every commit is configured to say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage

ABOUT = {"title": "reanalysis", "contacts": ["a@example.org"], "grid": {"lat": 0.25, "n": None}}


def group(repo: Repository, name: str, **metadata: Any) -> str:
    session = repo.writable_session()
    zarr.create_group(session.store, path=name)
    return session.commit(f"make {name}", metadata or None)


def cloned(repo: Repository) -> Repository:
    zm.clone(repo, "memory://metadata-of-a-clone")
    return zm.open("memory://metadata-of-a-clone")


def recovered(repo: Repository) -> Repository:
    repo.storage.put("current", b"damaged")
    zm.recover(repo.storage)
    return zm.open(repo.storage)


LATER: dict[str, Callable[[Repository], object]] = {
    "compact": lambda repo: repo.compact(mode="full"),
    "expire": lambda repo: repo.expire_snapshots(keep_last=1),
    "restore": lambda repo: zm.recover(repo, 1),
    "config": lambda repo: repo.save_config({"commits": {"mode": "rewrite"}}),
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
    clone.metadata({"here": 1}, replace=True)
    repo.metadata(ABOUT, replace=True)
    zm.clone(repo, tmp_path / "clone")
    assert clone.metadata() == {"here": 1, **ABOUT}


@pytest.mark.parametrize("metadata", [[("a", 1)], {"a": object()}, {1: 2}, {"a": "x" * 20_000}])
def test_what_cannot_be_kept_is_refused(metadata: Any) -> None:
    repo = zm.create(MemoryStorage())
    repo.metadata(ABOUT, replace=True)
    for replaced in (True, False):
        with pytest.raises(InvalidArgumentError, match=r"repository metadata|bytes"):
            repo.metadata(metadata, replace=replaced)
    assert repo.metadata() == ABOUT


def test_it_can_be_saved_and_a_name_removed() -> None:
    storage = MemoryStorage()
    repo = zm.create(storage)
    repo.save_config({"commits": {"metadata": {"institution": "here", "run": 1}}})
    group(zm.open(storage), "air")
    assert dict(next(repo.ancestry()).metadata) == {"institution": "here", "run": 1}
    repo.save_config({"commits": {"metadata": {"run": None, "more": 0.5}}})
    group(zm.open(storage), "sea")
    assert dict(next(repo.ancestry()).metadata) == {"institution": "here", "more": 0.5}
    assert {*repo.ancestry()} == {*zm.open(storage).ancestry()}  # entries can be keys


@pytest.mark.parametrize("metadata", [[1], {"a": [1]}, {"a": float("nan")}, {"": 1}])
def test_what_no_commit_can_say_is_refused(metadata: Any) -> None:
    with pytest.raises(ConfigError, match="metadata"):
        zm.create(MemoryStorage(), {"commits": {"metadata": metadata}})
