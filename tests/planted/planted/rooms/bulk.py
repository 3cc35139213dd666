"""Reading and writing in bulk, and threads."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "a-chunk-may-become-larger-than-its-array-says",
        "bulk/bounded.py",
        "return cells * max(spec.dtype.item_size, least) * 5 // 4 + spare",
        "return None",
    ),
    Fault(
        "writes-of-parts-of-one-chunk-race",
        "bulk/__init__.py",
        "return await in_turn(locks_of(contents_of(store), keys), write)",
        "return await write()",
    ),
    Fault(
        "a-write-that-was-interrupted-is-committed",
        "bulk/batch.py",
        "workspace.closed = INTERRUPTED",
        "pass",
    ),
    Fault(
        "absent-parts-of-shards-are-what-was-in-memory",
        "bulk/batch.py",
        "batch.put_fill_value(number)",
        "pass",
    ),
    Fault(
        "whole-shards-of-any-size-are-read",
        "bulk/batch.py",
        "return half and self.chunk_bytes <= _MOST_WHOLE_BYTES",
        "return half",
    ),
    Fault(
        "after-an-interrupt-calls-that-nobody-began-still-run",
        "runtime.py",
        "for outcome in [outcome for _, outcome in handed if not outcome.cancel()]:",
        "for outcome in [outcome for _, outcome in handed if outcome.running()]:",
    ),
]
