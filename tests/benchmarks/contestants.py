"""The stores that are compared, behind one small interface.

Each keeps what it writes below one folder. `create` makes it, `writer` gives a Zarr store to write
to and what commits it, `reader` opens what was committed anew, as another process would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr.storage
from distant import HttpStorage
from zarr.abc.store import Store

import zarr_manifests as zm
from zarr_manifests.bulk import use_bulk

FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"


class Contestant:
    """One of those compared."""

    needs: tuple[str, ...] = ()
    """Packages that have to be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, *, inline_bytes: int | None = None) -> None:
        """Make it, if it has to be made."""

    def writer(self) -> tuple[Store, Callable[[], object]]:
        """A store to write to, and what commits it."""
        raise NotImplementedError

    def reader(self) -> Store:
        """A store that reads what was committed."""
        raise NotImplementedError

    def distant_reader(self, port: int) -> Store:
        """A store that reads it by HTTP."""
        raise NotImplementedError

    def forget(self) -> None:
        """Know nothing any more of what was read before, as a new process would."""

    def make_durable(self) -> None:
        """Have all that was committed on the disk.

        For one that does not, the whole filesystem is synced: one call, and less work than an
        fsync of each of its files.
        """
        os.sync()


class Ours(Contestant):
    """This project."""

    def create(self, *, inline_bytes: int | None = None, **options: Any) -> None:
        config = {} if inline_bytes is None else {"inline-chunk-bytes": inline_bytes}
        zm.create(str(self.folder / "r"), config, **options)

    def open(self, **options: Any) -> zm.Repository:
        return zm.open(str(self.folder / "r"), **options)

    def distant(self, port: int) -> zm.Repository:
        return zm.open(HttpStorage(port, self.folder / "r"))

    def distant_reader(self, port: int) -> Store:
        return self.distant(port).readonly_session("main").store

    def make_durable(self) -> None:
        """Each commit has done it."""

    def forget(self) -> None:
        for name, module in list(sys.modules.items()):
            # What the package says of its own options was not read anywhere.
            if name.startswith("zarr_manifests.") and ".config" not in name:
                for value in vars(module).values():
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()

    def writer(self) -> tuple[Store, Callable[[], object]]:
        session = self.open().writable_session("main")
        return session.store, lambda: session.commit("benchmark")

    def reader(self) -> Store:
        return self.open().readonly_session("main").store


class Icechunk(Contestant):
    """The transactional store that this one is compared with."""

    needs = ("icechunk",)

    def storage(self) -> Any:
        import icechunk

        icechunk.set_logs_filter("error")
        return icechunk.local_filesystem_storage(str(self.folder / "r"))

    def create(self, *, inline_bytes: int | None = None, **options: Any) -> None:
        import icechunk

        config = icechunk.RepositoryConfig.default()
        if inline_bytes is not None:
            config.inline_chunk_threshold_bytes = inline_bytes
        for container in options.pop("containers", ()):
            config.set_virtual_chunk_container(container)
        storage = self.storage()
        icechunk.Repository.create(storage, config, **options).save_config()

    def open(self, **options: Any) -> Any:
        import icechunk

        return icechunk.Repository.open(self.storage(), **options)

    def distant(self, port: int) -> Any:
        import icechunk

        icechunk.set_logs_filter("error")
        storage = icechunk.http_storage(f"http://127.0.0.1:{port}", opts={"allow_http": "true"})
        return icechunk.Repository.open(storage)

    def distant_reader(self, port: int) -> Store:
        store: Store = self.distant(port).readonly_session("main").store
        return store

    def writer(self) -> tuple[Store, Callable[[], object]]:
        repository = self.open()
        session = repository.writable_session("main")

        def commit() -> None:
            session.commit("benchmark")

        return session.store, commit

    def reader(self) -> Store:
        return self.open().readonly_session("main").store


class Plain(Contestant):
    """A store of Zarr's own, which has no commits."""

    def store(self) -> Store:
        raise NotImplementedError

    def writer(self) -> tuple[Store, Callable[[], object]]:
        return self.store(), lambda: None

    def reader(self) -> Store:
        return self.store()


class Local(Plain):
    """Zarr's store in a folder."""

    def store(self) -> Store:
        return zarr.storage.LocalStore(self.folder / "r")


class Memory(Plain):
    """Zarr's store in memory: what the pipeline itself takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = zarr.storage.MemoryStore()

    def store(self) -> Store:
        return self._store


class Obstore(Plain):
    """Zarr over obstore, in a folder."""

    needs = ("obstore",)

    def store(self) -> Store:
        from obstore.store import LocalStore

        place = self.folder / "r"
        return zarr.storage.ObjectStore(LocalStore(place, mkdir=True))


class Fsspec(Plain):
    """Zarr over fsspec, in a folder."""

    needs = ("fsspec",)

    def store(self) -> Store:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
        from fsspec.implementations.local import LocalFileSystem

        place = self.folder / "r"
        files = AsyncFileSystemWrapper(LocalFileSystem(auto_mkdir=True), asynchronous=True)
        return zarr.storage.FsspecStore(files, path=str(place))


CONTESTANTS: dict[str, type[Contestant]] = {
    "zarr_manifests": Ours,
    "icechunk": Icechunk,
    "LocalStore": Local,
    "MemoryStore": Memory,
    "ObjectStore": Obstore,
    "FsspecStore": Fsspec,
}


def fresh(name: str, folder: Path, number: int) -> Contestant:
    """The contestant in a new folder for that round, the one of the round before removed."""
    shutil.rmtree(folder / str(number - 1), ignore_errors=True)
    place = folder / str(number)
    place.mkdir()
    return CONTESTANTS[name](place)


def missing(names: Sequence[str]) -> list[str]:
    """Packages that are not installed and that one of these needs."""
    wanted = {need for name in names if name in CONTESTANTS for need in CONTESTANTS[name].needs}
    return sorted(need for need in wanted if importlib.util.find_spec(need) is None)


def use_pipeline(name: str) -> None:
    """Have Zarr use its default pipeline of codecs, the fused or ours, perhaps on one thread."""
    zarr.config.reset()
    if name.startswith("bulk"):  # which is the fused one for all others
        zm.tune_zarr(concurrency=zarr.config.get("async.concurrency"))
    if name.startswith("fused"):
        zarr.config.set({"codec_pipeline.path": FUSED})
    if name.endswith("one thread"):
        zarr.config.set({"codec_pipeline.max_workers": 1})


def opened(contestant: Contestant, pipeline: str) -> Any:
    """The contestant's array, to be read."""
    return as_said(zarr.open_array(contestant.reader(), path="a", mode="r"), contestant, pipeline)


def as_said(array: Any, contestant: Contestant, pipeline: str) -> Any:
    """The array; ours as the xarray engine and `write` open it, if the pipeline says so."""
    if "engine" in pipeline and isinstance(contestant, Ours):
        use_bulk(array)
    return array


def values(chunks: int, chunk_bytes: int) -> np.ndarray:
    """As many rows of random numbers, a chunk each."""
    rng = np.random.default_rng(5)
    return rng.integers(0, 2**31, (chunks, chunk_bytes // 4), dtype=np.int32)


def new_array(store: Store, like: np.ndarray, name: str = "a", chunks: int | None = None) -> Any:
    """An array for these rows; codecs that compress would be the same work for everyone."""
    shape = like.shape if chunks is None else (chunks, *like.shape[1:])
    return zarr.create_array(
        store,
        name=name,
        shape=shape,
        chunks=(1, *like.shape[1:]),
        dtype=like.dtype,
        compressors=None,
        overwrite=True,
    )
