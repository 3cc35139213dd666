"""What compactions of many refs take: `python tests/benchmarks/folds.py [refs ...] [case ...]`.

Not collected by pytest. Virtual refs (10 M, if not said otherwise) into files of a thousand chunks
each, as an archive of netCDF files would give them, are committed to a repository on disk, and
brought into the base by one compaction, in a process of its own. It prints refs a second by
the clock, CPU time (of all threads) a ref, the peak of resident memory, and the CPU time relative
to the same columns merely sorted, gathered and compressed with numpy and Blosc, which says more
than seconds do where a machine is busy. Cases (all, if none is named):

- `new`: one array, ten commits, no base yet;
- `many`: ten arrays, one commit each;
- `random`: as `new`, but each commit's chunks lie anywhere in the array;
- `update`: an array that is in the base; then four tenths of it anew, in chunks that lie anywhere;
- `again`: as `update`, by a full compaction, which writes the whole array anew;
- `import`: all refs set in one session, a million at once, and committed; then a full compaction.
  Both steps have a line of their own.

Memory is bounded by what is worked on at a time: the peak of 100 M refs is that of 10 M. So is CPU
time a ref; `folds.py 10000000 100000000 import` compares both.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc
from zarr.core.buffer import cpu

import zarr_manifests as zm

REFS, STEPS, TILES, IN_FILE, AT_ONCE = 10_000_000, 10, 100, 1_000, 1_000_000
CASES = ("new", "many", "random", "update", "again", "import")
FULL = ("again", "import")
_MODE = {"compaction": {"mode": "manual"}}


def document(steps: int) -> bytes:
    """The metadata of an array of that many steps in time, of a hundred chunks each."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 10, 10]}}
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [steps, 100, 100],
        "data_type": "float32",
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["time", "lat", "lon"],
    }
    return json.dumps(fields).encode()


