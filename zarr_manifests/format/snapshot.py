"""Snapshots: one committed version each.

A snapshot names its parent and its own log delta (history and conflict checks need both for as
long as it is in history) and, apart from them, its *read list*: the base and every live delta
since it. Invariant: a reader never walks to an earlier snapshot; the read list is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.blobs import PARENT_COPY_BYTES, BlobRef, with_copies
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind, Delta
from zarr_manifests.format.envelope import MAX_MS, Fields, Kind, decode, encode
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.ids import snapshot_id_of

__all__ = ["DeltaEntry", "Snapshot"]


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """A live delta in a snapshot's read list, with what it has for which node.

    Parameters
    ----------
    log : BlobRef
        The delta itself.
    changes_nodes : bool
        Whether walking the hierarchy needs it.
    embedded : tuple of Part
        The chunk tables embedded in it.
    manifests : tuple of ManifestRef
        The manifests with its other chunk tables.
    """

    log: BlobRef
    changes_nodes: bool
    embedded: tuple[Part, ...]
    manifests: tuple[ManifestRef, ...]

    @classmethod
    def of(cls, log: BlobRef, delta: Delta) -> DeltaEntry:
        """The entry of a delta that lies at `log`."""
        return cls(log.bare(), delta.changes_nodes, delta.embedded.directory(), delta.manifests)

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        return {
            "log": self.log.pack(),
            "nodes": self.changes_nodes,
            "embedded": [part.pack() for part in self.embedded],
            "manifests": [manifest.pack() for manifest in self.manifests],
        }

    @classmethod
    def parse(cls, fields: Fields) -> DeltaEntry:
        """From a map that `pack` made."""
        return cls(
            BlobRef.parse_due(fields, "log"),
            bool(fields.value.get("nodes")),
            Part.parse_all(fields, "embedded"),
            tuple(ManifestRef.parse(f) for f in fields.maps("manifests")),
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One committed version.

    Parameters
    ----------
    parent : BlobRef or None
        The snapshot before it; None for the first of a repository.
    commit_id : bytes
        Of the commit that made it; the same over the commit's retries.
    kind : CommitKind
        What the commit mostly did.
    message : str
        Why.
    metadata : mapping
        What else the committer wanted kept.
    written_ms : int
        When, in milliseconds since 1970 UTC, by the committer's clock.
    base : BlobRef or None
        Node table and leaf directory; None when everything is in deltas.
    deltas : tuple of DeltaEntry
        Live deltas since the base, oldest first.
    log : BlobRef
        This commit's own delta.
    totals : mapping of str to int
        Refs set and unset, bytes of the chunks set, and chunk objects written by this commit.
    streams : mapping of str to int
        Last batch each streaming query has committed.
    """

    parent: BlobRef | None
    commit_id: bytes
    kind: CommitKind
    message: str
    metadata: Mapping[str, Any]
    written_ms: int
    base: BlobRef | None
    deltas: tuple[DeltaEntry, ...]
    log: BlobRef
    totals: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.commit_id) != COMMIT_ID_BYTES:
            raise CorruptObjectError("snapshot: a commit id of the wrong length")

    @property
    def parent_id(self) -> str | None:
        """Id of the parent."""
        return None if self.parent is None else snapshot_id_of(self.parent.key)

    def with_delta_copies(self, known: Mapping[str, bytes]) -> Snapshot:
        """The same, carrying copies of the deltas a reader needs first while they fit."""
        order = sorted(range(len(self.deltas)), key=lambda i: (not self.deltas[i].changes_nodes, i))
        refs = with_copies([self.deltas[i].log for i in order], known, PARENT_COPY_BYTES)
        deltas = list(self.deltas)
        for i, ref in zip(order, refs, strict=True):
            deltas[i] = replace(deltas[i], log=ref)
        return replace(self, deltas=tuple(deltas))

    def encode(self) -> bytes:
        """The object's bytes."""
        return encode(
            Kind.SNAPSHOT,
            {
                "parent": None if self.parent is None else self.parent.bare().pack(),
                "commit": self.commit_id,
                "kind": str(self.kind),
                "message": self.message,
                "metadata": dict(self.metadata),
                "at_ms": self.written_ms,
                "base": None if self.base is None else self.base.bare().pack(),
                "deltas": [entry.pack() for entry in self.deltas],
                "log": self.log.bare().pack(),
                "totals": dict(self.totals),
                "streams": dict(self.streams),
            },
        )

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Snapshot:
        """The snapshot that the object's bytes hold."""
        return decode(data, Kind.SNAPSHOT, cls._parse, ref.key, crc=ref.crc32c, length=ref.length)

    @classmethod
    def _parse(cls, fields: Fields) -> Snapshot:
        totals, streams = fields.table("totals"), fields.table("streams")
        if not all(type(n) is int for n in (*totals.values(), *streams.values())):
            raise CorruptObjectError("snapshot: a total is not a number")
        try:
            kind = CommitKind(fields.text("kind"))
        except ValueError as error:
            raise CorruptObjectError(f"snapshot.kind: {error}") from error
        return cls(
            BlobRef.parse_optional(fields, "parent"),
            fields.binary("commit", COMMIT_ID_BYTES),
            kind,
            fields.text("message"),
            fields.table("metadata"),
            fields.number("at_ms", MAX_MS),
            BlobRef.parse_optional(fields, "base"),
            tuple(DeltaEntry.parse(f) for f in fields.maps("deltas")),
            BlobRef.parse_due(fields, "log"),
            totals,
            streams,
        )
