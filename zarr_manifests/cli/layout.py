"""`zarr-manifests explain`: which manifests hold refs now, or would, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group

from zarr_manifests.cli.arguments import At, Json, Options, Url, open_at, verb
from zarr_manifests.cli.config import read_config
from zarr_manifests.cli.console import console, progress, show
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.rendering import columns
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import ArrayPlace, ManifestLayout, ReadCost

__all__ = ["run"]


@verb
def run(
    url: Url,
    array: str | None = None,
    *,
    at: At = "main",
    config: str | None = None,
    plot: str | None = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show each array's matching rule, its set and manifests, and why it overflowed.

    Parameters
    ----------
    array :
        Show the leaves of this array.
    config : -c FILE
        What a full compaction with this configuration would give; a YAML file, - for standard
        input. Nothing is written.
    plot :
        Draw it into this PNG file (needs matplotlib).
    """
    if config is not None and array is not None:
        raise InvalidArgumentError("give an ARRAY or --config, not both")
    given = None if config is None else read_config(config)
    repo, out = open_at(url, option), console()
    with progress("planning"):
        now = repo.explain_manifests(at, costs=given is not None)
        then = now if given is None else repo.explain_manifests(at, config=given)
    if array is not None:
        chosen = _named(now, array)
        show(chosen, as_json, None if as_json else _leaves(now, chosen))
    elif as_json:
        show(now if given is None else {"now": now, "then": then}, as_json)
    else:
        out.print(then.snapshot_id, style="yellow")
        out.print(_arrays(then), "", _manifests(then), sep="\n")
        if given is not None:
            out.print(f"now:    {_sum(now)}", f"then:   {_sum(then)}", "", sep="\n")
            out.print(_costs(now, then))
    if plot is not None:
        _plot(plot, then, "Manifests" if given is None else "Manifests as planned")


def _arrays(layout: ManifestLayout) -> Any:
    numbers = ("rule", "leaves", "refs", "pending")
    table = columns("array", "rule", "set", "manifests", *numbers[1:], "overflowed",
                    right=numbers, whole=("array",))  # fmt: skip
    for array in layout.arrays:
        sets = dict.fromkeys(layout.manifests[i].set_name for i in array.manifests)
        table.add_row(
            array.path,
            "" if array.rule is None else str(array.rule),
            ", ".join(sets) or array.wanted,
            _numbers(array.manifests),
            f"{len(array.leaves):,}",
            f"{array.refs:,}",
            f"{array.pending_refs:,}" if array.pending_refs else "",
            "; ".join(f"{of.set_name}: {of.why}" for of in array.overflows),
        )
    return table


def _manifests(layout: ManifestLayout) -> Any:
    numbers = ("arrays", "refs", "bytes")
    table = columns("manifest", "set", *numbers, "key", right=numbers)
    for i, one in enumerate(layout.manifests, 1):
        size = bytes_text(one.nbytes)
        table.add_row(str(i), one.set_name, f"{one.arrays:,}", f"{one.refs:,}", size, one.key or "")
    return table


def _leaves(layout: ManifestLayout, array: ArrayPlace) -> Any:
    table = columns("from chunk", "to before", "refs", "manifest", "set", right=("refs",))
    rule = "no rule matched" if array.rule is None else f"rule {array.rule} matched"
    lines = [layout.snapshot_id, f"{array.path}: {rule}, so it belongs to set {array.wanted}"]
    lines += [f"overflowed {overflow.set_name}: {overflow.why}" for overflow in array.overflows]
    if array.pending_refs:
        lines.append(f"{count_text(array.pending_refs, 'ref')} of commits since, in no leaf yet")
    for leaf in array.leaves:
        ends = (str(list(end)) for end in (leaf.lo, leaf.hi))
        where = layout.manifests[leaf.manifest].set_name
        table.add_row(*ends, f"{leaf.refs:,}", str(leaf.manifest + 1), where)
    return Group(*lines, table)


def _named(layout: ManifestLayout, array: str) -> ArrayPlace:
    from zarr_manifests.keys import absolute, no_array

    path = absolute(array.strip("/"))
    for one in layout.arrays:
        if one.path == path:
            return one
    arrays = (one.path for one in layout.arrays)
    raise no_array(path, arrays, f" in snapshot {layout.snapshot_id}")


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


def _costs(now: ManifestLayout, then: ManifestLayout) -> Any:
    def said(cost: ReadCost) -> str:
        return f"{count_text(cost.requests, 'request')}, {bytes_text(cost.nbytes)}"

    table = columns("to read for", "now", "then", right=("now", "then"))
    for name, what in (
        ("opening", "opening"),
        ("coordinates", "then all coordinates"),
        ("last_step", "then one more step"),
    ):
        table.add_row(what, said(getattr(now.costs, name)), said(getattr(then.costs, name)))
    return table


def _plot(file: str, layout: ManifestLayout, title: str) -> None:
    from pathlib import Path

    try:
        from zarr_manifests.cli.picture import draw

        draw(Path(file), layout, title)
    except ImportError as error:
        raise InvalidArgumentError(
            f"--plot needs {error.name}: install zarr-manifests[plot]"
        ) from error
    except OSError as error:
        raise InvalidArgumentError(f"{file} cannot be written: {error.strerror}") from error
