"""How much memory a decoded value takes, as far as it can be told from outside.

The value is walked through, and every object in it is counted once: what Python says it takes,
and for an array the buffer it is a view of, which a constant column has a single number in.
Objects that exist once for the whole process (small numbers, classes, the empty tuple) are
counted all the same where they are few; what matters are bytes, texts, arrays and containers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

import numpy as np

__all__ = ["decoded_bytes"]

_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})


def decoded_bytes(value: Any) -> int:
    """Bytes of memory that the value and all it consists of take.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.engine.sizes import decoded_bytes
    >>> 80_000 <= decoded_bytes((np.zeros(10_000), b"")) <= 81_000
    True
    """
    total, due, seen = 0, [value], set()
    while due:
        item = due.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind: Any = type(item)
        total += sys.getsizeof(item)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is list:
            due.extend(item)
        elif isinstance(item, Mapping):
            due.extend(item)
            due.extend(item.values())
        elif isinstance(item, np.ndarray):
            if item.base is not None:
                due.append(item.base)
        elif is_dataclass(item):
            due.extend(getattr(item, name) for name in _names(kind))
    return total


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))
