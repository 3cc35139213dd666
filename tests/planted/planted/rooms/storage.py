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
        "depends on.\n                self._folders.sync([os.path.dirname(path)])",
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
        "self._lost[path] = _identity(fd)",
        "pass",
    ),
    Fault(
        "a-swap-on-a-disk-takes-no-lock",
        "storage/local.py",
        "exclusive(self._prefix + _LOCK_NAME),\n            ):",
        "contextlib.nullcontext(),\n            ):",
    ),
    Fault(
        "a-put-does-not-wait-for-a-swap",
        "storage/local.py",
        "with exclusive(self._prefix + _LOCK_NAME):\n                self._name",
        "with contextlib.nullcontext():\n                self._name",
    ),
    Fault(
        "a-root-is-read-however-large-it-is",
        "storage/local.py",
        "data = _read(fd, 0, MAX_TAGGED_BYTES + 1)",
        "data = _read(fd, 0, None)",
    ),
    Fault(
        "a-short-read-is-taken-for-the-end",
        "storage/local.py",
        "if len(data) == length or not data:",
        "if True:",
    ),
    Fault(
        "writes-go-through-linked-folders",
        "storage/local.py",
        "check_folders(self._path, *keys)",
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
        "storage/files.py",
        "os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)",
        "os.open(name, _FOLDER, dir_fd=at)",
    ),
    Fault(
        "a-listing-goes-through-linked-folders",
        "storage/local_listing.py",
        "if not follow_links and entry.is_symlink():",
        "if False:",
    ),
    Fault(
        "a-pipe-is-opened-as-an-object",
        "storage/files.py",
        "if not stat.S_ISREG(mode):",
        "if False:",
    ),
    Fault(
        "spare-files-stay-open-when-no-descriptor-is-left",
        "storage/files.py",
        "for close in _given_up:\n        close()",
        "",
    ),
    Fault(
        "a-folder-that-was-removed-counts-as-flushed",
        "storage/folders.py",
        "os.truncate(self._lock, os.stat(self._lock).st_size + 1)",
        "pass",
    ),
    Fault(
        "empty-folders-of-another-storage-are-removed",
        "storage/folders.py",
        "if folder != self._root and any(",
        "if False and any(",
    ),
    Fault(
        "a-child-keeps-its-parents-lock",
        "storage/locks.py",
        "_held.add(weakref.ref(file, _held.discard))",
        "pass",
    ),
    Fault(
        "a-lock-may-be-a-link",
        "storage/locks.py",
        "return open_regular(path, flags)",
        "return open_regular(path, flags, follow_links=True)",
    ),
    Fault(
        "a-deleted-object-is-read-from-its-open-file",
        "storage/handles.py",
        "for path in paths:\n            _open.pop(path, None)",
        "pass",
    ),
    Fault(
        "open-files-are-used-for-ever",
        "storage/handles.py",
        "found is not None and _now_s() < found.until_s else None",
        "found is not None else None",
    ),
    Fault(
        "the-reserve-is-kept-on-a-full-disk",
        "storage/reserve.py",
        "self._disk.unlink(self._path)",
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
        "storage/files.py",
        "            above, at = at, _opened_folder(folder, at, path)\n"
        "            os.close(above)  # last",
        "            below = _opened_folder(folder, at, path)\n"
        "            os.close(at)\n"
        "            at = below  # last",
    ),
]
