"""A repository to be called in every way, and what has to be true of it afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.engine.history.leases import HeldLease
from zarr_manifests.errors import ManifestsError, SnapshotExpiredError
from zarr_manifests.repository import build_index
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import copy_of

FILES = "entrance-files"
CONTAINERS = {"raw": f"memory://{FILES}"}
PLAIN = (
    b'{"zarr_format":3,"node_type":"array","shape":[4],"data_type":"uint8","chunk_grid":{"name":'
    b'"regular","configuration":{"chunk_shape":[4]}},"chunk_key_encoding":{"name":"default"},'
    b'"fill_value":0,"codecs":[{"name":"bytes"}],"attributes":{}}'
)


def load(name: str, path: Path) -> Any:
    """A module that lies in no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


reader = load("entrances_reader", Path(__file__).parents[1] / "spec" / "reader.py")


def buffer(data: bytes) -> cpu.Buffer:
    return cpu.Buffer.from_bytes(data)


def contents(session: zm.Session) -> dict[str, bytes]:
    """All keys and values of a session."""
    found = {}
    for key in contents_of(session.store).keys_below(""):
        value = session.store.get_sync(key)
        assert value is not None, f"{key!r} is listed, and reads as absent"
        found[key] = value.to_bytes()
    return found


def dataset(start: int, stop: int) -> xr.Dataset:
    values = np.arange(start * 3, stop * 3, dtype="f4").reshape(-1, 3)
    return xr.Dataset({"t": (("time", "x"), values)}, {"time": np.arange(start, stop)})


class Template:
    """A small repository with every kind of thing, and what each of its snapshots holds."""

    def __init__(self) -> None:
        files = MemoryStorage(FILES)
        files.put("one", bytes(range(64)))
        files.put("plain/zarr.json", PLAIN)
        files.put("plain/c/0", b"abcd")
        self.storage = MemoryStorage()
        config = {"compaction": {"max-delta-count": 4}, "pack-chunk-bytes": 1000}
        repository = zm.create(self.storage, config, virtual_containers=CONTAINERS)
        zm.write(dataset(0, 2), repository, message="one", encoding={"t": {"chunks": (1, 3)}})
        zm.write(dataset(2, 4), repository, message="two", append_dim="time")
        with repository.transaction(message="more") as store:
            group = zarr.open_group(store)
            a = group.create_array("a", shape=(8,), chunks=(2,), dtype="u1", compressors=None)
            a[:6] = 7
            big = group.create_array("g/big", shape=(4000,), chunks=(2000,), dtype="u1")
            big[:] = np.random.default_rng(0).integers(0, 256, 4000, "u1")
            group.create_array("v", shape=(8,), chunks=(4,), dtype="u1", compressors=None)
            store.set_virtual_refs("v", [[0], [1]], ["virtual://raw/one"], [0, 0], [0, 4], [4, 4])
            store.set_sync("note.txt", buffer(b"a note"))
        repository.create_tag("v1")
        repository.create_branch("dev")
        with repository.transaction("dev", message="on dev") as store:
            zarr.open_group(store).create_group("only-dev")
        with repository.transaction(message="the last") as store:
            zarr.open_array(store, path="a")[:2] = 9
        build_index(repository)
        infos = [*repository.ancestry(), *repository.ancestry("dev")]
        self.ids = list(dict.fromkeys(info.snapshot_id for info in infos))
        self.head = self.ids[0]
        self.snapshots = {
            snapshot_id: contents(repository.readonly_session(snapshot_id))
            for snapshot_id in self.ids
        }


