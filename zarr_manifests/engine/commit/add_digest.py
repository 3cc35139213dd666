"""Adding copies, and a digest of its newest entries, to a snapshot before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import DIGESTS, opening_kind
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.snapshot import DigestEntry, Snapshot
from zarr_manifests.planning.at_open import digest_from, make_digest, needs_digest


def with_digest(
    context: ReadContext,
    snapshot: Snapshot,
    nodes: Callable[[], Iterable[Node]],
    base_sequence: int,
    keys: SessionKeys,
    known: Mapping[str, bytes],
) -> tuple[Snapshot, list[Upload]]:
    """Return the snapshot with copies and, if it is due, one more digest, which is to upload.

    `nodes` gives all its nodes, `base_sequence` is the sequence of its base's node table, and
    `known` are new objects by key.
    """
    snapshot = snapshot.with_delta_copies(known)
    if not needs_digest(snapshot):
        return snapshot, []
    places = snapshot.opening()
    start = places[digest_from([ref.length for _, ref in places])][0]
    due = [(at, ref) for at, ref in places if at >= start]
    context.objects.prefetch([(ref, opening_kind(ref)) for _, ref in due])
    found = {at - start: context.objects.load(ref, opening_kind(ref)) for at, ref in due}
    digest = make_digest(snapshot.deltas[start:], found, nodes(), base_sequence)
    upload = Upload(keys.next(DIGESTS), digest.encode())
    context.objects.remember(upload.ref, digest)
    older = tuple(entry for entry in snapshot.digests if entry.first < start)
    entry = DigestEntry(upload.ref, start, len(snapshot.deltas) - start)
    snapshot = replace(snapshot, digests=(*older, entry))
    return snapshot.with_delta_copies({**known, upload.key: upload.data}), [upload]
