"""Pages: refs, leases and pending deletions that the root has no room for.

A page holds the branches, tags or leases in a range of names, or pending deletions, which have no
names. Invariants: pages never change; the root overrides its pages; a deleted tag stays in its page
as a name without a snapshot, so that the name is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import ObjectKind
from zarr_manifests.format.records import OPTIONAL_POINTER, MetadataObject, by_name, pointer, rows
from zarr_manifests.format.root import Branch, Lease, PendingDeletion, check_ref_name, parse_branch


def _tag(value: object, where: str) -> BlobRef | None:
    return None if value is None else pointer(value, where)


@dataclass(frozen=True, slots=True)
class Page(MetadataObject):
    """Entries of one of the root's lists, in a range of names.

    Parameters
    ----------
    branches : mapping of str to Branch
        Branches by name.
    tags : mapping of str to BlobRef or None
        Tags by name; None for a deleted one.
    leases : mapping of str to Lease
        Leases by name.
    pending : tuple of PendingDeletion
        Expired snapshots whose objects are not deleted yet.
    """

    branches: Mapping[str, Branch] = field(default_factory=dict)
    tags: Mapping[str, BlobRef | None] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)
    pending: tuple[PendingDeletion, ...] = ()

    _KIND = ObjectKind.PAGE
    _FIELDS = (
        ("branches", "branches", by_name(parse_branch, Branch.pack)),
        ("tags", "tags", by_name(_tag, OPTIONAL_POINTER.pack)),
        ("leases", "leases", by_name(lambda value, _: Lease.parse(value), Lease.pack)),
        ("pending", "pending", rows(PendingDeletion).left_out()),
    )

    def __post_init__(self) -> None:
        if any(lease.name != name for name, lease in self.leases.items()):
            raise CorruptObjectError("page: a lease has another name than its own")
        for name in (*self.branches, *self.tags):
            check_ref_name(name)

    def section(self, name: str) -> Mapping[str, Any]:
        """Its entries of that section, by name."""
        found: Mapping[str, Any] = getattr(self, name)
        return found

    def __len__(self) -> int:
        return len(self.branches) + len(self.tags) + len(self.leases) + len(self.pending)

    def __or__(self, other: Page) -> Page:
        return Page(
            {**self.branches, **other.branches},
            {**self.tags, **other.tags},
            {**self.leases, **other.leases},
            self.pending + other.pending,
        )
