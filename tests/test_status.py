"""What a session says of its changes is what `diff` says once they are committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.core.sync import sync

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zarr_manifests.repository import resolved
from zarr_manifests.session import Session
from zarr_manifests.storage.memory import MemoryStorage


def made(name: str, **options: Any) -> Callable[[Session], object]:
    how: dict[str, Any] = {"shape": (6, 4), "chunks": (2, 2), "dtype": "i4", "overwrite": True}

    def make(session: Session) -> None:
        array = zarr.create_array(session.store, name=name, **(how | options))
        array[:2] = 7

    return make


def written(name: str, at: Any, value: Any) -> Callable[[Session], object]:
    return lambda session: zarr.open_array(session.store, path=name).__setitem__(at, value)


def resized(*shapes: tuple[int, ...]) -> Callable[[Session], object]:
    def resize(session: Session) -> None:
        array = zarr.open_array(session.store, path="a")
        for shape in shapes:
            array.resize(shape)

    return resize


def said(units: str) -> Callable[[Session], object]:
    return lambda session: zarr.open_array(session.store, path="a").attrs.put({"units": units})


def put(key: str, value: bytes) -> Callable[[Session], object]:
    return lambda session: session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def deleted(path: str) -> Callable[[Session], object]:
    return lambda session: sync(session.store.delete_dir(path))


CHANGES: dict[str, Callable[[Session], object]] = {
    "write": written("a", (0, 0), 5),
    "write the same": written("a", ..., 1),
    "unset": written("a", (slice(2), slice(2)), 0),
    "write below": written("g/b", ..., 3),
    "make again": made("a"),
    "make another": made("a", dtype="f8", chunks=(3, 4)),
    "make below": made("g/b", shape=(4, 2)),
    "make": made("new"),
    "delete": deleted("a"),
    "delete the new one": deleted("new"),
    "delete a group": deleted("g"),
    "make a group again": lambda session: zarr.create_group(
        session.store, path="g", overwrite=True
    ),
    "cut": resized((3, 4)),
    "grow": resized((9, 4)),
    "cut and grow": resized((2, 4), (6, 4)),
    "attributes": said("m"),
    "attributes back": said("K"),
    "a note": put("notes.txt", b"new"),
    "another note": put("more.txt", b"n"),
    "no note": lambda session: session.store.delete_sync("notes.txt"),
    "move": lambda session: session.move("a", "moved"),
    "move back": lambda session: session.move("moved", "a"),
    "move below": lambda session: session.move("a", "g/a"),
    "shift": lambda session: session.shift_array("a", (1, 0)),
}


@pytest.fixture(scope="module")
def repo() -> Repository:
    made = zm.create(MemoryStorage(), {"compaction": {"mode": "manual"}})
    with made.transaction() as store:
        for name in ("a", "g/b"):
            array = zarr.create_array(
                store, name=name, shape=(6, 4), chunks=(2, 2), dtype="i4", attributes={"units": "K"}
            )
            array[:4] = 1
        store.set_sync("notes.txt", cpu.Buffer.from_bytes(b"old"))
    return made


def agree(repo: Repository, steps: list[str]) -> None:
    start = resolved(repo, "main")
    session = repo.writable_session()
    for step in steps:
        try:
            CHANGES[step](session)
        except (AlreadyExistsError, FileNotFoundError, InvalidArgumentError, NotFoundError):
            continue  # what it would change is gone or moved
    status, changed = session.status(), session.status()
    if changed:
        session.commit("try")
    diff = repo.diff(start, "main")
    repo.reset_branch("main", start, force=True)
    names = ("created", "updated", "deleted", "moved", "truncated")
    assert {name: getattr(status, name) for name in names} == {
        name: getattr(diff, name) for name in names
    }
    assert status.chunks == {path: len(at) for path, at in diff.chunks.items()}
    assert status.coordinates == {
        path: tuple(map(tuple, at.tolist())) for path, at in diff.chunks.items()
    }
    assert str(status) == str(diff)
    assert bool(status) == bool(diff)


@pytest.mark.parametrize("step", CHANGES)
def test_status_and_diff_agree_on_each_change(repo: Repository, step: str) -> None:
    agree(repo, [step])


@settings(max_examples=60)
@given(steps=st.lists(st.sampled_from([*CHANGES]), min_size=2, max_size=5))
def test_status_and_diff_agree(repo: Repository, steps: list[str]) -> None:
    agree(repo, steps)


def test_status_says_that_what_an_array_held_is_gone(repo: Repository) -> None:
    session = repo.writable_session()
    made("a", shape=(2, 2))(session)
    status = session.status()
    assert status.created == status.deleted == ("/a",)
    assert str(status).split("\n") == [
        "+ /a",
        "- /a",
        "  /a: made again, so all that it held before is gone",
        "  /a: 1 chunk: (0, 0)",
    ]


@pytest.mark.slow
def test_the_first_chunks_are_named_and_all_are_counted() -> None:
    repo = zm.create(MemoryStorage(), {"spill-refs": 1000})
    session = repo.writable_session()
    array = zarr.create_array(session.store, name="a", shape=(60, 50), chunks=(1, 1), dtype="i2")
    order = np.random.default_rng(1).permutation(60)
    for row in order:  # some are spilled to manifests
        array[int(row)] = 1
    status = session.status()
    assert status.chunks == {"/a": 3000}
    assert status.coordinates == {"/a": tuple((i, j) for i in range(2) for j in range(50))}
    assert str(status).endswith("  /a: 3,000 chunks: (0, 0), (0, 1), (0, 2), (0, 3), ...")
