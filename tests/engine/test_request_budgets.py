"""What reading and committing cost a cold process, in rounds of requests, on a large repository.

The repository: 200 arrays with attributes, one of them of a million chunks in eight leaves,
coordinates of which one is beyond 64 KiB and so not inline, ten branches, and a full log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.format.nodes import Base
from zarr_manifests.format.root import LOG_TAIL
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Box
from zarr_manifests.ids import crc32c, snapshot_id_of
from zarr_manifests.runtime import SYSTEM, Runtime, one_by_one
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, copy_of

LEAVES, LEAF_ROWS = 8, 125_000
CHUNK = b"\x05" * 8


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(session: Session, key: str) -> bytes:
    value = session.store.get_sync(key)
    assert value is not None, key
    return value.to_bytes()


def stopped_clock() -> Runtime:
    return replace(SYSTEM, monotonic_s=lambda: 1000.0)


def arrays(repository: Repository) -> None:
    session = repository.writable_session("main")
    group = zarr.create_group(session.store, attributes={"title": "budgets"})
    names = {"dimension_names": ("time",), "dtype": "i8"}
    for name, values in (("time", np.arange(50)), ("far", np.arange(9_000.0))):
        group.create_array(name, data=values, dimension_names=(name,), compressors=None)
    group.create_array("huge", shape=(LEAVES * LEAF_ROWS,), chunks=(1,), **names)
    for i in range(197):
        attributes = {"long_name": f"the {i}th of many variables", "units": "m s-1"}
        group.create_array(f"v{i}", shape=(50,), chunks=(10,), attributes=attributes, **names)
    session.commit("200 arrays")


def table(first: int, source: str, number: int) -> ChunkTable:
    """References to 125,000 chunks of one object."""
    n = LEAF_ROWS
    rows = np.arange(n, dtype=np.int64)
    columns = {
        "kind": np.full(n, RefKind.NATIVE, np.int64),
        "source": np.zeros(n, np.int64),
        "number": np.full(n, number, np.int64),
        "offset": rows * 0,
        "length": np.full(n, len(CHUNK), np.int64),
        "crc32c": np.full(n, crc32c(CHUNK), np.int64),
    }
    box = Box((first,), (first + n,))
    return ChunkTable(box, None, **columns, sources=(source,), inline=b"")


def put_base(storage: MemoryStorage) -> None:
    """A base with the million references, as a fold would leave it, made without writing each."""
    repository = zm.open(storage, {"compaction": {"max-delta-count": 1}})
    session = repository.writable_session("main")
    put(session, "v0/c/0", b"small")
    session.commit("and fold")
    roots = Roots(storage, SYSTEM)
    at = roots.read()
    keys = SessionKeys(at.root.version, SYSTEM)
    uploads = []

    def upload(kind: str, data: bytes) -> BlobRef:
        uploads.append(Upload(keys.next(kind), data))
        return uploads[-1].ref

    chunk = keys.next("chunks")
    storage.create(chunk, CHUNK)
    view = contents_of(repository.readonly_session("main").store).view
    old = Base.from_object(storage.get(view.snapshot.base.key), view.snapshot.base)
    leaves = []
    for leaf in range(LEAVES):
        _, source, number = chunk.split("/")
        rows = table(leaf * LEAF_ROWS, source, int(number))
        manifest = Manifest.of([(view.nodes["huge"].node_id, rows)])
        leaves.append(ManifestRef(upload("manifests", manifest.encode()), manifest.directory()))
    base = upload("nodes", replace(old, manifests=(*old.manifests, *leaves)).encode())
    log = upload("deltas", Delta(b"c" * 16).encode())
    tip = at.root.branches["main"]
    head_key = keys.next("snapshots")
    snapshot = Snapshot(
        snapshot_id_of(head_key),
        at.root.repository_id,
        tip.head.bare(),
        b"c" * 16,
        CommitKind.REWRITE,
        "base",
        {},
        1,
        base,
        (),
        log,
        sequence=view.snapshot.sequence,
    )
    uploads.append(Upload(head_key, snapshot.encode()))
    head = uploads[-1].ref
    for one in uploads:
        storage.create(one.key, one.data)
    moved = {**at.root.branches, "main": replace(tip, head=head, base=base)}
    roots.archive(at)
    assert roots.swap(at, replace(at.root, branches=moved), b"c" * 16)


@pytest.fixture(scope="module")
def large() -> MemoryStorage:
    storage = MemoryStorage()
    repository = zm.create(storage, {"compaction": {"max-delta-count": 100}})
    arrays(repository)
    put_base(storage)
    repository.create_tag("base")
    for i in range(9):
        repository.create_branch(f"branch-{i}")
        session = repository.writable_session(f"branch-{i}")
        put(session, "v0/c/1", b"of this branch")
        session.commit("on a branch")
    for i in range(LOG_TAIL):
        repository.create_branch(f"gone-{i}")
        repository.delete_branch(f"gone-{i}")
    assert len(root_of(storage).log) == LOG_TAIL
    return storage


def append(session: Session, commit: int, names: list[str]) -> None:
    """What an append leaves: the arrays longer, the coordinate written anew, chunks beyond."""
    length = 60 + 10 * commit
    for name in ("time", *names):
        document = json.loads(get(session, f"{name}/zarr.json"))
        document["shape"] = [length if name != "huge" else LEAVES * LEAF_ROWS + commit + 1]
        put(session, f"{name}/zarr.json", json.dumps(document).encode())
    at = 1 + commit // 5
    put(session, f"time/c/{at}", np.arange(50 * at, 50 * at + 50).tobytes())
    put(session, f"huge/c/{LEAVES * LEAF_ROWS + commit}", CHUNK + bytes(600))


FEW = ["huge", "v0", "v1"]
ALL = ["huge", *(f"v{i}" for i in range(197))]


@pytest.fixture(scope="module", params=["few", "all"])
def ahead(request: pytest.FixtureRequest, large: MemoryStorage) -> MemoryStorage:
    """The large repository with 49 deltas that change nodes on top of its base."""
    storage = copy_of(large)
    session = zm.open(storage).writable_session("main")
    for commit in range(49):
        append(session, commit, FEW if request.param == "few" else ALL)
        session.commit(f"append {commit}")
    assert len(contents_of(session.store).view.snapshot.deltas) == 49
    return storage


def cold(storage: MemoryStorage) -> tuple[CountingStorage, Repository]:
    counting = CountingStorage(LatencyStorage(storage, latency_s=0))
    return counting, zm.open(counting, runtime=stopped_clock())


def walk(session: Session) -> int:
    """Open, walk the hierarchy, read every document; the number of keys."""
    documents = [key for key in keys_of(session) if key.endswith("zarr.json")]
    return sum(bool(get(session, key)) for key in documents)


def keys_of(session: Session) -> Iterator[str]:
    view = contents_of(session.store).view
    return (f"{path}/zarr.json" if path else "zarr.json" for path in view.nodes)


# --- reading ---------------------------------------------------------------------------------


def test_a_repository_that_fits_in_its_root_is_read_in_one_round() -> None:
    storage = MemoryStorage()
    session = zm.create(storage).writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("x", data=np.arange(9.0), dimension_names=("x",))
    session.commit("small")
    counting, repository = cold(storage)
    session = repository.readonly_session("main")
    assert walk(session) == 2
    np.testing.assert_array_equal(zarr.open_array(session.store, path="x")[:], np.arange(9.0))
    assert counting.rounds() == 1


@pytest.mark.parametrize("branch", ["main", "branch-4"])
def test_a_branch_head_takes_two_rounds(large: MemoryStorage, branch: str) -> None:
    counting, repository = cold(large)
    session = repository.readonly_session(branch)
    assert walk(session) == 201
    assert np.frombuffer(get(session, "time/c/0"), "i8")[-1] == 49
    assert counting.rounds() == 2
    assert zarr.open_array(session.store, path="far")[-1] == 8_999.0
    assert counting.rounds() == 3  # a coordinate that is not inline


def test_a_branch_head_takes_two_rounds_with_many_deltas(ahead: MemoryStorage) -> None:
    counting, repository = cold(ahead)
    session = repository.readonly_session("main")
    assert walk(session) == 201
    assert zarr.open_array(session.store, path="time").shape == (540,)
    for at in range(11):
        assert np.frombuffer(get(session, f"time/c/{at}"), "i8")[0] == 50 * at if at else True
    assert counting.rounds() == 2
    assert counting.requests <= 7
    assert zarr.open_array(session.store, path="far")[-1] == 8_999.0
    assert counting.rounds() == 3


@pytest.mark.parametrize("how", ["tag", "snapshot_id"])
def test_a_tag_or_an_old_snapshot_takes_a_round_more(large: MemoryStorage, how: str) -> None:
    counting, repository = cold(large)
    name = {"tag": "base", "snapshot_id": zm.open(large).list_tags()["base"]}[how]
    session = repository.readonly_session(name)
    assert walk(session) == 201
    assert get(session, "time/c/0")
    assert counting.rounds() <= 3


def test_an_old_snapshot_with_many_deltas_takes_a_round_more(ahead: MemoryStorage) -> None:
    snapshot_id = next(zm.open(ahead).ancestry()).parent_id
    counting, repository = cold(ahead)
    session = repository.readonly_session(snapshot_id)
    assert walk(session) == 201
    assert get(session, "time/c/0")
    assert counting.rounds() <= 3


def name_of(section: str, i: int) -> str:
    """A name that does not compress away."""
    return f"{section}-{i}-{sha256(b'%d' % i).hexdigest()}"


@pytest.fixture(scope="module")
def paged(ahead: MemoryStorage) -> MemoryStorage:
    """The same with so many tags and branches that most lie in pages."""
    storage = copy_of(ahead)
    roots = Roots(storage, SYSTEM)
    for section in ("tags", "branches"):
        at = roots.read()
        main = at.root.branches["main"].bare()
        names = [name_of(section, i) for i in range(2_000)]
        value = main if section == "branches" else at.root.tags["base"]
        more = {**getattr(at.root, section), **dict.fromkeys(names, value)}
        roots.archive(at)
        assert roots.swap(at, replace(at.root, **{section: more}), b"p" * 16)
    return storage


@pytest.mark.parametrize(
    ("ref", "rounds"),
    [
        ("main", 2),
        ("refs/heads/" + name_of("branches", 700), 3),  # one for the page
        ("refs/tags/" + name_of("tags", 700), 4),  # and one for a tag
    ],
)
def test_a_ref_in_a_page_takes_a_round_more(paged: MemoryStorage, ref: str, rounds: int) -> None:
    counting, repository = cold(paged)
    session = repository.readonly_session(ref)
    assert walk(session) == 201
    assert get(session, "time/c/0")
    assert counting.rounds() == rounds
    assert sum(r.key.startswith("pages/") for r in counting.log) == (rounds > 2)
    assert zarr.open_array(session.store, path="far")[-1] == 8_999.0
    assert counting.rounds() == rounds + 1


def test_a_commit_beside_many_refs_takes_two_rounds(paged: MemoryStorage) -> None:
    costs = written(paged, FEW, 1)
    assert "pages" not in costs[0]


@pytest.mark.parametrize("chunk", [17, LEAVES * LEAF_ROWS - 1])
def test_the_first_chunk_of_a_huge_array_takes_four_rounds(
    large: MemoryStorage, chunk: int
) -> None:
    counting, repository = cold(large)
    session = repository.readonly_session("main")
    assert get(session, f"huge/c/{chunk}") == CHUNK
    assert counting.rounds() <= 4
    manifests = [r for r in counting.log if r.key.startswith("manifests/")]
    assert len(manifests) == 1
    counting.reset()
    beside = chunk + 1 if chunk == 17 else chunk - 1
    assert get(session, f"huge/c/{beside}") == CHUNK
    assert (counting.rounds(), counting.requests) == (1, 1)


def test_the_first_chunk_under_many_deltas_takes_four_rounds(ahead: MemoryStorage) -> None:
    counting, repository = cold(ahead)
    session = repository.readonly_session("main")
    assert get(session, "huge/c/17") == CHUNK
    assert counting.rounds() <= 4
    counting.reset()
    first = LEAVES * LEAF_ROWS
    assert get(session, f"huge/c/{first + 7}") == CHUNK + bytes(600)
    assert counting.rounds() == 2, "all deltas that are left in one, then the chunk"
    counting.reset()
    assert get(session, f"huge/c/{first + 8}") == CHUNK + bytes(600)
    assert (counting.rounds(), counting.requests) == (1, 1)


def test_what_is_read_in_turn_takes_more_rounds(ahead: MemoryStorage) -> None:
    """The counts tell: without threads, each request is a round."""
    counting = CountingStorage(LatencyStorage(ahead, latency_s=0))
    in_turn = replace(stopped_clock(), parallel=one_by_one)
    session = zm.open(counting, runtime=in_turn).readonly_session("main")
    assert get(session, "huge/c/17") == CHUNK
    assert counting.rounds() == counting.requests > 4


# --- writing ---------------------------------------------------------------------------------


def written(storage: MemoryStorage, names: list[str], commits: int) -> list[dict[str, int]]:
    """Bytes of each commit by kind of object; every commit takes two rounds."""
    counting = CountingStorage(LatencyStorage(copy_of(storage), latency_s=0))
    session = zm.open(counting).writable_session("main")
    costs = []
    for commit in range(commits):
        append(session, commit, names)
        counting.reset()
        session.commit(f"append {commit}")
        assert counting.rounds() == 2
        cost: dict[str, int] = {}
        for record in counting.log:
            kind = record.key.split("/")[0]
            cost[kind] = cost.get(kind, 0) + record.nbytes
        costs.append(cost)
    return costs


def test_a_commit_takes_two_rounds_and_few_bytes(large: MemoryStorage) -> None:
    costs = written(large, FEW, 40)
    metadata = [sum(n for kind, n in cost.items() if kind != "chunks") for cost in costs]
    assert sum(metadata) / len(metadata) <= 16 * 1024, metadata


def test_digests_cost_about_as_much_as_the_deltas(large: MemoryStorage) -> None:
    costs = written(large, ALL, 30)
    digests = sum(cost.get("digests", 0) for cost in costs)
    deltas = sum(cost["deltas"] for cost in costs)
    assert 0 < digests <= 2 * deltas


def test_the_root_varies_by_eight_kib_beyond_its_copies(ahead: MemoryStorage) -> None:
    root = root_of(ahead)
    assert len(root.branches) == 10
    assert len(root.bare().encode()) <= 8 * 1024
