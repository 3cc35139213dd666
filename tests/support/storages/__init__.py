"""Storages for tests, which count, delay, fail and crash.

Each storage wraps any other one, so they can be combined:
`CountingStorage(LatencyStorage(MemoryStorage()))` counts sequential rounds as on an object store.
"""

from storages.copied import copy_of
from storages.counting import CountingStorage, Record
from storages.crash import CrashDisk
from storages.faulty import Fault, FaultKind, FaultyStorage, SimulatedCrash
from storages.interrupting import InterruptingStorage
from storages.latency import LatencyStorage
from storages.wrapped import Call, WrappedStorage

__all__ = [
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
    "WrappedStorage",
    "copy_of",
]
