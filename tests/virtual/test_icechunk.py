"""Icechunk repositories of both formats, taken in with their history, against what icechunk read.

The repositories are committed; `make_icechunk.py` made them, and wrote down what icechunk says of
each snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard

import zarr_manifests as zm
from hearing import Hearing
from zarr_manifests.engine.edit.import_icechunk import IcechunkImport
from zarr_manifests.error_cases import NotARepositoryError, VirtualSourceChangedError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    NotFoundError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.flatbuffers import Flat
from zarr_manifests.virtual.icechunk_files import ForeignSnapshot, IcechunkFiles

GOLDEN = Path(__file__).parent / "icechunk_golden"


@pytest.fixture(params=[1, 2])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / f"format-{request.param}", tmp_path / "source")
    shutil.copy(GOLDEN / f"format-{request.param}.json", tmp_path / "expected.json")
    return tmp_path / "source"


@pytest.fixture
def expected(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((source.parent / "expected.json").read_text())
    return found


@pytest.fixture
def repo(source: Path) -> zm.Repository:
    places: dict[str, Any] = {"source": source}
    return zm.create(source.parent / "repo", virtual_containers=places)


def held(repo: zm.Repository, snapshot_id: str) -> dict[str, str]:
    """A digest of everything but virtual chunks of /v, as `make_icechunk.everything` has it."""
    store = repo.readonly_session(snapshot_id).store

    async def read() -> dict[str, str]:
        found = {}
        async for key in store.list():
            if not key.startswith("v/c/"):
                data = await store.get(key, zarr.core.buffer.default_buffer_prototype())
                assert data is not None
                found[key] = hashlib.sha256(data.to_bytes()).hexdigest()[:16]
        return found

    return asyncio.run(read())


def check(repo: zm.Repository, ours: dict[str, str], expected: dict[str, Any]) -> None:
    """Every imported snapshot says and holds what it did in icechunk."""
    for name, snapshot_id in ours.items():
        is_first = name == "1CECHNKREP0F1RSTCMT0"
        wanted = expected["snapshots"][name]
        assert held(repo, snapshot_id) == wanted["keys"]
        (info,) = repo.ancestry(snapshot_id, limit=1)
        if not is_first:
            said = {"icechunk-snapshot": name, "icechunk-time": wanted["written"]}
            said["icechunk-import"] = snapshot_id[:25]
            assert info.message == wanted["message"]
            assert info.metadata == wanted["metadata"] | said


def test_all_snapshots_branches_and_tags_come_along(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    hearing = Hearing()
    ours = zm.virtual.import_icechunk(repo, source, progress=hearing)
    assert ours.keys() == expected["snapshots"].keys()
    assert hearing.done == hearing.totals == {"snapshots": len(ours)}
    again = Hearing()
    zm.virtual.import_icechunk(repo, source, progress=again)
    assert again.done == again.totals == {"snapshots": 1}  # the empty first one, as each time
    check(repo, ours, expected)
    assert repo.list_branches() == {n: ours[s] for n, s in expected["branches"].items()}
    assert repo.list_tags() == {n: ours[s] for n, s in expected["tags"].items()}
    for name, lineage in expected["lineages"].items():
        found = [info.snapshot_id for info in repo.ancestry(ours[name])]
        assert found == [ours[each] for each in lineage]
    assert not repo.verify().problems


def test_native_chunks_are_not_copied_and_guarded(repo: zm.Repository, source: Path) -> None:
    zm.virtual.import_icechunk(repo, source)
    store = repo.readonly_session("made").store
    refs = store.get_virtual_refs("air/p")
    assert [Path(url).parent.name for url in refs.locations] == ["chunks"] * 2
    assert refs.guarded.all()
    assert refs.sizes.tolist() == refs.length.tolist() == [80, 80]
    (first, second) = (source / "chunks" / Path(url).name for url in refs.locations)
    first.unlink()
    second.write_bytes(bytes(80))
    array = zarr.open_array(store, path="air/p", mode="r")
    with pytest.raises(MissingChunkError, match="not read as fill value"):
        array[:10]
    with pytest.raises(VirtualSourceChangedError):
        array[10:20]


def test_virtual_refs_stay_as_they_are(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    ours = zm.virtual.import_icechunk(repo, source)
    refs = repo.readonly_session("side").store.get_virtual_refs("v")
    assert refs.locations == tuple(f"s3://zarr-manifests-golden/bytes-{i}.bin" for i in (0, 1, 1))
    assert refs.source.tolist() == [0, 1, 0, 2, 0]
    assert refs.offset.tolist() == [0, 2, 4, 6, 8]
    assert refs.length.tolist() == [2] * 5
    assert refs.guarded.tolist() == [False, False, True]
    assert refs.unchanged_since.tolist() == [-1, -1, 4_102_444_800_999]
    assert len(ours) == len(expected["snapshots"])


def test_importing_again_continues_and_adds_nothing_twice(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    first = zm.virtual.import_icechunk(repo, source, branches=["side"])
    assert set(repo.list_branches()) == {"main", "side"}
    assert set(repo.list_tags()) == {"made"}
    assert len(list(repo.ancestry("main"))) == 1
    whole = zm.virtual.import_icechunk(repo, source)
    assert whole.items() >= first.items()
    check(repo, whole, expected)
    before = repo.list_branches(), repo.list_tags(), len(list(repo.ancestry("main")))
    for history in ("all", "heads"):
        assert zm.virtual.import_icechunk(repo, source, history) == whole  # type: ignore[arg-type]
    assert (repo.list_branches(), repo.list_tags(), len(list(repo.ancestry("main")))) == before
    repo.compact()  # the branch is at a rewrite now, which is still the imported commit
    assert zm.virtual.import_icechunk(repo, source) == whole


def test_an_import_that_was_interrupted_goes_on(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    class Stop(Exception):  # noqa: N818 - it is no error
        pass

    def stop(_: str, done: int) -> None:
        if done > 1:  # the first is where a history begins, which is there
            raise Stop

    rounds = 0
    while rounds < 20:
        try:
            ours = zm.virtual.import_icechunk(repo, source, progress=stop)
        except Stop:
            rounds += 1
        else:
            break
    assert rounds == len(expected["snapshots"]) - 1
    check(repo, ours, expected)
    assert set(repo.list_branches()) == set(expected["branches"])


def test_heads_are_imported_alone(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    hearing = Hearing()
    ours = zm.virtual.import_icechunk(repo, source, history="heads", progress=hearing)
    named = {*expected["branches"].values(), *expected["tags"].values()}
    assert ours.keys() == named | {"1CECHNKREP0F1RSTCMT0"}
    assert hearing.done == hearing.totals == {"snapshots": len(named)}
    check(repo, ours, expected)
    found = [info.snapshot_id for info in repo.ancestry("side")]
    assert found[0] == ours[expected["branches"]["side"]]
    assert found[1] == ours[expected["tags"]["made"]]


def test_moved_nodes_keep_their_id(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    ours = zm.virtual.import_icechunk(repo, GOLDEN / "format-2")
    infos = {info.message: info.snapshot_id for info in repo.ancestry()}
    before, after = infos["grow t, and make p anew"], infos["move"]
    diff = repo.diff(before, after)
    assert dict(diff.moved) == {
        "/air": "/wind",
        "/air/p": "/wind/p",
        "/air/t": "/temperature",
    }
    anew = repo.diff(infos["shrink t"], before)
    assert "/air/p" in {*anew.deleted, *anew.created, *anew.updated}
    ids = [
        contents_of(repo.readonly_session(infos[at]).store).array_at("air/p").node_id
        for at in ("shrink t", "grow t, and make p anew")
    ]
    assert ids[0] != ids[1]
    assert len(ours) == 10


def test_chunks_count_within_the_extents_and_the_grid(tmp_path: Path) -> None:
    files = IcechunkFiles.open(zm.storage.from_url(GOLDEN / "format-1"), max_bytes=2**20)
    whole = files.nodes(files.tags["made"])
    (node_id,) = (node_id for node_id, node in whole.items() if node.path == "air/p")
    node = whole[node_id]
    (manifest,) = node.manifests
    cut = replace(node, manifests=frozenset({manifest._replace(lo=(1,))}))
    document = json.loads(node.document) | {"shape": [10]}
    small = replace(node, document=json.dumps(document).encode())
    repo = zm.create(tmp_path / "repo")
    source, before = IcechunkImport(files, Containers()), {}
    for after, chunks in ((whole, [0, 1]), (cut, [1]), (small, [0]), (whole, [0, 1])):
        session = repo.writable_session()
        nodes = after if after is whole else whole | {node_id: after}
        source.apply(workspace_of(session.store), before, nodes)
        session.commit("the next")
        refs = repo.readonly_session().store.get_virtual_refs("air/p")
        assert refs.index.ravel().tolist() == chunks
        before = nodes


def test_what_is_here_already_is_not_mixed_up(repo: zm.Repository, source: Path) -> None:
    with repo.transaction(message="mine") as store:
        zarr.create_group(store)
    with pytest.raises(ConflictError, match="branch 'main' has commits"):
        zm.virtual.import_icechunk(repo, source)
    assert [info.message for info in repo.ancestry()] == ["mine", "create repository"]
    with pytest.raises(NotFoundError, match="no branch 'nope'; it has main, side"):
        zm.virtual.import_icechunk(repo, source, branches=["nope"])
    with pytest.raises(InvalidArgumentError, match="a list of names is due"):
        zm.virtual.import_icechunk(repo, source, branches="main")
    with pytest.raises(InvalidArgumentError, match="'all' or 'heads'"):
        zm.virtual.import_icechunk(repo, source, "some")  # type: ignore[arg-type]
    with pytest.raises(NotARepositoryError, match="no icechunk repository at"):
        zm.virtual.import_icechunk(repo, source.parent / "nowhere")
    for options in ({"history": "some"}, {"authorize": ["a"]}, {"max_bytes": -1}):
        with pytest.raises(InvalidArgumentError):  # before anything is looked for
            zm.virtual.import_icechunk(repo, source.parent / "nowhere", **options)  # type: ignore[arg-type]


def test_a_commit_that_was_amended_is_not_continued(repo: zm.Repository, source: Path) -> None:
    zm.virtual.import_icechunk(repo, source, branches=["main"])
    repo.create_branch("side", repo.list_tags()["made"])
    session = repo.writable_session("side")
    zarr.open_group(session.store, mode="r+").create_group("other")
    session.amend()
    with pytest.raises(ConflictError, match="branch 'side' has commits"):
        zm.virtual.import_icechunk(repo, source, branches=["side"])


def test_amended_values_are_noticed(repo: zm.Repository, source: Path) -> None:
    ours = zm.virtual.import_icechunk(repo, source, branches=["main"])
    session = repo.writable_session("main")
    zarr.open_array(session.store, path="small", mode="r+")[:] = 7
    session.amend()
    with pytest.raises(ConflictError, match="branch 'main' has commits"):
        zm.virtual.import_icechunk(repo, source, branches=["main"])
    repo.reset_branch("main", list(ours.values())[-2], force=True)
    assert zm.virtual.import_icechunk(repo, source, branches=["main"]).keys() == ours.keys()
    assert zarr.open_array(repo.readonly_session().store, path="small")[:].tolist() == [0, 1, 2, 3]


def test_a_branch_that_went_another_way_is_not_continued(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "format-1", source)
    expected = json.loads((GOLDEN / "format-1.json").read_text())
    lineage = expected["lineages"][expected["branches"]["main"]]
    ref = source / "refs/branch.main/ref.json"
    for tag in ("made", "lost"):
        shutil.rmtree(source / f"refs/tag.{tag}")
    repo = zm.create(tmp_path / "repo", virtual_containers={"source": source})
    ref.write_text(json.dumps({"snapshot": lineage[2]}))
    old = zm.virtual.import_icechunk(repo, source, branches=["main"])
    ref.write_text(json.dumps({"snapshot": lineage[0]}))
    ours = zm.virtual.import_icechunk(repo, source, branches=["main"])
    assert ours.items() >= old.items()
    check(repo, ours, expected)
    ref.write_text(json.dumps({"snapshot": lineage[3]}))  # was reset there
    with pytest.raises(ConflictError, match="it was reset or amended there"):
        zm.virtual.import_icechunk(repo, source, branches=["main"])
    repo.reset_branch("main", ours[lineage[2]], force=True)
    session = repo.writable_session("main")
    zarr.open_group(session.store, mode="r+").create_group("other")
    session.amend()
    ref.write_text(json.dumps({"snapshot": lineage[0]}))
    with pytest.raises(ConflictError, match="written to here"):
        zm.virtual.import_icechunk(repo, source, branches=["main"])
    session = repo.writable_session("main")
    session.amend(metadata={"icechunk-snapshot": lineage[2]})  # as earlier versions have it
    with pytest.raises(ConflictError, match="changed since"):
        zm.virtual.import_icechunk(repo, source, branches=["main"])


def test_what_has_expired_there_is_named(
    repo: zm.Repository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As icechunk's expiry, which makes the oldest snapshot left the child of the first."""
    everything = IcechunkFiles.lineage

    def earlier(files: IcechunkFiles, name: str) -> list[ForeignSnapshot]:
        return everything(files, everything(files, name)[2].name)

    def left(files: IcechunkFiles, name: str) -> list[ForeignSnapshot]:
        first, *others = everything(files, name)
        return [first, *others[2:]]

    monkeypatch.setattr(IcechunkFiles, "lineage", earlier)
    zm.virtual.import_icechunk(repo, source, branches=["main"])
    monkeypatch.setattr(IcechunkFiles, "lineage", left)
    with pytest.raises(ConflictError, match="has expired there"):
        zm.virtual.import_icechunk(repo, source, branches=["main"])


