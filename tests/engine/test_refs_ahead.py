"""However many chunks are looked up at once, and in whatever order, each is what was written."""

from __future__ import annotations

import numpy as np
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore

SIDE = 8


def made(*, inline_bytes: int, leaf: int) -> Repository:
    """An array of chunks of one number each, all of which are 1."""
    sets = [{"default": {"max-manifest-size": leaf}}]
    config = {
        "inline-chunk-bytes": inline_bytes,
        "compaction": {"mode": "manual"},
        "chunk-manifests": {"sets": sets},
    }
    repository = zm.create(MemoryStorage(), config)
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(
            store, name="a", shape=(SIDE, SIDE), chunks=(1, 1), dtype="u1", compressors=None
        )
        array[:] = 1
    return repository


def change(repository: Repository, model: np.ndarray, step: tuple[str, int, int]) -> None:
    what, start, many = step
    if what in ("full", "minor"):
        repository.compact(mode=what)  # type: ignore[call-overload]
        return
    with repository.transaction(message=what) as store:
        array = zarr.open_array(store, path="a")
        if what == "set":
            array[start : start + many] = 10 * many + start
            model[start : start + many] = 10 * many + start
        elif what == "delete":
            for j in range(many):
                store.delete_sync(f"a/c/{j}/{start}")
            model[:many, start] = 0
        else:
            array.resize((SIDE, start + 1))
            array.resize((SIDE, SIDE))
            model[:, start + 1 :] = 0


STEPS = st.tuples(
    st.sampled_from(["set", "delete", "full", "minor", "cut"]),
    st.integers(0, SIDE - 1),
    st.integers(1, SIDE),
)
RUNS = st.lists(
    st.tuples(st.integers(0, SIDE**2 - 1), st.integers(1, SIDE**2)), min_size=1, max_size=4
)


@settings(max_examples=examples(30))
@given(
    st.lists(STEPS, max_size=6),
    RUNS,
    st.data(),
    st.sampled_from([0, 9]),
    st.sampled_from([20, 999]),
)
def test_one_chunk_many_and_all_are_found_alike(
    steps: list[tuple[str, int, int]],
    runs: list[tuple[int, int]],
    data: st.DataObject,
    inline_bytes: int,
    leaf: int,
) -> None:
    """After any history, in a process that has read nothing yet."""
    repository = made(inline_bytes=inline_bytes, leaf=leaf)
    model = np.ones((SIDE, SIDE), "u1")
    for step in steps:
        change(repository, model, step)

    def value(store: ManifestStore, i: int, j: int) -> int:
        found = store.get_sync(f"a/c/{i}/{j}")
        return 0 if found is None else found.to_bytes()[0]

    one_by_one, among, whole = (zm.open(repository.storage).readonly_session() for _ in range(3))
    for first, many in runs:
        for at in range(first, min(first + many, SIDE * SIDE)):
            assert value(one_by_one.store, *divmod(at, SIDE)) == model[divmod(at, SIDE)]
    cells = st.tuples(st.integers(0, SIDE - 1), st.integers(0, SIDE - 1))
    some = sorted(data.draw(st.sets(cells, min_size=1, max_size=6)))
    there = {at: bytes([model[at]]) for at in some if model[at]}
    assert dict(among.read_chunks("a", coords=some)) == there
    (top, left), (bottom, right) = some[0], some[-1]
    box = [slice(top, bottom + 1), slice(min(left, right), max(left, right) + 1)]
    boxed = whole.chunk_refs("a", box).coords
    assert len(boxed) == np.count_nonzero(model[tuple(box)])
    for session in (whole, among):
        assert np.array_equal(zarr.open_array(session.store, path="a")[:], model)
