"""`zarr-manifests info`: what a repository is, what it contains, and its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table

from zarr_manifests.cli.arguments import Json, Options, Url, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.config import value_text
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.plain import plain_text
from zarr_manifests.progress import counted
from zarr_manifests.texts import bytes_text, count_text, time_text, written_text

if TYPE_CHECKING:
    from zarr_manifests.config import Config
    from zarr_manifests.format.root import Root
    from zarr_manifests.repository import Repository

__all__ = ["run"]

_SHOWN_REFS = 20


def run(url: Url, as_json: Json = False, option: Options = None) -> None:
    """Show what a repository is, its branches and tags, its size, metadata and configuration."""
    from zarr_manifests.format.root import ROOT_KEY, Root

    repo = open_at(url, option)
    root = Root.from_object(repo.storage.get_tagged(ROOT_KEY).data)
    if as_json:
        print_json(_everything(repo, root))
        return
    out = console()
    out.print(_facts(repo, root))
    out.print()
    out.print(_refs(repo))
    out.print()
    out.print(_options(repo.config))
    out.print()
    out.print(_sizes(_stored(repo)))


def _everything(repo: Repository, root: Root) -> dict[str, Any]:
    from zarr_manifests.format.envelope import FORMAT_VERSION

    def listed(heads: Mapping[str, str]) -> list[dict[str, Any]]:
        return [{"name": name, **_ref(repo, head)} for name, head in heads.items()]

    return {
        "url": repo.storage.url,
        "repository_id": root.repository_id,
        "format": FORMAT_VERSION,
        "root_version": root.version,
        "root_written_at": _written_at(root),
        "last_on_main": next(repo.ancestry(limit=1)),
        "branches": listed(repo.list_branches()),
        "tags": listed(repo.list_tags()),
        "metadata": repo.metadata(),
        "config": repo.config.to_dict(),
        "stored": {
            kind: {"objects": objects, "nbytes": nbytes}
            for kind, (objects, nbytes) in _stored(repo).items()
        },
    }


def _written_at(root: Root) -> datetime:
    return datetime.fromtimestamp(root.written_ms / 1000, UTC)


def _facts(repo: Repository, root: Root) -> Table:
    from zarr_manifests.format.envelope import FORMAT_VERSION

    facts = _named_facts()
    facts.add_row("repository", repo.storage.url)
    facts.add_row("id", root.repository_id)
    facts.add_row("format", str(FORMAT_VERSION))
    facts.add_row("root state", f"version {root.version:,}, {time_text(_written_at(root))}")
    last = next(repo.ancestry(limit=1))
    done = ", ".join(filter(None, (last.kind, written_text(last.written))))
    facts.add_row("last on main", f"{plain_text(last.message)} [{done}]")
    for name, value in repo.metadata().items():
        facts.add_row("metadata", f"{plain_text(name)}: {value_text(value)}")
    return facts


def _options(config: Config) -> Table:
    facts = _named_facts()
    for line in _option_lines(config):
        facts.add_row("config", line)
    return facts


def _named_facts() -> Table:
    facts = columns("", "")
    facts.show_header = False
    facts.columns[0].style = "dim"
    return facts


def _option_lines(config: Config) -> Iterator[str]:
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
    heads = {f"branch {name}": head for name, head in repo.list_branches().items()}
    heads |= {f"tag {name}": head for name, head in repo.list_tags().items()}
    numbers = ("arrays", "deltas")
    table = columns("ref", "snapshot", *numbers, right=numbers, whole=("snapshot",))
    for name, head in list(heads.items())[:_SHOWN_REFS]:
        ref = _ref(repo, head)
        table.add_row(name, head, f"{ref['arrays']:,}", f"{ref['deltas']:,}")
    if len(heads) > _SHOWN_REFS:
        table.add_row(f"... and {len(heads) - _SHOWN_REFS:,} more")
    return table


def _ref(repo: Repository, snapshot_id: str) -> dict[str, Any]:
    from zarr_manifests.format.nodes import NodeKind
    from zarr_manifests.store import contents_of

    view = contents_of(repo.readonly_session(snapshot_id).store).view
    arrays = sum(node.kind is NodeKind.ARRAY for node in view.nodes.values())
    return {"snapshot_id": snapshot_id, "arrays": arrays, "deltas": len(view.snapshot.deltas)}


def _stored(repo: Repository) -> dict[str, tuple[int, int]]:
    """Objects and bytes by top-level folder, the largest first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with progress("looking at what is stored") as told:
        for info in counted(told, "looking at what is stored", repo.storage.list()):
            kind = info.key.partition("/")[0]
            counts[kind] += 1
            sizes[kind] += info.nbytes
    return {kind: (counts[kind], nbytes) for kind, nbytes in sizes.most_common()}


def _sizes(stored: Mapping[str, tuple[int, int]]) -> Table:
    table = columns("stored", "objects", "bytes", right=("objects", "bytes"))
    for kind, (objects, nbytes) in stored.items():
        table.add_row(kind, f"{objects:,}", bytes_text(nbytes))
    objects = sum(count for count, _ in stored.values())
    nbytes = sum(nbytes for _, nbytes in stored.values())
    table.add_row("all", f"{objects:,}", bytes_text(nbytes), style="bold")
    return table
