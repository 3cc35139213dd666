"""`zarr-manifests tree`, `cat`, `info` and `du`: what a repository and a version of it hold."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group

from zarr_manifests.cli.arguments import At, Authorize, Json, Options, Url, Version, open_at, verb
from zarr_manifests.cli.console import console, progress, say, show
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.progress import counted
from zarr_manifests.rendering import columns, fact_table, more
from zarr_manifests.report import json_line, plain
from zarr_manifests.texts import bytes_text, count_text, time_text, written_text
from zarr_manifests.versions import VersionName

if TYPE_CHECKING:
    from zarr_manifests.display import Row
    from zarr_manifests.engine.snapshot.view import SnapshotView
    from zarr_manifests.format.nodes import Node
    from zarr_manifests.reports import Amount, ArrayStatistics, Usage
    from zarr_manifests.repository import Repository
    from zarr_manifests.session import Session

__all__ = ["run_cat", "run_du", "run_info", "run_tree", "value_text"]

_CORNER: Final = 8
_SHOWN_REFS: Final = 20
_PART: Final = re.compile(r"(-?\d{1,18})|(-?\d{1,18})?:(-?\d{1,18})?(?::(\d{1,18})?)?", re.ASCII)


# --- tree ------------------------------------------------------------------------------------


@verb
def run_tree(
    url: Url,
    version: Version = "main",
    *,
    chunks: bool = False,
    stats: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show groups and arrays: dimensions, type, chunk shape and units.

    Parameters
    ----------
    chunks :
        Count the chunks that are there instead of showing units; reads manifests.
    stats :
        Say how many chunks have statistics; reads manifests.
    """
    from zarr_manifests.display import hierarchy
    from zarr_manifests.engine.compact.compute_statistics import statistics_of
    from zarr_manifests.store import contents_of

    if chunks and stats:
        raise InvalidArgumentError("--chunks or --stats, not both")
    repo = open_at(url, option)
    contents = contents_of(repo.readonly_session(version).store)
    view, name = contents.view, VersionName.parse(version).name
    branch = name if stats and name in repo.list_branches() else None  # its index has them
    last = ("there", "stored") if chunks else ("statistics",) if stats else ("units",)
    whole = ("", "type") if chunks else ("", "type", "dimensions")
    table = columns("", "dimensions", "type", "chunk", *last, right=last * chunks, whole=whole)
    for row in hierarchy(view.nodes):
        array = row.node.array
        measured = (
            statistics_of(contents.context, view, row.node, branch) if stats and array else None
        )
        if as_json:
            say(json_line(_node_record(view, row, measured, chunks)))
        elif array is None:
            table.add_row(row.guide + row.name)
        else:
            told = [row.units]
            if chunks:
                count, nbytes = _stored_of(view, row.node)
                told = [f"{count:,}/{array.grid.size:,}", bytes_text(nbytes)]
            elif measured is not None:
                told = [_described(measured)]
            table.add_row(row.guide + row.name, row.dimensions, row.type, row.chunk, *told)
    if not as_json:
        out = console()
        out.print(view.snapshot_id, style="yellow")
        out.print(table if table.row_count else "(empty)")


def _node_record(
    view: SnapshotView, row: Row, measured: ArrayStatistics | None, chunks: bool
) -> dict[str, Any]:
    """A node for JSON: of a group the path, of an array what its documents say."""
    node, array = row.node, row.node.array
    if array is None:
        return {"path": f"/{node.path}", "node_type": "group"}
    found: dict[str, Any] = {
        "path": f"/{node.path}",
        "node_type": "array",
        "shape": array.shape,
        "chunk_shape": array.chunk_shape,
        "dimensions": array.dimension_names,
        "data_type": row.type,
        "units": row.units or None,
    }
    if chunks:
        count, nbytes = _stored_of(view, node)
        found |= {"initialized_chunks": count, "total_chunks": array.grid.size, "nbytes": nbytes}
    return found if measured is None else {**found, "statistics": measured}


def _described(found: ArrayStatistics) -> str:
    if found.skipped:
        return f"none: {found.skipped}"
    if not found.known:
        return "none" if found.chunks else "no chunks"
    known = "all" if found.complete else f"{found.known:,}"
    return f"{known} of {count_text(found.chunks, 'chunk')}"


