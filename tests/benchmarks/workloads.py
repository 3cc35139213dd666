"""What is measured: each workload prepares its data and then gives a figure a round.

All contestants of a row get the same values, chunks and codecs. What a workload checks, it checks
outside of the time it takes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from contestants import (
    CONTESTANTS,
    Contestant,
    Icechunk,
    Ours,
    as_said,
    fresh,
    new_array,
    opened,
    use_pipeline,
    values,
)
from distant import served
from runner import Case, Figure, Watch

import zarr_manifests as zm
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

_SEED = 7


def writing(case: Case) -> Iterator[Figure]:
    """Write all chunks of an array, and commit."""
    return _writing(case, lambda contestant: None)


def writing_durably(case: Case) -> Iterator[Figure]:
    """The same, until all of it is on the disk, be it by the commit or after it."""
    return _writing(case, Contestant.make_durable)


def _writing(case: Case, then: Callable[[Contestant], None]) -> Iterator[Figure]:
    use_pipeline(case.pipeline)
    chunks = case.sizes["chunks"]
    data = values(chunks, case.sizes["chunk_bytes"])
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        contestant.create()
        store, commit = contestant.writer()
        array = as_said(new_array(store, data), contestant, case.pipeline)
        os.sync()  # nobody is to wait for what others have left to be written
        with Watch() as watch:
            array[:] = data
            commit()
            then(contestant)
        last = zarr.open_array(contestant.reader(), path="a", mode="r")[chunks - 1]
        assert np.array_equal(last, data[-1])
        yield watch.figure(chunks)


def _written(case: Case, data: np.ndarray) -> Contestant:
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    store, commit = contestant.writer()
    new_array(store, data)[:] = data
    commit()
    return contestant


def measuring(case: Case, kind: str) -> Iterator[Figure]:
    """Write a compressed variable with statistics of its chunks, and without."""
    return _comparing(case, kind, {"statistics": True}, {"statistics": False})


def checking(case: Case, kind: str) -> Iterator[Figure]:
    """Write a compressed variable with a check of its values, and without; no statistics."""
    checked, unchecked = ({"check": how, "statistics": False} for how in (True, False))
    return _comparing(case, kind, checked, unchecked)


def _comparing(
    case: Case, kind: str, more: dict[str, Any], less: dict[str, Any]
) -> Iterator[Figure]:
    """Write a compressed variable with more work and with less, in turn.

    The figure is the middle one of the ratios of processor time. What other processes leave in the
    processor's caches makes single writes differ by a tenth, and hits neighbouring ones alike.
    """
    ds = _variable(kind, case.sizes["side"])
    while True:
        ratios, seconds = [], []
        for number in range(case.sizes["pairs"]):
            pair = {}
            for name in ("more", "less") if number % 2 else ("less", "more"):
                with Watch() as watch:
                    how = more if name == "more" else less
                    zm.write(ds, MemoryStorage(), message="m", scheduler="threads", **how)
                pair[name] = watch
            ratios.append(pair["more"].cpu_seconds / pair["less"].cpu_seconds)
            seconds.append([each.seconds for each in (pair["more"], pair["less"])])
        wall = dict(zip(("with", "without"), np.median(seconds, axis=0).tolist(), strict=True))
        yield Figure(
            statistics.median(ratios),
            pair["more"].cpu_seconds,
            pair["more"].peak_bytes,
            {f"seconds {name} it, by the clock": value for name, value in wall.items()},
        )


def _variable(kind: str, side: int) -> xr.Dataset:
    noise = 275 + np.random.default_rng(_SEED).normal(0, 5, (8, side, side))
    constant = np.where(noise > 280, np.nan, 273.25)
    given, encoding = {
        "float32": (noise.astype("f4"), {}),
        "rounded": (noise, {"dtype": "f4"}),
        "int32": ((noise * 1000).astype("i4"), {}),
        "packed": (
            noise,
            {"dtype": "i2", "scale_factor": 0.001, "add_offset": 275.0, "_FillValue": -32768},
        ),
        "dask": (constant, {"dtype": "f4"}),
    }[kind]
    ds = xr.Dataset({"t": (("time", "y", "x"), given)})
    if kind == "dask":
        ds = ds.chunk(time=1, y=side // 2, x=side // 2)
    ds["t"].encoding = {**encoding, "chunks": (1, side // 2, side // 2)}
    return ds


def creating(case: Case) -> Iterator[Figure]:
    """Make many arrays in one group and one session, and commit."""
    arrays = case.sizes["arrays"]
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        contestant.create()
        store, commit = contestant.writer()
        group = zarr.create_group(store)
        with Watch() as watch:
            for i in range(arrays):
                group.create_array(f"a{i}", shape=(10,), chunks=(5,), dtype="i4")
            commit()
        assert sum(1 for _ in zarr.open_group(contestant.reader(), mode="r")) == arrays
        yield watch.figure(arrays)


def creating_beside_zarr(case: Case) -> Iterator[Figure]:
    """Make each array in a session and in memory: the processor time that the session adds.

    The two take turns, and the median difference counts, since what is measured is a tenth of what
    Zarr itself takes.
    """
    arrays = case.sizes["arrays"]
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        contestant.create()
        store, commit = contestant.writer()
        groups = zarr.create_group(store), zarr.create_group(zarr.storage.MemoryStore())
        added: list[float] = []
        with Watch() as watch:
            for i in range(arrays):
                began = time.process_time()
                groups[0].create_array(f"a{i}", shape=(10,), chunks=(5,), dtype="i4")
                between = time.process_time()
                groups[1].create_array(f"a{i}", shape=(10,), chunks=(5,), dtype="i4")
                added.append(2 * between - began - time.process_time())
            began = time.process_time()
            commit()
            committing = (time.process_time() - began) / arrays
        tenth = max(arrays // 10, 1)
        extras = {
            "seconds, first tenth": statistics.median(added[:tenth]) + committing,
            "seconds, last tenth": statistics.median(added[-tenth:]) + committing,
            "seconds, commit": committing,
        }
        value = statistics.median(added) + committing
        yield Figure(value, watch.cpu_seconds / arrays, watch.peak_bytes, extras)


def reading(case: Case) -> Iterator[Figure]:
    """Read all chunks of an array, opened anew."""
    use_pipeline(case.pipeline)
    chunks = case.sizes["chunks"]
    data = values(chunks, case.sizes["chunk_bytes"])
    contestant = _written(case, data)
    while True:
        array = opened(contestant, case.pipeline)
        with Watch() as watch:
            found = array[:]
        assert np.array_equal(found, data)
        yield watch.figure(chunks)


def averaging(case: Case) -> Iterator[Figure]:
    """Compute a mean over time with xarray and dask, each stored chunk as the engine likes."""
    use_pipeline(case.pipeline)
    days = case.sizes["days"]
    shape = (days, 2 * 160, 2 * 160)
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    store, commit = contestant.writer()
    group = zarr.create_group(store)
    how: Any = {"chunks": (1, 160, 160), "dtype": "f4", "compressors": None}
    array = group.create_array("t", shape=shape, dimension_names=("time", "y", "x"), **how)
    rng = np.random.default_rng(_SEED)
    for day in range(days):
        array[day] = rng.random(shape[1:], "f4")
    commit()
    while True:
        with Watch() as watch:
            if isinstance(contestant, Ours):
                ds = xr.open_dataset(contestant.open(), engine="zarr_manifests", chunks={})
            else:
                ds = xr.open_zarr(contestant.reader(), chunks={}, consolidated=False)
            found = ds.t.mean("time").values
        assert found.shape == shape[1:]
        yield watch.figure(4 * days)


def picking(case: Case) -> Iterator[Figure]:
    """Read single chunks, anywhere, one after another."""
    use_pipeline(case.pipeline)
    chunks, reads = case.sizes["chunks"], case.sizes["reads"]
    data = values(chunks, case.sizes["chunk_bytes"])
    contestant = _written(case, data)
    rng = np.random.default_rng(_SEED)
    while True:
        array = zarr.open_array(contestant.reader(), path="a", mode="r")
        array[0]  # the manifest is in memory
        wanted = rng.integers(0, chunks, reads).tolist()
        with Watch() as watch:
            found = [array[i] for i in wanted]
        assert np.array_equal(found[-1], data[wanted[-1]])
        yield watch.figure(reads)


# --- references ------------------------------------------------------------------------------

_FILE_CHUNKS = 1000  # chunks a file, as in a year of hourly maps
_VIRTUAL_BYTES = 4096


def _create_for_references(contestant: Contestant, elsewhere: Path) -> None:
    elsewhere.mkdir(exist_ok=True)
    if isinstance(contestant, Ours):
        contestant.create(virtual_containers={"raw": elsewhere})
    elif isinstance(contestant, Icechunk):
        import icechunk

        prefix = f"file://{elsewhere}/"
        store = icechunk.local_filesystem_store(str(elsewhere))
        container = icechunk.VirtualChunkContainer(prefix, store)
        contestant.create(
            containers=[container],
            authorize_virtual_chunk_access=icechunk.containers_credentials({prefix: None}),
        )


def _refer(session: Any, elsewhere: Path, count: int) -> Callable[[], None]:
    """A call that makes the first chunks of `a` ranges of files elsewhere, all at once."""
    rows = np.arange(count)
    files = [f"file://{elsewhere}/{i}.bin" for i in range(-(-count // _FILE_CHUNKS))]
    offset = rows % _FILE_CHUNKS * _VIRTUAL_BYTES
    length = np.full(count, _VIRTUAL_BYTES)
    if hasattr(session.store, "set_virtual_refs_arr"):
        locations = [files[i] for i in (rows // _FILE_CHUNKS).tolist()]

        def theirs() -> None:
            session.store.set_virtual_refs_arr(
                "a",
                (count, 1),
                locations,
                offset.astype(np.uint64),
                length.astype(np.uint64),
                validate_containers=False,
            )

        return theirs
    index = np.stack([rows, np.zeros_like(rows)], axis=1)

    def ours() -> None:
        session.store.set_virtual_refs("a", index, files, rows // _FILE_CHUNKS, offset, length)

    return ours


def _like(chunk_bytes: int = _VIRTUAL_BYTES) -> np.ndarray:
    return np.zeros((1, chunk_bytes // 4), np.int32)


def referring(case: Case) -> Iterator[Figure]:
    """Set many virtual refs, and commit."""
    count, elsewhere = case.sizes["refs"], case.folder / "files"
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        _create_for_references(contestant, elsewhere)
        assert isinstance(contestant, Ours | Icechunk)
        session = contestant.open().writable_session("main")
        new_array(session.store, _like(), chunks=count)
        session.commit("array")
        session = contestant.open().writable_session("main")
        refer = _refer(session, elsewhere, count)
        with Watch() as watch:
            refer()
            session.commit("references")
        yield watch.figure()


def appending(case: Case) -> Iterator[Figure]:
    """Append ten chunks to an array that has many, and commit; the base is compact."""
    use_pipeline(case.pipeline)
    count, elsewhere, appended = case.sizes["refs"], case.folder / "files", 10
    contestant = CONTESTANTS[case.contestant](case.folder)
    _create_for_references(contestant, elsewhere)
    assert isinstance(contestant, Ours | Icechunk)
    session = contestant.open().writable_session("main")
    new_array(session.store, _like(), chunks=count)
    _refer(session, elsewhere, count)()
    session.commit("references")
    if isinstance(contestant, Ours):
        contestant.open().compact("main", "full")
    session = contestant.open().writable_session("main")
    data = values(appended, _VIRTUAL_BYTES)
    array = zarr.open_array(session.store, path="a", mode="r+")
    while True:
        with Watch() as watch:
            if getattr(session, "read_only", False):  # theirs takes one commit
                session = contestant.open().writable_session("main")
                array = zarr.open_array(session.store, path="a", mode="r+")
            array.resize((count + appended, array.shape[1]))
            array[count:] = data
            session.commit("append")
        count += appended
        yield watch.figure()


def sizing(case: Case) -> Iterator[Figure]:
    """Bytes on the disk for each native ref, chunks not counted."""
    use_pipeline(case.pipeline)
    chunks = case.sizes["chunks"]
    data = values(chunks, 64)
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        contestant.create(inline_bytes=0)
        store, commit = contestant.writer()
        with Watch() as watch:
            new_array(store, data)[:] = data
            commit()
        if isinstance(contestant, Ours):
            contestant.open().compact("main", "full")
            kinds = {"manifests"}  # of a base; what it is made of stays until it is collected
            head = contestant.open().readonly_session("main")
            refs = contents_of(head.store).view.pages.manifests()
            total = sum(ref.blob.length for ref in refs)
        else:
            kinds = {"manifests"}
            total = sum(
                path.stat().st_size
                for kind in kinds
                for path in (contestant.folder / "r" / kind).rglob("*")
                if path.is_file()
            )
        assert total > 0
        yield Figure(total / chunks, peak_bytes=watch.peak_bytes)


# --- from far away ---------------------------------------------------------------------------


def _dataset(arrays: int) -> Any:
    """As many variables of some chunks over three coordinates, each with attributes."""
    import xarray as xr

    rng = np.random.default_rng(_SEED)
    sizes = {"time": 64, "lat": 30, "lon": 40}
    coords = {name: (name, np.arange(n) * 0.5, {"units": "m"}) for name, n in sizes.items()}
    attributes = {"cell_methods": "time: mean", "valid_min": -1e3}
    variables = {
        f"v{i}": (
            tuple(sizes),
            rng.random(tuple(sizes.values()), np.float32),
            {"long_name": f"variable {i}", **attributes},
        )
        for i in range(arrays)
    }
    return xr.Dataset(variables, coords)


def opening(case: Case) -> Iterator[Figure]:
    """Open a dataset that nothing is known of, with xarray, and load its coordinates."""
    import xarray as xr

    use_pipeline(case.pipeline)
    dataset = _dataset(case.sizes["arrays"])
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    store, commit = contestant.writer()
    chunks = {name: {"chunks": (16, 30, 40)} for name in dataset.data_vars}
    dataset.to_zarr(store, encoding=chunks, consolidated=False)
    commit()
    with served(case.folder / "r", case.sizes["delay_ms"]) as port:
        while True:
            contestant.forget()
            with Watch() as watch:
                reader = contestant.distant_reader(port)
                opened = xr.open_zarr(reader, consolidated=False, chunks=None)
                found = opened.coords["time"].values
            assert np.array_equal(found, dataset.time.values)
            assert len(opened.data_vars) == case.sizes["arrays"]
            yield watch.figure()


# --- many processes --------------------------------------------------------------------------


def _commit_often(
    contestant: Contestant, number: int, commits: int, ready: Any, times: Any, peaks: Any
) -> None:
    """Overwrite chunks that nobody else writes, a commit for each; and say from when to when."""
    use_pipeline("fused")
    data = values(1, 4096)[0]
    assert isinstance(contestant, Ours | Icechunk)
    place = contestant.folder / f"beside-{number}"
    place.mkdir()
    _begin(type(contestant)(place), data)
    repository = contestant.open()
    with Watch() as watch:
        ready.wait()
        times[2 * number] = time.perf_counter()  # a clock that all processes share
        try:
            mine = range(number * commits, (number + 1) * commits)
            _overwrite(contestant, repository, data, mine)
            times[2 * number + 1] = time.perf_counter()
        except BaseException:
            ready.abort()  # nobody is to wait for this one
            raise
        ready.wait()  # an exit takes a processor for as long as twenty commits
    peaks[number] = watch.peak_bytes


def _begin(beside: Contestant, data: np.ndarray) -> None:
    """Commit to a repository of its own, since a process's first commit imports what it takes."""
    beside.create()
    store, commit = beside.writer()
    new_array(store, _like(), chunks=1)
    commit()
    assert isinstance(beside, Ours | Icechunk)
    _overwrite(beside, beside.open(), data, range(1))


