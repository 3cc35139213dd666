"""The directory of a branch's indexes: bitmaps of leaves, and pages of zone maps.

Invariant: indexes only repeat what chunks and manifests say, so one that cannot be read counts as
missing.
"""

from __future__ import annotations

from typing import Final

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import CorruptObjectError, StorageError, UnsupportedFormatError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.index import IndexDirectory

UNUSABLE: Final = (CorruptObjectError, UnsupportedFormatError, StorageError)
"""What an index that cannot be read raises."""


def index_pointer(context: ReadContext, branch: str | None = None) -> BlobRef | None:
    """The index directory of the branch (default `main`), as of the newest root seen.

    It is valid for any snapshot: another branch's index has fewer entries for it, never wrong ones.
    """
    name = "main" if branch is None else branch
    tip = context.roots.with_branch(context.roots.latest.root, name).branches.get(name)
    return None if tip is None else tip.index


def index_directory(context: ReadContext, pointer: BlobRef | None) -> IndexDirectory:
    """The directory at the pointer; an empty one if it cannot be read."""
    if pointer is None:
        return IndexDirectory({})
    try:
        return context.objects.load(pointer, IndexDirectory)
    except UNUSABLE:
        return IndexDirectory({})  # as if missing: it can be rebuilt
