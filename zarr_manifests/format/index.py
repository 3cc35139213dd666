"""The index of a branch: the stored bytes of the base's leaves, and where zone maps are.

A leaf is identified by node, box, and key and checksum of its manifest. Manifests never change, so
what the index says of a leaf stays true, and what it says of other leaves is ignored. An index that
is outdated, incomplete or damaged makes lookups slower, never wrong. A branch names the directory,
outside snapshots, so that commits need not write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields, ObjectKind, check_numbers
from zarr_manifests.format.records import BlobRef, MetadataObject, box_of, pointer
from zarr_manifests.grid import Box
from zarr_manifests.ids import NODE_ID_BYTES

type LeafName = tuple[bytes, Box, str, int]
"""Identity of a leaf: node id, box, key and checksum of its manifest."""


@dataclass(frozen=True, slots=True)
class IndexDirectory(MetadataObject):
    """The stored bytes of leaves, newest last.

    `zones` are pointers to the pages of zone maps, by node id.
    """

    entries: Mapping[LeafName, int]
    zones: Mapping[bytes, BlobRef] = field(default_factory=dict)

    _KIND = ObjectKind.INDEX
    _TYPE = "directory"

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack."""
        entries = [
            [node_id, box.lo, box.hi, key, crc32c, nbytes]
            for (node_id, box, key, crc32c), nbytes in self.entries.items()
        ]
        found: dict[str, Any] = {"entries": entries}
        if self.zones:
            found["zones"] = [[n, self.zones[n].bare().pack()] for n in sorted(self.zones)]
        return found

    @classmethod
    def parse(cls, fields: Fields) -> IndexDirectory:
        """From a map that `pack` made."""
        entries = {}
        for value in fields.items("entries"):
            match value:
                case [bytes(node), list(lo), list(hi), str(key), int(crc), int(nbytes)] if (
                    len(node) == NODE_ID_BYTES
                ):
                    check_numbers("index.entries", crc, most=2**32 - 1)
                    check_numbers("index.entries", nbytes)
                    entries[node, box_of(lo, hi, "index.entries"), key, crc] = nbytes
                case _:
                    raise CorruptObjectError("index.entries: expected leaf and bytes")
        zones = {}
        for value in fields.items("zones"):
            match value:
                case [bytes(node), blob] if len(node) == NODE_ID_BYTES:
                    zones[node] = pointer(blob, "index.zones")
                case _:
                    raise CorruptObjectError("index.zones: expected node and pointer")
        return cls(entries, zones)
