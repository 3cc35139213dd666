"""Exports and clones: nothing is lost, and nothing is opened before it is whole."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "an-unfinished-export-can-be-opened",
        "exporting/exports.py",
        "for batch in source.chunks():\n            put(batch)\n        put(documents[:-1])",
        "put(documents)\n        for batch in source.chunks():\n            put(batch)",
    ),
    Fault(
        "an-export-goes-over-what-is-in-a-bucket",
        "exporting/exports.py",
        "if not is_empty:",
        "if False:",
    ),
    Fault(
        "an-export-into-the-repository-is-not-refused",
        "exporting/exports.py",
        "if own.startswith(other) or other.startswith(own):",
        "if own == other:",
    ),
    Fault(
        "a-file-that-came-meanwhile-is-replaced",
        "exporting/exports.py",
        "path.hardlink_to(new)",
        "new.replace(path)",
    ),
    Fault(
        "an-export-names-files-outside-of-containers",
        "exporting/exports.py",
        "if not os.path.realpath(inside + place.path).startswith(inside):",
        "if False:",
    ),
    Fault(
        "an-export-names-objects-that-are-links",
        "exporting/exports.py",
        "source.storage.head(key)",
        "pass",
    ),
    Fault(
        "no-tag-keeps-what-an-export-refers-to",
        "exporting/exports.py",
        "refs.create_tag(name, source.snapshot_id)",
        "pass",
    ),
    Fault(
        "names-of-an-export-may-climb",
        "exporting/__init__.py",
        "return check_inside(key[len(directory(self.path)) :])",
        "return key[len(directory(self.path)) :]",
    ),
    Fault(
        "a-document-in-kerchunk-is-decoded",
        "exporting/exports.py",
        'if not text.startswith("base64:"):',
        "if True:",
    ),
    Fault(
        "damaged-chunks-are-cloned",
        "engine/upkeep/clone_repository.py",
        "if problem is not None:",
        "if False:",
    ),
    Fault(
        "a-clone-overwrites-commits-of-the-clone",
        "engine/upkeep/clone_repository.py",
        "if head not in ids:",
        "if False:",
    ),
    Fault(
        "a-clone-overwrites-what-others-commit-meanwhile",
        "engine/upkeep/clone_repository.py",
        "if (now and now.head.key) != known.get(name):",
        "if False:",
    ),
    Fault(
        "a-clone-lands-beside-a-collection",
        "engine/upkeep/clone_repository.py",
        "if whole.collected != before.collected:",
        "if False:",
    ),
    Fault(
        "a-clone-begins-during-a-collection",
        "engine/upkeep/clone_repository.py",
        "if _is_collecting(self.there, root):",
        "if False:",
    ),
    Fault(
        "a-clone-moves-a-tag",
        "engine/upkeep/clone_repository.py",
        "if mine is not None and mine.key != ref.key:",
        "if False:",
    ),
]
