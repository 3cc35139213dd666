"""What a new process needs before it has its first values, beside Zarr alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import zarr
from runner import Case, Figure

import zarr_manifests as zm

_READ = "assert zarr.open_array(store, path='a', mode='r')[0, 0] == 7\n"
_ZARR = "import zarr\n"
_OURS = "import zarr_manifests as zm\n"


def importing(case: Case) -> Iterator[Figure]:
    """Import this package, and Zarr."""
    return _beside(_OURS, _ZARR, case.sizes["pairs"])


def starting(case: Case) -> Iterator[Figure]:
    """Import, open and read one chunk, and the same of Zarr's store of files."""
    repository, folder = zm.create(str(case.folder / "r")), str(case.folder / "plain")
    with repository.transaction(message="values") as store:
        for place in (store, zarr.storage.LocalStore(folder)):
            zarr.create_array(place, name="a", shape=(64, 64), chunks=(16, 16), dtype="f4")[:] = 7
    opened = f"store = zm.open({repository.storage.url!r}).readonly_session().store\n"
    plain = f"store = zarr.storage.LocalStore({folder!r}, read_only=True)\n"
    return _beside(_ZARR + _OURS + opened + _READ, _ZARR + plain + _READ, case.sizes["pairs"])


def _beside(ours: str, theirs: str, pairs: int) -> Iterator[Figure]:
    """The middle one of the ratios of processor time, of processes that take turns."""
    for code in (ours, theirs):
        _cost(code)  # leaves the bytecode
    while True:
        found = [(_cost(ours), _cost(theirs)) for _ in range(pairs)]
        ratios = [mine[0] / zarrs[0] for mine, zarrs in found]
        mine, zarrs = (statistics.median(pair[i][0] for pair in found) for i in (0, 1))
        seconds = {"seconds, ours": mine, "seconds, Zarr's": zarrs}
        peak = max(cost[1] for cost, _ in found)
        yield Figure(statistics.median(ratios), mine, peak, seconds)


def _cost(code: str) -> tuple[float, int]:
    """The seconds of processor time and the bytes of memory of a process that runs this."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
