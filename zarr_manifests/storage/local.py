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
  no error. Large files that are left for a later `sync` are handed to the system to write at once.
  That shortens the fsync and promises nothing.
- The token of a version is a digest of its bytes. The same bytes are the same version, so a caller
  of `cas` has to write something unique.

Missing folders are made, and empty ones removed (see `folders`). Files from which ranges are read
stay open for a moment (see `handles`).

Files that no key can name, such as the lock and temporary files, do not exist for a reader.

Objects are regular files. Without `follow_links`, neither they nor the folders below the root may
be symbolic links. A read is refused even if a link is put there at that moment; a write checks
before it begins.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH100, PTH111, PTH116, PTH120

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage.disk import Disk, PosixDisk, Temp, is_remote_filesystem
from zarr_manifests.storage.files import (
    check_folders,
    open_below,
    open_regular,
)
from zarr_manifests.storage.folders import Folders
from zarr_manifests.storage.handles import (
    Handle,
    ahead_of,
    at_hand,
    forget,
    handle_of,
    known,
    opened,
    would_block,
)
from zarr_manifests.storage.local_errors import read_error, translated
from zarr_manifests.storage.local_listing import objects_in, stray_in
from zarr_manifests.storage.locks import FileTurn, exclusive
from zarr_manifests.storage.protocol import (
    MAX_TAGGED_BYTES,
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    Turn,
    check_key,
    check_prefix,
    check_range,
)
from zarr_manifests.storage.reserve import Reserve

__all__ = ["LocalStorage"]

