"""Estimates of the memory that decoded values take.

A value is traversed, and every object in it counts once, with the size that Python reports. An
array counts with the buffer it is a view of; a constant column's buffer holds a single number.
Objects shared by the whole process (small numbers, classes, the empty tuple) are not excluded,
since they matter little beside bytes, strings, arrays and containers.

This runs for every decoded object. So the way to traverse a type is computed once per type, and of
a long sequence, whose items are alike, only a sample is measured. Snapshots and read list entries,
which every commit reads and writes, are not traversed: their sizes are computed from constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np

from zarr_manifests.format.snapshot import DeltaEntry, Snapshot

type _Parts = Callable[[Any], Sequence[Any]]
_MOST: Final = 16
_SNAPSHOT_BYTES: Final = 1000
_BLOB_BYTES: Final = 200
_NUMBER_BYTES: Final = 100
_ENTRY_BYTES: Final = 450
_PART_BYTES: Final = 400
_MANIFEST_BYTES: Final = 500
_COUNT_BYTES: Final = 170


def decoded_bytes(value: Any) -> int:
    """Return the estimated bytes of memory of the value and everything in it.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
    >>> 80_000 <= decoded_bytes((np.zeros(10_000), b"")) <= 81_000
    True
    """
    total, due = 0.0, list[tuple[Any, float]]([(value, 1.0)])
    seen: set[int] = set()
    while due:
        item, weight = due.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if kind is DeltaEntry:
            total += weight * _entry_bytes(item)
            continue
        if kind is Snapshot:
            blobs = [blob for blob in (item.parent, item.base, item.log) if blob is not None]
            copies = sum(len(blob.copy or b"") for blob in blobs)
            numbers = _NUMBER_BYTES * (len(item.totals) + len(item.sums))
            total += weight * (_SNAPSHOT_BYTES + _BLOB_BYTES * len(blobs) + copies + numbers)
            rest = item.deltas, item.message, item.metadata, item.marks, item.digests
            due.extend([(part, weight) for part in rest if part])
            continue
        total += weight * sys.getsizeof(item)
        if kind not in _PARTS:
            _PARTS[kind] = _parts_of(kind)
        get = _PARTS[kind]
        if get is None:
            continue
        parts = get(item)
        if len(parts) > _MOST:
            some = parts[:: len(parts) // _MOST | 1]  # odd: samples both of alternating items
            parts, weight = some, weight * len(parts) / len(some)
        due.extend([(part, weight) for part in parts])
    return int(total)


def _entry_bytes(entry: DeltaEntry) -> int:
    parts = len(entry.embedded) + sum(len(ref.parts) for ref in entry.manifests)
    more = _PART_BYTES * parts + _MANIFEST_BYTES * len(entry.manifests)
    more += _COUNT_BYTES * len(entry.counts) + len(entry.log.copy or b"")
    return _ENTRY_BYTES + more


def _parts_of(kind: type) -> _Parts | None:
    """How to get the parts of a value of this type; None if it has none."""
    if issubclass(kind, tuple | list):
        return _itself
    if issubclass(kind, Mapping):
        return _keys_and_values
    if issubclass(kind, np.ndarray):
        return _base
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    if len(names) > 1:
        return attrgetter(*names)
    return None if not names else _only(names[0])


def _itself(item: Sequence[Any]) -> Sequence[Any]:
    return item


def _keys_and_values(item: Mapping[Any, Any]) -> Sequence[Any]:
    return (*item.keys(), *item.values())


def _base(item: np.ndarray[Any, Any]) -> Sequence[Any]:
    return () if item.base is None else (item.base,)


def _only(name: str) -> _Parts:
    get = attrgetter(name)
    return lambda item: (get(item),)


_PARTS: dict[type, _Parts | None] = {}
