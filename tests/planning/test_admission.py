"""Which changes a root admits: one table."""

from __future__ import annotations

import pytest

from zarr_manifests.config import Config
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import COMPACTOR, Branch, Lease, Root
from zarr_manifests.ids import new_session_id, snapshot_id_of
from zarr_manifests.planning.conflict.admission import Refusal, Writer, admission

BEGAN = 10
OWN = new_session_id(BEGAN, bytes(12))
COPY = new_session_id(BEGAN, bytes(6) + b"\1" * 6)
"""A copy of the session: the same lineage, another id."""
OTHER = new_session_id(BEGAN, b"\2" * 12)
HEAD = BlobRef.to(f"snapshots/{OTHER}/1", b"head")
SNAPSHOT = snapshot_id_of(HEAD.key)
OLDER = snapshot_id_of(f"snapshots/{OTHER}/0")
AMENDS = (HEAD.key, SNAPSHOT)
MOVED = (f"snapshots/{OTHER}/0", OLDER)


def root(
    *,
    epoch: int = 0,
    floor: str | None = None,
    fence: int = 0,
    lease: str | None = None,
    compactor: int = 0,
) -> Root:
    leases = () if lease is None else (Lease(bytes(16), lease, SNAPSHOT, 0, "test"),)
    return Root(
        "0" * 32,
        version=20,
        write_id=bytes(16),
        written_ms=0,
        config=Config(),
        branches={"main": Branch(HEAD, None, epoch, floor)},
        fence=fence,
        leases=leases,
        epochs={COMPACTOR: compactor},
    )


WRITER = Writer(BEGAN, OWN)
CLAIMED = Writer(BEGAN, OWN, 12)
COMPACTION = Writer(BEGAN, compacts=True)


@pytest.mark.parametrize(
    ("at", "writer", "branch", "amends", "refusal"),
    [
        # The branch is there.
        (root(), WRITER, "main", None, None),
        (root(), WRITER, "gone", None, Refusal.NO_BRANCH),
        (root(), COMPACTION, "gone", None, Refusal.NO_BRANCH),
        (root(), WRITER, None, None, None),
        # Claims of the branch: who has not claimed it began at the newest claim or later.
        (root(epoch=BEGAN), WRITER, "main", None, None),
        (root(epoch=BEGAN + 1), WRITER, "main", None, Refusal.CLAIMED),
        (root(epoch=12), CLAIMED, "main", None, None),
        (root(epoch=13), CLAIMED, "main", None, Refusal.CLAIMED),
        (root(epoch=11), CLAIMED, "main", None, Refusal.CLAIMED),
        (root(epoch=0), CLAIMED, "main", None, Refusal.MADE_AGAIN),
        (root(epoch=BEGAN + 1), COMPACTION, "main", None, None),
        (root(epoch=BEGAN + 1), WRITER, None, None, None),
        # The fence, and leases: one of any copy of the session counts, whatever its time says.
        (root(fence=BEGAN), WRITER, "main", None, None),
        (root(fence=BEGAN + 1), WRITER, "main", None, Refusal.FENCED),
        (root(fence=BEGAN + 1), WRITER, None, None, Refusal.FENCED),
        (root(fence=BEGAN + 1, lease=OWN), WRITER, "main", None, None),
        (root(fence=BEGAN + 1, lease=COPY), WRITER, "main", None, None),
        (root(fence=BEGAN + 1, lease=OTHER), WRITER, "main", None, Refusal.FENCED),
        (root(fence=BEGAN + 1, lease=OWN), Writer(BEGAN), None, None, Refusal.FENCED),
        (root(fence=BEGAN + 1, epoch=12), CLAIMED, "main", None, Refusal.FENCED),
        (root(fence=BEGAN + 1), COMPACTION, "main", None, Refusal.FENCED),
        # Claims of the compactor count for compactors alone.
        (root(compactor=BEGAN), COMPACTION, "main", None, None),
        (root(compactor=BEGAN + 1), COMPACTION, "main", None, Refusal.OVERTAKEN),
        (root(compactor=BEGAN + 1), WRITER, "main", None, None),
        # What is amended is the head, and its parent is still in history.
        (root(), WRITER, "main", AMENDS, None),
        (root(), WRITER, "main", MOVED, Refusal.NOT_HEAD),
        (root(floor=SNAPSHOT), WRITER, "main", AMENDS, Refusal.NO_PARENT),
        (root(floor=OLDER), WRITER, "main", AMENDS, None),
        (root(floor=SNAPSHOT), WRITER, "main", None, None),
        # The first rule that refuses says why.
        (root(epoch=11, fence=11), WRITER, "main", None, Refusal.CLAIMED),
        (root(fence=11, compactor=11), COMPACTION, "main", None, Refusal.FENCED),
        (root(fence=11), WRITER, "main", MOVED, Refusal.FENCED),
    ],
)
def test_admission(
    at: Root,
    writer: Writer,
    branch: str | None,
    amends: tuple[str, str] | None,
    refusal: Refusal | None,
) -> None:
    assert admission(at, writer, branch, amends) is refusal
