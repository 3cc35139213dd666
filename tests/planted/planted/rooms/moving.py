"""Exports and clones: nothing is lost, and nothing is opened before it is whole."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "an-unfinished-export-can-be-opened",
        "exporting/plain_zarr.py",
        "for batch in source.chunks(stored, count.add_reused):",
        "place.put(list(source.documents().items()))\n"
        "    for batch in source.chunks(stored, count.add_reused):",
    ),
    Fault(
        "an-export-continues-one-of-another-snapshot",
        "exporting/plain_zarr.py",
        "if found == mark:",
        "if found is not None:",
    ),
    Fault(
        "an-export-replaces-what-is-no-zarr-store",
        "exporting/plain_zarr.py",
        "if not roots and mark is None:",
        "if False:",
    ),
    Fault(
        "an-export-into-the-repository-is-not-refused",
        "exporting/places.py",
        "if _holds(here, there) or _holds(there, here):",
        "if here == there:",
    ),
    Fault(
        "a-file-that-came-meanwhile-is-replaced",
        "exporting/places.py",
        "(_DISK.rename if overwrite else _DISK.link)(temp, path)",
        "_DISK.rename(temp, path)",
    ),
    Fault(
        "an-export-follows-links-in-its-folder",
        "exporting/places.py",
        "if stat.S_ISLNK(there.st_mode):",
        "if False:",
    ),
    Fault(
        "an-export-names-files-outside-of-containers",
        "exporting/placed_chunks.py",
        "if not os.path.realpath(inside + place.path).startswith(inside):",
        "if False:",
    ),
    Fault(
        "an-export-names-objects-that-are-links",
        "exporting/placed_chunks.py",
        "storage.head(ref.key)",
        "pass",
    ),
    Fault(
        "no-tag-keeps-what-an-export-refers-to",
        "exporting/placed_chunks.py",
        "refs.create_tag(name, source.snapshot_id)",
        "pass",
    ),
    Fault(
        "names-of-an-export-may-climb",
        "exporting/snapshot_source.py",
        "return check_inside(key[len(directory(self.path)) :])",
        "return key[len(directory(self.path)) :]",
    ),
    Fault(
        "a-name-in-a-zip-may-be-a-drive",
        "exporting/zip_file.py",
        'if "\\\\" in key or key[1:2] == ":":',
        "if False:",
    ),
    Fault(
        "a-document-in-kerchunk-is-decoded",
        "exporting/kerchunk_file.py",
        'if not text.startswith("base64:"):',
        "if True:",
    ),
    Fault(
        "damaged-chunks-are-cloned",
        "engine/upkeep/copy_objects.py",
        "_check(key, memoryview(data), rows)",
        "pass",
    ),
    Fault(
        "a-clone-overwrites-commits-of-the-clone",
        "engine/upkeep/clone_repository.py",
        "if parent is None or parent.key != mine.head.key:",
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
        "if _is_collecting(there, at.root):",
        "if False:",
    ),
    Fault(
        "a-clone-moves-a-tag",
        "engine/upkeep/clone_repository.py",
        "if mine is not None and mine.key != ref.key:",
        "if False:",
    ),
]
