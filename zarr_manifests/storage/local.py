"""Objects as files below one folder, safe against races and crashes.

How each promise is kept:

- *Whole or absent*: bytes go to a temporary file, which gets its name when it is complete.
- *One winner of `create`*: `link` gives the name, and fails if it is taken.
- *One winner of `cas`*: the swap compares and renames while it holds `flock` on `.lock`, a file
  that is never unlinked. `put` and `delete_many` hold the same lock, so no swap can miss them. The
  lock ends with the process that holds it.
- *Durable*: before the call returns, the file is fsynced, then gets its name, and then its folder
  is fsynced, and each folder above whose name is not known to be on the disk. A `create` that finds
  the object makes it durable too, since its caller may rely on it. If an fsync fails, a later one
  of the same file proves nothing: the system drops pages that it could not write, and then reports
  no error.
- The token of a version is a digest of its bytes. The same bytes are the same version, so a caller
  of `cas` has to write something unique.

Files that no key can name, such as the lock and temporary files, do not exist for a reader.

Objects are regular files. Neither they nor the folders below the root may be symbolic links. A read
is refused even if a link is put there at that moment; a write checks
before it begins.

A name is only on the disk if the names of all folders above it are. That costs an fsync per folder,
so a storage remembers which of those that are never removed it has flushed: the root, and those
directly below it. A folder that exists may have been made a moment ago by another process that has
not flushed its name yet. Empty folders further below are removed by collections, but for hidden
ones, and everything below a folder with a lock file of its own, which belongs to another storage.
Nothing is lost by that: the system removes no folder with anything in it, and a writer that finds
its folder gone makes it again.

Files from which ranges are read stay open for a moment, which halves the time of a small read:

- Only for ranges, which are read from objects that are never replaced. The root, which is replaced,
  is read whole from a file opened for that one read.
- *A deleted object is missing*: at once if this process has deleted it, otherwise after `_KEPT_S`
  at the latest. Until then its own bytes are read, never another object's. Where small ranges
  follow one another, bytes of the next ones are kept with the file. The disk space of a
  deleted object is free at the next such read after that, or when the process ends.
- A file is closed when nobody reads it any more, not when it is dropped from here. So a descriptor
  never changes its file during a read.
- A forked child closes its copies. Reads give their own offset, so a parent and a child that read
  the same open file do not affect each other.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH100, PTH111, PTH112, PTH116, PTH118, PTH120, PTH208

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import batched
from typing import Final

from zarr_manifests.errors import (
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedStorageError,
    VirtualContainerError,
)
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.disk import (
    TEMP_PREFIX,
    FileTurn,
    PosixDisk,
    Temp,
    check_folders,
    exclusive,
    explained,
    file_instead,
    link_refused,
    network_filesystem,
    open_below,
    open_inside,
    read_at,
    read_error,
    reading,
    translated,
)
from zarr_manifests.storage.protocol import (
    MAX_TAGGED_BYTES,
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    Version,
    check_key,
    check_prefix,
    check_range,
    is_key,
)

RESERVE_BYTES: Final = 256 * 1024
"""Disk space kept for an expiry and a collection: enough for their roots, archives and pages."""

_ABSENT = FileNotFoundError, NotADirectoryError
_A_TURN = 64  # objects or folders removed while others wait for the lock
# What will be synced later; from this size on it pays to begin writing at once.
_BEGUN_BYTES = 128 * 1024
_COPIED_BYTES = 16 * 1024  # up to this size, reading and copying is faster than asking first
_AHEAD_BYTES = 64 * 1024
_KEPT_S: Final = 1.0
_MOST: Final = 48
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # off Linux a read just waits
_now_s: Final = SYSTEM.monotonic_s


class LocalStorage:
    """Storage in a local folder.

    Nothing is written to the disk before the first write.

    Parameters
    ----------
    path : str or os.PathLike
        The folder; `~` is expanded. A relative path is resolved now, against the working directory.
    force : bool
        Also write to network and FUSE filesystems. Their locks and renames are often not safe
        between machines: use it only with a single writer at a time.
    disk : PosixDisk, optional
        Makes the system calls that change the disk.

    Raises
    ------
    InvalidArgumentError
        If the path is empty or contains an invalid character.

    Examples
    --------
    >>> import tempfile
    >>> from zarr_manifests.storage.local import LocalStorage
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = LocalStorage(folder)
    ...     storage.create("a/b", b"hello"), storage.create("a/b", b"again"), storage.get("a/b")
    (True, False, b'hello')
    """

    capabilities: Final = Capabilities(inline=True, durable=True, shared=True, turns=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        force: bool = False,
        disk: PosixDisk | None = None,
    ) -> None:
        text = os.fsdecode(path)
        try:
            valid = bool(text) and b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:  # lone surrogates from elsewhere
            valid = False
        if not valid:
            raise InvalidArgumentError(f"{text!r} is not the path of a folder")
        self.path: Final = os.path.abspath(os.path.expanduser(text))
        """The absolute path of the folder."""
        self._prefix = self.path.rstrip("/") + "/"
        self._force = force
        self._disk = disk or PosixDisk()
        self._writable = False
        self._lock = self._prefix + ".lock"
        self._reserve = self._prefix + ".reserve"
        self._flushed = {"/"}  # folders that stay, and whose names are known to be on the disk
        self._lost: dict[str, tuple[int, int]] = {}  # device and inode of files that failed fsync

    def __repr__(self) -> str:
        return f"LocalStorage({self.path!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        options = {"force": self._force, "disk": self._disk}
        return partial(LocalStorage, **options), (self.path,)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return _url(self.path)

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        if length is None:
            with self._opened(key) as fd:
                return read_at(fd, start, length)
        try:
            # A reference keeps the descriptor open during the read.
            return self._kept(key).read(start, length, read_at)
        except OSError as error:
            raise read_error(error, self.path, key) from error

    def read_into(self, key: str, start: int, room: memoryview) -> int:
        check_range(start, len(room))
        count, more = 0, 1
        with reading(self.path, key):
            file = self._kept(key)
            while more and count < len(room):
                more = os.preadv(file.fd, [room[count:]], start + count)
                count += more
        return count

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        # Without a thread, which takes ten times as long, if the system has the bytes in memory.
        check_range(start, length)
        if length and _NOWAIT is not None:
            try:
                data = self._kept(key).read(start, min(length, _COPIED_BYTES), _read_at_once)
                if len(data) == length:
                    return data
            except BlockingIOError:
                import asyncio  # slow to import, and looking around does without

                return await asyncio.to_thread(self.get, key, start, length)
            except OSError:  # unsupported by the filesystem, or the read itself will raise it
                pass
        return self.get(key, start, length)

    def get_tagged(self, key: str) -> Tagged:
        with self._opened(key) as fd:
            data = read_at(fd, 0, MAX_TAGGED_BYTES + 1)
        return Tagged(data, _token(data))

    def head(self, key: str) -> ObjectInfo:
        with self._opened(key) as fd:
            return _info(key, os.fstat(fd))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        folder = prefix[: check_prefix(prefix).rfind("/") + 1]
        with reading(self.path, folder):
            check_folders(self.path, folder)
        return self._below(folder, prefix, after)

    def _below(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """The objects below a folder (empty, or ending in a slash), in key order."""
        named: Sequence[tuple[str, os.DirEntry[str]]] = ()
        with (
            reading(self.path, folder),
            contextlib.suppress(*_ABSENT),
            os.scandir(self._prefix + folder) as entries,
        ):
            # In key order, a folder sorts by its name with a slash.
            named = sorted((f"{e.name}/" if e.is_dir() else e.name, e) for e in entries)
        for name, entry in named:
            key = folder + name
            if name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if entry.is_symlink():
                raise read_error(link_refused(entry.path), self.path, key)
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._below(key, prefix, after)
            elif key.startswith(prefix) and key > after and is_key(key):
                # It may have been deleted in the meantime.
                with reading(self.path, key), contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    if stat.S_ISREG(found.st_mode):
                        yield _info(key, found)

    def stray(self) -> str | None:
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise InvalidArgumentError(
                f"objects cannot be stored in {self.path}: {file_instead(self.path)} is a file, "
                "not a folder: choose another path, or move the file away"
            ) from error
        except OSError as error:
            raise StorageError(explained(error, "read", self.path)) from error
        # Hidden files belong to the system or to this storage.
        return next((n for n in names if not n.startswith(".") and not is_key(n)), None)

    def _kept(self, key: str) -> _OpenFile:
        period = int(_now_s() / _KEPT_S)
        if _period[0] != period:
            _period[0] = period
            _file.cache_clear()
        return _file(self.path, key)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        with reading(self.path, key):
            fd = open_below(self.path, check_key(key))
            try:
                yield fd
            finally:
                os.close(fd)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        path = self._prefix + check_key(key)
        with self._writing(key), self._temp(path, data, durable) as temp:
            with exclusive(self._lock):
                self._disk.rename(temp, path)
                _file.cache_clear()
            if durable:
                self._sync_folders([os.path.dirname(path)])

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        path = self._prefix + check_key(key)
        with self._writing(key):
            created = self._create(path, data, durable)
            if durable:
                if not created:
                    self._sync_file(key)
                self._sync_folders([os.path.dirname(path)])
            return created

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        path = self._prefix + check_key(key)
        with self._writing(key):
            if self._token_at(key) != token:
                return None  # refused before anything was written
            with self._temp(path, data, durable=True) as temp, exclusive(self._lock):
                if self._token_at(key) != token:
                    return None
                try:  # `create` does not take the lock
                    (self._disk.link if token is None else self._disk.rename)(temp, path)
                except FileExistsError:
                    return None
                _file.cache_clear()
                # A later object must not reach the disk before the swap it depends on.
                self._sync_folders([os.path.dirname(path)])
                if then_create is not None:
                    # fsynced before it has a name, so it is whole or absent in any case. The swap
                    # has succeeded, and is not affected by a failure here.
                    with contextlib.suppress(StorageError), self._writing(then_create[0]):
                        self._create(self._prefix + then_create[0], then_create[1], durable=True)
        return _token(data)

    def delete_many(self, keys: Iterable[str]) -> None:
        for some in batched(keys, _A_TURN):
            paths = [self._prefix + check_key(key) for key in some]
            if not any(map(os.path.lexists, paths)):
                continue
            with self._writing(*some), exclusive(self._lock):
                try:
                    for path in paths:
                        with translated(path), contextlib.suppress(*_ABSENT):
                            self._disk.unlink(path)
                finally:
                    _file.cache_clear()

    def turn(self, name: str) -> FileTurn:
        """A turn, which is a lock file; see `TakesTurns`."""
        with self._writing(check_key(name)):
            self._make(self.path)  # the turn may be taken before the first object
            return FileTurn(f"{self._lock}-{name}")

    def remove_temporary(self, before_ms: int) -> int:
        """Remove temporary files of killed writers, and empty folders, unchanged since then.

        The folder itself and those directly below it stay. A writer whose folder is removed at that
        moment makes it again.

        Parameters
        ----------
        before_ms : int
            Milliseconds since 1970 UTC.

        Returns
        -------
        int
            The number of files removed.
        """
        count, old = 0, []
        for folder, below, names in os.walk(self.path):
            if folder != self.path and ".lock" in names:  # another storage
                below.clear()
                continue
            below[:] = [name for name in below if not name.startswith(".")]
            temporary = [f"{folder}/{name}" for name in names if name.startswith(TEMP_PREFIX)]
            is_empty = len(names) == len(temporary)
            if is_empty and not self._stays(folder) and _is_old(folder, before_ms):
                old.append(folder)
            for path in temporary:
                # Its writer may have finished.
                with translated(path), contextlib.suppress(FileNotFoundError):
                    if _is_old(path, before_ms):
                        self._disk.unlink(path)
                        count += 1
        for folder in reversed(old):
            with contextlib.suppress(OSError):  # most often, something is in it
                self._disk.rmdir(folder)
        return count

    def sync(self, keys: Iterable[str]) -> None:
        keys = [*map(check_key, keys)]
        for key in keys:
            self._sync_file(key)
        with translated(self.path):
            self._sync_folders(os.path.dirname(self._prefix + key) for key in keys)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return self.create(key, data, durable=durable)

    def keep_reserve(self) -> None:
        """Reserve space for operations that free space, if there is enough."""
        with contextlib.suppress(OSError):
            self._create(self._reserve, bytes(RESERVE_BYTES), durable=False)

    def give_up_reserve(self) -> bool:
        """Release the space; return whether there was any."""
        with contextlib.suppress(OSError):
            self._disk.unlink(self._reserve)
            return True
        return False

    # --- internals ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self, *keys: str) -> Iterator[None]:
        with translated(self._prefix + keys[0]):
            remote = None if self._force or self._writable else network_filesystem(self.path)
            if remote is not None:
                raise UnsupportedStorageError(
                    f"{self.path} lies on a {remote} filesystem, where locks and renames are "
                    "often not safe: write to a local disk, or pass force=True if there is only "
                    "ever one writer; reading is fine"
                )
            self._writable = True
            check_folders(self.path, *keys)
            yield

    @contextlib.contextmanager
    def _temp(self, path: str, data: bytes | memoryview, durable: bool) -> Iterator[Temp]:
        """A written temporary file beside `path`, removed at the end unless it was renamed."""
        folder = os.path.dirname(path)
        try:
            temp = self._disk.open_temp(folder)
        except FileNotFoundError:
            self._make(folder)
            temp = self._disk.open_temp(folder)
        try:
            self._disk.write(temp, data)
            if durable:
                self._disk.fsync_file(temp.fd)
            elif len(data) >= _BEGUN_BYTES and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(temp.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # begins to write
            yield temp
        finally:
            os.close(temp.fd)
            with contextlib.suppress(OSError):  # it was renamed; or a collection removes it
                self._disk.unlink(temp.path)

    def _create(self, path: str, data: bytes | memoryview, durable: bool) -> bool:
        """Write and link the file; its name is not flushed to the disk."""
        if os.path.lexists(path):
            return False
        with self._temp(path, data, durable) as temp:
            try:
                self._disk.link(temp, path)
            except FileExistsError:
                return False
        return True

    def _token_at(self, key: str) -> Token | None:
        try:
            return self.get_tagged(key).token
        except ObjectNotFoundError:
            return None

    def _sync_file(self, key: str) -> None:
        """Flush the bytes of a named file to the disk; raise if that has failed before."""
        path = self._prefix + key
        with self._opened(key) as fd, translated(path):
            found = os.fstat(fd)  # tells it from a later file of the same name
            if self._lost.get(path) == (found.st_dev, found.st_ino):
                raise StorageError(
                    f"{path} could not be written to the disk, and its bytes may be lost whatever "
                    "a later attempt says: its chunk must be written again, or the changes made "
                    "again in a new session"
                )
            try:
                self._disk.fsync_file(fd)
            except OSError:
                self._lost[path] = found.st_dev, found.st_ino
                raise

    # --- folders -----------------------------------------------------------------------------

    def _make(self, folder: str) -> None:
        """Make the folder and missing folders above it."""
        if os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        self._make(above)
        self._flushed.discard(folder)
        try:
            self._disk.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        if len(folder) <= len(self.path):  # names above the root are flushed only here
            self._disk.fsync_dir(above)

    def _sync_folders(self, folders: Iterable[str]) -> None:
        """Flush the names in these folders, and the folders' own names, each once.

        Each folder contains a file that the caller has just written or found.
        """
        due = set(folders)
        for folder in tuple(due):
            while folder not in self._flushed and len(folder) >= len(self.path):
                folder = os.path.dirname(folder)
                due.add(folder)
        for folder in sorted(due, reverse=True):  # deepest first
            try:
                self._disk.fsync_dir(folder)
            except PermissionError:  # the folder above the root may be unreadable
                if len(folder) >= len(self.path):
                    raise
        self._flushed |= {one for one in due if self._stays(one) and os.path.dirname(one) in due}

    def _stays(self, folder: str) -> bool:
        """Whether the folder is the root or directly below it."""
        return self.path in (folder, os.path.dirname(folder))


def _url(path: str) -> str:
    return "file://" + urllib.parse.quote(os.fsencode(path))


def _is_old(path: str, before_ms: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # just removed
        return os.stat(path).st_mtime_ns // 1_000_000 < before_ms
    return False


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000_000)


def _token(data: bytes) -> Token:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


# --- files of others -------------------------------------------------------------------------


class LocalFiles:
    """The files below a folder that is no storage, of any name.

    Parameters
    ----------
    root : str
        The folder. Links in it are followed if they stay below it, and never listed.
    """

    def __init__(self, root: str) -> None:
        self.root, self.url = root, _url(root)

    def files(self) -> Iterator[ObjectInfo]:
        """All files, folder by folder.

        Raises
        ------
        InvalidArgumentError
            If something is a symbolic link, or neither a file nor a folder.
        StorageError
            If a folder cannot be listed.
        """
        due = [""]
        try:
            while due:
                folder = due.pop()
                with os.scandir(os.path.join(self.root, folder)) as found_here:
                    entries = sorted(found_here, key=lambda entry: entry.name)
                for entry in entries:
                    key = folder + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        due.append(key + "/")
                    elif entry.is_file(follow_symlinks=False):
                        yield _info(key, entry.stat())
                    else:
                        raise InvalidArgumentError(
                            f"{key!r} in {self.url} is a symbolic link, or neither a file nor a "
                            "folder; put there what it leads to"
                        )
        except OSError as error:
            raise StorageError(f"{self.url} cannot be listed: {error}") from error

    def get_version(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        """Bytes of a file, and its version; the etag is that which obstore gives local files.

        Raises
        ------
        ObjectNotFoundError
            If there is no such file.
        VirtualContainerError
            If it leads out of the folder.
        StorageError
            If it cannot be read.
        """
        fd = None
        try:
            fd = open_inside(self.root, name)
            data = read_at(fd, start, length)
            found = os.fstat(fd)  # after the read, so that a change during it is detected
        except (OSError, OverflowError, MemoryError) as error:
            url = _url(os.path.join(self.root, name))
            if isinstance(error, _ABSENT):
                raise ObjectNotFoundError(f"there is no file {url}") from error
            # The latter if a link was put there just now.
            if isinstance(error, OSError) and error.errno in (errno.EXDEV, errno.ELOOP):
                raise VirtualContainerError(
                    f"{url} leads out of its container through a symbolic link; open the "
                    "repository with a container that holds the link's target too"
                ) from error
            why = str(error) or type(error).__name__
            raise StorageError(f"{url} cannot be read: {why}") from error
        finally:
            if fd is not None:
                os.close(fd)
        etag = f"{found.st_ino:x}-{found.st_mtime_ns // 1000:x}-{found.st_size:x}"
        return data, Version(etag, found.st_mtime_ns // 1_000_000, found.st_size)


# --- files that stay open --------------------------------------------------------------------


def _read_at_once(fd: int, start: int, length: int) -> bytes:
    room = bytearray(length)
    return bytes(memoryview(room)[: os.preadv(fd, [room], start, _NOWAIT or 0)])


class _OpenFile:
    """An open file; closed with the last reference to this object."""

    __slots__ = ("ahead", "fd")

    def __init__(self, fd: int) -> None:
        self.fd, self.ahead = fd, (-1, b"")  # a place, and what was read from there on

    def read(self, start: int, length: int, read: Callable[[int, int, int], bytes]) -> bytes:
        """A range; where small ones follow one another, the next ones are read with it.

        Threads that share the ranges of a file read them in nearly that order: one that lags a
        little behind changes nothing.
        """
        at, data = self.ahead
        if 0 <= start - at <= len(data) - length:
            return data[start - at : start - at + length]
        if length > _COPIED_BYTES or not 0 <= start - at <= len(data):
            if not 0 < at - start <= _AHEAD_BYTES:
                self.ahead = start + length, b""
            return read(self.fd, start, length)
        data = read(self.fd, start, _AHEAD_BYTES)
        self.ahead = start, data
        return data[:length]

    def __del__(self, close: object = os.close) -> None:  # a default outlives the module
        close(self.fd)  # type: ignore[operator]


_period: Final = [0]
"""That in which the kept files were opened."""


@lru_cache(maxsize=_MOST)
def _file(root: str, key: str) -> _OpenFile:
    """The file of an object, open until the next read in another period."""
    return _OpenFile(open_below(root, check_key(key)))


os.register_at_fork(after_in_child=_file.cache_clear)
