"""`zarr-manifests explain`: which manifests hold refs now, or would, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zarr_manifests.cli.arguments import At, Json, Options, Url, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.config import read_config
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.config import Config
    from zarr_manifests.reports import ArrayPlace, ManifestLayout, ReadCost
    from zarr_manifests.repository import Repository

__all__ = ["run"]


def run(
    url: Url,
    array: Annotated[
        str | None,
        typer.Argument(help="Show the leaves of this array.", show_default=False),
    ] = None,
    at: At = "main",
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="What a full compaction with this configuration would give; a YAML file, - for "
            "standard input. Nothing is written.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", help="Draw it into this PNG file (needs matplotlib).", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show each array's matching rule, its set and manifests, and why it overflowed."""
    if config is None:
        _explain(open_at(url, option), at, array, plot, as_json)
    elif array is not None:
        raise InvalidArgumentError("give an ARRAY or --config, not both")
    else:
        given = read_config(config)
        _plan(open_at(url, option), at, given, plot, as_json)


def _explain(repo: Repository, at: str, array: str | None, plot: str | None, as_json: bool) -> None:
    layout = repo.explain_manifests(at)
    chosen = None if array is None else _named(layout, array)
    if as_json:
        print_json(layout if chosen is None else chosen)
    else:
        out = console()
        out.print(layout.snapshot_id, style="yellow")
        if chosen is None:
            _print(out, layout)
        else:
            _print_leaves(out, layout, chosen)
    _plot(plot, layout, "Manifests")


def _plan(repo: Repository, at: str, config: Config, plot: str | None, as_json: bool) -> None:
    with progress("planning") as told:
        before = repo.explain_manifests(at, costs=True)
        after = repo.explain_manifests(at, config=config, progress=told)
    now, then = before.costs, after.costs
    assert now is not None
    assert then is not None
    if as_json:
        print_json({"now": before, "then": after})
        _plot(plot, after, "Manifests as planned")
        return
    out = console()
    out.print(after.snapshot_id, style="yellow")
    _print(out, after)
    out.print(f"now:    {_sum(before)}")
    out.print(f"then:   {_sum(after)}")
    out.print()
    table = columns("to read for", "now", "then", right=("now", "then"))
    table.add_row("opening", _requests(now.opening), _requests(then.opening))
    table.add_row("then all coordinates", _requests(now.coordinates), _requests(then.coordinates))
    table.add_row("then one more step", _requests(now.last_step), _requests(then.last_step))
    out.print(table)
    _plot(plot, after, "Manifests as planned")


def _print(out: Console, layout: ManifestLayout) -> None:
    table = columns("array", "rule", "set", "manifests", "leaves", "refs", "pending", "overflowed",
                    right=("rule", "leaves", "refs", "pending"), whole=("array",))  # fmt: skip
    for array in layout.arrays:
        sets = dict.fromkeys(layout.manifests[i].set_name for i in array.manifests)
        table.add_row(
            plain_text(array.path),
            "" if array.rule is None else str(array.rule),
            ", ".join(sets) or array.wanted,
            _numbers(array.manifests),
            f"{len(array.leaves):,}",
            f"{array.refs:,}",
            f"{array.pending_refs:,}" if array.pending_refs else "",
            "; ".join(f"{of.set_name}: {of.why}" for of in array.overflows),
        )
    out.print(table)
    numbers = ("arrays", "refs", "bytes")
    table = columns("manifest", "set", *numbers, "key", right=numbers)
    for i, one in enumerate(layout.manifests, 1):
        size = bytes_text(one.nbytes)
        table.add_row(str(i), one.set_name, f"{one.arrays:,}", f"{one.refs:,}", size, one.key or "")
    out.print()
    out.print(table)


def _print_leaves(out: Console, layout: ManifestLayout, array: ArrayPlace) -> None:
    rule = "no rule matched" if array.rule is None else f"rule {array.rule} matched"
    out.print(f"{plain_text(array.path)}: {rule}, so it belongs to set {array.wanted}")
    for overflow in array.overflows:
        out.print(f"overflowed {overflow.set_name}: {overflow.why}")
    if array.pending_refs:
        out.print(f"{count_text(array.pending_refs, 'ref')} of commits since, in no leaf yet")
    table = columns("from chunk", "to before", "refs", "manifest", "set", right=("refs",))
    for leaf in array.leaves:
        ends = (str(list(end)) for end in (leaf.lo, leaf.hi))
        where = layout.manifests[leaf.manifest].set_name
        table.add_row(*ends, f"{leaf.refs:,}", str(leaf.manifest + 1), where)
    out.print(table)


def _named(layout: ManifestLayout, array: str) -> ArrayPlace:
    from zarr_manifests.keys import absolute, no_array

    path = absolute(array.strip("/"))
    found = next((one for one in layout.arrays if one.path == path), None)
    if found is None:
        arrays = (one.path for one in layout.arrays)
        raise no_array(path, arrays, f" in snapshot {layout.snapshot_id}")
    return found


def _numbers(positions: tuple[int, ...]) -> str:
    """`1, 3-5`: counted from 1, as in the table of manifests."""
    parts: list[list[int]] = []
    for at in positions:
        if parts and parts[-1][-1] == at:
            parts[-1][-1] = at + 1
        else:
            parts.append([at + 1, at + 1])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _sum(layout: ManifestLayout) -> str:
    refs = sum(manifest.refs for manifest in layout.manifests)
    size = sum(manifest.nbytes for manifest in layout.manifests)
    pending = sum(array.pending_refs for array in layout.arrays)
    text = f"{count_text(len(layout.manifests), 'manifest')}, {count_text(refs, 'ref')}, "
    text += bytes_text(size)
    return text + (f", and {count_text(pending, 'ref')} pending" if pending else "")


def _requests(cost: ReadCost) -> str:
    return f"{count_text(cost.requests, 'request')}, {bytes_text(cost.nbytes)}"


def _plot(file: str | None, layout: ManifestLayout, title: str) -> None:
    if file is None:
        return
    try:
        from zarr_manifests.cli.picture import draw
    except ImportError as error:
        raise InvalidArgumentError(
            f"--plot needs {error.name}: install zarr-manifests[plot]"
        ) from error
    try:
        draw(Path(file), layout, title)
    except OSError as error:
        raise InvalidArgumentError(f"{file} cannot be written: {error.strerror}") from error
