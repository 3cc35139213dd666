"""Test tools: storages that count, delay, fail and crash, and a checker of recorded transactions.

Each storage wraps any other one, so they can be combined:
`CountingStorage(LatencyStorage(MemoryStorage()))` counts sequential rounds as on an object store.
"""

from zarr_manifests.testing.copied import copy_of
from zarr_manifests.testing.counting import CountingStorage, Record
from zarr_manifests.testing.crash import CrashDisk
from zarr_manifests.testing.faulty import Fault, FaultKind, FaultyStorage, SimulatedCrash
from zarr_manifests.testing.in_order import in_order
from zarr_manifests.testing.interrupting import InterruptingStorage
from zarr_manifests.testing.isolation import (
    Access,
    Transaction,
    Violation,
    check_isolation,
)
from zarr_manifests.testing.latency import LatencyStorage
from zarr_manifests.testing.wrapped import Call, WrappedStorage

__all__ = [
    "Access",
    "Call",
    "CountingStorage",
    "CrashDisk",
    "Fault",
    "FaultKind",
    "FaultyStorage",
    "InterruptingStorage",
    "LatencyStorage",
    "Record",
    "SimulatedCrash",
    "Transaction",
    "Violation",
    "WrappedStorage",
    "check_isolation",
    "copy_of",
    "in_order",
]
