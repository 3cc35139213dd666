"""Spark access to repositories: a session that needs no setup, reads and writes."""

from __future__ import annotations

from importlib.util import find_spec

for _package in ("pyspark", "pandas", "pyarrow", "xarray"):
    if find_spec(_package) is None:
        raise ImportError(
            f"zarr_manifests.spark needs {_package}, which is not installed here; "
            'get all it needs with: pip install "zarr-manifests[spark]"',
            name=_package,
        )

from zarr_manifests.spark.changes import changes  # noqa: E402 - after the check above
from zarr_manifests.spark.data_source import create_view, register  # noqa: E402
from zarr_manifests.spark.explain import explain_pruning  # noqa: E402
from zarr_manifests.spark.ingest_tasks import ingest  # noqa: E402
from zarr_manifests.spark.metadata_tables import metadata_table  # noqa: E402
from zarr_manifests.spark.read import read  # noqa: E402
from zarr_manifests.spark.spark_session import session  # noqa: E402
from zarr_manifests.spark.write_dataframe import foreach_batch, write_dataframe  # noqa: E402
from zarr_manifests.spark.write_dataset import write_dataset  # noqa: E402

__all__ = [
    "changes",
    "create_view",
    "explain_pruning",
    "foreach_batch",
    "ingest",
    "metadata_table",
    "read",
    "register",
    "session",
    "write_dataframe",
    "write_dataset",
]
