"""Metadata kept on the local disk: never wrong, never an error, bounded, and for many processes."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Repository
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

_REPOSITORY = "ab" * 16
_SPAWN = multiprocessing.get_context("spawn")


def encoded(n: int, padding: int = 0) -> tuple[BlobRef, bytes]:
    data = Delta(
        n.to_bytes(16, "big"), deleted={"x" * padding: b"n" * 12} if padding else {}
    ).encode()
    return BlobRef.to(f"deltas/{1:012d}-{'cd' * 12}/{n}", data), data


class Clock:
    """A wall clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        self.now_ms += 1000
        return self.now_ms


def inline(call: Any) -> None:
    call()


@pytest.fixture
def runtime() -> Runtime:
    return replace(SYSTEM, now_ms=Clock(), background=inline)


def opened(
    folder: Path,
    runtime: Runtime = SYSTEM,
    max_bytes: int = 1 << 30,
    meter: Meter | None = None,
    disk: PosixDisk | None = None,
) -> DiskCache:
    options = CacheOptions(directory=str(folder), directory_bytes=max_bytes)
    cache = DiskCache.open(options, _REPOSITORY, runtime, meter or Meter(), disk)
    assert cache is not None
    return cache


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def only_file(folder: Path) -> Path:
    (found,) = files(folder)
    return found


def test_what_was_put_is_there_for_whoever_opens_the_folder(tmp_path: Path) -> None:
    ref, data = encoded(1)
    assert opened(tmp_path).get(ref) is None
    opened(tmp_path).put(ref, data)
    meter = Meter()
    assert opened(tmp_path, meter=meter).get(ref.bare()) == data
    assert meter.read().disk_cache_hits == 1


@pytest.mark.parametrize("name", ["../elsewhere", "..", "."])
def test_an_id_that_leads_elsewhere_makes_no_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache"
    for odd in (name, str(tmp_path / "elsewhere")):
        with pytest.raises(InvalidArgumentError, match="is refused"):
            DiskCache.open(CacheOptions(directory=str(folder)), odd, SYSTEM, Meter())
    assert [*tmp_path.rglob("*")] == [folder]