_CAPABILITIES = Capabilities(inline=True, durable=True, shared=True, turns=True)
_LOCK_NAME = ".lock"
_DELETED_A_TURN = 64  # objects deleted while others wait for the lock
_ABSENT = FileNotFoundError, NotADirectoryError
_RESERVE_NAME = ".reserve"
# What will be synced later; from this size on it pays to begin writing at once.
_BEGUN_BYTES = 128 * 1024
# Up to this size a read allocates what was asked for; beyond it checks the file's size first.
_UNCHECKED_READ_BYTES = 256 * 1024


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
    follow_links : bool
        Follow symbolic links below the folder. Links above it are always followed.
    disk : Disk, optional
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        force: bool = False,
        follow_links: bool = False,
        disk: Disk | None = None,
    ) -> None:
        text = os.fsdecode(path)
        if not text or "\0" in text or not _is_encodable(text):
            raise InvalidArgumentError(f"{text!r} is not the path of a folder")
        self._path = os.path.abspath(os.path.expanduser(text))
        self._prefix = self._path.rstrip("/") + "/"
        self._force = force
        self._follow = follow_links
        # What one storage may read must not be served to another that may not.
        self._at_hand = self._prefix + ("/" if follow_links else "")
        self._disk = disk or PosixDisk()
        self._writable = False
        self._folders = Folders(self._path, self._prefix + _LOCK_NAME, self._disk)
        self._lost: dict[str, tuple[int, int]] = {}  # device and inode of files that failed fsync

    def __repr__(self) -> str:
        return f"LocalStorage({self._path!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _reopen, (self._path, self._force, self._follow, self._disk)

    @property
    def path(self) -> str:
        """The absolute path of the folder."""
        return self._path

    @property
    def url(self) -> str:
        return "file://" + urllib.parse.quote(os.fsencode(self._path))

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def reserve(self) -> Reserve:
        return Reserve(self._prefix + _RESERVE_NAME, self._disk)

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is not None:
            handle = opened(self._at_hand + key)
            if handle is not None:  # like `known`, whose call would cost 2 % of a small read
                at, data = handle.ahead
                if 0 <= start - at <= len(data) - length <= len(data):
                    return data[start - at : start - at + length]
        check_range(start, length)
        try:
            if length is not None:
                handle = self._handle(key)  # a reference keeps the descriptor open during the read
                most = ahead_of(handle, start, length)
                data = _read(handle.fd, start, most)
                if most > length:
                    handle.ahead = start, data
                    return data[:length]
                return data
            fd = self._open(check_key(key))
            try:
                return _read(fd, start, length)
            finally:
                os.close(fd)
        except OSError as error:
            raise read_error(error, self._path, key) from error

    def read_into(self, key: str, start: int, room: memoryview) -> int:
        check_range(start, len(room))
        try:
            handle, count = self._handle(key), 0
            while count < len(room):
                more = os.preadv(handle.fd, [room[count:]], start + count)
                if not more:
                    break
                count += more
            return count
        except OSError as error:
            raise read_error(error, self._path, key) from error

    def _handle(self, key: str) -> Handle:
        # Only files of valid keys are ever opened, so an open file needs no second check.
        path = self._at_hand + key
        return opened(path) or handle_of(path, lambda: self._open(check_key(key)))

    def _open(self, key: str) -> int:
        return open_below(self._path, key, follow_links=self._follow)

    def _forget(self, *keys: str) -> None:
        forget([f"{self._prefix}{links}{key}" for key in keys for links in ("", "/")])

    @contextlib.contextmanager
    def _newly_opened(self, key: str) -> Iterator[int]:
        try:
            fd = self._open(check_key(key))
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            raise read_error(error, self._path, key) from error

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for start, length in ranges:
            check_range(start, length)
        with self._newly_opened(key) as fd:
            return [_read(fd, start, length) for start, length in ranges]

    def get_tagged(self, key: str) -> Tagged:
        with self._newly_opened(key) as fd:
            data = _read(fd, 0, MAX_TAGGED_BYTES + 1)
        return Tagged(data, _token(data))

    def head(self, key: str) -> ObjectInfo:
        with self._newly_opened(key) as fd:
            found = os.fstat(fd)
        return ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000_000)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        start = folder + "/" if folder else ""
        return objects_in(self._path, start, prefix, after, follow_links=self._follow)

    def stray(self) -> str | None:
        return stray_in(self._path)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        # Without a thread, which takes ten times as long, if the system has the bytes in memory.
        if length:
            ahead = known(self._at_hand + key, start, length)
            if ahead is not None:
                return ahead
            check_range(start, length)
            try:
                handle = self._handle(key)
            except OSError as error:
                raise read_error(error, self._path, key) from error
            data = at_hand(handle, start, length)
            if data is not None:
                return data
            if would_block(handle, start, length):
                import asyncio  # slow to import, and looking around does without

                return await asyncio.to_thread(self.get, key, start, length)
        return self.get(key, start, length)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        path = self._prefix + check_key(key)
        with self._writing(key), self._temp(path, data, durable) as temp:
            with exclusive(self._prefix + _LOCK_NAME):
                self._name(self._disk.rename, temp, path)
                self._forget(key)
            if durable:
                self._folders.sync([os.path.dirname(path)])

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        path = self._prefix + check_key(key)
        with self._writing(key):
            created = self._create(key, data, durable)
            if durable:
                if not created:
                    self._sync_file(key)
                self._folders.sync([os.path.dirname(path)])
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
        if then_create is not None:
            check_key(then_create[0])
        with self._writing(key):
            if self._token_at(key) != token:
                return None  # refused before anything was written
            with (
                self._temp(path, data, durable=True) as temp,
                exclusive(self._prefix + _LOCK_NAME),
            ):
                if not self._swap(temp, key, token):
                    return None
                # A later object must not reach the disk before the swap it depends on.
                self._folders.sync([os.path.dirname(path)])
                if then_create is not None:
                    self._create_after(*then_create)
        return _token(data)

    def delete_many(self, keys: Iterable[str]) -> None:
        for some in batched(keys, _DELETED_A_TURN):
            paths = {key: self._prefix + check_key(key) for key in some}
            if not any(map(os.path.lexists, paths.values())):
                continue
            with self._writing(*paths), exclusive(self._prefix + _LOCK_NAME):
                try:
                    for path in paths.values():
                        with translated(path), contextlib.suppress(*_ABSENT):
                            self._disk.unlink(path)
                finally:
                    self._forget(*paths)

    def turn(self, name: str) -> Turn:
        """A turn, made of one or two lock files; see `TakesTurns`."""
        if not (name.isascii() and name.isalpha()):
            raise InvalidArgumentError(f"{name!r} is not the name of a turn; names are letters")
        with self._writing(name):
            self._folders.make(self._path)  # the turn may be taken before the first object
            return FileTurn(f"{self._prefix}{_LOCK_NAME}-{name}")

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
        count = 0
        with translated(self._path):
            files, folders = self._folders.leftovers(before_ms)
            for path in files:
                with contextlib.suppress(FileNotFoundError):  # its writer has finished
                    self._disk.unlink(path)
                    count += 1
            self._folders.remove(folders)
        return count

    def sync(self, keys: Iterable[str]) -> None:
        folders: dict[str, None] = {}
        for key in keys:
            path = self._prefix + check_key(key)
            with translated(path):
                try:
                    self._sync_file(key)
                except (FileNotFoundError, NotADirectoryError) as error:
                    raise read_error(error, self._path, key) from error
            folders[os.path.dirname(path)] = None
        with translated(self._path):
            self._folders.sync(folders)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return self.create(key, data, durable=durable)

    # --- internals ---------------------------------------------------------------------------

    def _create(self, key: str, data: bytes | memoryview, durable: bool) -> bool:
        """Write and link the file; its name is not flushed to the disk."""
        path = self._prefix + key
        if self._is_there(path):
            return False
        with self._temp(path, data, durable) as temp:
            try:
                self._name(self._disk.link, temp, path)
            except FileExistsError:
                return False
        return True

    def _create_after(self, key: str, data: bytes) -> None:
        # fsynced before it has a name, so it is whole or absent in any case. The swap before it has
        # succeeded, and is not affected by a failure here.
        with contextlib.suppress(StorageError), self._writing(key):
            self._create(key, data, durable=True)

    def _is_there(self, path: str) -> bool:
        try:
            mode = os.stat(path, follow_symlinks=self._follow).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode):
            os.close(open_regular(path, follow_links=self._follow))  # raises if it is no object
        return True

    def _swap(self, temp: Temp, key: str, token: Token | None) -> bool:
        path = self._prefix + key
        if self._token_at(key) != token:
            return False
        if token is not None:
            self._disk.rename(temp, path)
            self._forget(key)
            return True
        try:
            self._name(self._disk.link, temp, path)  # `create` does not take the lock
        except FileExistsError:
            return False
        return True

    def _token_at(self, key: str) -> Token | None:
        try:
            fd = self._open(key)
        except FileNotFoundError:
            return None
        try:
            return _token(_read(fd, 0, MAX_TAGGED_BYTES + 1))
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _temp(self, path: str, data: bytes | memoryview, durable: bool) -> Iterator[Temp]:
        """A written temporary file beside `path`, removed at the end unless it was renamed."""
        folder = os.path.dirname(path)
        try:
            temp = self._disk.open_temp(folder)
        except FileNotFoundError:
            self._folders.make(folder)
            temp = self._disk.open_temp(folder)
        try:
            self._disk.write(temp, data)
            if durable:
                self._disk.fsync_file(temp.fd)
            elif len(data) >= _BEGUN_BYTES:
                self._disk.begin_sync(temp.fd)
            yield temp
        finally:
            os.close(temp.fd)
            if temp.path is not None:
                self._disk.unlink(temp.path)

    def _name(self, give: Callable[[Temp, str], None], temp: Temp, path: str) -> None:
        """Give the file its name, even if its folder was removed since the file was opened."""
        try:
            give(temp, path)
        except FileNotFoundError:
            self._folders.make(os.path.dirname(path))
            give(temp, path)

    def _sync_file(self, key: str) -> None:
        """Flush the bytes of a named file to the disk; raise if that has failed before."""
        path, fd = self._prefix + key, self._open(key)
        try:
            if path in self._lost and self._lost[path] == _identity(fd):
                raise StorageError(
                    f"{path} could not be written to the disk, and its bytes may be lost whatever "
                    "a later attempt says: its chunk must be written again, or the changes made "
                    "again in a new session"
                )
            try:
                self._disk.fsync_file(fd)
            except OSError:
                self._lost[path] = _identity(fd)
                raise
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _writing(self, *keys: str) -> Iterator[None]:
        with translated(self._prefix + keys[0]):
            if not self._writable:
                self._check_filesystem()
            if not self._follow:
                check_folders(self._path, *keys)
            yield

    def _check_filesystem(self) -> None:
        remote = None if self._force else is_remote_filesystem(self._path)
        if remote is not None:
            raise UnsupportedStorageError(
                f"{self._path} lies on a {remote} filesystem, where locks and renames are often "
                "not safe: write to a local disk, or pass force=True if there is only ever one "
                "writer; reading is fine"
            )
        self._writable = True


def _reopen(path: str, force: bool, follow_links: bool, disk: Disk) -> LocalStorage:
    return LocalStorage(path, force=force, follow_links=follow_links, disk=disk)


def _is_encodable(path: str) -> bool:
    """Whether the path can be encoded for the system; lone surrogates from elsewhere cannot."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _identity(fd: int) -> tuple[int, int]:
    """What distinguishes a file from a later file of the same name."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _token(data: bytes) -> Token:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def _read(fd: int, start: int, length: int | None) -> bytes:
    """Read up to `length` bytes from `start` on; fewer only at the end of the file."""
    if length is None or length > _UNCHECKED_READ_BYTES:
        rest = max(os.fstat(fd).st_size - start, 0)
        length = rest if length is None else min(rest, length)
    data = os.pread(fd, length, start)
    if len(data) == length or not data:
        return data
    parts = [data]
    while data and (length := length - len(data)):
        start += len(data)
        data = os.pread(fd, length, start)
        parts.append(data)
    return b"".join(parts)
