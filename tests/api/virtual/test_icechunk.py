"""Icechunk repositories of both formats, taken in with their history, against what icechunk read.

The repositories are committed; `make_icechunk.py` made them, and wrote down what icechunk says of
each snapshot.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
import zstandard
from zarr.core.sync import sync

import zarr_manifests as zm
from digests import digests
from hearing import Hearing
from zarr_manifests.commits import SessionCommits
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    MissingChunkError,
    NotARepositoryError,
    StorageError,
    VirtualSourceChangedError,
)
from zarr_manifests.storage.memory import MemoryStorage

GOLDEN = Path(__file__).parent / "icechunk_golden"


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A repository of format 2, or of the one that a test is parametrized with."""
    version = getattr(request, "param", 2)
    shutil.copytree(GOLDEN / f"format-{version}", tmp_path / "source")
    shutil.copy(GOLDEN / f"format-{version}.json", tmp_path / "expected.json")
    return tmp_path / "source"


both_formats = pytest.mark.parametrize("source", [1, 2], indirect=True)


@pytest.fixture
def expected(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((source.parent / "expected.json").read_text())
    return found


@pytest.fixture
def repo(source: Path) -> zm.Repository:
    places: dict[str, Any] = {"source": source}
    return zm.create(source.parent / "repo", virtual_containers=places)


def check(repo: zm.Repository, ours: dict[str, str], expected: dict[str, Any]) -> None:
    """Every imported snapshot says and holds what it did in icechunk."""
    for name, snapshot_id in ours.items():
        store = repo.readonly_session(snapshot_id).store
        wanted = expected["snapshots"][name]
        assert digests(store, but="v/c/") == wanted["keys"]
        (info,) = repo.ancestry(snapshot_id, limit=1)
        if name != "1CECHNKREP0F1RSTCMT0":  # the first one, which icechunk makes
            said = {"icechunk-snapshot": name, "icechunk-time": wanted["written"]}
            said["icechunk-import"] = snapshot_id[:25]
            assert info.message == wanted["message"]
            assert info.metadata == wanted["metadata"] | said


@both_formats
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


@both_formats
def test_importing_again_continues_and_adds_nothing_twice(
    repo: zm.Repository,
    source: Path,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit, first = SessionCommits.commit, list[str]()

    def commit_two(commits: SessionCommits, *args: Any, **how: Any) -> str:
        if len(first) == 2:
            raise StorageError("the disk is full")
        first.append(commit(commits, *args, **how))
        return first[-1]

    with monkeypatch.context() as patch:
        patch.setattr(SessionCommits, "commit", commit_two)
        with pytest.raises(StorageError, match="disk is full"):
            zm.virtual.import_icechunk(repo, source)
    hearing = Hearing()
    with zm.show_progress(hearing):
        whole = zm.virtual.import_icechunk(repo, source)
    assert hearing.totals["snapshots"] == hearing.done["snapshots"] > 0
    assert {*first} < {*whole.values()}
    check(repo, whole, expected)
    before = repo.list_branches(), repo.list_tags(), len(list(repo.ancestry("main")))
    assert zm.virtual.import_icechunk(repo, source) == whole
    assert (repo.list_branches(), repo.list_tags(), len(list(repo.ancestry("main")))) == before
    repo.compact()  # the branch is at a rewrite now, which is still the imported commit
    assert zm.virtual.import_icechunk(repo, source) == whole


def test_a_chunk_that_a_later_snapshot_does_not_have_is_gone(tmp_path: Path) -> None:
    place = icechunk.local_filesystem_storage(str(tmp_path / "source"))
    theirs = icechunk.Repository.create(place)
    session = theirs.writable_session("main")
    made = zarr.create_array(
        session.store, name="v", shape=(4,), chunks=(2,), dtype="i4", fill_value=7
    )
    made[:] = 1
    session.commit("all")
    session = theirs.writable_session("main")
    sync(session.store.delete("v/c/0"))
    session.commit("less")
    repo = zm.create(tmp_path / "repo", virtual_containers={"source": tmp_path / "source"})
    zm.virtual.import_icechunk(repo, tmp_path / "source")
    found = [
        zarr.open_array(repo.readonly_session(at).store, path="v") for at in ("main~1", "main")
    ]
    assert [array[:].tolist() for array in found] == [[1, 1, 1, 1], [7, 7, 1, 1]]


def test_what_is_here_already_is_not_mixed_up(repo: zm.Repository, source: Path) -> None:
    other = zm.create(source.parent / "other", virtual_containers={"source": source})
    other.create_tag("made", other.list_branches()["main"])
    with pytest.raises(ConflictError, match="tag 'made' exists"):
        zm.virtual.import_icechunk(other, source)
    with repo.transaction(message="mine") as store:
        zarr.create_group(store)
    with pytest.raises(ConflictError, match="branch 'main' has commits"):
        zm.virtual.import_icechunk(repo, source)
    assert [info.message for info in repo.ancestry()] == ["mine", "create repository"]


@pytest.mark.parametrize("source", [1], indirect=True)
def test_a_branch_that_went_another_way_is_not_continued(
    repo: zm.Repository, source: Path, expected: dict[str, Any]
) -> None:
    lineage = expected["lineages"][expected["branches"]["main"]]
    ref = source / "refs/branch.main/ref.json"
    for tag in ("made", "lost"):
        shutil.rmtree(source / f"refs/tag.{tag}")
    shutil.rmtree(source / "refs/branch.side")

    def imported(at: int) -> dict[str, str]:
        ref.write_text(json.dumps({"snapshot": lineage[at]}))
        return zm.virtual.import_icechunk(repo, source)

    def amend(**how: Any) -> None:
        session = repo.writable_session()
        if not how:
            zarr.open_group(session.store, mode="r+").create_group("other")
        session.amend(**how)

    old = imported(2)
    ours = imported(0)
    assert ours.items() >= old.items()
    check(repo, ours, expected)
    with pytest.raises(ConflictError, match="reset or amended there"):
        imported(3)
    repo.reset_branch("main", ours[lineage[2]], force=True)
    amend()
    with pytest.raises(ConflictError, match="written to here"):
        imported(0)
    amend(metadata={"icechunk-snapshot": lineage[2]})  # as earlier versions have it
    with pytest.raises(ConflictError, match="changed since"):
        imported(0)


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


@both_formats
def test_damaged_files_are_errors_of_the_project(source: Path) -> None:
    """With a changed byte, or cut off, a file is read as something or gives a named error."""
    files = [each for each in sorted(source.rglob("*")) if each.is_file()]
    rng, seen = np.random.default_rng(5), set()
    for path in files:
        if path.parent.name == "chunks" or path.name == "config.yaml":
            continue
        whole = path.read_bytes()
        header, content = unpacked(whole)
        bad = bytearray(content)
        bad[int(rng.integers(0, len(bad)))] ^= int(rng.integers(1, 256))
        if rng.random() < 0.5:
            del bad[int(rng.integers(0, len(bad))) :]
        path.write_bytes(header + (zstandard.compress(bytes(bad)) if header else bad))
        try:
            zm.virtual.import_icechunk(zm.create(MemoryStorage()), source)
        except ManifestsError as error:
            seen.add(type(error))
        path.write_bytes(whole)
    assert CorruptObjectError in seen


def unpacked(data: bytes) -> tuple[bytes, bytes]:
    """The header of a file of icechunk, if it has one, and what is compressed after it."""
    if not data.startswith(b"ICE"):
        return b"", data
    return data[:39], zstandard.ZstdDecompressor().decompress(data[39:], 2**24)


def test_what_a_file_unpacks_to_is_bounded(repo: zm.Repository, source: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="larger max_bytes="):
        zm.virtual.import_icechunk(repo, source, max_bytes=50)
    for path in (source / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:39] + zstandard.compress(bytes(10_000_000)))
    with pytest.raises(InvalidArgumentError, match=r"10000000 bytes.* larger max_bytes="):
        zm.virtual.import_icechunk(repo, source, max_bytes=2**20)


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[Path, icechunk.Repository]:
    """A folder with files, and an icechunk repository that may refer to them."""
    place, root = tmp_path / "files", f"file://{tmp_path}/files/"
    place.mkdir()
    config = icechunk.RepositoryConfig.default()
    store = icechunk.local_filesystem_store(str(place))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(root, store, "files"))
    made = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(tmp_path / "source")), config
    )
    made.save_config()
    session = made.writable_session("main")
    zarr.create_array(session.store, name="v", shape=8, chunks=2, dtype="u1", compressors=None)
    session.commit("an array")
    return place, made