def _stored_of(view: SnapshotView, node: Node) -> tuple[int, int]:
    table = view.chunks(node.node_id)
    return (0, 0) if table is None else (len(table), int(table.length.sum()))


# --- cat -------------------------------------------------------------------------------------


@verb
def run_cat(
    url: Url,
    array: str,
    index: str | None = None,
    *,
    at: At = "main",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Read at most so many values.")
    ] = 1000,
    authorize: Authorize = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Print values of an array: those of its first corner, or those at an index.

    Parameters
    ----------
    array :
        The path of the array.
    index : INDEX
        As in NumPy, such as 0,:4,-1 or 10:20:2; write -- before -1. By default the first corner.
    """
    session = open_at(url, option, authorize).readonly_session(at)
    node = _array_at(session, array)
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
        show(_values_record(session, node, chosen, values), as_json)
    else:
        _print_values(node, chosen, values)


def _array_at(session: Session, path: str) -> Node:
    from zarr_manifests.keys import no_array
    from zarr_manifests.store import contents_of

    nodes = contents_of(session.store).view.nodes
    node = nodes.get(path.strip("/"))
    if node is None or node.array is None:
        arrays = (name for name, one in nodes.items() if one.array is not None)
        raise no_array(path, arrays, f" at {session.snapshot_id}")
    return node


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
    parts[at : at + 1] = [":"] * (len(shape) - len(parts) + parts.count("..."))
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


def _values_record(
    session: Session, node: Node, chosen: Sequence[range], values: Any
) -> dict[str, Any]:
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


def _print_values(node: Node, chosen: Sequence[range], values: Any) -> None:
    import numpy as np

    from zarr_manifests.display import hierarchy

    (row,) = hierarchy({node.path: node})
    out = console()
    text = " ".join(filter(None, (f"/{node.path}", row.dimensions, row.type, row.units)))
    out.print(text, style="yellow", soft_wrap=True)
    parts = (f"{one.start}:{one.stop}" + f":{one.step}" * (one.step != 1) for one in chosen)
    out.print(f"[{', '.join(parts)}]", style="dim", soft_wrap=True)
    shown = np.array2string(np.asarray(values), threshold=sys.maxsize, max_line_width=out.width)
    out.print(shown, soft_wrap=True)


# --- sizes -----------------------------------------------------------------------------------


@verb
def run_du(
    url: Url,
    version: Version = "main",
    *,
    array: str | None = None,
    estimate: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show how many chunks and bytes each array has, and how many more than one commit before.

    Parameters
    ----------
    array :
        Only this array.
    estimate :
        By what the snapshot says itself: no manifest is read.
    """
    repo = open_at(url, option)
    with progress("reading manifests"):
        usage = repo.du(version, path=array, estimate=estimate)
    show(usage, as_json, None if as_json else _usage_table(usage))
    if not (as_json or usage.exact):
        said = "<= at most: what commits overwrite or remove they do not look up"
        console().print(said, style="dim")


def _usage_table(usage: Usage) -> Any:
    kinds = ("inline", "native", "virtual")
    apart = kinds if all(array.inline is not None for array in usage.arrays) else ()
    numbers = ("chunks", "of", *apart, "bytes", "more chunks", "more bytes")
    table = columns("", *numbers, right=numbers, whole=("",))
    for array in usage.arrays:
        grid = "" if array.grid_shape is None else f"{math.prod(array.grid_shape):,}"
        chunks, nbytes = _amount(array.total)
        parts = [_amount(getattr(array, kind))[1] for kind in apart]
        table.add_row(array.path, chunks, grid, *parts, nbytes, *_amount(array.growth))
    chunks, nbytes = _amount(usage.total)
    sums = [bytes_text(sum(getattr(one, kind).nbytes for one in usage.arrays)) for kind in apart]
    table.add_row("all", chunks, "", *sums, nbytes, *_amount(usage.growth), style="bold")
    return Group(usage.snapshot_id, table)


def _amount(amount: Amount) -> tuple[str, str]:
    chunks = f"{amount.chunks:,}" if amount.chunks_exact else f"<= {amount.chunks:,}"
    if amount.nbytes is None:
        return chunks, "?"
    nbytes = f"-{bytes_text(-amount.nbytes)}" if amount.nbytes < 0 else bytes_text(amount.nbytes)
    return chunks, nbytes if amount.nbytes_exact else f"<= {nbytes}"


