"""Documents and their checks: checksums, bounds, and what readers refuse."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "checksums-of-objects-not-compared",
        "format/records.py",
        "if crc32c(memoryview(data)[CRC_FROM:]) != header.crc32c:",
        "if header.crc32c < 0:",
    ),
    Fault(
        "exchanged-objects-accepted",
        "format/records.py",
        "if crc is not None and crc != self.crc32c:",
        "if crc is not None and crc < 0:",
    ),
    Fault(
        "unknown-flags-ignored",
        "format/records.py",
        "if self.flags:",
        "if self.flags < 0:",
    ),
    Fault(
        "small-objects-fill-memory",
        "format/records.py",
        "if size > min(most, MAX_PAYLOAD_BYTES):",
        "if size > MAX_PAYLOAD_BYTES:",
    ),
    Fault(
        "lists-without-a-bound",
        "format/records.py",
        "if len(data) > most:  # else",
        "if len(data) < 0:  # else",
    ),
    Fault(
        "blocks-not-verified",
        "format/manifest.py",
        "!= ref.length or crc32c(data) != ref.crc32c:",
        "!= ref.length:",
    ),
    Fault(
        "snapshots-of-other-repositories-accepted",
        "format/snapshot.py",
        "if self.repository_id != repository_id:",
        "if not self.repository_id:",
    ),
    Fault(
        "unknown-features-ignored",
        "format/root.py",
        "for feature in features if feature not in FEATURES]",
        "for feature in features if not feature]",
    ),
    Fault(
        "written-larger-than-readers-accept",
        "format/records.py",
        "if CRC_FROM + len(covered) > _MOST_BYTES.get(kind, HEADER_BYTES + MAX_PAYLOAD_BYTES):",
        "if len(covered) > HEADER_BYTES + MAX_PAYLOAD_BYTES:",
    ),
    Fault(
        "rows-out-of-order-accepted",
        "format/chunk_table.py",
        "bool((self.index[1:] > self.index[:-1]).all())",
        "bool((self.index >= 0).all())",
    ),
]
