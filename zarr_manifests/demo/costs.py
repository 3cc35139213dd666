"""Measuring what a step costs: its storage requests, bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zarr_manifests.metrics import process_totals
from zarr_manifests.runtime import SYSTEM

__all__ = ["Commit", "Cost", "Measured", "Rewrite", "measure"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Requests, bytes and seconds of an operation."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.requests + other.requests,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """An appended month.

    Parameters
    ----------
    months : int
        Months in the repository after it.
    cost : Cost
        What it cost, including the reads it needed.
    compacted : bool
        Whether it also compacted the deltas.
    """

    months: int
    cost: Cost
    compacted: bool


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of all months so far: one commit into an empty repository on the same disk."""

    months: int
    cost: Cost


@dataclass(slots=True)
class Measured:
    """The result of `measure`, after its block has ended."""

    cost: Cost


@contextmanager
def measure() -> Iterator[Measured]:
    """Measure what the block does in this process.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.demo.costs import measure
    >>> with measure() as measured:
    ...     _ = zm.create("memory://measured")
    >>> measured.cost.requests > 0
    True
    """
    measured = Measured(Cost())
    before, start_s = process_totals(), SYSTEM.monotonic_s()
    yield measured
    seconds = SYSTEM.monotonic_s() - start_s
    done = process_totals() - before
    measured.cost = Cost(done.requests, done.bytes_read, done.bytes_written, seconds)