def _overwrite(
    contestant: Contestant, repository: Any, data: np.ndarray, chunks: Sequence[int]
) -> None:
    for i in chunks:
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a", mode="r+")[i] = data
        if isinstance(contestant, Ours):
            session.commit(f"{i}")
        else:
            import icechunk

            session.commit(f"{i}", rebase_with=icechunk.ConflictDetector(), rebase_tries=10_000)


def contending(case: Case) -> Iterator[Figure]:
    """Eight processes, each with commits of one chunk of its own: seconds for each commit.

    From when all are ready to the last commit of the last; what it takes a process to begin and to
    exit is not in it: those that are done first wait for the others. Commits that were lost are
    not counted.
    """
    commits, processes = case.sizes["commits"], case.sizes["processes"]
    context = multiprocessing.get_context("spawn")
    for number in range(1_000_000):
        contestant = fresh(case.contestant, case.folder, number)
        contestant.create()
        store, commit = contestant.writer()
        new_array(store, _like(), chunks=processes * commits)
        commit()
        ready, times = context.Barrier(processes), context.Array("d", 2 * processes)
        peaks = context.Array("q", processes)
        running = [
            context.Process(
                target=_commit_often, args=(contestant, i, commits, ready, times, peaks)
            )
            for i in range(processes)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
        assert isinstance(contestant, Ours | Icechunk)
        found = zarr.open_array(contestant.reader(), path="a", mode="r")[:, 0]
        landed = int((found != 0).sum())
        assert landed == processes * commits or (landed and case.contestant != "zarr_manifests")
        yield Figure((max(times) - min(times)) / landed, peak_bytes=max(peaks))
