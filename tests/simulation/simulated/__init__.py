"""Deterministic simulation: one seed, one schedule, of many processes and much going wrong.

`python tests/simulation --seed N` runs the schedule of a seed again and prints its trace.
"""

from simulated.schedule import CALLS as CALLS
from simulated.schedule import KINDS as KINDS
from simulated.schedule import Outcome as Outcome
from simulated.schedule import simulate as simulate
from simulated.world import BrokenPromiseError as BrokenPromiseError