@dataclass
class World:
    """One copy of the template, to be called once."""

    template: Template
    folder: Path
    fresh: Iterator[int]
    given: Any = None
    """The storage; a copy of the template's if there is none."""
    closing: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.apart: Any = MemoryStorage()
        self.storage = self.given or copy_of(self.template.storage)
        self.repository = self.opened()
        self.before = self.objects()

    def opened(self) -> zm.Repository:
        return zm.open(self.storage, virtual_containers=CONTAINERS)

    def objects(self) -> dict[str, bytes]:
        return {info.key: self.storage.get(info.key) for info in self.storage.list()}

    def path(self) -> str:
        """A name in the working directory that nobody had before."""
        return f"new-{next(self.fresh)}"

    def held(self, session: zm.Session) -> zm.Session:
        self.closing.append(session.close)
        return session

    def writing(self) -> zm.Session:
        session = self.held(self.repository.writable_session())
        session.store.set_sync("a/c/1", buffer(b"!!"))
        return session

    def leased(self) -> HeldLease:
        lease = self.repository.lease(self.template.ids[0])
        self.closing.append(lambda: lease.__exit__(None, None, None))
        return lease.__enter__()

    def objects_apart(self, storage: Any) -> Any:
        """Another storage, in which there is no repository."""
        for key in ("kept", "a/kept"):
            storage.put(key, b"kept")
        self.apart = storage
        return storage

    def close(self) -> None:
        while self.closing:
            self.closing.pop()()

    # --- what has to be true afterwards --------------------------------------------------------

    def check(self, sessions: list[zm.Session], *, may_expire: bool) -> None:
        """Commit what is left, and look at all there is by every reader."""
        for session in sessions:
            if session.status():
                with only_clear_errors():
                    session.commit("what was left", discard_unmerged=True)
        self.close()
        if self.objects() == self.before:
            return
        repository = self.opened()
        report = repository.verify()
        assert report.ok, report.problems
        spec = reader.Reader(self.storage.get, get_file=file_of)
        for name, head in spec.heads().items():
            history = dict(spec.history(head, spec.branches().get(name, {}).get("floor")))
            newest = next(iter(history))
            held = contents(repository.readonly_session(newest))
            assert spec.contents(history[newest]) == held, f"{name} reads otherwise"
        for branch in repository.list_branches():
            assert [*repository.ancestry(f"refs/heads/{branch}")]  # a tag may have its name
        assert [*repository.ops_log()]
        for snapshot_id, held in self.template.snapshots.items():
            try:
                found = contents(repository.readonly_session(snapshot_id))
            except SnapshotExpiredError:
                assert may_expire, f"{snapshot_id} is gone"
            else:
                assert found == held, f"{snapshot_id} reads otherwise"


def file_of(file: Any) -> bytes:
    container, path, *_ = file
    return MemoryStorage(FILES).get(path) if container == "raw" else b""


@contextmanager
def only_clear_errors(*also: type[Exception]) -> Iterator[None]:
    """Anything else than the package's errors, or what `also` names, goes on."""
    try:
        yield
    except (ManifestsError, *also) as error:
        if not isinstance(error, ManifestsError):
            if isinstance(error, UnicodeError):  # it is a ValueError as well
                raise
        elif not str(error).strip() or obeyed(str(error)):
            raise AssertionError(f"{type(error).__name__} says {str(error)[:200]!r}") from error


def obeyed(text: str) -> list[str]:
    """The characters that a terminal would take for more than text."""
    return [c for c in text if not (c.isprintable() or c.isspace()) or c in "\r\x0b\x0c\u2028"]


def used(result: Any) -> None:
    """What a caller does with what is returned: show it, go through it, enter it."""
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    elif hasattr(result, "__aiter__"):
        result = asyncio.run(_collected(result))
    elif hasattr(result, "__next__"):
        result = [one for one, _ in zip(result, range(10_000), strict=False)]
    elif hasattr(result, "__enter__") and not isinstance(result, zm.Session | ManifestStore):
        with result as entered:
            if isinstance(entered, ManifestStore):
                entered.set_sync("a/c/2", buffer(b"??"))
            elif isinstance(entered, HeldLease):
                entered.check()
    shown = (repr(result), str(result))
    if type(result).__module__.startswith("zarr_manifests"):
        assert obeyed("".join(shown)) == []
    if hasattr(result, "_repr_html_"):
        # A signalling NaN cannot even be compared; no report that we make counts with one.
        with warnings.catch_warnings(action="ignore"), suppress(InvalidOperation):
            result._repr_html_()


async def _collected(result: Any) -> list[Any]:
    return [one async for one in result]
