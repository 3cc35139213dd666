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
from zarr_manifests.format.envelope import Fields, ObjectKind, decode, encode
from zarr_manifests.format.root import Branch, Lease, PendingDeletion, check_ref_name


@dataclass(frozen=True, slots=True)
class Page:
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

    def __post_init__(self) -> None:
        if any(lease.name != name for name, lease in self.leases.items()):
            raise CorruptObjectError("page: a lease has another name than its own")
        for name in (*self.branches, *self.tags):
            check_ref_name(name)

    def names(self, section: str) -> list[str]:
        """Its names in that section."""
        found: Mapping[str, Any] = {
            "branches": self.branches,
            "tags": self.tags,
            "leases": self.leases,
        }[section]
        return list(found)

    def __len__(self) -> int:
        return len(self.branches) + len(self.tags) + len(self.leases) + len(self.pending)

    def __or__(self, other: Page) -> Page:
        return Page(
            {**self.branches, **other.branches},
            {**self.tags, **other.tags},
            {**self.leases, **other.leases},
            self.pending + other.pending,
        )

    def encode(self) -> bytes:
        """The object's bytes."""
        branches: dict[str, Any] = {n: self.branches[n].pack() for n in sorted(self.branches)}
        tags = {}
        for name in sorted(self.tags):
            ref = self.tags[name]
            tags[name] = None if ref is None else ref.bare().pack()
        leases = {name: self.leases[name].pack() for name in sorted(self.leases)}
        fields: dict[str, Any] = {"branches": branches, "tags": tags, "leases": leases}
        if self.pending:
            fields["pending"] = [chain.pack() for chain in self.pending]
        return encode(ObjectKind.PAGE, fields)

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Page:
        """Decode a page."""
        return decode(data, ObjectKind.PAGE, cls._parse, ref.key, crc=ref.crc32c, length=ref.length)

    @classmethod
    def _parse(cls, fields: Fields) -> Page:
        branches = {name: Branch.parse(f) for name, f in fields.named("branches").items()}
        tags: dict[str, BlobRef | None] = {}
        for name, value in fields.table("tags").items():
            tags[name] = None if value is None else BlobRef.parse(Fields(value, "page.tags"))
        leases = {name: Lease.parse(value) for name, value in fields.table("leases").items()}
        pending = tuple(PendingDeletion.parse(value) for value in fields.items("pending"))
        return cls(branches, tags, leases, pending)
