"""`zarr-manifests info`: what a repository is, what it contains, and its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.table import Table

from zarr_manifests.cli.console import (
    Options,
    Url,
    columns,
    console,
    open_at,
)
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, count_text, time_text, written_text

if TYPE_CHECKING:
    from zarr_manifests.config import RepositoryConfig
    from zarr_manifests.format.root import Root
    from zarr_manifests.repository import Repository
    from zarr_manifests.storage import Storage

__all__ = ["run"]

_SHOWN_REFS = 20


def run(url: Url, option: Options = None) -> None:
    """Show what a repository is, its branches and tags, and its size."""
    from zarr_manifests.format.root import ROOT_KEY, Root

    repo = open_at(url, option)
    root = Root.from_object(repo.storage.get_tagged(ROOT_KEY).data)
    out = console()
    out.print(_facts(repo, root))
    out.print()
    out.print(_refs(repo))
    out.print()
    with out.status("Looking at what is stored ..."):
        stored = _stored(repo.storage)
    out.print(stored)


def _facts(repo: Repository, root: Root) -> Table:
    from zarr_manifests.format.envelope import FORMAT_VERSION

    facts = columns("", "")
    facts.show_header = False
    facts.columns[0].style = "dim"
    facts.add_row("repository", repo.url)
    facts.add_row("id", root.repository_id)
    facts.add_row("format", str(FORMAT_VERSION))
    written_at = datetime.fromtimestamp(root.written_ms / 1000, UTC)
    facts.add_row("root state", f"version {root.version:,}, {time_text(written_at)}")
    last = next(repo.ancestry())
    done = ", ".join(filter(None, (last.kind, written_text(last.written))))
    facts.add_row("last on main", f"{plain_text(last.message)} [{done}]")
    for line in _options(repo.config):
        facts.add_row("config", line)
    return facts


def _options(config: RepositoryConfig) -> Iterator[str]:
    """The options, with only a summary of the manifest sets."""
    options = config.to_dict()
    del options["chunk-manifests"]
    for name, value in options.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}: {plain}" for inner, plain in value.items())
        else:
            yield f"{name}: {value}"
    planned = config.chunk_manifests
    counts = (count_text(len(planned.sets), "set"), count_text(len(planned.rules), "rule"))
    yield f"chunk-manifests: {', '.join(counts)} (see `zarr-manifests config show`)"


def _refs(repo: Repository) -> Table:
    """Branches and tags, each with its arrays and the number of live deltas."""
    from zarr_manifests.format.nodes import NodeKind
    from zarr_manifests.store import contents_of

    heads = {f"branch {name}": head for name, head in repo.list_branches().items()}
    heads |= {f"tag {name}": head for name, head in repo.list_tags().items()}
    numbers = ("arrays", "deltas")
    table = columns("ref", "snapshot", *numbers, right=numbers, whole=("snapshot",))
    for name, snapshot_id in list(heads.items())[:_SHOWN_REFS]:
        view = contents_of(repo.readonly_session(snapshot_id=snapshot_id).store).view
        arrays = sum(node.kind is NodeKind.ARRAY for node in view.nodes.values())
        table.add_row(name, snapshot_id, f"{arrays:,}", f"{len(view.snapshot.deltas):,}")
    if len(heads) > _SHOWN_REFS:
        table.add_row(f"... and {len(heads) - _SHOWN_REFS:,} more")
    return table


def _stored(storage: Storage) -> Table:
    """Objects and bytes, by top-level folder."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in storage.list():
        kind = info.key.partition("/")[0]
        counts[kind] += 1
        sizes[kind] += info.nbytes
    table = columns("stored", "objects", "bytes", right=("objects", "bytes"))
    for kind, nbytes in sizes.most_common():
        table.add_row(kind, f"{counts[kind]:,}", bytes_text(nbytes))
    table.add_row("all", f"{counts.total():,}", bytes_text(sizes.total()), style="bold")
    return table
