"""`zarr-manifests tree`, `cat`, `summarize`, `du`: what a version holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from zarr_manifests.cli.verbs import Pairs, Repo, Told, TrustingRepo, console, pairs, styled, verb
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.rendering import columns
from zarr_manifests.texts import count_text

if TYPE_CHECKING:
    from zarr_manifests.display import Row

_CORNER: Final = 8


# --- tree ------------------------------------------------------------------------------------


@verb
def run_tree(repo: Repo, version: str = "main") -> object:
    """Show groups and arrays: dimensions, type, chunk shape and units."""
    from zarr_manifests.display import hierarchy
    from zarr_manifests.store import contents_of

    view = contents_of(repo.readonly_session(version).store).view
    rows = [*hierarchy(view.nodes)]
    table = columns("", "dimensions", "type", "chunk", "units", whole=("", "type", "dimensions"))
    for row in rows:
        table.add_row(row.guide + row.name, row.dimensions, row.type, row.chunk, row.units)
    head = styled(view.snapshot_id, "yellow")
    return Told([_record(row) for row in rows], [head, table if rows else "(empty)"])


def _record(row: Row) -> dict[str, Any]:
    """A node for JSON: of a group the path, of an array what its documents say."""
    path, array = f"/{row.node.path}", row.node.array
    if array is None:
        return {"path": path, "node_type": "group"}
    return {
        "path": path,
        "node_type": "array",
        "shape": array.shape,
        "chunk_shape": array.chunk_shape,
        "dimensions": array.dimension_names,
        "data_type": row.type,
        "units": row.units or None,
    }


# --- cat -------------------------------------------------------------------------------------


@verb
def run_cat(
    repo: TrustingRepo,
    array: str,
    index: str | None = None,
    *,
    at: str = "main",
    limit: Annotated[int, {"min": 1}] = 1000,
) -> object:
    """Print values of an array, as stored: by default its first corner, or an index.

    Parameters
    ----------
    array :
        The path of the array.
    index : INDEX
        As in NumPy, such as 0,:4,-1 or 10:20:2; write -- before -1. By default the first corner.
    limit : -n
        Read at most so many values.
    """
    import numpy as np
    import zarr

    from zarr_manifests.bulk import use_bulk
    from zarr_manifests.decoding import readable
    from zarr_manifests.display import attributes_of, hierarchy
    from zarr_manifests.selecting import chosen_axes
    from zarr_manifests.store import contents_of

    session = repo.readonly_session(at)
    node = contents_of(session.store).array_at(array)
    shape = node.array_meta.shape
    asked: Any = _corner(shape, limit) if index is None else chosen_axes(index, shape)
    chosen = [one if isinstance(one, range) else range(one, one + 1) for one in asked]
    count = math.prod(map(len, chosen))
    if count > limit:
        raise InvalidArgumentError(
            f"INDEX {index!r} selects {count:,} values of {shape}, and --limit is {limit:,}: "
            "narrow the one or raise the other"
        )
    with readable(node.path):
        found = zarr.open_array(session.store, path=node.path, mode="r")
        use_bulk(found)  # which decompresses no chunk to more than the array has
        where = (slice(one.start, max(one.start, one.stop), one.step) for one in chosen)
        values: Any = found[tuple(where)]
    (row,) = hierarchy({node.path: node})
    unit = "as stored" if {"scale_factor", "add_offset"} & {*attributes_of(node)} else row.units
    head = " ".join(filter(None, (f"/{node.path}", row.dimensions, row.type, unit)))
    parts = (f"{one.start}:{one.stop}" + f":{one.step}" * (one.step != 1) for one in chosen)
    text = np.array2string(np.asarray(values), console().width, threshold=sys.maxsize)
    lines = [styled(head, "yellow"), styled(f"[{', '.join(parts)}]", "dim"), *text.split("\n")]
    record = {
        "path": f"/{node.path}",
        "snapshot_id": session.snapshot_id,
        "shape": shape,
        "dimensions": node.array_meta.dimension_names,
        "dtype": str(values.dtype),
        "attributes": attributes_of(node),
        **{name: [getattr(one, name) for one in chosen] for name in ("start", "stop", "step")},
        "values": values,
    }
    return Told(record, lines)


def _corner(shape: Sequence[int], limit: int) -> list[range]:
    """The first few of the last two axes, and the first of the others."""
    sizes = [min(length, _CORNER if at >= len(shape) - 2 else 1) for at, length in enumerate(shape)]
    while math.prod(sizes) > limit:
        sizes[sizes.index(max(sizes))] -= 1
    return [range(size) for size in sizes]


# --- summarize -------------------------------------------------------------------------------


@verb
def run_summarize(
    repo: TrustingRepo,
    array: str,
    *,
    at: str = "main",
    by: list[str] | None = None,
    where: str | None = None,
    weight: Pairs = None,
) -> object:
    """Count values of an array, with extremes, sum and mean, mostly from statistics.

    Parameters
    ----------
    array :
        The path of the array.
    by : DIM[.PART]
        Answer for each label of a dimension, or in groups: time, time.month, time.MS.
    where :
        Which labels, such as "lat > 30 AND time >= '2020'".
    weight : -w DIM=WEIGHTS
        Weights of cells, for the mean: lat=cos, or the name of a variable along it.
    """
    weights = pairs(weight, "--weight") or None
    found = repo.readonly_session(at).summarize(array, where, by=by, weights=weights)
    frame = (found if found.sizes else found.expand_dims("all")).to_dataframe()
    frame = frame.reset_index(drop=not found.sizes)
    table = frame.to_string(index=False, float_format="{:,.6g}".format)
    answered, read = found.attrs["chunks_answered"], found.attrs["chunks_read"]
    last = f"{count_text(answered, 'chunk')} answered by statistics, {read:,} read"
    return Told([*frame.to_dict("records"), found.attrs], [*table.split("\n"), styled(last, "dim")])


# --- sizes -----------------------------------------------------------------------------------


@verb
def run_du(
    repo: Repo, version: str = "main", *, array: str | None = None, estimate: bool = False
) -> object:
    """Show the chunks and bytes of each array, and the growth since the commit before.

    Parameters
    ----------
    array :
        Only this array.
    estimate :
        By what the snapshot says itself: no manifest is read.
    """
    return repo.du(version, path=array, estimate=estimate)
