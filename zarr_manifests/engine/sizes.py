"""How much memory a decoded value takes, as far as it can be told from outside.

The value is walked through, and every object in it is counted once: what Python says it takes,
and for an array the buffer it is a view of, which a constant column has a single number in.
Objects that exist once for the whole process (small numbers, classes, the empty tuple) are
counted all the same where they are few; what matters are bytes, texts, arrays and containers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
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
    total, due, seen = 0, [value], set[int]()
    size_of, enter = sys.getsizeof, seen.add
    while due:
        item = due.pop()
        key = id(item)
        if key in seen:
            continue
        enter(key)
        kind: Any = type(item)
        total += size_of(item)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is list:
            due += item
        elif (parts := _parts(kind)) is not None:
            due += parts(item)
        elif isinstance(item, Mapping):
            due += item
            due += item.values()
        elif isinstance(item, np.ndarray) and item.base is not None:
            due.append(item.base)
    return total


@cache
def _parts(kind: Hashable) -> Callable[[Any], Sequence[Any]] | None:
    """What gives the fields of a dataclass; None for other types."""
    if not is_dataclass(kind):
        return None
    names = [field.name for field in fields(cast(Any, kind))]
    # Of one name alone an attrgetter gives the value, of none there is no attrgetter.
    return attrgetter(*names) if len(names) > 1 else lambda item: [getattr(item, n) for n in names]
