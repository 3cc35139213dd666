"""The root, commits, merges and appends."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "archive-of-another-version-believed",
        "engine/roots.py",
        "if root.version != version:",
        "if root.version < version:",
    ),
    Fault(
        "found-swap-not-made-durable",
        "engine/roots.py",
        "be durable yet.\n            self._storage.sync([ROOT_KEY])",
        "be durable yet.\n            self._storage.sync([])",
    ),
    Fault(
        "loser-of-a-creation-told-it-won",
        "engine/roots.py",
        "return found if found.root.write_id == root.write_id else None",
        "return found",
    ),
    Fault(
        "lost-repository-covered-by-a-new-one",
        "engine/create.py",
        "if not _is_abandoned(key):",
        "if not _is_abandoned(key) and not key.startswith('root/'):",
    ),
    Fault(
        "repository-made-inside-another",
        "engine/create.py",
        "    check_outside(storage)\n    repository_id",
        "    repository_id",
    ),
    Fault(
        "epoch-comes-twice",
        "engine/roots.py",
        "moved = replace(tip, epoch=root.version + 1)",
        "moved = replace(tip, epoch=tip.epoch + 1)",
    ),
    Fault(
        "collection-goes-on-on-an-older-root",
        "engine/roots.py",
        "if newest < epoch:",
        "if newest < 0:",
    ),
    Fault(
        "lease-trusted-by-one-clock",
        "engine/heartbeat.py",
        " or runtime.now_ms() >= self.stored.expires_ms",
        "",
    ),
    Fault(
        "unknown-outcome-leaves-the-session-open",
        "engine/commit_changes.py",
        "if isinstance(error, CommitOutcomeUnknownError) or not isinstance(error, ManifestsError):",
        "if not isinstance(error, ManifestsError):",
    ),
    Fault(
        "said-to-be-committed-before-it-is-durable",
        "engine/landing.py",
        "context.storage.sync([ROOT_KEY])",
        "context.storage.sync([])",
    ),
    Fault(
        "forgotten-mark-stays-in-its-page",
        "engine/landing.py",
        "moved_marks(marks_of(context, tip), steps)",
        "{**marks_of(context, tip), **own}",
    ),
    Fault(
        "revert-overwrites-later-changes",
        "engine/rebase.py",
        "changed = ~same_chunks(context, on, node_id, was, now, at)",
        "changed = np.zeros(len(at), np.bool_)",
    ),
    Fault(
        "values-changed-before-an-append-are-lost",
        "commits.py",
        "if not _equal(now[: move.start - first], before):",
        "if len(now) < move.start - first:",
    ),
]