# --- the repository --------------------------------------------------------------------------


@verb
def run_info(url: Url, *, as_json: Json = False, option: Options = None) -> None:
    """Show what a repository is, its branches and tags, its size, metadata and configuration."""
    repo = open_at(url, option)
    found = _info(repo)
    if as_json:
        show(found, as_json)
        return
    last, root = found["last_on_main"], found["root_version"]
    done = ", ".join(filter(None, (last.kind, written_text(last.written))))
    facts = [
        ("repository", found["url"]),
        ("id", found["repository_id"]),
        ("format", str(found["format"])),
        ("root state", f"version {root:,}, {time_text(found['root_written_at'])}"),
        ("last on main", f"{last.message} [{done}]"),
        *(("metadata", f"{name}: {value_text(one)}") for name, one in found["metadata"].items()),
    ]
    out = console()
    out.print(fact_table(facts), "")
    table = columns("ref", "snapshot", "arrays", "deltas", right=("arrays", "deltas"))
    refs = [(kind, one) for kind in ("branch", "tag") for one in found[_PLURAL[kind]]]
    for kind, ref in refs[:_SHOWN_REFS]:
        numbers = f"{ref['arrays']:,}", f"{ref['deltas']:,}"
        table.add_row(f"{kind} {ref['name']}", ref["snapshot_id"], *numbers)
    out.print(table, *more(len(refs) - _SHOWN_REFS), "")
    out.print(fact_table(("config", line) for line in _option_lines(repo)), "")
    table = columns("stored", "objects", "bytes", right=("objects", "bytes"))
    for kind, of in found["stored"].items():
        table.add_row(kind, f"{of['objects']:,}", bytes_text(of["nbytes"]))
    sums = [sum(of[name] for of in found["stored"].values()) for name in ("objects", "nbytes")]
    table.add_row("all", f"{sums[0]:,}", bytes_text(sums[1]), style="bold")
    out.print(table)


_PLURAL: Final = {"branch": "branches", "tag": "tags"}


def _info(repo: Repository) -> dict[str, Any]:
    from zarr_manifests.format.envelope import FORMAT_VERSION
    from zarr_manifests.format.root import ROOT_KEY, Root

    root = Root.from_object(repo.storage.get_tagged(ROOT_KEY).data)
    objects: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with progress("looking at what is stored"):
        for one in counted("looking at what is stored", repo.storage.list()):
            kind = one.key.partition("/")[0]
            objects[kind] += 1
            sizes[kind] += one.nbytes
    heads = {"branches": repo.list_branches(), "tags": repo.list_tags()}
    return {
        "url": repo.storage.url,
        "repository_id": root.repository_id,
        "format": FORMAT_VERSION,
        "root_version": root.version,
        "root_written_at": datetime.fromtimestamp(root.written_ms / 1000, UTC),
        "last_on_main": next(repo.ancestry(limit=1)),
        **{kind: [_ref(repo, *one) for one in of.items()] for kind, of in heads.items()},
        "metadata": repo.metadata(),
        "config": repo.config.to_dict(),
        "stored": {
            kind: {"objects": objects[kind], "nbytes": n} for kind, n in sizes.most_common()
        },
    }


def _ref(repo: Repository, name: str, snapshot_id: str) -> dict[str, Any]:
    from zarr_manifests.format.nodes import NodeKind
    from zarr_manifests.store import contents_of

    view = contents_of(repo.readonly_session(snapshot_id).store).view
    arrays = sum(node.kind is NodeKind.ARRAY for node in view.nodes.values())
    deltas = len(view.snapshot.deltas)
    return {"name": name, "snapshot_id": snapshot_id, "arrays": arrays, "deltas": deltas}


def _option_lines(repo: Repository) -> list[str]:
    """The options, with only a summary of the manifest sets."""
    lines = []
    for name, value in repo.config.to_dict().items():
        if name == "chunk-manifests":
            planned = repo.config.chunk_manifests
            counts = count_text(len(planned.sets), "set"), count_text(len(planned.rules), "rule")
            lines.append(f"{name}: {', '.join(counts)} (see `zarr-manifests config show`)")
        elif isinstance(value, dict):
            lines += [f"{name}.{inner}: {one}" for inner, one in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return lines


def value_text(value: object) -> str:
    """The value on one line; text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