def refer(made: icechunk.Repository, **checksums: str | datetime | None) -> None:
    """Commit that the chunks are in files of these names, with what is noted of the files."""
    session = made.writable_session("main")
    for number, (name, checksum) in enumerate(checksums.items()):
        session.store.set_virtual_ref(
            f"v/c/{number}", f"vcc://files/{name}", offset=2, length=2, checksum=checksum
        )
    session.commit("refer to files", allow_empty=True)


def test_files_that_have_changed_since_icechunk_noted_them_are_not_read(
    elsewhere: tuple[Path, icechunk.Repository],
) -> None:
    place, made = elsewhere
    long_ago, now = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
    for name in ("same", "changed", "unknown"):
        (place / name).write_bytes(b"abcd")
    refer(made, same=now, changed=long_ago, unknown=None, gone=now)
    repo = zm.create(place.parent / "repo", virtual_containers={"files": place})
    first = zm.virtual.import_icechunk(repo, place.parent / "source")
    array = zarr.open_array(repo.readonly_session().store, path="v", mode="r")
    assert array[:2].tolist() == array[4:6].tolist() == [*b"cd"]
    with pytest.raises(VirtualSourceChangedError):
        array[2:4]
    with pytest.raises(MissingChunkError):
        array[6:]
    assert repo.verify().unguarded == 0
    refer(made, same=now, changed=now, unknown=None, gone=now)
    (place / "same").write_bytes(b"efgh")
    ours = zm.virtual.import_icechunk(repo, place.parent / "source")
    assert len(ours.keys() - first.keys()) == 1
    array = zarr.open_array(repo.readonly_session().store, path="v", mode="r")
    assert array[2:4].tolist() == [*b"cd"]
    with pytest.raises(VirtualSourceChangedError):
        array[:2]


