"""`zarr-manifests cat`: the values in a corner of an array, or at some indices."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zarr_manifests.cli.arguments import At, Authorize, Json, Options, Url, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import console
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr_manifests.format.nodes import Node
    from zarr_manifests.session import Session

__all__ = ["run"]

_CORNER: Final = 8
_PART: Final = re.compile(r"(-?\d{1,18})|(-?\d{1,18})?:(-?\d{1,18})?(?::(\d{1,18})?)?", re.ASCII)


def run(
    url: Url,
    array: Annotated[str, typer.Argument(help="The path of the array.", show_default=False)],
    index: Annotated[
        str | None,
        typer.Argument(
            metavar="INDEX",
            help="As in NumPy, such as 0,:4,-1 or 10:20:2; write -- before -1. By default the "
            "first corner.",
            show_default=False,
        ),
    ] = None,
    at: At = "main",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Read at most so many values.")
    ] = 1000,
    authorize: Authorize = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Print values of an array: those of its first corner, or those at an index."""
    session = open_at(url, option, authorize).readonly_session(at)
    node = _node(session, array)
    assert node.array is not None
    shape = node.array.shape
    chosen = _corner(shape, limit) if index is None else _parsed(index, shape)
    count = math.prod(map(len, chosen))
    if count > limit:
        raise InvalidArgumentError(
            f"INDEX {index!r} selects {count:,} values of {shape}, and --limit is {limit:,}: "
            "narrow the one or raise the other"
        )
    values = _read(session, node, chosen)
    if as_json:
        print_json(_record(session, node, chosen, values))
        return
    _print(node, chosen, values)


def _node(session: Session, path: str) -> Node:
    from zarr_manifests.keys import no_array
    from zarr_manifests.store import contents_of

    nodes = contents_of(session.store).view.nodes
    node = nodes.get(path.strip("/"))
    if node is None or node.array is None:
        arrays = (name for name, one in nodes.items() if one.array is not None)
        raise no_array(path, arrays, f" at {session.snapshot_id}")
    return node


# --- which values ----------------------------------------------------------------------------


def _corner(shape: Sequence[int], limit: int) -> list[range]:
    """The first few of the last two axes, and the first of the others."""
    sizes = [min(length, _CORNER if at >= len(shape) - 2 else 1) for at, length in enumerate(shape)]
    while math.prod(sizes) > limit:
        sizes[sizes.index(max(sizes))] -= 1
    return [range(size) for size in sizes]


def _parsed(text: str, shape: Sequence[int]) -> list[range]:
    """The indices along each axis; axes that are not named are taken whole."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if parts.count("...") > 1 or len(parts) - parts.count("...") > len(shape):
        raise InvalidArgumentError(f"INDEX {text!r} has more parts than the array has axes")
    at = parts.index("...") if "..." in parts else len(parts)
    whole = [":"] * (len(shape) - len(parts) + parts.count("..."))
    parts[at : at + 1] = whole
    return [_along(*each) for each in zip(parts, shape, range(len(shape)), strict=True)]


def _along(part: str, length: int, axis: int) -> range:
    found = _PART.fullmatch(part)
    if found is None or found[4] == "0":
        raise InvalidArgumentError(
            f"INDEX: {part[:40]!r} is not an index; write 3, -1, 2:5, :10, ::4 or ..."
        )
    number, *bounds = found.groups()
    if number is None:
        return range(length)[slice(*(None if one is None else int(one) for one in bounds))]
    at = int(number)
    if not -length <= at < length:
        raise InvalidArgumentError(
            f"INDEX: {at} is out of range on axis {axis}, which has length {length}"
        )
    return range(length)[at:][:1]


def _read(session: Session, node: Node, chosen: Sequence[range]) -> Any:
    import zarr

    from zarr_manifests.bulk import use_bulk
    from zarr_manifests.decoding import readable

    where = tuple(slice(one.start, max(one.start, one.stop), one.step) for one in chosen)
    with readable(node.path):
        array = zarr.open_array(session.store, path=node.path, mode="r")
        use_bulk(array)  # which decompresses no chunk to more than the array has
        return array[where]


# --- how they are shown ----------------------------------------------------------------------


def _record(session: Session, node: Node, chosen: Sequence[range], values: Any) -> dict[str, Any]:
    from zarr_manifests.display import fields_of

    assert node.array is not None
    return {
        "path": f"/{node.path}",
        "snapshot_id": session.snapshot_id,
        "shape": node.array.shape,
        "dimensions": node.array.dimension_names,
        "dtype": str(values.dtype),
        "attributes": fields_of(node).get("attributes"),
        "start": [one.start for one in chosen],
        "stop": [one.stop for one in chosen],
        "step": [one.step for one in chosen],
        "values": values,
    }


def _print(node: Node, chosen: Sequence[range], values: Any) -> None:
    import numpy as np

    from zarr_manifests.display import hierarchy

    (row,) = hierarchy({node.path: node})
    out = console()
    text = " ".join(filter(None, (f"/{node.path}", row.dimensions, row.type, row.units)))
    out.print(plain_text(text), style="yellow", soft_wrap=True)
    parts = (_shown(one) for one in chosen)
    out.print(f"[{', '.join(parts)}]", style="dim", soft_wrap=True)
    shown = np.array2string(np.asarray(values), threshold=sys.maxsize, max_line_width=out.width)
    out.print(plain_text(shown, lines=True), soft_wrap=True)


def _shown(one: range) -> str:
    step = "" if one.step == 1 else f":{one.step}"
    return f"{one.start}:{one.stop}{step}"
