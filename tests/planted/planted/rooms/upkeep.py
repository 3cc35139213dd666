"""Compaction, repacking, expiry, collection, verification, recovery and clones."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "deleted-although-something-cannot-be-read",
        "engine/upkeep/collect.py",
        "            if link.page is None and link.kind not in (IndexDirectory, ZonePages):\n"
        "                raise\n            lost",
        "            lost",
    ),
    Fault(
        "pages-deleted-although-one-cannot-be-read",
        "engine/upkeep/collect.py",
        "    for kind in lost:",
        "    for kind in lost - lost:",
    ),
    Fault(
        "pages-of-archives-deleted",
        "engine/upkeep/collect.py",
        'if any(info.key.startswith("pages/") for info in dead):',
        'if any(info.key.startswith("page/") for info in dead):',
    ),
    Fault(
        "overtaken-collection-goes-on",
        "engine/upkeep/collect.py",
        "    check_collector(roots.read().root, epoch)\n    storage",
        "    storage",
    ),
    Fault(
        "expired-leases-stay",
        "engine/upkeep/collect.py",
        "for lease in context.roots.leases(root) if lease.expires_ms <= now_ms]",
        "for lease in context.roots.leases(root) if lease.expires_ms <= 0]",
    ),
    Fault(
        "dry-run-of-an-expiry-expires",
        "engine/upkeep/collect.py",
        "if report.expired and not dry_run:",
        "if report.expired:",
    ),
    Fault(
        "leased-snapshot-of-a-tag-expires",
        "engine/upkeep/collect.py",
        "    if has_expired(whole):",
        "    if has_expired(whole) or whole.tags:",
    ),
    Fault(
        "damaged-chunks-not-found",
        "engine/upkeep/verify.py",
        "if crc32c(data) != crc:",
        "if not data:",
    ),
    Fault(
        "older-root-in-place-of-the-newest-not-found",
        "engine/upkeep/verify.py",
        "if root is not None and newest > root.version:",
        "if root is None and newest > 0:",
    ),
    Fault(
        "recovered-at-a-version-that-was-there",
        "engine/upkeep/recover.py",
        "return archived + _UNSEEN_VERSIONS",
        "return archived + 1",
    ),
    Fault(
        "recovered-beside-a-collection",
        "engine/upkeep/recover.py",
        "if not collections_ended:",
        "if collections_ended:",
    ),
    Fault(
        "deleted-tag-restored",
        "engine/upkeep/recover.py",
        "for n, ref in old.tags.items() if TAGS + n not in whole.deleted}",
        "for n, ref in old.tags.items()}",
    ),
    Fault(
        "clone-drops-its-own-commits",
        "engine/upkeep/clone_repository.py",
        "if head not in ids:",
        "if head not in ids and not ids:",
    ),
    Fault(
        "damaged-chunk-repacked",
        "engine/upkeep/repack_chunks.py",
        "if len(chunk) != one.length or crc32c(chunk) != one.crc32c:",
        "if len(chunk) != one.length:",
    ),
    Fault(
        "cleaning-counts-compactions-as-versions",
        "engine/upkeep/collect.py",
        "keep_last=kept.keep_last + more)",
        "keep_last=kept.keep_last)",
    ),
    Fault(
        "chunks-of-deleted-arrays-never-freed",
        "engine/upkeep/collect.py",
        "or any(part.node_id not in alive for part in parts)",
        "",
    ),
]
