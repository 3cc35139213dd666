"""Objects of every kind that lie in each other's place, or in another repository's, or are cut off.

Every way to read a repository answers as before or raises an error of the package: never other
values, never fill. What cannot be told is that `current` is an older one of the same repository,
or another repository's: it is what says which versions there are. `verify` tells that by the
archives that are newer than it, or of another repository.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import swept
from inside import change_root, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.root import Lease
from zarr_manifests.ids import new_session_id
from zarr_manifests.repository import build_index
from zarr_manifests.runtime import Runtime
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, copy_of, in_order

START_MS = 1_700_000_000_000
KINDS = (
    "chunks",
    "deltas",
    "digests",
    "history",
    "indexes",
    "manifests",
    "nodes",
    "pages",
    "root",
    "snapshots",
)
MOST_KEYS = 3


def runtime(*, at_ms: Iterator[int] | None = None) -> Runtime:
    clock = at_ms or itertools.repeat(START_MS + 10**9)
    return in_order(now_ms=lambda: next(clock))


def put(session: Session, key: str, data: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(data))


def name_of(what: str, i: int) -> str:
    return f"{what}-{i:03d}-{sha256(bytes(what, 'ascii') + bytes([i])).hexdigest()}"


def make(seed: int, commits: int = 26, notes: int = 40, deltas: int = 12) -> MemoryStorage:
    """A repository with every kind of object; repositories of two seeds differ in all values."""
    storage = MemoryStorage()
    config = {
        "compaction": {"max-delta-count": deltas},
        "inline-chunk-bytes": 16,
        "pack-chunk-bytes": 400,
    }
    clock = itertools.count(START_MS, 60_000)
    repository = zm.create(storage, config, runtime=runtime(at_ms=clock))
    rng = np.random.default_rng(seed)
    session = repository.writable_session()
    group = zarr.create_group(session.store)
    group.create_array("a", shape=(60,), chunks=(1,), dtype="u1", compressors=None)
    group.create_array("x", data=rng.random(30), chunks=(5,), dimension_names=("x",))
    session.commit("made")
    for i in range(commits):
        for at in (i % 13, i % 13 + 13, i % 13 + 26):
            put(session, f"a/c/{at}", rng.bytes(300))
        put(session, f"a/c/{i % 13 + 40}", rng.bytes(900))
        put(session, f"x/c/{i % 6}", rng.bytes(60))
        put(session, f"y-{i}/zarr.json", b'{"zarr_format":3,"node_type":"group"}')
        for number in range(notes if i % 2 else 1):  # more than is copied along with a pointer
            put(session, f"note-{i}-{number}-{rng.bytes(60).hex()}.txt", rng.bytes(300))
        put(session, f"g-{i}/zarr.json", b'{"zarr_format":3,"node_type":"group"}')
        session.commit(f"commit {i}")
        if i in (commits // 3, 2 * commits // 3):
            repository.create_tag(f"t{2 * i // commits}")
            repository.create_branch(f"b{2 * i // commits}")
        if i == 2 * commits // 3:
            build_index(repository)
    head = root_of(repository).branches["main"].bare().head
    tags = {name_of("tag", i): head for i in range(256)}
    leases = tuple(
        Lease(rng.bytes(16), new_session_id(5, rng.bytes(12)), session.snapshot_id, 2**43, "o")
        for i in range(250)
    )
    change_root(
        repository,
        "create tag",
        lambda root: replace(root, tags={**root.tags, **tags}, leases=(*root.leases, *leases)),
    )
    for i in range(3):
        put(session, f"late-{i}.txt", rng.bytes(20))
        session.commit(f"late {i}")
    return storage


# --- what readers do ---------------------------------------------------------------------------


def contents(session: Session) -> dict[str, bytes]:
    found = {}
    for key in sorted(contents_of(session.store).keys_below("")):
        value = session.store.get_sync(key)
        assert value is not None, f"{key} is listed and reads as absent"
        found[key] = value.to_bytes()
    for key in ("a/c/59", "absent"):
        assert session.store.get_sync(key) is None
    return found


def plain(value: Any) -> Any:
    """Something that can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        fields = [f for f in value.__dataclass_fields__ if not f.startswith("_")]
        return type(value).__name__, [plain(getattr(value, name)) for name in fields]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Iterator):
        return [plain(one) for one in value]
    return value if isinstance(value, str | bytes | int | float | None) else str(value)


