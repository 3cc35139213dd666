"""Spark access to repositories: a session that needs no setup, reads and writes.

Names are imported when they are used, since the tasks of a read need few of them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.spark.changes import changes
    from zarr_manifests.spark.data_source import create_view, register
    from zarr_manifests.spark.explain import explain_pruning
    from zarr_manifests.spark.ingest_tasks import ingest
    from zarr_manifests.spark.metadata_tables import metadata_table
    from zarr_manifests.spark.read import read
    from zarr_manifests.spark.spark_session import session
    from zarr_manifests.spark.write_dataframe import foreach_batch, write_dataframe
    from zarr_manifests.spark.write_dataset import write_dataset

for _package in ("pyspark", "pandas", "pyarrow", "xarray"):
    if find_spec(_package) is None:
        raise ImportError(
            f"zarr_manifests.spark needs {_package}, which is not installed here; "
            'get all it needs with: pip install "zarr-manifests[spark]"',
            name=_package,
        )

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

_HOMES: Final = {
    "create_view": "data_source",
    "explain_pruning": "explain",
    "foreach_batch": "write_dataframe",
    "ingest": "ingest_tasks",
    "metadata_table": "metadata_tables",
    "register": "data_source",
    "session": "spark_session",
}
"""The modules of the names that are not those of their modules."""


class _Package(ModuleType):
    """A package where functions keep their names, although modules have some of them, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a module here once it is imported.
        of_module = name in __all__ and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if of_module else value)


sys.modules[__name__].__class__ = _Package
__getattr__ = on_demand(__name__, **{name: _HOMES.get(name, name) for name in __all__})
