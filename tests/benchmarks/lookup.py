"""How long a lookup in a table of a million rows takes: `python tests/benchmarks/lookup.py`.

Not a test, since machines differ. Due are less than 5 microseconds.
"""

from __future__ import annotations

import timeit

import numpy as np

from zarr_manifests.format.chunk_table import (
    ChunkTable,
    RefKind,
    VirtualSource,
)
from zarr_manifests.grid import Box

N, FILES, TIMES = 1_000_000, 1_000, 100_000


def table(kind: RefKind, *, dense: bool) -> ChunkTable:
    """A million rows of that kind."""
    rows = np.arange(N, dtype=np.int64)
    zeros = np.zeros(N, np.int64)
    virtual = kind is RefKind.VIRTUAL
    files = [VirtualSource("era5", f"daily/{i}.nc") for i in range(FILES)]
    return ChunkTable(
        Box((0, 0), (N if dense else 3 * N, 1)),
        None if dense else 3 * rows,
        np.full(N, kind, np.int64),
        rows % FILES if virtual else zeros,
        zeros if virtual else rows,
        rows,
        rows + 1,
        zeros,
        () if virtual else ("000000000001-" + "ab" * 12,),
        b"",
        tuple(files) if virtual else (),
    )


def main() -> None:
    """Print the best of five for each kind of table."""
    for kind in (RefKind.NATIVE, RefKind.VIRTUAL):
        for dense in (True, False):
            rows = table(kind, dense=dense)
            at = (N // 3 if dense else 3 * (N // 3), 0)
            best = min(timeit.repeat(lambda r=rows, a=at: r.get(a), number=TIMES, repeat=5))
            how = "direct" if dense else "binary search"
            print(f"{kind.name.lower():8} {how:14} {best / TIMES * 1e6:.2f} us")


if __name__ == "__main__":
    main()
