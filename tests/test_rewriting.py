"""Arrays that are written anew with other chunks, shards or codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box
from zarr_manifests.planning.upkeep.rechunk import plan_rechunk, reads_per_chunk
from zarr_manifests.session import Fork

VALUES = np.arange(480, dtype="f4").reshape(60, 8)


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> zm.Repository:
    repo = zm.create(f"memory://{request.node.name.replace('[', '-').strip(']')}")
    with repo.transaction(message="one day a chunk") as store:
        how: dict[str, Any] = {"chunks": (1, 8), "dtype": "f4", "attributes": {"units": "K"}}
        a = zarr.create_array(
            store, name="t", shape=(60, 8), dimension_names=("day", "x"), fill_value=-1, **how
        )
        a[:40] = VALUES[:40]
    return repo


def values(repo: zm.Repository, **where: str) -> Any:
    return zarr.open_array(repo.readonly_session(**where).store, path="t")[:]


def branches(repo: zm.Repository) -> list[str]:
    return sorted(repo.list_branches())


def test_the_values_stay_and_all_else_but_the_layout(repo: zm.Repository) -> None:
    old, before = values(repo), repo.list_branches()["main"]
    report = zm.rewrite_chunks(
        repo,
        "/t",
        chunks=(10, 4),
        shards=(20, 8),
        codecs={"compressors": zarr.codecs.GzipCodec()},
        task_bytes=20 * 8 * 4,
    )
    array = zarr.open_array(repo.readonly_session().store, path="t")
    assert np.array_equal(array[:], old)
    assert (array.chunks, array.shards, array.fill_value) == ((10, 4), (20, 8), -1)
    assert array.compressors == (zarr.codecs.GzipCodec(),)
    assert (array.metadata.dimension_names, dict(array.attrs)) == (("day", "x"), {"units": "K"})
    assert len(repo.readonly_session().chunk_refs("t")) == 2  # none where nothing was written
    assert (report.tasks, report.chunks_after, report.reads_per_chunk) == (2, 2, 1.0)
    assert report.snapshot_id == repo.list_branches()["main"]
    assert next(info.message for info in repo.ancestry(limit=2)) == "rewrite the chunks of /t"
    assert next(iter(repo.ancestry(limit=2))).parent_id == before  # one commit
    assert np.array_equal(values(repo, version=before), old)
    assert branches(repo) == ["main"]
    assert repo.verify().ok


def test_the_new_chunks_have_statistics(repo: zm.Repository) -> None:
    zm.rewrite_chunks(repo, "t", chunks=(20, 8))
    found = repo.readonly_session().chunk_refs("t", statistics=True)
    assert len(found) == 2
    selection = repo.readonly_session().chunks_where("t", "t > 200")
    assert selection.boxes.tolist() == [[[1, 0], [2, 1]]]


def test_a_dry_run_writes_nothing(repo: zm.Repository) -> None:
    before = repo.list_branches()
    report = zm.rewrite_chunks(repo, "t", chunks=(60, 1), task_bytes=60 * 4, dry_run=True)
    assert repo.list_branches() == before
    assert (report.snapshot_id, report.tasks) == (None, 8)
    assert report.reads_per_chunk == 8
    assert str(report) == (
        "/t: chunks 1 x 8 -> 60 x 1\nwould read 40 chunks 8 times, and write 8 chunks; tasks: 8"
    )


class StopsError(Exception):
    """Raised by tasks."""


def failing_after(rounds: int) -> Callable[..., Iterable[Fork]]:
    calls = []

    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        calls.append(boxes)
        if len(calls) > rounds:
            raise StopsError
        return [call(box) for box in boxes]

    return run


def stops(*_: object) -> None:
    raise StopsError


SMALL: dict[str, Any] = {"chunks": (5, 8), "task_bytes": 5 * 8 * 4, "round_bytes": 2 * 5 * 8 * 4}
"""Eight tasks in four rounds."""


def test_what_was_written_before_a_failure_is_used(repo: zm.Repository) -> None:
    old = values(repo)
    with pytest.raises(StopsError):
        zm.rewrite_chunks(repo, "t", **SMALL, run=failing_after(3))
    assert np.array_equal(values(repo), old)
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (1, 8)
    with repo.transaction(message="something else") as store:
        zarr.create_group(store, path="other")
    ran: list[Sequence[Box]] = []

    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        ran.append(boxes)
        return [call(box) for box in boxes]

    report = zm.rewrite_chunks(repo, "t", **SMALL, run=run)
    assert (len(ran), report.tasks, report.reused_tasks) == (1, 8, 6)
    assert np.array_equal(values(repo), old)
    assert branches(repo) == ["main"]
    assert len(repo.readonly_session().chunk_refs("t", statistics=True)) == 8


def test_a_failure_before_the_last_step_needs_no_task(
    repo: zm.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(zm.Repository, "cherry_pick", stops)
        with pytest.raises(StopsError):
            zm.rewrite_chunks(repo, "t", **SMALL)
    report = zm.rewrite_chunks(repo, "t", **SMALL, run=failing_after(0))
    assert report.reused_tasks == report.tasks == 8


def test_what_was_written_of_an_array_that_has_changed_is_not_used(repo: zm.Repository) -> None:
    with pytest.raises(StopsError):
        zm.rewrite_chunks(repo, "t", **SMALL, run=failing_after(3))
    with repo.transaction(message="a correction") as store:
        zarr.open_array(store, path="t")[0] = 7
    report = zm.rewrite_chunks(repo, "t", **SMALL)
    assert report.reused_tasks == 0
    assert (values(repo)[0] == 7).all()


def test_a_change_meanwhile_is_a_conflict(repo: zm.Repository) -> None:
    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        with repo.transaction(message="a correction") as store:
            zarr.open_array(store, path="t")[0] = 7
        return [call(box) for box in boxes]

    with pytest.raises(ConflictError):
        zm.rewrite_chunks(repo, "t", chunks=(60, 8), run=run)
    assert (values(repo)[0] == 7).all()
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (1, 8)
    zm.rewrite_chunks(repo, "t", chunks=(60, 8))
    assert (values(repo)[0] == 7).all()


def test_only_changes_of_the_array_itself_are_conflicts(repo: zm.Repository) -> None:
    with repo.transaction(message="more arrays") as store:
        for path in ("u", "gone"):
            zarr.create_array(store, name=path, shape=(4, 8), chunks=(1, 8), dtype="f4")
    old = values(repo)

    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        with repo.transaction(message="an append elsewhere") as store:
            other = zarr.open_array(store, path="u")
            other.resize((6, 8))
            other[4:] = 3
        with repo.transaction(message="a new array, and attributes of the root") as store:
            zarr.create_array(store, name="new", shape=(2,), dtype="f4")[:] = 5
            zarr.open_group(store).attrs["title"] = "changed"
        with repo.transaction(message="one is gone") as store:
            del zarr.open_group(store)["gone"]
        return [call(box) for box in boxes]

    zm.rewrite_chunks(repo, "t", chunks=(60, 8), run=run)
    root = zarr.open_group(repo.readonly_session().store, mode="r")
    assert np.array_equal(root["t"][:], old)  # type: ignore[index]
    assert (root["u"][4:] == 3).all()  # type: ignore[index,operator,union-attr]
    assert (root["new"][:] == 5).all()  # type: ignore[index,operator,union-attr]
    assert "gone" not in root
    assert root.attrs["title"] == "changed"
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (60, 8)


@pytest.mark.parametrize("how", ["resize", "attributes"])
def test_an_append_or_attributes_of_the_array_meanwhile_are_conflicts(
    how: str, repo: zm.Repository
) -> None:
    """The new array has the shape and the attributes that the old one had."""

    def run(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
        with repo.transaction(message=how) as store:
            array = zarr.open_array(store, path="t")
            if how == "resize":
                array.resize((61, 8))
            else:
                array.attrs["units"] = "degC"
        return [call(box) for box in boxes]

    with pytest.raises(ConflictError):
        zm.rewrite_chunks(repo, "t", chunks=(60, 8), run=run)
    assert zarr.open_array(repo.readonly_session().store, path="t").chunks == (1, 8)


def test_wrong_arguments_change_nothing(repo: zm.Repository) -> None:
    before = repo.list_branches()
    with pytest.raises(NotFoundError, match="no array '/u'"):
        zm.rewrite_chunks(repo, "u", chunks=(1, 1))
    with pytest.raises(InvalidArgumentError, match="already"):
        zm.rewrite_chunks(repo, "t")
    with pytest.raises(InvalidArgumentError, match="must have 2 axes"):
        zm.rewrite_chunks(repo, "t", chunks=(3,))
    with pytest.raises(InvalidArgumentError, match="'level'; known here: compressors, filters"):
        zm.rewrite_chunks(repo, "t", codecs={"level": 3})
    with pytest.raises(ValueError, match="divisible"):
        zm.rewrite_chunks(repo, "t", chunks=(3, 8), shards=(10, 8))
    assert repo.list_branches() == before


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    "data",
    [
        np.array([0.0, -0.0, np.nan, np.inf, 1.5]),
        np.array(["2026-01-01", "NaT", "1970-01-01"], "M8[ns]"),
        np.array([True, False, True]),
        np.array(["a", "", "longer"], "U6"),
        np.array(5, "i8"),
    ],
    ids=["float", "time", "bool", "text", "scalar"],
)
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_values_of_any_type_are_the_same_bytes(data: Any, zarr_format: Any) -> None:
    repo = zm.create(f"memory://rewritten-{data.dtype.kind}-{zarr_format}")
    with repo.transaction(message="values") as store:
        how = {"shape": data.shape, "dtype": data.dtype, "chunks": (1,) * data.ndim}
        a = zarr.create_array(store, name="t", zarr_format=zarr_format, **how)
        a[...] = data
    chunks = (2,) * data.ndim
    codecs = None if data.ndim else {"compressors": None}
    zm.rewrite_chunks(repo, "t", chunks=chunks, codecs=codecs)
    found = zarr.open_array(repo.readonly_session().store, path="t")
    assert (found.metadata.zarr_format, found.chunks) == (zarr_format, chunks)
    assert np.asarray(found[...]).tobytes() == data.tobytes()


lengths = st.integers(1, 40)


@given(st.lists(st.tuples(lengths, lengths, lengths), max_size=3), st.integers(1, 5000))
@settings(deadline=None)
def test_boxes_hold_each_cell_once_and_whole_new_chunks(
    axes: list[tuple[int, int, int]], target: int
) -> None:
    shape, old, new = ([axis[i] for axis in axes] for i in range(3))
    scan = plan_rechunk(shape, old, new, target)
    seen = np.zeros(shape, int)
    for box in scan:
        seen[tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))] += 1
        for lo, hi, chunk, length in zip(box.lo, box.hi, new, shape, strict=True):
            assert lo % chunk == 0
            assert hi % chunk == 0 or hi == length
    assert (seen == 1).all()
    reads = 0
    for box in scan:
        sides = zip(box.lo, box.hi, old, strict=True)
        reads += int(np.prod([-(-hi // chunk) - lo // chunk for lo, hi, chunk in sides]))
    chunks = int(np.prod([-(-n // chunk) for n, chunk in zip(shape, old, strict=True)]))
    assert reads_per_chunk(scan, old) == pytest.approx(reads / chunks)
