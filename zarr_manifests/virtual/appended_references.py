"""References that continue existing arrays along a dimension, as a later file continues the first.

Arrays with the dimension grow: their chunks get later keys, and their documents a larger shape.
Arrays without it have to be as they are already, and their references are left out; so are groups.

Invariant: existing chunks decode as before. What differs in anything but the length along the
dimension is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box
from zarr_manifests.keys import (
    V2_ARRAY,
    V2_ATTRIBUTES,
    V2_GROUP,
    V3_DOCUMENT,
    ArrayMeta,
    join,
    node_documents,
    parse_documents,
    split,
)
from zarr_manifests.records import dataclass
from zarr_manifests.virtual.references import Numbered, References

__all__ = ["appended"]

_DOCUMENTS: Final = frozenset({V3_DOCUMENT, V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, ".zmetadata"})
_ENCODINGS: Final = (
    *("_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar"),
    *("_Unsigned", "_ARRAY_DIMENSIONS"),
)


@dataclass(frozen=True, slots=True)
class _Moved:
    """An array that grows along an axis: its chunks begin at `first` there."""

    meta: ArrayMeta
    axis: int
    first: int
    grid: Box
    documents: Mapping[str, bytes]

    def key(self, path: str, rest: str) -> str:
        """The key of a chunk, given the one in the references."""
        coords = self.meta.chunk_keys.decode(rest, len(self.meta.shape))
        if coords is None:
            raise InvalidArgumentError(
                f"reference {join(path, rest)[:200]!r} is no chunk of the array /{path}"
            )
        at = tuple(c + (self.first if i == self.axis else 0) for i, c in enumerate(coords))
        return join(path, self.meta.chunk_keys.encode(at))


def appended(
    references: References,
    there: Callable[[str], Mapping[str, bytes]],
    stored: Callable[[str], bytes | None],
    dim: str,
) -> References:
    """The references, moved behind what is there along the dimension.

    Parameters
    ----------
    references : References
        What is to be appended.
    there : callable
        The documents at a path, by file name; none if nothing is there.
    stored : callable
        The bytes of a chunk, by its key; None if it is not there.
    dim : str
        The dimension.

    Raises
    ------
    InvalidArgumentError
        If an array does not exist or does not fit, or none has the dimension; or an array without
        it has other values in the references than are there.
    """
    found: dict[str, dict[str, bytes]] = {}
    for key, value in references.values.items():
        folder, name = split(key)
        if name in _DOCUMENTS:
            found.setdefault(folder, {})[name] = value
    moved: dict[str, _Moved | None] = {}
    for path, documents in found.items():
        used = node_documents(documents)
        meta = parse_documents(used)
        if isinstance(meta, ArrayMeta):
            moved[path] = _moved(path, used, meta, there(path), dim)
    if not any(moved.values()):
        raise InvalidArgumentError(f"no array in the references has the dimension {dim!r}")
    values = {
        join(path, name): document
        for path, one in moved.items()
        if one is not None
        for name, document in one.documents.items()
    }
    chunks = {k: v for k, v in references.values.items() if split(k)[1] not in _DOCUMENTS}
    for key, value in chunks.items():
        if (new := _moved_key(key, moved)) is not None:
            values[new] = value
        else:
            _check_same(key, value, stored(key), dim)
    keys, rows = [], []
    for row, key in enumerate(references.keys):
        new = _moved_key(key, moved)
        if new is not None:
            keys.append(new)
            rows.append(np.array([row], np.int64))
    numbered, count = [], len(keys)
    for part in references.numbered:
        one = moved.get(part.path)
        if one is None:
            continue
        coords = one.meta.grid.unravel(part.chunk)
        coords[:, one.axis] += one.first
        numbered.append(Numbered(part.path, count, one.grid.ravel(coords)))
        rows.append(np.arange(part.first, part.first + len(part.chunk)))
        count += len(part.chunk)
    at = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return References(
        values,
        tuple(keys),
        references.locations,
        references.source[at],
        references.offset[at],
        references.length[at],
        references.modified,
        references.sizes,
        tuple(numbered),
    )


def _check_same(key: str, value: bytes, stored: bytes | None, dim: str) -> None:
    if stored != value:
        raise InvalidArgumentError(
            f"the chunk {key} has other bytes than here, and its array does not have the dimension "
            f"{dim!r}, so it would stay as it is. If the values are the same in another encoding, "
            "take the array out of the references"
        )


def _moved_key(key: str, moved: Mapping[str, _Moved | None]) -> str | None:
    """The new key of a chunk; None if its array stays as it is."""
    path = split(key)[0]
    while path not in moved:
        if not path:
            raise InvalidArgumentError(f"reference {key[:200]!r} is no chunk of an array")
        path = split(path)[0]
    one = moved[path]
    return None if one is None else one.key(path, key[len(path) :].lstrip("/"))


def _moved(
    path: str, new: Mapping[str, bytes], meta: ArrayMeta, old: Mapping[str, bytes], dim: str
) -> _Moved | None:
    """How an array moves; None if it has no such dimension and is there already."""
    was = parse_documents(old)
    if not isinstance(was, ArrayMeta):
        raise InvalidArgumentError(f"there is no array /{path} to append to")
    names = meta.dimension_names or ()
    axis = names.index(dim) if dim in names else -1
    for part, (a, b) in _differences(old, new).items():
        raise InvalidArgumentError(
            f"/{path} has another {part} than the references: {a} there, {b} here"
        )
    shapes = [[n for i, n in enumerate(one.shape) if i != axis] for one in (was, meta)]
    if shapes[0] != shapes[1] or len(was.shape) != len(meta.shape):
        raise InvalidArgumentError(
            f"/{path} has the shape {was.shape} and the references {meta.shape}, which differ in "
            f"more than {dim!r}"
        )
    if axis < 0:
        return None
    length, chunk = was.shape[axis], was.chunk_shape[axis]
    if length % chunk:
        raise InvalidArgumentError(
            f"/{path} ends within a chunk: it has {length} along {dim!r}, in chunks of {chunk}. "
            "One chunk cannot be in two files; append with zm.virtual.write, or write it as data"
        )
    shape = [n + (length if i == axis else 0) for i, n in enumerate(meta.shape)]
    name = V3_DOCUMENT if V3_DOCUMENT in old else V2_ARRAY
    grown = json.dumps({**json.loads(old[name]), "shape": shape}).encode()
    after = parse_documents({**old, name: grown})
    assert isinstance(after, ArrayMeta)
    return _Moved(meta, axis, length // chunk, after.grid, {name: grown})


def _differences(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, tuple[Any, Any]]:
    """What decides how chunks decode, and differs."""
    one, other = _decoding(old), _decoding(new)
    return {
        name: (one.get(name), other.get(name))
        for name in {**one, **other}
        if json.dumps(one.get(name)) != json.dumps(other.get(name))
    }


def _decoding(documents: Mapping[str, bytes]) -> dict[str, Any]:
    """All of an array's documents but its shape, and of its attributes those that encode."""
    name = V3_DOCUMENT if V3_DOCUMENT in documents else V2_ARRAY
    fields: dict[str, Any] = json.loads(documents[name])
    attributes = fields.pop("attributes", {})
    if name == V2_ARRAY:
        try:
            attributes = json.loads(documents.get(V2_ATTRIBUTES, b"{}"))
        except ValueError:  # as for who reads them
            attributes = {}
    fields.pop("shape")
    known = attributes if isinstance(attributes, dict) else {}
    return fields | {key: known[key] for key in _ENCODINGS if key in known}
