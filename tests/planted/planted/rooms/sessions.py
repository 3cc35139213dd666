"""Changes of sessions and their copies, packs, chunk bytes and caches."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "copy-not-told-that-its-report-was-too-late",
        "engine/node_edits.py",
        "if not is_there(storage, token):",
        "if not token:",
    ),
    Fault(
        "committed-though-copies-may-go-on",
        "engine/node_edits.py",
        "    if is_there(storage, token):",
        "    if not token:",
    ),
    Fault(
        "one-copys-report-replaces-anothers",
        "engine/forks.py",
        "for copy_id, ref in refs.items():",
        'for copy_id, ref in (("", ref) for ref in refs.values()):',
    ),
    Fault(
        "unmerged-copies-left-out-silently",
        "engine/forks.py",
        "    if writers:",
        "    if len(writers) > 1:",
    ),
    Fault(
        "reporting-copy-deletes-in-vain",
        "engine/workspace.py",
        'if self.reports:\n            refuse_in_copy(f"what is below',
        'if self.reports and not prefix:\n            refuse_in_copy(f"what is below',
    ),
    Fault(
        "chunks-of-strangers-merged",
        "engine/forks.py",
        "    if foreign:\n        raise",
        "    if len(foreign) > 1000:\n        raise",
    ),
    Fault(
        "spilled-chunks-of-strangers-merged",
        "engine/forks.py",
        "elif isinstance(rows, Spilled) and rows.is_own:",
        "elif isinstance(rows, Spilled):",
    ),
    Fault(
        "chunks-outside-the-array-merged",
        "engine/forks.py",
        "if outside.any():",
        "if outside.all() and len(outside) > 1000:",
    ),
    Fault(
        "chunks-of-copies-not-made-durable",
        "engine/workspace.py",
        "[partial(self.storage.sync, part) for part in sync_parts(due)]",
        "[partial(self.storage.sync, part) for part in sync_parts([])]",
    ),
    Fault(
        "pack-that-was-not-written-referred-to",
        "engine/chunks.py",
        "if pack.written and pack.settle(changes)",
        "if pack.settle(changes)",
    ),
    Fault(
        "overwritten-chunk-comes-back-with-its-pack",
        "engine/chunks.py",
        "            if ref.is_live(changes):",
        "            if ref.at.node_id in changes.chunks:",
    ),
    Fault(
        "reads-of-documents-not-noted",
        "engine/overlay.py",
        "self.changes.reads.documents.add(path)",
        "self.changes.reads.documents.discard(path)",
    ),
    Fault(
        "different-shards-of-two-forks-merged",
        "engine/overlay.py",
        "if node is None or node.array is None or not node.array.checks_itself:",
        "if node is None or node.array is None or node.array.checks_itself:",
    ),
    Fault(
        "reads-of-a-box-not-noted",
        "engine/bulk_chunks.py",
        "if contents.keys is not None and read is None:",
        "if contents.keys is None and read is None:",
    ),
    Fault(
        "damaged-chunk-read-as-data",
        "engine/chunks.py",
        "if length == ref.length and crc32c(data) != ref.crc32c:",
        "if length > ref.length and crc32c(data) != ref.crc32c:",
    ),
    Fault(
        "restored-chunk-read-as-damaged",
        "engine/chunks.py",
        "data = self._storage.get(ref.key, ref.offset + start)[:length]",
        "self._storage.head(ref.key)",
    ),
]
