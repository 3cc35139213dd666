"""Storages on a local disk and in memory: locks, links, folders, and what survives a crash."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "durable-files-are-not-flushed",
        "storage/local.py",
        "self._disk.fsync_file(temp.fd)",
        "pass",
    ),
    Fault(
        "what-follows-a-swap-reaches-the-disk-first",
        "storage/local.py",
        "depends on.\n                self._sync_folders([os.path.dirname(path)])",
        "depends on.",
    ),
    Fault(
        "an-object-that-is-found-is-not-made-durable",
        "storage/local.py",
        "if not created:",
        "if False:",
    ),
    Fault(
        "a-flush-that-failed-is-made-good-by-a-second",
        "storage/local.py",
        "self._lost[path] = found.st_dev, found.st_ino",
        "pass",
    ),
    Fault(
        "a-swap-on-a-disk-takes-no-lock",
        "storage/local.py",
        "durable=True) as temp, exclusive(self._lock):",
        "durable=True) as temp:",
    ),
    Fault(
        "a-put-does-not-wait-for-a-swap",
        "storage/local.py",
        "with exclusive(self._lock):\n                self._disk.rename",
        "with contextlib.nullcontext():\n                self._disk.rename",
    ),
    Fault(
        "a-root-is-read-however-large-it-is",
        "storage/local.py",
        "data = read_at(fd, 0, MAX_TAGGED_BYTES + 1)",
        "data = read_at(fd, 0, None)",
    ),
    Fault(
        "a-short-read-is-taken-for-the-end",
        "storage/disk.py",
        "start, length = start + len(data), length - len(data)",
        "start, length = start + len(data), 0",
    ),
    Fault(
        "writes-go-through-linked-folders",
        "storage/local.py",
        "check_folders(self.path, *keys)",
        "pass",
    ),
    Fault(
        "network-filesystems-are-written-to",
        "storage/local.py",
        "if remote is not None:",
        "if False:",
    ),
    Fault(
        "reads-go-through-linked-folders",
        "storage/disk.py",
        "os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)",
        "os.open(name, _FOLDER, dir_fd=at)",
    ),
    Fault(
        "a-listing-goes-through-linked-folders",
        "storage/local.py",
        "if entry.is_symlink():",
        "if False:",
    ),
    Fault(
        "a-pipe-is-opened-as-an-object",
        "storage/disk.py",
        "if not stat.S_ISREG(mode):",
        "if False:",
    ),
    Fault(
        "a-folder-that-was-removed-counts-as-flushed",
        "storage/local.py",
        "for one in due if self._stays(one) and os.path.dirname(one) in due}",
        "for one in due}",
    ),
    Fault(
        "empty-folders-of-another-storage-are-removed",
        "storage/local.py",
        'if folder != self.path and ".lock" in names:',
        "if False:",
    ),
    Fault(
        "a-child-keeps-its-parents-lock",
        "storage/disk.py",
        "_lock_files.add(self.file)",
        "pass",
    ),
    Fault(
        "a-lock-may-be-a-link",
        "storage/disk.py",
        "opener=open_regular)",
        "opener=lambda path, flags: open_regular(path, flags, follow_links=True))",
    ),
    Fault(
        "a-deleted-object-is-read-from-its-open-file",
        "storage/local.py",
        "finally:\n                    _file.cache_clear()",
        "finally:\n                    pass",
    ),
    Fault(
        "open-files-are-used-for-ever",
        "storage/local.py",
        "int(_now_s() / _KEPT_S)",
        "0",
    ),
    Fault(
        "the-reserve-is-kept-on-a-full-disk",
        "storage/local.py",
        "self._disk.unlink(self._reserve)",
        "pass",
    ),
    Fault(
        "memory-of-another-process-reads-as-empty",
        "storage/memory.py",
        "_NAMED.get(name) if process == os.getpid() else None",
        "_NAMED.setdefault(name, {})",
    ),
    Fault(
        "a-folder-is-closed-twice-after-an-interrupt",
        "storage/disk.py",
        "            above, at = at, _opened_inside(at, name, path)\n"
        "            os.close(above)  # last",
        "            below = _opened_inside(at, name, path)\n"
        "            os.close(at)\n"
        "            at = below  # last",
    ),
]