def test_files_at_places_that_are_not_trusted_stay_unguarded(
    elsewhere: tuple[Path, icechunk.Repository],
) -> None:
    place, made = elsewhere
    refer(made, one=None, other=datetime(2000, 1, 1, tzinfo=UTC))
    repo = zm.create(place.parent / "repo")
    zm.virtual.import_icechunk(repo, place.parent / "source")
    report = repo.verify()
    assert (report.unguarded, report.virtual_files) == (2, 2)
    assert str(report).endswith("; not looked at: 2 files with virtual chunks")
    containers: dict[str, Any] = {
        "files": place.parent,
        "google": zm.VirtualContainer("gs://data", anonymous=True),
        "azure": zm.VirtualContainer("az://data", account="winds"),
        "web": "https://example.org/data",
    }
    again = zm.create(place.parent / "again", virtual_containers=containers)
    zm.virtual.import_icechunk(again, place.parent / "source")
    assert again.verify().unguarded == 0


def test_a_repository_is_read_at_any_place(source: Path, expected: dict[str, Any]) -> None:
    storage = MemoryStorage("icechunk-in-memory")
    for path in source.rglob("*"):
        if path.is_file():
            storage.put(path.relative_to(source).as_posix(), path.read_bytes())
    containers: dict[str, Any] = {"source": "memory://icechunk-in-memory"}
    repo = zm.create(MemoryStorage(), virtual_containers=containers)
    check(repo, zm.virtual.import_icechunk(repo, "memory://icechunk-in-memory"), expected)


def test_icechunk_is_needed(
    repo: zm.Repository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "icechunk", None)
    with pytest.raises(ImportError, match=r'pip install "zarr-manifests\[icechunk\]"'):
        zm.virtual.import_icechunk(repo, source)


def test_a_folder_without_an_icechunk_repository_is_named(repo: zm.Repository) -> None:
    with pytest.raises(NotARepositoryError, match="no icechunk repository at memory://nothing"):
        zm.virtual.import_icechunk(repo, "memory://nothing")


def test_a_tag_with_the_name_of_a_branch_is_refused_before_anything_is_imported(
    repo: zm.Repository, tmp_path: Path
) -> None:
    made = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "both")))
    session = made.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(2,), dtype="i4")[:] = 1
    made.create_tag("main", snapshot_id=session.commit("one"))
    before = next(repo.ancestry()).snapshot_id
    with pytest.raises(InvalidArgumentError, match="main is a tag and a branch"):
        zm.virtual.import_icechunk(repo, tmp_path / "both")
    assert next(repo.ancestry()).snapshot_id == before
