"""Repositories in a bucket, 20 ms away: a server of Amazon S3's API, behind a proxy that waits.

Each contestant has a server and a proxy of its own, both of one kind, in processes of their own.
The proxy passes on what it gets after half of the delay, either way, and counts requests and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xarray as xr
import zarr
from contestants import Contestant, new_array, use_pipeline, values
from runner import OURS, Case, Figure, Watch

import zarr_manifests as zm
from servers import ENVIRONMENT
from servers.amazon import BUCKET, ministack

_READERS = 8
_REGION = "us-east-1"


# --- a server far away -----------------------------------------------------------------------


class _Counts:
    requests = 0
    nbytes = 0


async def _pass_on(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    delay_s: float,
    note: Callable[[bytes], None],
) -> None:
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def send() -> None:
        while True:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - loop.time()))
            if not data:
                target.close()
                return
            target.write(data)
            await target.drain()

    sending = asyncio.create_task(send())
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 18):
            note(data)
            due.put_nowait((loop.time() + delay_s, data))
    due.put_nowait((loop.time() + delay_s, b""))
    with contextlib.suppress(ConnectionError):
        await sending


def _proxy(pipe: Any, upstream: int, delay_s: float) -> None:
    counts = _Counts()

    def note_request(data: bytes) -> None:
        counts.requests += data.count(b" HTTP/1.1\r\n")

    def note_answer(data: bytes) -> None:
        counts.nbytes += len(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(
            _pass_on(reader, below, delay_s / 2, note_request),
            _pass_on(above, writer, delay_s / 2, note_answer),
        )

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=128)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    with contextlib.suppress(EOFError):  # who asked for it has ended
        while pipe.recv():
            pipe.send((counts.requests, counts.nbytes))


class _Place:
    """A bucket behind a proxy."""

    def __init__(self, pipe: Any, port: int) -> None:
        self._pipe = pipe
        self.endpoint = f"http://127.0.0.1:{port}"

    def counts(self) -> tuple[int, int]:
        """Requests so far, and bytes of the answers."""
        self._pipe.send(True)
        found: tuple[int, int] = self._pipe.recv()
        return found


@contextlib.contextmanager
def _far_away(delay_ms: int) -> Iterator[_Place]:
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    with ministack() as server:
        ours, theirs = context.Pipe()
        port = int(server.endpoint.rpartition(":")[2])
        arguments = theirs, port, delay_ms / 1000
        process = context.Process(target=_proxy, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            yield _Place(ours, ours.recv())
        finally:
            ours.close()
            process.join(10)


# --- who is compared -------------------------------------------------------------------------


class _Ours(Contestant):
    def __init__(self, endpoint: str, prefix: str) -> None:
        self._url = f"s3://{BUCKET}/{prefix}"
        self._options = {"endpoint": endpoint, "region": _REGION}

    def create(self, *, inline_bytes: int | None = None, **options: Any) -> None:
        config = {} if inline_bytes is None else {"inline-chunk-bytes": inline_bytes}
        zm.create(self._url, config, storage_options=self._options, **options)

    def open(self) -> Any:
        return zm.open(self._url, storage_options=self._options)


class _Icechunk(Contestant):
    def __init__(self, endpoint: str, prefix: str) -> None:
        import icechunk

        icechunk.set_logs_filter("error")
        self._storage = icechunk.s3_storage(
            bucket=BUCKET,
            prefix=prefix,
            region=_REGION,
            endpoint_url=endpoint,
            allow_http=True,
            force_path_style=True,
            access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        )

    def create(self, *, inline_bytes: int | None = None, **options: Any) -> None:
        import icechunk

        icechunk.Repository.create(self._storage)

    def open(self) -> Any:
        import icechunk

        return icechunk.Repository.open(self._storage)


def _contestant(case: Case, place: _Place, prefix: str) -> Any:
    return (_Ours if case.contestant == OURS else _Icechunk)(place.endpoint, prefix)


def _rounds(case: Case) -> Iterator[tuple[_Place, Any, int]]:
    """For each round: the place, a repository that is not made yet, the number of the round."""
    use_pipeline(case.pipeline)
    with _far_away(case.sizes["delay_ms"]) as place:
        for number in range(1_000_000):
            yield place, _contestant(case, place, f"r{number}"), number


def _filled(case: Case, place: _Place, data: np.ndarray) -> Any:
    """A repository with one array."""
    contestant = _contestant(case, place, "filled")
    contestant.create()
    session = contestant.open().writable_session("main")
    new_array(session.store, data)[:] = data
    session.commit("benchmark")
    return contestant


def _reading(case: Case, read: Callable[[Any, np.ndarray], int]) -> Iterator[Figure]:
    """`read` reads a repository anew and returns how many chunks it has read."""
    use_pipeline(case.pipeline)
    data = values(case.sizes["chunks"], case.sizes["chunk_bytes"])
    with _far_away(case.sizes["delay_ms"]) as place:
        contestant = _filled(case, place, data)
        while True:
            requests, nbytes = place.counts()
            with Watch() as watch:
                chunks = read(contestant, data)
            asked, answered = place.counts()
            wanted = chunks * data[0].nbytes
            more = {"requests": asked - requests, "times the bytes": (answered - nbytes) / wanted}
            yield watch.figure(chunks, extras=more)


def _array(contestant: Any) -> Any:
    return zarr.open_array(contestant.open().readonly_session("main").store, path="a", mode="r")


# --- what is measured ------------------------------------------------------------------------


def making(case: Case) -> Iterator[Figure]:
    """Create a repository."""
    for place, contestant, _ in _rounds(case):
        before = place.counts()[0]
        with Watch() as watch:
            contestant.create()
        yield watch.figure(extras={"requests": place.counts()[0] - before})


def beginning(case: Case) -> Iterator[Figure]:
    """Open a dataset that nothing is known of, and load its coordinates."""
    use_pipeline(case.pipeline)
    arrays = case.sizes["arrays"]
    time = np.arange(365)
    variables = {f"v{i}": (("time", "x"), np.zeros((365, 8), "f4")) for i in range(arrays)}
    dataset = xr.Dataset(variables, {"time": time, "x": np.arange(8.0)})
    with _far_away(case.sizes["delay_ms"]) as place:
        contestant = _contestant(case, place, "filled")
        contestant.create()
        session = contestant.open().writable_session("main")
        dataset.to_zarr(session.store, consolidated=False)
        session.commit("benchmark")
        while True:
            before = place.counts()[0]
            with Watch() as watch:
                store = contestant.open().readonly_session("main").store
                opened = xr.open_zarr(store, consolidated=False, chunks=None)
                found = [opened.coords[name].values for name in ("time", "x")]
            assert np.array_equal(found[0], time)
            yield watch.figure(extras={"requests": place.counts()[0] - before})


def committing(case: Case) -> Iterator[Figure]:
    """Overwrite ten chunks in an open repository, and commit."""
    use_pipeline(case.pipeline)
    data = values(case.sizes["chunks"], case.sizes["chunk_bytes"])
    with _far_away(case.sizes["delay_ms"]) as place:
        repository = _filled(case, place, data).open()
        while True:
            with Watch() as watch:
                session = repository.writable_session("main")
                zarr.open_array(session.store, path="a", mode="r+")[:10] = data[:10]
                session.commit("benchmark")
            yield watch.figure()


def storing(case: Case) -> Iterator[Figure]:
    """Write all chunks of an array, and commit."""
    data = values(case.sizes["chunks"], case.sizes["chunk_bytes"])
    for _, contestant, _ in _rounds(case):
        contestant.create()
        session = contestant.open().writable_session("main")
        array = new_array(session.store, data)
        with Watch() as watch:
            array[:] = data
            session.commit("benchmark")
        yield watch.figure(len(data))


def taking(case: Case) -> Iterator[Figure]:
    """Open a repository and read all chunks of an array."""

    def read(contestant: Any, data: np.ndarray) -> int:
        assert np.array_equal(_array(contestant)[:], data)
        return len(data)

    return _reading(case, read)


def sampling(case: Case) -> Iterator[Figure]:
    """Open a repository and read a tenth of the chunks of an array, at random."""
    rng = np.random.default_rng(11)

    def read(contestant: Any, data: np.ndarray) -> int:
        some = np.sort(rng.choice(len(data), len(data) // 10, replace=False))
        assert np.array_equal(_array(contestant).oindex[some], data[some])
        return len(some)

    return _reading(case, read)


def sharing(case: Case) -> Iterator[Figure]:
    """Eight threads open a repository each, and read an array."""

    def read(contestant: Any, data: np.ndarray) -> int:
        def one(number: int) -> None:
            assert np.array_equal(_array(contestant)[:], data), number

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(one, range(_READERS)))
        return _READERS * len(data)

    return _reading(case, read)


def referring_far(case: Case) -> Iterator[Figure]:
    """Read a chunk of a repository that nothing is known of: in another bucket, or its own."""
    use_pipeline(case.pipeline)
    data = values(case.sizes["chunks"], case.sizes["chunk_bytes"])
    with _far_away(case.sizes["delay_ms"]) as place:
        options = {"endpoint": place.endpoint, "region": _REGION}
        raw, elsewhere = f"s3://{BUCKET}/raw", zm.storage.from_url(f"s3://{BUCKET}/raw", **options)
        elsewhere.put("all.bin", data.tobytes())
        size = data[0].nbytes
        url = f"s3://{BUCKET}/r"
        container = {"raw": zm.VirtualContainer(raw, endpoint=place.endpoint, region=_REGION)}
        given: dict[str, Any] = {"virtual_containers": container, "storage_options": options}
        session = zm.create(url, {"inline-chunk-bytes": 0}, **given).writable_session()
        new_array(session.store, data, "native")[:] = data
        new_array(session.store, data, "virtual")
        here = np.arange(len(data))
        etag = elsewhere.get_tagged("all.bin").token
        session.store.set_virtual_refs(
            "virtual",
            np.stack([here, 0 * here], axis=1),
            [f"{raw}/all.bin"],
            0 * here,
            here * size,
            0 * here + size,
            etags=[etag],
        )
        session.commit("benchmark")
        while True:
            found = {}
            for name in ("native", "virtual"):
                before = place.counts()[0]
                with Watch() as watch:
                    store = zm.open(url, **given).readonly_session("main").store
                    row = zarr.open_array(store, path=name, mode="r")[3]
                assert np.array_equal(row, data[3])
                found[name] = watch, place.counts()[0] - before
            more = found["virtual"][1] - found["native"][1]
            chosen = "virtual" if case.contestant == OURS else "native"
            yield found[chosen][0].figure(extras={"requests more than of a native one": more})
