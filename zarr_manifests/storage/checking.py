"""Trying out what a place can be used for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import ManifestsError, ObjectNotFoundError, StorageError
from zarr_manifests.report import Report
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.object_store import RACERS, race
from zarr_manifests.storage.protocol import Storage, Token
from zarr_manifests.storage.url import Location, storage_of

_ROUNDS: Final = 3
_LISTED: Final = 1100  # more than a page of most stores
_AT_ONCE: Final = 50


class StorageReport(Report, Struct, frozen=True):
    """What a place can be used for, and why not for more.

    Parameters
    ----------
    url : str
        The place.
    usable_for : {"nothing", "reading", "writing by one process", "everything"}
        What a repository can do there.
    problems : tuple of str
        Each begins with what was tried: `reading`, `ranges`, `listing`, `conditions`, `paging`,
        `deletes`, or `processes`.

    Examples
    --------
    >>> from zarr_manifests.storage import check
    >>> check("memory://check-example").usable_for
    'writing by one process'
    """

    url: str
    usable_for: Literal["nothing", "reading", "writing by one process", "everything"]
    problems: tuple[str, ...] = ()


def check(
    location: Location, *, storage_options: Mapping[str, object] | None = None
) -> StorageReport:
    """Try out what a place can be used for: conditions, ranges, paging, deletes.

    It writes about 1,200 small objects and 1 MiB under a name of its own, and deletes them. Where
    nothing can be written, it only reads. A repository that is there is not changed, and a folder
    that is not there is not made.

    Parameters
    ----------
    location : str, os.PathLike, Storage, or a store of obstore, zarr or fsspec
        The place.
    storage_options : mapping, optional
        Options of `from_url`.

    Raises
    ------
    InvalidArgumentError, ConfigError, UnsupportedStorageError
        As for `from_url`. What the place itself does wrong is in the report.

    Examples
    --------
    >>> from zarr_manifests.storage import check
    >>> check("memory://check-example").problems
    ('processes: others cannot see what is written, and it ends with this process',)
    """
    storage = storage_of(location, storage_options)
    if isinstance(storage, LocalStorage):
        return _check_folder(storage)
    return _Check(storage).report()


def _check_folder(storage: LocalStorage) -> StorageReport:
    """Try out a folder on a disk in one of its own below it, which is removed with all in it."""
    folder = Path(storage.path)
    if not folder.is_dir():
        why = f"reading: there is no folder {folder}; make it, or correct the path"
        return StorageReport(storage.url, "nothing", (why,))
    own = folder / f"check-{SYSTEM.random_bytes(8).hex()}"
    try:
        return replace(_Check(LocalStorage(own)).report(), url=storage.url)
    finally:
        shutil.rmtree(own, ignore_errors=True)


class _Check:
    """Tries one thing after another, and notes what fails."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._folder = f"check-{SYSTEM.random_bytes(8).hex()}"
        self._problems: list[str] = []

    def report(self) -> StorageReport:
        storage = self._storage
        readable = self._try("reading", self._read)
        listed = readable and self._try("listing", lambda: next(iter(storage.list()), None))
        usable: Any = "reading" if readable else "nothing"
        if listed and self._try("conditions", self._race):
            due = {"ranges": self._ranges, "paging": self._pages, "deletes": self._deletes}
            worked = [self._try(*one) for one in due.items()]
            if not worked[0]:
                usable = "nothing"
            elif all(worked):
                usable = "everything" if storage.capabilities.shared else "writing by one process"
        if usable == "writing by one process":
            self._problems.append(
                "processes: others cannot see what is written, and it ends with this process"
            )
        return StorageReport(storage.url, usable, tuple(self._problems))

    def _try(self, what: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except ManifestsError as error:
            self._problems.append(f"{what}: {error}")
            return False
        return True

    def _read(self) -> None:
        with suppress(ObjectNotFoundError):
            self._storage.get(f"{self._folder}/absent", 0, 1)
            raise StorageError("an object that does not exist was read")

    def _race(self) -> None:
        storage = self._storage

        def put(key: str, data: bytes, token: Token | None) -> Token | None:
            if token is not None:
                return storage.cas(key, data, token)
            return storage.get_tagged(key).token if storage.create(key, data) else None

        for number in range(_ROUNDS):
            lost = race(partial(put, f"{self._folder}/race-{number}"))
            if lost is not None:
                created = lost[0] == "If-None-Match"
                what = "created the same object" if created else "replaced the same version"
                raise StorageError(f"{lost[1]} of {RACERS} writers {what}")

    def _ranges(self) -> None:
        key, data = f"{self._folder}/ranges", bytes(range(256)) * 4096
        self._storage.create(key, data)
        far = [(0, 3), (len(data) - 3, 9), (500_000, 7)]
        found = [
            self._storage.get(key),
            self._storage.get(key, 1000, 5),
            self._storage.get(key, len(data), 5),
            *(self._storage.get(key, *one) for one in far),
        ]
        if found != [data, data[1000:1005], b"", *(data[a : a + n] for a, n in far)]:
            raise StorageError("a range came back with other bytes than were written")

    def _pages(self) -> None:
        keys = [f"{self._folder}/page/{i:05}" for i in range(_LISTED)]
        for some in batched(keys, _AT_ONCE):
            SYSTEM.parallel([partial(self._storage.create, key, b"x") for key in some])
        for after in ("", keys[_LISTED // 2]):
            listed = [info.key for info in self._storage.list(f"{self._folder}/page/", after)]
            if listed != [key for key in keys if key > after]:
                raise StorageError(f"a listing of {_LISTED} objects is not complete or in order")

    def _deletes(self) -> None:
        keys = [info.key for info in self._storage.list(f"{self._folder}/")]
        self._storage.delete_many([*keys, f"{self._folder}/absent"])
        left = sum(1 for _ in self._storage.list(f"{self._folder}/"))
        if left:
            raise StorageError(f"{left} of {len(keys)} objects are there after they were deleted")
