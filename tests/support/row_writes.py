"""Writes from rows without Spark: both steps on Arrow batches, with a sort in place of Spark."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import xarray as xr

from zarr_manifests import Repository
from zarr_manifests.session import Fork
from zarr_manifests.spark.cell_writer import WritePlan, share_cells, write_cells
from zarr_manifests.spark.dataframes import WriteOptions, write_rows


def rows_of(ds: xr.Dataset, dims: list[str], seed: int | None = 0) -> pa.Table:
    """The cells of a dataset as rows, shuffled, as Spark would have them."""
    frame = ds.to_dataframe(dim_order=dims).reset_index()[[*dims, *map(str, ds.data_vars)]]
    if seed is not None:
        frame = frame.sample(frac=1, random_state=seed)
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        values = column.to_numpy()
        if values.dtype.kind == "M":
            columns[str(name)] = pa.array(values.astype("M8[us]"), pa.timestamp("us")).cast(
                pa.timestamp("us", "UTC")
            )
        elif values.dtype.kind in "OT" or isinstance(column.dtype, pd.StringDtype):
            columns[str(name)] = pa.array([None if v is None else str(v) for v in values.tolist()])
        else:
            columns[str(name)] = pa.array(values)
    return pa.table(columns)


class TableRows:
    """The rows of a table, which two tasks look up and a sort distributes."""

    def __init__(self, table: pa.Table, batch: int = 50, attempts: int = 1) -> None:
        self._table, self._batch, self._attempts = table, batch, attempts
        self.columns = table.schema

    def labels(self, dims: Sequence[str]) -> dict[str, pa.Array]:
        return {dim: self._table[dim].unique() for dim in dims}

    def fill(self, plan: WritePlan, fork: Fork) -> list[tuple[Fork, int]]:
        """Of several attempts of a task the last one counts, as where Spark speculates."""
        plan, half = pickle.loads(pickle.dumps(plan)), self._table.num_rows // 2
        shares: list[Any] = [(number, None) for number in range(len(plan.bins))]
        for part in (self._table.slice(0, half), self._table.slice(half)):
            shares += share_cells(plan, part.to_batches(max_chunksize=self._batch))
        shares.sort(key=lambda share: share[0])
        frozen, found = pickle.dumps(fork), []
        for task in range(plan.tasks):
            mine = [each for each in shares if each[0] * plan.tasks // len(plan.bins) == task]
            for _ in range(self._attempts):
                done = write_cells(plan, pickle.loads(frozen), mine)
            found.append(pickle.loads(pickle.dumps(done)))
        return found


def write_table(
    repo: Repository,
    table: pa.Table,
    *,
    parallelism: int = 2,
    batch: int = 50,
    attempts: int = 1,
    **asked: Any,
) -> int:
    """Write rows and commit; the number of cells."""
    rows = TableRows(table, batch, attempts)
    report = write_rows(repo, WriteOptions(**asked), rows, parallelism=parallelism)
    return report.cells