def refs_of(rows: np.ndarray, seed: int) -> dict[str, Any]:
    """Refs of these chunks (by number in C order): what `set_virtual_refs` takes."""
    tile = rows % TILES
    files, source = np.unique(rows // IN_FILE, return_inverse=True)
    length = np.random.default_rng(seed).integers(30_000, 60_000, len(rows))
    return {
        "index": np.stack([rows // TILES, tile // 10, tile % 10], axis=1),
        "locations": [
            f"file:///archive/v{seed}/{i // 365}/daily-{i:06d}.nc" for i in files.tolist()
        ],
        "source": source,
        # A file has other variables between two chunks of this one.
        "offset": 8_192 + (rows % IN_FILE) * 400_000 + length % 4_096,
        "length": length,
        "modified": np.full(len(files), 1_700_000_000_000),
        "sizes": np.full(len(files), 500_000_000),
    }


def parts_of(refs: int, case: str) -> Iterator[np.ndarray]:
    """Which chunks are set by each commit."""
    if case == "random":
        yield from np.split(np.random.default_rng(1).permutation(refs), STEPS)
    else:
        yield from np.split(np.arange(refs), STEPS)


def _put_document(session: Any, name: str, refs: int) -> None:
    session.store.set_sync(f"{name}/zarr.json", cpu.Buffer.from_bytes(document(refs // TILES)))


def make(url: str, refs: int, case: str) -> None:
    """The repository that is to be compacted."""
    repository = zm.create(url, _MODE)
    session = repository.writable_session("main")
    names = [f"v{i}" for i in range(STEPS)] if case == "many" else ["v"] * STEPS
    each = refs // STEPS
    for name in dict.fromkeys(names):
        _put_document(session, name, each if case == "many" else refs)
    session.commit("arrays")
    for step, (name, rows) in enumerate(zip(names, parts_of(refs, case), strict=True)):
        inside = rows - step * each if case == "many" else rows
        session.store.set_virtual_refs(name, **refs_of(inside, step))
        session.commit("refs")
    if case in ("update", "again"):
        repository.compact("main", "full")
        session = repository.writable_session("main")
        rng = np.random.default_rng(2)
        for step in range(4):
            rows = np.sort(rng.choice(refs, each, replace=False))
            session.store.set_virtual_refs("v", **refs_of(rows, STEPS + step))
            session.commit("better refs")


def compact(url: str, mode: str) -> dict[str, Any]:
    """The compaction."""
    report = zm.open(url).compact("main", mode)
    return {"refs": report.refs_merged, "manifests": report.manifests_written}


def set_in_one_session(url: str, refs: int) -> dict[str, Any]:
    """All refs set in one session, and committed."""
    session = zm.create(url, _MODE).writable_session("main")
    _put_document(session, "v", refs)
    for step, first in enumerate(range(0, refs, AT_ONCE)):
        rows = np.arange(first, min(first + AT_ONCE, refs))
        session.store.set_virtual_refs("v", **refs_of(rows, step))
    session.commit("refs")
    written = [path.stat().st_size for path in Path(url, "manifests").rglob("*") if path.is_file()]
    return {"refs": refs, "manifests": len(written), "nbytes": sum(written)}


def plainly(refs: int, case: str) -> dict[str, Any]:
    """The same columns sorted, gathered and compressed, a million rows at a time."""
    found = [refs_of(rows, step) | {"at": rows} for step, rows in enumerate(parts_of(refs, case))]
    start = time.process_time()
    at = np.concatenate([one["at"] for one in found])
    order = np.argsort(at, kind="stable")
    columns = {"at": at[order]}
    for name in ("source", "offset", "length"):
        columns[name] = np.concatenate([one[name] for one in found])[order]
    for first in range(0, refs, 1_000_000):
        for column in columns.values():
            raw = column[first : first + 1_000_000].astype("<u4").tobytes()
            blosc.compress(raw, b"zstd", 5, blosc.BITSHUFFLE, typesize=4)
    return {"cpu_s": time.process_time() - start}


def _measured(pipe: Any, call: Callable[..., dict[str, Any]], *args: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, used = time.perf_counter(), time.process_time()
    found = call(*args) or {}
    found.setdefault("cpu_s", time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send(found | {"wall_s": time.perf_counter() - wall, "peak": peak, "before": before})


def apart(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call it in a fresh process, whose time and memory are its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_measured, args=(there, call, *args))
    child.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    finally:
        child.join()
    return found


def show(case: str, refs: int) -> None:
    """Run a case and print its figures."""
    sample = min(refs, REFS)
    plain = apart(plainly, sample, "random" if case == "random" else "new")["cpu_s"]
    plain *= refs / sample
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "repository")
        if case == "import":
            tell("session", apart(set_in_one_session, url, refs), plain)
        else:
            apart(make, url, refs, case)
        tell(case, apart(compact, url, "full" if case in FULL else "major"), plain)


def tell(step: str, found: dict[str, Any], plain: float) -> None:
    """Print a line of figures."""
    n, wall, used = found["refs"], found["wall_s"], found["cpu_s"]
    print(
        f"{step:8} {n:11,} refs  {n / wall / 1e6:5.2f} M refs/s ({wall:5.1f} s)  "
        f"{used / n * 1e6:5.2f} CPU µs/ref ({used:5.1f} s, {used / plain:4.1f} x numpy)  "
        f"peak {found['peak'] / 1024:,.0f} MiB ({found['before'] / 1024:,.0f} at start), "
        f"{found['manifests']} manifests"
        + (f" of {found['nbytes'] / n:.1f} bytes a ref" if "nbytes" in found else ""),
        flush=True,
    )


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    counts = [int(one) for one in arguments if one.isdigit()]
    cases = [one for one in arguments if one in CASES]
    for case in cases or CASES:
        for refs in counts or [REFS]:
            show(case, refs)


if __name__ == "__main__":
    main(sys.argv[1:])
