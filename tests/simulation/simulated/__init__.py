"""Deterministic simulation: one seed, one schedule, of many processes and much going wrong.

`python tests/simulation --seed N` runs the schedule of a seed again and prints its trace.
"""

from simulated.schedule import CALLS, KINDS, Outcome, simulate
from simulated.world import BrokenPromiseError

__all__ = ["CALLS", "KINDS", "BrokenPromiseError", "Outcome", "simulate"]