def test_files_of_containers_are_inspected(tmp_path: Path) -> None:
    """A ref without etag and time is noted with what a trusted place says now."""
    shutil.copytree(GOLDEN / "format-1", tmp_path / "source")
    files = IcechunkFiles.open(zm.storage.from_url(tmp_path / "source"), max_bytes=2**20)
    assert files.branches.keys() == {"main", "side"}
    repo = zm.create(tmp_path / "repo")
    options: dict[str, Any] = {"allow_http": True, "anonymous": True, "retries": 0}
    nobody = "http://127.0.0.1:1"
    place = zm.VirtualContainer("s3://zarr-manifests-golden", endpoint=nobody, **options)
    with pytest.raises(zm.errors.StorageError, match="zarr-manifests-golden"):
        zm.virtual.import_icechunk(repo, tmp_path / "source", authorize={"data": place})


def test_an_object_that_is_missing_is_named(repo: zm.Repository, source: Path) -> None:
    for folder, error in (("chunks", MissingChunkError), ("manifests", CorruptObjectError)):
        aside = source.parent / "aside"
        (source / folder).rename(aside)
        (source / folder).mkdir()
        with pytest.raises(error, match=f"/{folder}/[0-9A-Z]{{20}}"):
            zm.virtual.import_icechunk(repo, source)
        (source / folder).rmdir()
        aside.rename(source / folder)
    zm.virtual.import_icechunk(repo, source)


