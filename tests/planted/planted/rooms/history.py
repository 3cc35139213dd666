"""Versions, branches, tags, leases, history and differences."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "reset-drops-commits-unasked",
        "engine/refs.py",
        "if not force and expected is None and not self._comes_after(moved, old):",
        "if not force and expected is None and not self._comes_after(old, old):",
    ),
    Fault(
        "reset-drops-what-came-meanwhile",
        "engine/refs.py",
        "if expected is not None and at != expected:",
        "if expected is not None and not at:",
    ),
    Fault(
        "reset-ends-a-claim",
        "engine/refs.py",
        "epoch=old.epoch, index=old.index)\n            at =",
        "epoch=0, index=old.index)\n            at =",
    ),
    Fault(
        "fast-forward-ends-a-claim",
        "engine/refs.py",
        "epoch=old.epoch, index=old.index)\n            return",
        "epoch=0, index=old.index)\n            return",
    ),
    Fault(
        "fast-forward-drops-commits",
        "engine/refs.py",
        "if snapshot_id_of(old.head.key) != expected:",
        "if not expected:",
    ),
    Fault(
        "name-of-a-deleted-tag-used-again",
        "engine/refs.py",
        "return without(root, TAGS + name)",
        "return replace(without(root, TAGS + name), deleted=())",
    ),
    Fault(
        "ambiguous-name-guessed",
        "engine/refs.py",
        "if branch is not None and tag is not None:",
        "if branch is not None and tag is not None and branch.head.key == tag.key:",
    ),
    Fault(
        "version-written-at-the-time-itself-passed-over",
        "engine/refs.py",
        "if entry.written_ms <= until_ms:",
        "if entry.written_ms < until_ms:",
    ),
    Fault(
        "changes-told-beyond-the-floor",
        "engine/changes_between.py",
        "if snapshot.parent is not None and snapshot_id_of(ref.key) == floor:",
        "if snapshot.parent is None and snapshot_id_of(ref.key) == floor:",
    ),
    Fault(
        "net-changes-forget-what-was-cut-off",
        "engine/differences.py",
        "for node_id in delta.truncated.keys() & both}",
        "for node_id in set[bytes]()}",
    ),
    Fault(
        "different-shards-of-one-checksum-are-the-same",
        "engine/differences.py",
        "or node.array is None or not node.array.checks_itself:",
        "or node.array is None or node.array.checks_itself:",
    ),
    Fault(
        "lease-that-was-taken-away-renewed",
        "engine/leases.py",
        "there.get(held.stored.lease_id)",
        "there.get(held.stored.lease_id, held.stored)",
    ),
    Fault(
        "damage-stops-the-renewal-of-other-leases",
        "engine/leases.py",
        "found[held] = error\n            except CorruptObjectError:",
        "found[held] = error\n            except ZeroDivisionError:",
    ),
    Fault(
        "forked-child-gives-up-its-parents-lease",
        "engine/leases.py",
        "    if held.is_inherited:\n        return\n    context.heart.drop(held)",
        "    context.heart.drop(held)",
    ),
    Fault(
        "head-that-went-told-as-damage",
        "engine/roots.py",
        "if not is_missing(error) or str(error) in missed:",
        "if not is_missing(error) or str(error) not in missed:",
    ),
    Fault(
        "what-has-lost-chunks-named-again",
        "engine/ancestry.py",
        "first = root.collected or root.fence",
        "first = 0",
    ),
    Fault(
        "page-of-marks-not-reached",
        "engine/ancestry.py",
        "if value.marks_page is not None:",
        "if value.marks_page is not None and of_page:",
    ),
]
