"""Deterministic simulation: one seed, one schedule, of many processes and much going wrong.

`python -m zarr_manifests.testing.simulation --seed N` runs the schedule of a seed again and prints
its trace.
"""

from zarr_manifests.testing.simulation.schedule import CALLS, Outcome, simulate
from zarr_manifests.testing.simulation.world import BrokenPromiseError

__all__ = ["CALLS", "BrokenPromiseError", "Outcome", "simulate"]
