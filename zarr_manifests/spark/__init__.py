"""Spark access to repositories: a session that needs no setup, reads and writes.

Names are imported when they are used, since the tasks of a read need few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.runtime import need, on_demand

if TYPE_CHECKING:
    from zarr_manifests.spark.cell_rows import aggregate, changes, read
    from zarr_manifests.spark.data_source import register
    from zarr_manifests.spark.dataframes import foreach_batch, write_dataframe
    from zarr_manifests.spark.maintenance import metadata_table
    from zarr_manifests.spark.tasks import ingest, session, write_dataset

need(__name__, "spark", "pyspark", "pandas", "pyarrow", "xarray")

__all__ = [
    "aggregate",
    "changes",
    "foreach_batch",
    "ingest",
    "metadata_table",
    "read",
    "register",
    "session",
    "write_dataframe",
    "write_dataset",
]

__getattr__ = on_demand(
    __name__,
    **dict.fromkeys(("aggregate", "changes", "read"), "cell_rows"),
    **dict.fromkeys(("foreach_batch", "write_dataframe"), "dataframes"),
    **dict.fromkeys(("ingest", "session", "write_dataset"), "tasks"),
    metadata_table="maintenance",
    register="data_source",
)
