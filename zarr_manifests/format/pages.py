"""Pages: refs and other lists that the root names instead of holding.

A page holds the branches, or the tags, of a range of names; or leases, operations of the log, or
expired snapshots that the root has no room for. Invariants: pages never change; what
the root itself says about a name counts before what a page says; a deleted tag stays in its page
as a name without snapshot, so that the name is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import Fields, Kind, decode, encode
from zarr_manifests.format.root import Branch, Lease, LogEntry, Pending

__all__ = ["Page"]


@dataclass(frozen=True, slots=True)
class Page:
    """Refs of a range of names, or a piece of one of the root's lists.

    Parameters
    ----------
    branches : mapping of str to Branch
        Branches by name.
    tags : mapping of str to BlobRef or None
        Tags by name; None for a deleted one.
    leases, log, pending : tuple
        As in the root.
    """

    branches: Mapping[str, Branch] = field(default_factory=dict)
    tags: Mapping[str, BlobRef | None] = field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    log: tuple[LogEntry, ...] = ()
    pending: tuple[Pending, ...] = ()

    def encode(self) -> bytes:
        """The object's bytes."""
        branches: dict[str, Any] = {n: self.branches[n].pack() for n in sorted(self.branches)}
        tags = {}
        for name in sorted(self.tags):
            ref = self.tags[name]
            tags[name] = None if ref is None else ref.bare().pack()
        lists = {
            "leases": [lease.pack() for lease in self.leases],
            "log": [entry.pack() for entry in self.log],
            "pending": [chain.pack() for chain in self.pending],
        }
        held = {name: values for name, values in lists.items() if values}
        return encode(Kind.PAGE, {"branches": branches, "tags": tags, **held})

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Page:
        """The page that the object's bytes hold."""
        return decode(data, Kind.PAGE, cls._parse, ref.key, crc=ref.crc32c, length=ref.length)

    @classmethod
    def _parse(cls, fields: Fields) -> Page:
        branches = {name: Branch.parse(f) for name, f in fields.named("branches").items()}
        tags: dict[str, BlobRef | None] = {}
        for name, value in fields.table("tags").items():
            tags[name] = None if value is None else BlobRef.parse(Fields(value, "page.tags"))
        return cls(
            branches,
            tags,
            tuple(Lease.parse(value) for value in fields.items("leases")),
            tuple(LogEntry.parse(value) for value in fields.items("log")),
            tuple(Pending.parse(value) for value in fields.items("pending")),
        )
