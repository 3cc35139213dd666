"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A broken rule: one text of one module of the package, replaced by another.

    Parameters
    ----------
    name : str
        The broken rule, in a few words with hyphens.
    path : str
        The module, from the package's folder on.
    old, new : str
        The text, which is there exactly once, and what stands there instead.
    """

    name: str
    path: str
    old: str
    new: str