class Ways:
    """Everything that reads one repository, by name; what it was asked for is known beforehand."""

    def __init__(self, storage: MemoryStorage) -> None:
        repository = zm.open(storage, runtime=runtime())
        infos = [*repository.ancestry()]
        newest, oldest, middle = infos[0], infos[-1], infos[len(infos) // 2]
        tag = name_of("tag", 77)
        reads: dict[str, Callable[[Repository], Any]] = {
            "branch": lambda r: contents(r.readonly_session()),
            "other branch": lambda r: contents(r.readonly_session("b1")),
            "tag": lambda r: contents(r.readonly_session("t0")),
            "tag of a page": lambda r: contents(r.readonly_session(tag)),
            "estimate": lambda r: r.du(estimate=True),
            "estimate of a tag": lambda r: r.du("t1", estimate=True),
            "diff": lambda r: r.diff(middle.snapshot_id, newest.snapshot_id),
            "ancestry": lambda r: r.ancestry(),
            "ancestry of a tag": lambda r: r.ancestry("t0"),
            "changes": lambda r: r.changes(oldest.snapshot_id),
            "net changes": lambda r: r.changes(middle.snapshot_id, mode="net"),
            "du": lambda r: r.du(),
            "branches": lambda r: r.list_branches(),
            "tags": lambda r: r.list_tags(),
            "du of one": lambda r: r.du(path="a").chunks,
            "initialized": lambda r: initialized_chunks(r.readonly_session(), "a"),
            "bulk": lambda r: sorted(
                (tuple(map(int, coords)), data)
                for coords, data in r.readonly_session().read_chunks("a")
            ),
            "explain": lambda r: r.explain_manifests(),
            "config": lambda r: r.config.to_dict(),
            "ops": lambda r: r.ops_log(),
        }
        for info in infos[::9]:
            reads[f"id {info.message}"] = lambda r, i=info.snapshot_id: contents(
                r.readonly_session(i)
            )
            one = partial(Repository.du, version=info.snapshot_id, estimate=True)
            reads[f"estimate of {info.message}"] = one
        at = infos[len(infos) // 3].written_at
        reads["as of"] = lambda r: contents(r.readonly_session(f"main@{at}"))
        self.reads = reads
        self.answers: dict[str, Any] = {}
        self.keys: dict[str, set[str]] = {}
        self.errors = 0
        for name, read in reads.items():
            counting = CountingStorage(storage)
            self.answers[name] = plain(read(zm.open(counting, runtime=runtime())))
            self.keys[name] = {record.key for record in counting.log}

    def wrong(self, storage: MemoryStorage, keys: set[str]) -> list[str]:
        """Those that answer otherwise than before, of those that read one of these keys."""
        found = []
        for name, read in self.reads.items():
            if not keys & self.keys[name]:
                continue
            try:
                answer = plain(read(zm.open(storage, runtime=runtime())))
            except ManifestsError:
                self.errors += 1
            else:
                if answer != self.answers[name]:
                    found.append(name)
        return found


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    return make(0)


@pytest.fixture(scope="module")
def other() -> MemoryStorage:
    return make(1)


@pytest.fixture(scope="module")
def ways(storage: MemoryStorage) -> Ways:
    return Ways(storage)


def keys_of(storage: MemoryStorage, kind: str) -> list[str]:
    return [info.key for info in storage.list(f"{kind}/")]


def some(keys: list[str], most: int = MOST_KEYS) -> list[str]:
    """Spread over all of them."""
    return [keys[i * len(keys) // most] for i in range(most)] if len(keys) > most else keys


@pytest.mark.slow
def test_the_repository_has_every_kind_of_object(storage: MemoryStorage, ways: Ways) -> None:
    assert {info.key.split("/")[0] for info in storage.list()} == {"current", *KINDS}
    root = root_of(zm.open(storage))
    assert root.pages.keys() >= {"tags", "leases"}
    read = set().union(*ways.keys.values())
    assert {key.split("/")[0] for key in read} == {"current", *KINDS}


def damaged(storage: MemoryStorage, objects: dict[str, bytes | None]) -> MemoryStorage:
    copy = copy_of(storage)
    for key, data in objects.items():
        copy.delete_many([key])
        if data is not None:
            copy.put(key, data)
    return copy


def damages(
    storage: MemoryStorage, other: MemoryStorage, kind: str, read: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Some of the keys of that kind, all of which are read, and what lies there instead."""
    keys, theirs = keys_of(storage, kind), keys_of(other, kind)
    chosen = some([key for key in keys if read is None or key in read])
    for key in chosen:
        at = keys.index(key)
        data, next_key = storage.get(key), keys[(at + 1) % len(keys)]
        yield f"{key} is exchanged with {next_key}", {key: storage.get(next_key), next_key: data}
        yield f"{key} is like {keys[at - 1]}", {key: storage.get(keys[at - 1])}
        yield f"{key} is another repository's", {key: other.get(theirs[at % len(theirs)])}
        yield f"{key} is cut off", {key: data[: len(data) // 2]}
        yield f"{key} is gone", {key: None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_right_or_an_error(
    storage: MemoryStorage, other: MemoryStorage, ways: Ways, kind: str
) -> None:
    before = ways.errors
    wrong = [
        f"{what}: {name}"
        for what, objects in damages(storage, other, kind, set().union(*ways.keys.values()))
        for name in ways.wrong(damaged(storage, objects), set(objects))
    ]
    assert wrong == []
    # Without an index, all is read; without a page of history, the snapshots are.
    assert ways.errors > before or kind in ("indexes", "history")


# --- what maintenance does ---------------------------------------------------------------------

NEVER = timedelta(0)


def _commit(repository: Repository) -> None:
    session = repository.writable_session()
    put(session, "late-0.txt", b"rewritten")
    session.commit("mine")


def _recover(repository: Repository) -> None:
    repository.storage.delete_many(["current"])
    zm.recover(repository.storage, runtime=runtime())


UPKEEP: dict[str, Callable[[Repository], object]] = {
    "compact": lambda r: r.compact(mode="full"),
    "expire": lambda r: r.expire_snapshots(keep_last=4),
    "expire dry": lambda r: r.expire_snapshots(keep_last=4, dry_run=True),
    "gc": lambda r: r.garbage_collect(NEVER),
    "gc dry": lambda r: r.garbage_collect(NEVER, dry_run=True),
    "repack": lambda r: r.compact(mode="packs", min_live=1.0),
    "index": build_index,
    "restore": lambda r: zm.recover(r, root_of(r).version - 3),
    "recover": _recover,
    "commit": _commit,
    "tag": lambda r: r.create_tag("new", r.list_tags()["t0"]),
    "lease": lambda r: r.lease(r.list_tags()["t0"]).__enter__().check(),
}


def held_by(storage: MemoryStorage) -> dict[str, dict[str, bytes]]:
    """What can be read of refs and of the snapshots below, by the id of the snapshot."""
    repository = zm.open(storage, runtime=runtime())
    found = {}
    for info in repository.ancestry():
        try:
            found[info.snapshot_id] = contents(repository.readonly_session(info.snapshot_id))
        except ManifestsError:
            continue
    return found


@pytest.fixture(scope="module")
def small() -> MemoryStorage:
    return make(0, 8, 30, 5)


@pytest.fixture(scope="module")
def other_small() -> MemoryStorage:
    return make(1, 8, 30, 5)


@pytest.fixture(scope="module")
def held(small: MemoryStorage) -> dict[str, dict[str, bytes]]:
    return held_by(small)


@pytest.mark.parametrize("name", UPKEEP)
@pytest.mark.parametrize("every", swept([4, 12], but=[12]))
def test_upkeep_of_what_is_damaged_is_right_or_an_error(
    small: MemoryStorage,
    other_small: MemoryStorage,
    held: dict[str, dict[str, bytes]],
    name: str,
    every: int,
) -> None:
    """And whatever it has done, put back what was damaged, and all reads as before."""
    tried, counting = 0, CountingStorage(copy_of(small))
    UPKEEP[name](zm.open(counting, runtime=runtime()))
    read = {record.key for record in counting.log}
    for kind in (kind for kind in KINDS if keys_of(small, kind)):
        some_damages = itertools.islice(damages(small, other_small, kind, read), 0, None, every)
        for what, objects in some_damages:
            copy = damaged(small, objects)
            tried += 1
            with suppress(ManifestsError):
                UPKEEP[name](zm.open(copy, runtime=runtime()))
            for key in objects if name != "recover" else (*objects, "current"):
                copy.delete_many([key])
                copy.put(key, small.get(key))
            repository = zm.open(copy, runtime=runtime())
            infos = [*repository.ancestry()]
            for at, info in [*enumerate(infos)][::6]:
                session = repository.readonly_session(info.snapshot_id)
                found = contents(session)
                if info.message == "mine":
                    assert found.pop("late-0.txt") == b"rewritten"
                # Nothing but that has changed since the newest that was there before.
                same = next(one.snapshot_id for one in infos[at:] if one.snapshot_id in held)
                if info.message == "mine":
                    found["late-0.txt"] = held[same]["late-0.txt"]
                assert found == held[same], f"{what}: {info.message}"
    assert tried


@pytest.mark.parametrize("kind", KINDS)
def test_verification_tells_of_it(
    small: MemoryStorage, other_small: MemoryStorage, kind: str
) -> None:
    """Any single damage is in `test_recovery`; here is what lies in another's place."""
    for what, objects in itertools.islice(damages(small, other_small, kind), 5, 8):
        report = zm.open(damaged(small, objects), runtime=runtime()).verify()
        assert not report.ok, what


# --- the root ----------------------------------------------------------------------------------


def test_another_repositorys_root_is_refused_by_who_knows_this_one(
    storage: MemoryStorage, other: MemoryStorage
) -> None:
    copy = copy_of(storage)
    repository = zm.open(copy, runtime=runtime())
    session = repository.writable_session()
    put(session, "late-0.txt", b"rewritten")
    assert contents(repository.readonly_session())
    copy.put("current", other.get("current"))
    for use in (
        lambda: session.commit("mine"),
        lambda: [*repository.ancestry()],
        repository.du,
        lambda: repository.create_tag("new"),
        lambda: repository.expire_snapshots(keep_last=1),
        lambda: repository.garbage_collect(NEVER),
        lambda: repository.compact(mode="full"),
        lambda: contents(repository.readonly_session()),
    ):
        with pytest.raises(ManifestsError):
            use()
    assert copy.get("current") == other.get("current")
    assert {i.key for i in copy.list()} >= {i.key for i in storage.list()}


@pytest.mark.slow
def test_an_older_root_reads_as_it_was_and_verification_tells(storage: MemoryStorage) -> None:
    versions = keys_of(storage, "root")
    for archive in versions[5:-1:8]:
        copy = copy_of(storage)
        copy.put("current", storage.get(archive))
        repository = zm.open(copy, runtime=runtime())
        assert contents(repository.readonly_session())
        report = repository.verify()
        assert any("is newer" in problem.what for problem in report.problems), archive
        copy.delete_many(["current"])  # as it says
        zm.recover(copy, runtime=runtime())
        assert contents(zm.open(copy).readonly_session()) == contents(
            zm.open(storage).readonly_session()
        )