@pytest.mark.parametrize("odd", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_regular_file_is_no_hit(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    ref, data = encoded(1)
    cache = opened(tmp_path)
    cache.put(ref, data)
    path = only_file(tmp_path)
    path.unlink()
    odd(path)
    over = threading.Timer(60, os._exit, [3])  # a thread that waits for a pipe cannot be ended
    over.start()
    try:
        assert cache.get(ref) is None
    finally:
        over.cancel()


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ref, data = encoded(1)
        opened(tmp_path / "cache").put(ref, data)
    finally:
        os.umask(old)
    modes = {p.is_dir(): stat.S_IMODE(p.stat().st_mode) for p in (tmp_path).rglob("*")}
    assert modes == {True: 0o700, False: 0o600}


def test_another_repository_length_or_checksum_is_another_file(tmp_path: Path) -> None:
    ref, data = encoded(1)
    cache = opened(tmp_path)
    cache.put(ref, data)
    assert cache.get(replace(ref, crc32c=ref.crc32c ^ 1)) is None
    assert cache.get(replace(ref, length=ref.length + 1)) is None
    options = CacheOptions(directory=str(tmp_path))
    other = DiskCache.open(options, "cd" * 16, SYSTEM, Meter())
    assert other is not None
    assert other.get(ref) is None
    assert cache.get(ref) == data


@pytest.mark.parametrize("harm", ["flip", "cut", "append", "empty", "other", "carried"])
def test_a_damaged_file_is_dropped(tmp_path: Path, harm: str) -> None:
    ref, data = encoded(1, padding=100)
    meter = Meter()
    cache = opened(tmp_path, meter=meter)
    cache.put(ref, data)
    file = only_file(tmp_path)
    flipped = data[:40] + bytes([data[40] ^ 1]) + data[41:]
    damaged = {
        "flip": flipped,
        "cut": data[:-1],
        "append": data + b"\0",
        "empty": b"",
        "other": encoded(2, padding=100)[1],
        # the header still says what the pointer says
        "carried": data[:24] + bytes(len(data) - 24),
    }[harm]
    file.write_bytes(damaged)
    assert cache.get(ref) is None
    assert not file.exists()
    assert meter.read().disk_cache_damaged_files == 1
    cache.put(ref, data)
    assert cache.get(ref) == data


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    ref, data = encoded(1)
    cache = opened(tmp_path)
    for at in range(len(data)):
        cache.put(ref, data)
        only_file(tmp_path).write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        found = cache.get(ref)
        # Format, kind, codec and flags are covered by the checksum; only the magic is not.
        assert found is None or (at < 8 and found != data)


class FullDisk(PosixDisk):
    """Fails one kind of call."""

    def __init__(self, call: str, code: int = errno.ENOSPC) -> None:
        super().__init__(anonymous=False)
        self.call, self.code = call, code

    def _maybe(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.code, os.strerror(self.code))

    def open_temp(self, directory: str) -> Temp:
        self._maybe("open")
        return super().open_temp(directory)

    def write(self, temp: Temp, data: bytes) -> None:
        if self.call == "write":
            super().write(temp, data[: len(data) // 2])
        self._maybe("write")
        super().write(temp, data)

    def rename(self, temp: Temp, path: str) -> None:
        self._maybe("rename")
        super().rename(temp, path)


@pytest.mark.parametrize("call", ["open", "write", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_is_no_error_and_leaves_nothing(
    tmp_path: Path, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    meter, disk = Meter(), FullDisk(call, code)
    cache = opened(tmp_path, meter=meter, disk=disk)
    for n in range(3):
        cache.put(*encoded(n))
    assert [*files(tmp_path)] == []
    assert meter.read().disk_cache_failures == 3
    assert len(caplog.records) == 1, "said once"
    disk.call = ""
    cache.put(*encoded(1))
    assert cache.get(encoded(1)[0]) == encoded(1)[1]


def test_a_folder_that_disappears_is_made_again(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    cache.put(*encoded(1))
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert cache.get(encoded(1)[0]) is None
    cache.put(*encoded(1))
    assert cache.get(encoded(1)[0]) == encoded(1)[1]
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "cache").rmdir()
    cache.put(*encoded(1))
    assert cache.get(encoded(1)[0]) is None


@pytest.mark.slow
def test_what_was_read_longest_ago_is_dropped_first(tmp_path: Path, runtime: Runtime) -> None:
    room = 64 * 4096
    cache = opened(tmp_path, runtime, room)
    for n in range(300):
        cache.put(*encoded(n))
        assert cache.get(encoded(0)[0]) is not None, "read all the time"
        assert sum(1 for _ in files(tmp_path)) <= 64 + 4, "a sixteenth more at most"
    kept = {n for n in range(300) if cache.get(encoded(n)[0]) is not None}
    assert kept == {0, *range(300 - len(kept) + 1, 300)}
    assert len(kept) > 48


def test_chunks_are_within_the_same_bound_and_verified(tmp_path: Path, runtime: Runtime) -> None:
    cache, two = opened(tmp_path, runtime, 64 * 4096), opened(tmp_path, runtime, 64 * 4096)
    for n in range(200):
        cache.put(*encoded(n))
        two.put_chunk(b"chunk %d" % n, bytes([n]) * 1000)
        assert cache.get_chunk(b"chunk %d" % n, 1000) == bytes([n]) * 1000
        assert sum(1 for _ in files(tmp_path)) <= 64 + 8, "a sixteenth more for each at most"
    assert cache.get_chunk(b"chunk 0", 1000) is None, "dropped"
    assert cache.get_chunk(b"chunk 199", 999) is None, "another length"
    two.put_chunk(b"chunk 1", b"abc")
    (file,) = (one for one in files(tmp_path) if one.stat().st_size == 7)
    for damaged in (b"abd" + file.read_bytes()[3:], b"", b"abc", file.read_bytes() + b"x"):
        two.put_chunk(b"chunk 1", b"abc")
        file.write_bytes(damaged)
        assert cache.get_chunk(b"chunk 1", 3) is None
        assert not file.exists()


def test_the_bound_is_the_folders_not_a_repositorys(tmp_path: Path, runtime: Runtime) -> None:
    options = CacheOptions(directory=str(tmp_path), directory_bytes=16 * 4096)
    for repository in range(5):
        cache = DiskCache.open(options, f"{repository:032x}", runtime, Meter())
        assert cache is not None
        for n in range(10):
            cache.put(*encoded(n))
    assert sum(1 for _ in files(tmp_path)) <= 17


def test_what_is_larger_than_a_quarter_of_the_room_is_left_out(tmp_path: Path) -> None:
    cache = opened(tmp_path, max_bytes=4096)
    cache.put(*encoded(1))
    assert [*files(tmp_path)] == []
    opened(tmp_path, max_bytes=0).put(*encoded(1))
    assert [*files(tmp_path)] == []


def test_temporary_files_of_the_dead_are_swept_after_an_hour(
    tmp_path: Path, runtime: Runtime
) -> None:
    opened(tmp_path, runtime).put(*encoded(1))
    folder = only_file(tmp_path).parent
    for name, age_s in ((".tmp-1-0", 3700), (".tmp-2-0", 60)):
        (folder / name).write_bytes(b"half")
        then = runtime.now_ms() / 1000 - age_s
        os.utime(folder / name, (then, then))
    opened(tmp_path, runtime).put(*encoded(2))
    assert sorted(path.name for path in folder.glob(".tmp-*")) == [".tmp-2-0"]


def test_what_is_fetched_while_the_interpreter_exits_is_kept(tmp_path: Path) -> None:
    def no_thread(call: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    ref, data = encoded(1)
    cache = opened(tmp_path, replace(SYSTEM, background=no_thread), max_bytes=16 * 4096)
    for n in range(32):
        cache.put(*encoded(n))
    assert cache.get(ref) == data


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="others could write"):
        zm.create(MemoryStorage(), cache={"directory": shared})
    shared.chmod(0o1777)
    opened(shared).put(*encoded(1))
    (shared / _REPOSITORY).chmod(0o770)
    with pytest.raises(InvalidArgumentError, match="others could write"):
        opened(shared)
    (shared / "file").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        opened(shared / "file")
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(InvalidArgumentError, match="cannot be used"):
            zm.create(MemoryStorage(), cache={"directory": str(tmp_path / name)})


# --- through a repository, in several processes --------------------------------------------------


def filled(path: Path, cache: Path | None = None, commits: int = 3) -> Repository:
    repository = zm.create(path, cache=CacheOptions(directory=cache))  # type: ignore[arg-type]
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(100_000,), chunks=(1,), dtype="u1")
    session.commit("array")
    for commit in range(commits):
        for i in range(1000):
            value = cpu.Buffer.from_bytes(bytes([commit, i % 251]) * 16)
            session.store.set_sync(f"a/c/{commit * 1000 + i}", value)
        session.commit("chunks")
    return repository


def read_all(repository: Repository, commits: int = 3) -> None:
    session = repository.readonly_session()
    assert "a" in contents_of(session.store).nodes()
    for commit in range(commits):
        for i in (0, 7, 999):
            found = session.store.get_sync(f"a/c/{commit * 1000 + i}")
            assert found is not None
            assert found.to_bytes() == bytes([commit, i % 251]) * 16


def _open_cold(path: str, cache: str, out: Queue[list[str]]) -> None:
    counting = CountingStorage(LocalStorage(path))
    read_all(zm.open(counting, cache={"directory": cache}))
    out.put([record.key for record in counting.log])


def in_processes(target: Any, *args: object, count: int = 1) -> list[Any]:
    out: Queue[Any] = _SPAWN.Queue()
    processes = [_SPAWN.Process(target=target, args=(*args, out)) for _ in range(count)]
    for process in processes:
        process.start()
    results = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return results


@pytest.mark.slow
def test_a_second_process_fetches_only_the_root(tmp_path: Path) -> None:
    filled(tmp_path / "r")
    place = str(tmp_path / "r"), str(tmp_path / "cache")
    (first,) = in_processes(_open_cold, *place)
    assert len(first) > 3
    (second,) = in_processes(_open_cold, *place)
    assert second == ["current"]


def test_what_a_process_has_committed_another_does_not_fetch(tmp_path: Path) -> None:
    filled(tmp_path / "r", tmp_path / "cache")
    (log,) = in_processes(_open_cold, str(tmp_path / "r"), str(tmp_path / "cache"))
    assert log == ["current"]


def test_only_metadata_is_kept_and_never_the_root(tmp_path: Path) -> None:
    repository = filled(tmp_path / "r", tmp_path / "cache")
    session = repository.writable_session()
    session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(os.urandom(5000)))
    session.commit("a chunk that is an object")
    assert session.store.get_sync("a/c/0") is not None
    assert [*repository.storage.list("chunks/")]
    kinds = {path.name.partition("+")[0] for path in files(tmp_path / "cache")}
    assert {"snapshots", "deltas", "manifests"} <= kinds
    assert kinds <= {"snapshots", "deltas", "manifests", "nodes", "digests", "pages"}
    current = repository.storage.get("current").decode("latin-1")
    assert "directory" not in current
    assert str(tmp_path) not in current


def test_pages_of_the_root_are_kept_too(tmp_path: Path) -> None:
    repository = zm.create(tmp_path / "r", cache={"directory": tmp_path / "cache"})
    for n in range(250):
        repository.create_tag(hashlib.sha256(bytes([n])).hexdigest())
    assert [*repository.storage.list("pages/")]
    counting = CountingStorage(LocalStorage(tmp_path / "r"))
    other = zm.open(counting, cache={"directory": tmp_path / "cache"})
    assert len(other.list_tags()) == 250
    assert {record.key for record in counting.log} == {"current"}


def test_damage_in_the_folder_is_fetched_anew(tmp_path: Path) -> None:
    filled(tmp_path / "r", tmp_path / "cache")
    for path in files(tmp_path / "cache"):
        data = path.read_bytes()
        path.write_bytes(data[:30] + bytes([data[30] ^ 255]) + data[31:])
    repository = zm.open(tmp_path / "r", cache={"directory": tmp_path / "cache"})
    read_all(repository)
    assert repository.metrics().disk_cache_damaged_files >= 3
    counting = CountingStorage(LocalStorage(tmp_path / "r"))
    again = zm.open(counting, cache={"directory": tmp_path / "cache"})
    read_all(again)
    assert [record.key for record in counting.log] == ["current"]
    assert again.metrics().disk_cache_damaged_files == 0


def _churn(path: str, cache: str, out: Queue[int]) -> None:
    """Opens again and again, with so little room that files go all the time."""
    options = {"directory": cache, "directory-bytes": 10 * 4096}
    for _ in range(15):
        read_all(zm.open(path, cache=options))
    out.put(os.getpid())


@pytest.mark.slow
def test_many_processes_read_write_and_evict_at_once(tmp_path: Path) -> None:
    filled(tmp_path / "r")
    assert (
        len(set(in_processes(_churn, str(tmp_path / "r"), str(tmp_path / "cache"), count=4))) == 4
    )
    assert [path for path in files(tmp_path / "cache") if path.name.startswith(".tmp-")] == []


def _put_for_ever(cache: str, begun: Queue[int]) -> None:
    disk_cache = opened(Path(cache))
    for n in range(10**6):
        disk_cache.put(*encoded(n % 50, padding=20_000))
        if n == 20:
            begun.put(n)


def test_a_killed_process_leaves_nothing_wrong(tmp_path: Path) -> None:
    begun: Queue[int] = _SPAWN.Queue()
    victim = _SPAWN.Process(target=_put_for_ever, args=(str(tmp_path), begun))
    victim.start()
    begun.get(timeout=60)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    meter = Meter()
    cache = opened(tmp_path, meter=meter)
    found = [cache.get(encoded(n, padding=20_000)[0]) for n in range(50)]
    assert sum(data is not None for data in found) >= 20
    assert meter.read().disk_cache_damaged_files == 0


def test_pickles_bring_the_folder_along_and_do_without_where_they_cannot_use_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = filled(tmp_path / "r", tmp_path / "cache")
    session = repository.writable_session()
    for travelled in (repository, session.fork()):
        there = pickle.loads(pickle.dumps(travelled))
        context = getattr(there, "_context", None) or contents_of(there.store).context
        assert context.cache == context_of(repository).cache
        assert context.objects._disk is not None
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").write_bytes(b"a file is in the way")
    there = pickle.loads(pickle.dumps(repository))
    read_all(there)
    assert context_of(there).objects._disk is None
    assert "going on without it" in caplog.text
