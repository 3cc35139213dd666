"""Writes from rows without Spark: both steps on Arrow batches, with a sort in place of Spark."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import xarray as xr

from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.session import Session, commits_of
from zarr_manifests.spark.cell_shares import SHARES, cell_bounds, distinct_labels, share_cells
from zarr_manifests.spark.cell_values import to_numpy
from zarr_manifests.spark.cell_writer import write_cells
from zarr_manifests.spark.write_plan import WriteOptions, WritePlan
from zarr_manifests.spark.write_target import Begun, Target, begin

__all__ = ["rows_of", "run_tasks", "write_table"]


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
    options = WriteOptions(**asked)
    with repo.writable_session() as session:
        begun, plan = _planned(session, table, options, parallelism, batch)
        cells = run_tasks(session, plan, table, batch, attempts=attempts)
        if session.status():
            commits_of(session).commit("rows", check_tip=begun.check_tip)
    return cells


def _planned(
    session: Session, table: pa.Table, options: WriteOptions, parallelism: int, batch: int
) -> tuple[Begun, WritePlan]:
    target = Target.of(session, options, table.column_names)
    labels = _labels(table, target.new_labels(session, options), batch)
    begun = begin(session, target, options, table.schema, labels, parallelism=parallelism)
    if begun.region is not None:
        return begun, begun.plan
    found = list(cell_bounds(begun.plan, table.to_batches(max_chunksize=batch)))
    for each in found:
        if each["failure"][0].is_valid:
            raise InvalidArgumentError(each["failure"][0].as_py())
    lo, hi = (found[0][end][0].as_py() for end in ("lo", "hi"))
    region = Box(tuple(lo), tuple(at + 1 for at in hi))
    return begun, begun.within(region, options, parallelism)


def _labels(table: pa.Table, dims: tuple[str, ...], batch: int) -> Mapping[str, Any]:
    if not dims:
        return {}
    batches = table.select(list(dims)).to_batches(max_chunksize=batch)
    found = pa.Table.from_batches(list(distinct_labels(batches)))
    return {dim: np.unique(to_numpy(found[dim].combine_chunks().drop_null())) for dim in dims}


def run_tasks(
    session: Session, plan: WritePlan, table: pa.Table, batch: int = 50, *, attempts: int = 1
) -> int:
    """Run both steps of a plan, merge what tasks give, and return the number of cells.

    Of several attempts of a task the last one counts, as where Spark speculates.
    """
    plan = pickle.loads(pickle.dumps(plan))
    half = table.num_rows // 2  # two tasks of the first step
    parts = [table.slice(0, half), table.slice(half)]
    shares = [
        share for part in parts for share in share_cells(plan, part.to_batches(max_chunksize=batch))
    ]
    whole = pa.Table.from_batches(shares, schema=SHARES)
    fork, cells, forks = pickle.dumps(session.fork()), 0, []
    for task in range(plan.tasks):
        mark = pa.table([[task], [None], [None], [None]], schema=SHARES)
        mine = pa.concat_tables([whole.filter(pa.array(whole["task"].to_numpy() == task)), mark])
        mine = mine.sort_by("bin")
        for _ in range(attempts):
            reported = list(write_cells(plan, pickle.loads(fork), mine.to_batches()))
        for row in reported:
            if row["failure"][0].is_valid:
                raise InvalidArgumentError(row["failure"][0].as_py())
            cells += row["cells"][0].as_py()
            forks.append(pickle.loads(row["fork"][0].as_py()))
    session.merge(*forks)
    return cells
