"""Storages for tests, which count, delay, fail and crash.

Each storage wraps any other one, so they can be combined:
`CountingStorage(LatencyStorage(MemoryStorage()))` counts sequential rounds as on an object store.
"""

from storages.copied import copy_of as copy_of
from storages.counting import CountingStorage as CountingStorage
from storages.counting import Record as Record
from storages.crash import CrashDisk as CrashDisk
from storages.faulty import Fault as Fault
from storages.faulty import FaultKind as FaultKind
from storages.faulty import FaultyStorage as FaultyStorage
from storages.faulty import SimulatedCrash as SimulatedCrash
from storages.interrupting import InterruptingStorage as InterruptingStorage
from storages.latency import LatencyStorage as LatencyStorage
from storages.wrapped import Call as Call
from storages.wrapped import WrappedStorage as WrappedStorage
