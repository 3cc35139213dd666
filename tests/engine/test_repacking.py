"""Repacking: dead bytes go, no value changes, and nobody who writes meanwhile loses anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from stored import contents, put
from zarr_manifests import Repository
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, NotFoundError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

RUNTIME = in_order()
CHUNK = 100
CONFIG = {
    "inline-chunk-bytes": 8,
    "pack-bytes": 8 * CHUNK,
    "pack-chunk-bytes": 2 * CHUNK,
    "compaction": {"mode": "manual"},
}


def chunk(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK)


def head(storage: Storage) -> dict[str, bytes]:
    """What a new process reads at each key."""
    return contents(zm.open(storage, runtime=RUNTIME))


def filled(storage: Storage) -> Repository:
    """Three packs of an array and one of entries, of which most chunks are dead."""
    repo = zm.create(storage, CONFIG, runtime=RUNTIME)
    session = repo.writable_session()
    for name in ("a", "b"):
        zarr.create_array(
            session.store, name=name, shape=(24 * CHUNK,), chunks=(CHUNK,), dtype="u1",
            compressors=None,
        )  # fmt: skip
    for i in range(24):
        put(session.store, f"a/c/{i}", chunk(i))
    for i in range(4):
        put(session.store, f"b/c/{i}", chunk(100 + i))
        put(session.store, f"note{i}", chunk(200 + i))
    session.commit("all")
    session = repo.writable_session()
    for i in range(24):
        if i % 8 > 1:  # two of each pack stay
            put(session.store, f"a/c/{i}", chunk(1000 + i))
    session.store.delete_sync("b/c/0")
    session.store.delete_sync("note0")
    put(session.store, "b/c/5", b"inline")
    put(session.store, "b/c/6", bytes(range(250)))  # an object of its own
    session.commit("most of a anew")
    return repo


def collected(repo: Repository) -> None:
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))


def test_what_it_refuses() -> None:
    repo = zm.create(MemoryStorage())
    for wrong in (0, 1.1, "0.5"):
        with pytest.raises(InvalidArgumentError, match="min_live"):
            repo.compact(mode="packs", min_live=wrong)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="other"):
        repo.compact("other", mode="packs")
    assert repo.compact(mode="packs").packs == 0


def overwrite(repo: Repository) -> None:
    session = repo.writable_session()
    put(session.store, "a/c/0", chunk(5000))
    session.store.delete_sync("a/c/8")
    put(session.store, "a/c/17", b"inline")
    session.commit("meanwhile")


def rewrite_all_and_collect(repo: Repository) -> None:
    """What is read anew is not there any more; but then nothing refers to it, either."""
    session = repo.writable_session()
    for i in range(24):
        put(session.store, f"a/c/{i}", chunk(6000 + i))
    session.commit("meanwhile")
    repo.compact(mode="full")
    collected(repo)


def repack(repo: Repository) -> None:
    repo.compact(mode="packs")


@pytest.mark.parametrize(
    ("stage", "act", "overtaken"),
    [
        ("looking at refs", overwrite, 3),
        ("reading packs", rewrite_all_and_collect, 6),
        ("writing packs", overwrite, 3),
        ("merging refs", repack, 6),
    ],
)
def test_what_others_write_meanwhile_wins(
    stage: str, act: Callable[[Repository], None], overtaken: int
) -> None:
    storage, plain = MemoryStorage(), MemoryStorage()
    act(filled(plain))
    filled(storage)
    due = [zm.open(storage, runtime=RUNTIME)]

    def progress(now: str, _: int) -> None:
        if now == stage and due:
            act(due.pop())

    repo = zm.open(storage, runtime=RUNTIME)
    with zm.show_progress(progress):
        report = repo.compact(mode="packs")
    assert head(storage) == head(plain)
    assert report.chunks == 6 - overtaken
    copied = stage in ("writing packs", "merging refs")
    assert report.chunks_overtaken == (overtaken if copied else 0)
    assert repo.verify().ok
    collected(repo)
    assert head(storage) == head(plain)
    assert repo.compact(mode="packs").packs == 0


def test_a_damaged_chunk_is_not_repacked() -> None:
    repo = filled(storage := MemoryStorage())
    session = repo.writable_session()
    session.store.delete_sync("a/c/22")
    session.commit("half of a pack")
    found = repo.readonly_session().chunk_refs("a", [slice(23, 24)])
    pack = found.locations[found.source[0]]
    data = storage.get(pack)
    storage.put(pack, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptObjectError, match="/a"):
        repo.compact(mode="packs", min_live=1.0)
    assert [*repo.readonly_session().chunk_refs("a", [slice(23, 24)]).locations] == [pack]
    storage.delete_many([pack])
    # Of what is not there it is not known how large it is: `verify` tells.
    repo.compact(mode="packs", min_live=1.0)
