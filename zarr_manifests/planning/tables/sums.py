"""Arithmetic of totals: exact counts or upper bounds of chunks and bytes. No I/O.

The base has a count for each node. Every live delta or run says by how much it changes the count,
or what the count is after it. Added up in order they give the totals of a snapshot. Invariants: a
number marked exact is exact; any other is an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from zarr_manifests.format.nodes import Count, Counted, Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.report import Report
from zarr_manifests.texts import count_text


class Amount(Report, Struct, frozen=True):
    """A number of chunks and of their bytes, each exact or an upper bound.

    Parameters
    ----------
    chunks : int
        Chunks that are there, wherever their bytes are.
    nbytes : int
        Bytes of all of them.
    chunks_exact, nbytes_exact : bool
        Whether the number is exact; else it is an upper bound.
    """

    chunks: int = 0
    nbytes: int = 0
    chunks_exact: bool = True
    nbytes_exact: bool = True

    @property
    def exact(self) -> bool:
        """Whether both numbers are exact."""
        return self.chunks_exact and self.nbytes_exact

    def __str__(self) -> str:
        chunks = ("" if self.chunks_exact else "at most ") + count_text(self.chunks, "chunk")
        most = "" if self.nbytes_exact else "at most "
        return f"{chunks}, {most}{count_text(self.nbytes, 'byte')}"

    def __add__(self, other: Amount) -> Amount:
        """The sum of both."""
        return Amount(
            self.chunks + other.chunks,
            self.nbytes + other.nbytes,
            self.chunks_exact and other.chunks_exact,
            self.nbytes_exact and other.nbytes_exact,
        )

    def at_most(self, most: int) -> Amount:
        """The amount with a bound of at most `most` chunks."""
        if self.chunks_exact or self.chunks <= most:
            return self
        return Amount(most, self.nbytes, chunks_exact=False, nbytes_exact=self.nbytes_exact)

    @classmethod
    def from_count(cls, count: Count) -> Amount:
        """The amount of a stored count."""
        return cls(
            count.chunks,
            count.nbytes,
            not count.counted & Counted.CHUNKS_AT_MOST,
            not count.counted & Counted.BYTES_AT_MOST,
        )

    def to_count(self, node_id: bytes, counted: int = Counted.EXACT) -> Count:
        """The amount as a stored count of the node."""
        if not self.chunks_exact:
            counted |= Counted.CHUNKS_AT_MOST
        if not self.nbytes_exact:
            counted |= Counted.BYTES_AT_MOST
        return Count(node_id, self.chunks, self.nbytes, counted)


NOTHING: Final = Amount()


def lay_over(amounts: dict[bytes, Amount], entry: DeltaEntry) -> None:
    """Update the amounts of each node by one entry of the read list."""
    for count in entry.counts:
        flags = count.counted
        before = NOTHING if flags & Counted.WHOLE else amounts.get(count.node_id, NOTHING)
        amounts[count.node_id] = Amount(  # `before + Amount.from_count(count)`, twice as fast
            before.chunks + count.chunks,
            before.nbytes + count.nbytes,
            before.chunks_exact and not flags & Counted.CHUNKS_AT_MOST,
            before.nbytes_exact and not flags & Counted.BYTES_AT_MOST,
        )


def difference(before: Amount, after: Amount, count: Count) -> Amount:
    """How much a commit with this count of a node adds to its amount."""
    if not count.counted & Counted.WHOLE:
        return Amount.from_count(count)
    # Without an exact number before, nothing can be subtracted: all of the new number is the bound.
    chunks = after.chunks - (before.chunks if before.chunks_exact else 0)
    return Amount(
        chunks,
        after.nbytes - (before.nbytes if before.nbytes_exact else 0),
        after.chunks_exact and before.chunks_exact,
        after.nbytes_exact and before.nbytes_exact,
    )


def merged_counts(
    entries: Sequence[DeltaEntry], after: int, alive: Collection[bytes]
) -> tuple[Count, ...]:
    """The counts of a run of these entries, leaving out entries up to the sequence `after`.

    For a node that no longer exists, only a count that says nothing is left is kept: the node may
    come back, and older entries have counted its chunks.
    """
    found: dict[bytes, Count] = {}
    for entry in entries:
        if entry.last <= after:
            continue  # already counted by the base
        for count in entry.counts:
            old = found.get(count.node_id)
            if old is None or count.counted & Counted.WHOLE:
                found[count.node_id] = count
                continue
            whole = old.counted & Counted.WHOLE
            both = Amount.from_count(old) + Amount.from_count(count)
            found[count.node_id] = both.to_count(count.node_id, whole)
    return tuple(
        count
        for node_id, count in found.items()
        if node_id in alive or count == Count(node_id, 0, 0, Counted.WHOLE)
    )


def alive_amounts(amounts: Mapping[bytes, Amount], nodes: Iterable[Node]) -> dict[str, Amount]:
    """The amounts of all arrays and opaque entries among the nodes, by path."""
    found: dict[str, Amount] = {}
    for node in nodes:
        if node.kind is NodeKind.GROUP:
            continue
        amount = amounts.get(node.node_id, NOTHING)
        found[node.path] = amount if amount.chunks_exact else amount.at_most(_most(node))
    return found


def sum_of(amounts: Iterable[Amount]) -> Amount:
    """The sum of the amounts."""
    every = [*amounts]
    return Amount(
        sum(amount.chunks for amount in every),
        sum(amount.nbytes for amount in every),
        all(amount.chunks_exact for amount in every),
        all(amount.nbytes_exact for amount in every),
    )


def sums_of(amounts: Mapping[bytes, Amount], nodes: Iterable[Node]) -> dict[str, int]:
    """The sums that a snapshot stores about its nodes."""
    nodes = [*nodes]
    total = sum_of(alive_amounts(amounts, nodes).values())
    kinds = Counter(node.kind for node in nodes)
    return {
        "arrays": kinds[NodeKind.ARRAY],
        "groups": kinds[NodeKind.GROUP],
        "chunks" if total.chunks_exact else "chunks-at-most": total.chunks,
        "chunk-bytes" if total.nbytes_exact else "chunk-bytes-at-most": total.nbytes,
    }


def changed_sums(
    sums: Mapping[str, int], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, int]:
    """The sums of a snapshot of which some nodes have changed.

    `before` and `after` are the sums of these nodes. A sum that was not exact stays an upper bound.

    Examples
    --------
    >>> from zarr_manifests.planning.tables.sums import changed_sums
    >>> before = {"arrays": 1, "groups": 0, "chunks": 2, "chunk-bytes": 20}
    >>> after = {"arrays": 0, "groups": 0, "chunks": 0, "chunk-bytes": 0}
    >>> whole = {"arrays": 5, "groups": 1, "chunks-at-most": 9, "chunk-bytes": 90}
    >>> changed_sums(whole, before, after)
    {'arrays': 4, 'groups': 1, 'chunks-at-most': 7, 'chunk-bytes': 70}
    """
    found = {name: sums[name] - before[name] + after[name] for name in ("arrays", "groups")}
    for name in ("chunks", "chunk-bytes"):
        bound = f"{name}-at-most"
        total, gone, new = (each.get(name, each.get(bound, 0)) for each in (sums, before, after))
        found[name if name in sums and name in after else bound] = total - gone + new
    return found


def _most(node: Node) -> int:
    """The largest possible number of chunks of the node."""
    return 1 if node.array is None else node.array.grid.size