def test_damaged_files_are_errors_and_nothing_else(source: Path) -> None:
    """A file with a changed byte, or cut off, is read as something or gives a named error."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    whole = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
    storage = MemoryStorage()
    for key, data in whole.items():
        storage.put(key, data)
    rng = np.random.default_rng(5)
    seen = set()
    calls = reading(storage)
    for key, call in calls.items():
        body = unpacked(whole[key])
        for _ in range(60):
            bad = bytearray(body)
            bad[int(rng.integers(39 % len(bad), len(bad)))] ^= int(rng.integers(1, 256))
            if rng.random() < 0.3:
                del bad[int(rng.integers(0, len(bad))) :]
            storage.put(key, bytes(bad))
            try:
                call()
            except ManifestsError as error:
                seen.add(type(error))
        storage.put(key, whole[key])
    assert CorruptObjectError in seen
    assert calls.keys() == {
        key for key in whole if key.split("/")[0] not in ("chunks", "config.yaml")
    }


def reading(storage: MemoryStorage) -> dict[str, Callable[[], object]]:
    """By key of each object of an icechunk repository: what reads it."""

    def opened() -> IcechunkFiles:
        return IcechunkFiles.open(storage, max_bytes=2**20)

    files = opened()
    calls: dict[str, Callable[[], object]] = {}
    for info in storage.list(""):
        if info.key == "repo" or info.key.startswith("refs/"):
            calls[info.key] = opened
    for name in {*files.branches.values(), *files.tags.values()}:
        for snapshot in files.lineage(name):
            key = f"snapshots/{snapshot.name}"
            calls[key] = lambda at=snapshot.name: (opened().lineage(at), files.nodes(at))
            for node in files.nodes(snapshot.name).values():
                for each in node.manifests:
                    where = each.name, node.node_id, len(each.lo)
                    calls[f"manifests/{each.name}"] = lambda at=where: files.chunks(*at)
    return calls


def unpacked(data: bytes) -> bytes:
    """An icechunk file that is not compressed, so that damage is not found by zstd."""
    if not data.startswith(b"ICE"):
        return data
    return data[:38] + b"\0" + zstandard.ZstdDecompressor().decompress(data[39:], 2**24)


def test_a_tag_that_is_elsewhere_is_not_taken_for_the_imported_one(
    repo: zm.Repository, source: Path
) -> None:
    repo.create_tag("made", repo.list_branches()["main"])
    with pytest.raises(ConflictError, match="tag 'made' exists"):
        zm.virtual.import_icechunk(repo, source)


def test_the_branch_that_an_interrupted_import_left_is_deleted(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    ours = zm.virtual.import_icechunk(repo, source)
    repo.create_branch("icechunk-tag/lost", ours[expected["tags"]["lost"]])
    zm.virtual.import_icechunk(repo, source)
    assert set(repo.list_branches()) == set(expected["branches"])


def test_hostile_files_fill_no_memory(tmp_path: Path) -> None:
    """Inline chunks that overlap, and locations that unpack to more than a URL may have."""
    packed = zstandard.compress(b"s3://b/" + bytes(100_000_000))
    wrong = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**50) + b"\x01\x00\x00"
    many = [zstandard.compress(f"s3://b/{i}".encode() + b"a" * 60_000) for i in range(40)]
    overlap = struct.pack("<2000I", *([8000] * 2000)) + bytes(8000)
    starts = range(0, 8000, 4)
    tracemalloc.start()
    for data, field, error in (
        (manifest(1, [packed]), 8, "too long"),
        (manifest(1, [wrong]), 8, "too long"),
        (manifest(1, [b"s3://b/" + b"a" * 70_000], field=5), 5, "too long"),
        (manifest(40, many), 8, "larger max_bytes="),
        (manifest(2000, [overlap], field=1, starts=starts), 1, "inline chunks overlap"),
    ):
        storage = MemoryStorage()
        storage.put("manifests/m", "ICE🧊CHUNK".encode() + bytes(24) + bytes([2, 2, 0]) + data)
        tracemalloc.reset_peak()
        with pytest.raises((CorruptObjectError, InvalidArgumentError), match=error):
            IcechunkFiles(storage, 2**20).chunks("m", b"12345678", 1)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000, field
    tracemalloc.stop()
    storage = MemoryStorage()
    data = manifest(50, [bytes(50_000)], field=1)  # one that many chunks share is sound
    storage.put("manifests/m", "ICE🧊CHUNK".encode() + bytes(24) + bytes([2, 2, 0]) + data)
    files = IcechunkFiles(storage, 2**20)
    rows = files.chunks("m", b"12345678", 1)
    assert rows.columns[:, 4].tolist() == [50_000] * 50
    assert files.inlined == [bytes(50_000)]


def manifest(
    n: int, vectors: list[bytes], *, field: int = 8, starts: Sequence[int] | None = None
) -> bytes:
    """A manifest with n chunks of an array, whose field is each of the vectors in turn.

    With `starts`, the vectors are at these positions of the first one, and have no own length.
    """
    data = bytearray(4)

    def table(fields: dict[int, bytes]) -> tuple[int, dict[int, int]]:
        data.extend(bytes(-len(data) % 4))
        kinds, at, places = [0] * 9, 4, {}
        for number, value in fields.items():
            kinds[number], places[number] = at, len(data) + 22 + 2 + at
            at += len(value)
        data.extend(struct.pack("<HH9H2x", 22, at, *kinds))
        data.extend(struct.pack("<i", 24) + b"".join(fields.values()))
        return len(data) - at, places

    def vector(*values: int) -> int:
        data.extend(struct.pack(f"<{1 + len(values)}I", len(values), *values))
        return len(data) - 4 * (1 + len(values))

    def point(place: int, target: int) -> None:
        struct.pack_into("<I", data, place, target - place)

    root, of_root = table({1: bytes(4)})
    struct.pack_into("<I", data, 0, root)
    arrays = vector(0)
    point(of_root[1], arrays)
    array, of_array = table({0: b"12345678", 1: bytes(4)})
    point(arrays + 4, array)
    refs = vector(*[0] * n)
    point(of_array[1], refs)
    due = []
    for i in range(n):
        ref, of_ref = table({0: bytes(4), field: bytes(4)})
        point(refs + 4 + 4 * i, ref)
        point(of_ref[0], vector(i))
        due.append(of_ref[field])
    places = []
    for each in vectors:
        data.extend(bytes(-len(data) % 4))
        places.append(len(data))
        data.extend((b"" if starts else struct.pack("<I", len(each))) + each)
    if starts:
        places = [places[0] + start for start in starts]
    for i, place in enumerate(due):
        point(place, places[i % len(places)])
    return bytes(data)


def test_odd_values_are_named_errors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "format-1", source)
    repo = zm.create(tmp_path / "repo", virtual_containers={"source": source})
    ref = source / "refs/branch.side/ref.json"
    good = ref.read_text()
    ref.write_text("[" * 200_000)
    with pytest.raises(CorruptObjectError, match=r"ref\.json is damaged"):
        zm.virtual.import_icechunk(repo, source)
    ref.write_text(good)
    head = IcechunkFiles.open(zm.storage.from_url(source), max_bytes=2**20).branches["main"]
    path = source / "snapshots" / head
    data = bytearray(unpacked(path.read_bytes()))
    table = Flat(bytes(data[39:]), "it").root()
    struct.pack_into("<Q", data, 39 + table._field(3), 2**63)
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptObjectError, match=f"{head} is damaged: it was written at no time"):
        zm.virtual.import_icechunk(repo, source)


def test_what_a_file_unpacks_to_is_bounded(repo: zm.Repository, source: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="larger max_bytes="):
        zm.virtual.import_icechunk(repo, source, max_bytes=50)


def test_the_second_import_reads_no_manifest(repo: zm.Repository, source: Path) -> None:
    zm.virtual.import_icechunk(repo, source)
    counting = CountingStorage(zm.storage.from_url(source))
    zm.virtual.import_icechunk(repo, counting)
    assert not [one.key for one in counting.log if one.key.startswith(("manifests/", "chunks/"))]
