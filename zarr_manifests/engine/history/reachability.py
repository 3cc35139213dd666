"""Everything that a snapshot, an index or a page refers to, directly or not.

All references are followed without interpretation: the whole read list, each commit's own delta,
digests, the base and its pages, all manifests, and every chunk object that a row refers to. Only a
page of history is needed no more once the newest snapshot that it covers has expired. Objects are
loaded many at once, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import Delta, Digest
from zarr_manifests.format.history_pages import HistoryPage, HistoryPageRef
from zarr_manifests.format.index import Bitmaps, IndexDirectory, UnknownIndex
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Base
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import MarksPage, Snapshot
from zarr_manifests.format.zone_maps import ZonePages, Zones
from zarr_manifests.progress import expect, tell
from zarr_manifests.runtime import Runtime

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Link:
    """A pointer to an object of that kind.

    `parts` lists a manifest's tables, and `page` describes a page of history, according to the
    pointer. `of_page` says that the pointer is to a page of a base, or in one: other pages may list
    other tables of the same manifest.
    """

    ref: BlobRef
    kind: type[Any]
    parts: tuple[Part, ...] | None = None
    of_page: bool = False
    page: HistoryPageRef | None = None

    def check(self, value: Any) -> None:
        """Raise if a manifest or a page of history holds something else than its pointer says."""
        if self.page is not None:
            self.page.check(value)
        if self.parts is None or not isinstance(value, Manifest):
            return
        nodes = {part.node_id for part in self.parts} if self.of_page else None
        held = value.directory()
        if self.parts != tuple(p for p in held if nodes is None or p.node_id in nodes):
            raise CorruptObjectError(f"{self.ref.key} has other chunk tables than it should")

    def is_within(self, snapshots: Container[str]) -> bool:
        """Whether it is needed if these snapshots are in history, given their keys."""
        return self.page is None or self.page.newest.key in snapshots


def _manifests(refs: Iterable[ManifestRef], *, of_page: bool = False) -> Iterator[Link]:
    return (Link(ref.blob, Manifest, ref.parts, of_page) for ref in refs)


def _pages(refs: Iterable[HistoryPageRef]) -> Iterator[Link]:
    return (Link(ref.blob, HistoryPage, page=ref) for ref in refs)


def children(value: Any, *, of_page: bool = False) -> Iterator[Link]:
    """The metadata objects that an object names, except a snapshot's parent.

    `of_page` says that the object is a page of a base.
    """
    match value:
        case Snapshot():
            yield Link(value.log, Delta)
            if value.base is not None:
                yield Link(value.base, Base)
            for entry in value.deltas:
                yield Link(entry.log, Delta)
                if entry.zones is not None:
                    yield Link(entry.zones, Zones)
                yield from _manifests(entry.manifests)
            yield from (Link(entry.blob, Digest) for entry in value.digests)
            if value.marks_page is not None:
                yield Link(value.marks_page, MarksPage)
            yield from _pages(value.history.pages)
        case HistoryPage():
            yield from _pages(value.pages)
        case Base():
            paged = of_page or bool(value.leaf_pages)
            yield from _manifests(value.manifests, of_page=paged)
            yield from (Link(page.blob, Base, of_page=True) for page in value.pages)
            yield from (Link(page.blob, Base, of_page=True) for page in value.leaf_pages)
        case Delta():
            yield from _manifests(value.manifests)
        case IndexDirectory():
            yield from (Link(blob, Bitmaps) for blob in value.blobs)
            yield from (Link(blob, ZonePages) for blob in value.zones.values())
            yield from (Link(blob, UnknownIndex) for blob in value.others.values())
        case ZonePages():
            yield from (Link(blob, Zones) for blob in value.blobs)


def tables(value: Any) -> Iterator[ChunkTable]:
    """The chunk tables stored in the object itself."""
    manifest = {Delta: "embedded", Digest: "tables"}.get(type(value))
    held = value if isinstance(value, Manifest) else getattr(value, manifest or "", None)
    if isinstance(held, Manifest):
        yield from (held.decode(part, data) for part, data in held.parts)


def follow(
    runtime: Runtime,
    starts: Iterable[Link],
    load: Callable[[Link], Any],
    seen: set[str],
    wanted: Callable[[Link], bool],
    stage: str = "",
) -> Iterator[tuple[Link, Any]]:
    """All wanted objects that the links lead to, each once, with the result of `load`.

    Keys in `seen` are skipped, and visited keys are added to it. If `load` returns None, references
    of that object are not followed. `progress` is told how many of the objects found so far were
    loaded.
    """
    due: list[Link] = []
    known: set[str] = set()
    done = 0

    def add(links: Iterable[Link]) -> None:
        fresh = [link for link in links if link.ref.key not in seen and wanted(link)]
        known.update(link.ref.key for link in fresh)
        due.extend(fresh)

    add(starts)
    expect(stage, len(known))
    tell(stage, 0)
    while due:
        links: list[Link] = []
        while due and len(links) < _AT_ONCE:
            link = due.pop()
            if link.ref.key not in seen:
                seen.add(link.ref.key)
                links.append(link)
        for link, value in zip(
            links, runtime.parallel([partial(load, link) for link in links]), strict=True
        ):
            yield link, value
            add(children(value, of_page=link.of_page))
        done += len(links)
        expect(stage, len(known))
        tell(stage, done)
