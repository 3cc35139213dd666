"""Bases in pages: they answer as bases without pages do, and few of their pages are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.core.sync import sync

from zarr_manifests import Repository, Session
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.nodes import Base
from zarr_manifests.planning.layout import node_pages
from zarr_manifests.planning.layout.node_pages import PageLimits
from zarr_manifests.storage import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of

GROUP = b'{"zarr_format": 3, "node_type": "group"}'
SMALL = PageLimits(inline=0, nodes=2, leaves=2)
NEVER = PageLimits(inline=10**9)


def array(length: int = 6, dimension: str = "x") -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes"}],
            "fill_value": 0,
            "dimension_names": [dimension],
        }
    ).encode()


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


@contextmanager
def limits(of: PageLimits) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_pages, "LIMITS", of)
        yield


def repository(storage: Any = None, **config: Any) -> Repository:
    given_config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 100, **config}
    return Repository.create(MemoryStorage() if storage is None else storage, given_config)


def pages_of(repo: Repository) -> Base:
    """The base of main, with its pointers to pages."""
    pages = contents_of(repo.readonly_session("main").store).view.pages
    assert pages is not None
    return pages.base


# --- alike -----------------------------------------------------------------------------------

names = st.sampled_from(["a", "a-b", "a0", "b", "x"])
paths = st.lists(names, max_size=3).map("/".join)
keys = st.one_of(
    paths.map(lambda path: f"{path}/zarr.json".lstrip("/")),
    st.tuples(paths, st.integers(0, 6)).map(lambda one: f"{one[0]}/c/{one[1]}".lstrip("/")),
    st.tuples(paths, names).map(lambda one: f"{one[0]}/{one[1]}.txt".lstrip("/")),
)
documents = st.sampled_from([GROUP, array(), array(3), array(6, "a")])


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, ...]:
    match draw(st.sampled_from(["set", "set", "set", "set", "delete", "move", "fold", "commit"])):
        case "set":
            key = draw(keys)
            value = draw(documents) if key.endswith("zarr.json") else draw(st.binary(min_size=1))
            return "set", key, value.hex()
        case "delete":
            return "delete", draw(keys)
        case "move":
            return "move", draw(paths), draw(paths)
        case what:
            return (what,)


def outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except ManifestsError as error:
        return type(error)


class One:
    """A repository and a session on it."""

    def __init__(self, of: PageLimits) -> None:
        self.limits, self.repo = of, repository()
        self.session = self.repo.writable_session("main")

    def do(self, step: tuple[str, ...]) -> Any:
        store = self.session.store
        match step:
            case "set", key, value:
                return outcome(put, store, key, bytes.fromhex(value))
            case "delete", key:
                return outcome(store.delete_sync, key)
            case "move", old, new:
                return outcome(self.session.move, old, new)
        with suppress(ManifestsError):  # nothing to commit
            self.session.commit("change")
        if step == ("fold",):
            with limits(self.limits):
                self.repo.compact("main", "full")
        self.session = self.repo.writable_session("main")
        return None


def seen(session: Session, wanted: list[str]) -> Any:
    """What the store answers to these keys, and to listings."""
    store = session.store
    found: dict[str, Any] = {}
    for key in wanted:
        value = store.get_sync(key)
        found[key] = None if value is None else value.to_bytes()
    for prefix in {"", *(key.rpartition("/")[0] for key in wanted)}:
        found[f"list {prefix}"] = sorted(collected(store.list_dir(prefix)))
        found[f"all {prefix}"] = sorted(collected(store.list_prefix(prefix)))
    return found


def collected(names: Any) -> list[str]:
    async def gather() -> list[str]:
        return [name async for name in names]

    return sync(gather())


@given(st.lists(steps(), min_size=1, max_size=25), st.lists(keys, min_size=1, max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_base_in_pages_answers_as_one_without(
    changes: list[tuple[str, ...]], wanted: list[str]
) -> None:
    one, other = One(SMALL), One(NEVER)
    for step in changes:
        assert one.do(step) == other.do(step)
    wanted = [*wanted, *(step[1] for step in changes if step[0] in ("set", "delete"))]
    assert seen(one.session, wanted) == seen(other.session, wanted)
    for each in (one, other):
        each.do(("fold",))
        each.do(("commit",))
    readers = [each.repo.readonly_session("main") for each in (one, other)]
    assert seen(readers[0], wanted) == seen(readers[1], wanted)
    assert one.repo.verify().problems == ()
    tallies = [(each.repo.totals().total, each.repo.totals().arrays) for each in (one, other)]
    assert tallies[0] == tallies[1]
    sums = [contents_of(reader.store).view.snapshot.sums for reader in readers]
    assert sums[0] == sums[1]
