"""Any changes of a small tree of arrays, as steps that a test may draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr
from hypothesis import strategies as st

import zarr_manifests as zm
from stored import put
from zarr_manifests import Repository, Session
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of

PATHS = ("g/x", "g/inner/big", "other", "new", "g/new", "scalar")


def array(
    session: Session, path: str, values: Any, chunks: tuple[int, ...], names: Any = None
) -> zarr.Array[Any]:
    values = np.asarray(values)
    made = zarr.create_array(
        session.store,
        name=path,
        shape=values.shape,
        chunks=chunks,
        dtype=values.dtype,
        compressors=None,
        dimension_names=names,
    )
    made[...] = values
    return made


def start() -> Repository:
    """A tree with inline and native chunks, and an opaque key."""
    repo = zm.create(MemoryStorage(), {"inline-chunk-bytes": 16})

    session = repo.writable_session()
    zarr.create_group(session.store, path="g/inner")
    array(session, "g/x", np.arange(8, dtype="i4"), (2,), ["x"])
    array(session, "g/inner/big", np.arange(64.0).reshape(8, 8), (4, 4))
    put(session, "g/notes.txt", b"an opaque key")
    array(session, "other", np.arange(4, dtype="i4"), (2,))
    session.commit("fill")
    return repo


def write(session: Session, path: str, seed: int) -> None:
    found = zarr.open_array(session.store, path=path)
    if found.ndim:
        found[: 1 + seed % 5] = seed
    else:
        found[...] = seed


def create(session: Session, path: str, seed: int) -> None:
    above, _, name = path.rpartition("/")
    if above:
        zarr.open_group(session.store, path=above)  # KeyError without it
    array(
        session,
        path,
        np.int32(seed) if name == "scalar" else np.arange(seed % 7 + 1),
        (2,)[: name != "scalar"],
    )


def resize(session: Session, path: str, seed: int) -> None:
    found = zarr.open_array(session.store, path=path)
    found.resize(tuple((n + seed) % 11 + 1 for n in found.shape))


def change_attributes(session: Session, path: str, seed: int) -> None:
    zarr.open_array(session.store, path=path).update_attributes({"seed": seed})


def delete(session: Session, path: str, seed: int) -> None:
    workspace_of(session.store).delete_below(
        (path if seed % 2 else path.rpartition("/")[0] or path) + "/"
    )


def move(session: Session, path: str, seed: int) -> None:
    session.move(path if seed % 2 else path.partition("/")[0], PATHS[seed % len(PATHS)])


def shift(session: Session, path: str, seed: int) -> None:
    ndim = zarr.open_array(session.store, path=path).ndim
    session.shift_array(path, (seed % 5 - 2,) * ndim)


def opaque(session: Session, path: str, seed: int) -> None:
    put(session, path + ".txt", b"%d" % seed)


def unset(session: Session, path: str, seed: int) -> None:
    """Write the fill value, so that chunks go."""
    write(session, path, 0)


OPERATIONS = (
    *(write, write, unset, create, resize, change_attributes, delete, move, shift, opaque),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(PATHS), st.integers(1, 40)),
    min_size=1,
    max_size=6,
)


def do(session: Session, steps: list[tuple[Any, str, int]]) -> None:
    """Do all of the steps that can be done."""
    for operation, path, seed in steps:
        try:
            operation(session, path, seed)
        except (KeyError, ValueError, TypeError, FileExistsError, FileNotFoundError):
            continue  # there is no such node, or there is one already
