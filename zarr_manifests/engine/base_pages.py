"""The base of a snapshot, loaded page by page.

A path or node id is looked up in the one page that may have it; what is needed of several pages is
fetched in one round. A base without pages of nodes is one page for all paths, and is here already.

Invariants: a page is compared with its pointer before it is used, and a page that cannot be loaded
is an error, never an absent node. What is loaded is kept as long as the view, and in the objects'
cache while there is room.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import itemgetter
from typing import Final, NoReturn

from msgspec import Struct

from zarr_manifests.engine.objects import ObjectReader
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.manifest import (
    Base,
    Count,
    Delta,
    LeafPage,
    ManifestRef,
    Node,
    NodePage,
    grouped,
    path_order,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.tables import EMPTY, BaseIndex, PlacedLeaf, combined_refs

_parent: Final = itemgetter(slice(2))
"""What the order of paths begins with: whether it is an opaque entry, and the parent path."""


_FIRST: Final = path_order("")
_LAST: Final = (True, chr(0x10FFFF), "")
"""Not after any path, and after all of them."""
_NONE: Final[Mapping[str, None]] = {}


class PathIndex:
    """Paths by directory, in the order they were added.

    A directory is a text that ends with a slash, or is empty; a path is in the directory that ends
    with its last slash. The root's path, which is empty, is in no directory. Readers need no lock
    if one thread at a time changes the index.

    Parameters
    ----------
    paths : iterable of str
        The first paths.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._paths: dict[str, dict[str, None]] = {}
        self._directories: dict[str, dict[str, None]] = {}
        for path in paths:
            self.add(path)

    def paths(self, directory: str) -> Mapping[str, None]:
        """The paths right in the directory, as keys."""
        return self._paths.get(directory, _NONE)

    def directories(self, directory: str) -> Mapping[str, None]:
        """The directories right in the directory that have paths at any depth, as keys."""
        return self._directories.get(directory, _NONE)

    def add(self, path: str) -> None:
        """Add a path; the root's is left out."""
        if not path:
            return
        directory = path[: path.rfind("/") + 1]
        self._paths.setdefault(directory, {})[path] = None
        while directory:
            inner, directory = directory, _above(directory)
            beside = self._directories.setdefault(directory, {})
            if inner in beside:
                return
            beside[inner] = None

    def discard(self, path: str) -> None:
        """Remove a path, if it is there."""
        directory = path[: path.rfind("/") + 1]
        beside = self._paths.get(directory, {})
        beside.pop(path, None)
        if not beside:
            self._paths.pop(directory, None)
        while directory and directory not in self._paths and directory not in self._directories:
            inner, directory = directory, _above(directory)
            beside = self._directories.get(directory, {})
            beside.pop(inner, None)
            if not beside:
                self._directories.pop(directory, None)


def _above(directory: str) -> str:
    """The directory that this one is in."""
    return directory[: directory.rfind("/", 0, -1) + 1]


class NodesPage(Struct, frozen=True, dict=True):
    """A page of nodes, or a base without pages of nodes; its nodes by path and by id."""

    base: Base
    by_path: Mapping[str, Node]
    by_id: Mapping[bytes, Node]

    @classmethod
    def of(cls, base: Base) -> NodesPage:
        """The page, whose nodes have different ids."""
        by_path = {node.path: node for node in base.nodes}
        return cls(base, by_path, {node.node_id: node for node in base.nodes})

    @cached_property
    def paths(self) -> PathIndex:
        """The paths by directory."""
        return PathIndex(self.by_path)

    @cached_property
    def index(self) -> BaseIndex:
        """An index of its leaves."""
        return index_of(self.base.manifests)


def index_of(manifests: Sequence[ManifestRef]) -> BaseIndex:
    """An index of these leaves.

    Raises
    ------
    CorruptObjectError
        If a manifest is listed twice.
    """
    try:
        return BaseIndex(manifests)
    except InvalidArgumentError as error:
        raise CorruptObjectError(str(error)) from error


class BasePages:
    """The pages of a base. Thread-safe.

    Parameters
    ----------
    objects : ObjectReader
        Loads the pages.
    base : Base
        The base.
    ref : BlobRef or None
        The pointer to it; None if the snapshot has no base, which is then an empty one.

    Attributes
    ----------
    is_inline : bool
        Whether all nodes and leaves are in the base itself.
    """

    def __init__(self, objects: ObjectReader, base: Base, ref: BlobRef | None) -> None:
        self.base = base
        self.is_inline = not (base.pages or base.leaf_pages)
        self._objects = objects
        self._starts = [path_order(link.first) for link in base.pages] or [_FIRST]
        self._ends = [path_order(link.last) for link in base.pages] or [_LAST]
        self._pages: dict[int, NodesPage] = {}
        self._page_of: dict[bytes, int] = {}  # by id of the nodes in loaded pages
        self._large = grouped((link.node_id, link) for link in base.leaf_pages)
        self._indexes: dict[tuple[str, ...], BaseIndex] = {}  # by keys of pages of leaves
        if not base.pages:
            self._keep(0, ref, base)

    # --- nodes -------------------------------------------------------------------------------

    def at(self, path: str) -> int | None:
        """The number of the page that may have the path; None if there is none."""
        if not self.base.pages:
            return 0
        order = path_order(path)
        at = bisect_right(self._starts, order) - 1
        return at if at >= 0 and order <= self._ends[at] else None

    def is_here(self, path: str) -> bool:
        """Whether looking the path up needs no page that is not loaded."""
        at = self.at(path)
        return at is None or at in self._pages

    def node(self, path: str) -> Node | None:
        """The node at the path."""
        at = self.at(path)
        return None if at is None else self.page(at).by_path.get(path)

    def page(self, number: int) -> NodesPage:
        """The page of nodes with that number."""
        return self._pages.get(number) or self.load((number,))[0]

    def members(self, directory: str) -> range:
        """The numbers of the pages that may have nodes right in a directory.

        It ends with a slash, or is empty.
        """
        parent = path_order(directory)[:2]
        first = bisect_left(self._ends, parent, key=_parent)
        return range(first, bisect_right(self._starts, parent, key=_parent))

    def below(self, directory: str) -> range:
        """The numbers of the pages that may have nodes in directories in this one."""
        if not directory:
            return range(bisect_right(self._ends, (False, ""), key=_parent), len(self._starts))
        opaque = directory.startswith("/")
        end = directory[:-1] + chr(ord("/") + 1)  # follows all that start with the directory
        first = bisect_left(self._ends, (opaque, directory), key=_parent)
        return range(first, bisect_left(self._starts, (opaque, end), key=_parent))

    def loaded(self) -> list[NodesPage]:
        """The pages that are loaded."""
        return list(self._pages.values())

    def load(self, numbers: Iterable[int]) -> list[NodesPage]:
        """The pages with these numbers; missing ones are fetched in one round."""
        wanted = list(numbers)
        if due := {at: self.base.pages[at] for at in wanted if at not in self._pages}:
            found = self._objects.load_all([(link.blob, Base) for link in due.values()])
            for at, link in due.items():
                self.base.check_page(link, found[link.blob.key])
                self._keep(at, link.blob, found[link.blob.key])
        return [self._pages[at] for at in wanted]

    def _keep(self, at: int, blob: BlobRef | None, base: Base) -> None:
        make = partial(NodesPage.of, base)  # once for all views
        page = make() if blob is None else self._objects.derived(blob, NodesPage, make)
        pages = set(map(self._page_of.setdefault, page.by_id, repeat(at)))
        if pages - {at} or len(page.by_id) != len(base.nodes):
            raise CorruptObjectError("base: two nodes have the same id")
        self._pages[at] = page

    def all(self) -> list[NodesPage]:
        """All pages of nodes, in order."""
        return self.load(range(len(self._starts)))

    def page_with(self, node_id: bytes, near: Iterable[str] | None) -> int | None:
        """The number of the page with that node; None if the base does not have it.

        `near` are the paths that the node may have in the base; None if any is possible.
        """
        at = self._page_of.get(node_id)
        if at is None and near is not None:
            self.load({at for path in near if (at := self.at(path)) is not None})
        elif at is None:
            self.all()
        return self._page_of.get(node_id)

    # --- leaves and counts ---------------------------------------------------------------------

    def large(self, node_id: bytes) -> Sequence[LeafPage]:
        """The pages of leaves of that node."""
        return self._large.get(node_id, ())

    def leaves(self, links: Sequence[LeafPage]) -> BaseIndex:
        """An index of the leaves in these pages; missing ones are fetched in one round."""
        keys = tuple(link.blob.key for link in links)
        found = self._indexes.get(keys)
        if found is None:
            found = index_of([ref for page in self.leaf_bases(links) for ref in page.manifests])
            self._indexes[keys] = found
        return found

    def leaf_bases(self, links: Sequence[LeafPage]) -> list[Base]:
        """These pages of leaves; missing ones are fetched in one round."""
        loaded = self._objects.load_all([(link.blob, Base) for link in links])
        for link in links:
            self.base.check_page(link, loaded[link.blob.key])
        return [loaded[link.blob.key] for link in links]

    def pages(self) -> list[Base]:
        """All pages of nodes, in order."""
        return [page.base for page in self.all()]

    def linked_pages(self) -> list[tuple[NodePage, Base]]:
        """All pages of nodes and the pointers to them; none if the base has its nodes inline."""
        return [*zip(self.base.pages, self.pages(), strict=False)]

    def manifests(self) -> tuple[ManifestRef, ...]:
        """All leaves, each manifest once."""
        if self.is_inline:
            return self.base.manifests
        pages = [*self.pages(), *self.leaf_bases(self.base.leaf_pages)]
        return combined_refs(ref for page in pages for ref in page.manifests)

    def manifests_here(self) -> tuple[ManifestRef, ...]:
        """The leaves in pages of nodes that are loaded."""
        return combined_refs(ref for page in self.loaded() for ref in page.base.manifests)

    def counts(self) -> tuple[Count, ...]:
        """The counts of all nodes."""
        return tuple(count for page in self.pages() for count in page.counts)


class PagedNodes(Mapping[str, Node]):
    """The nodes of a snapshot by path: those in pages, changed by live deltas.

    Looking up a path loads one page at most; going through all nodes loads all pages.

    Parameters
    ----------
    pages : BasePages
        The pages.
    changes : iterable of Delta
        What has changed since, oldest first.
    """

    def __init__(self, pages: BasePages, changes: Iterable[Delta]) -> None:
        self.pages = pages
        self.made: dict[str, Node] = {}
        self._gone: dict[str, None] = {}
        for found in changes:
            for path in found.deleted:
                self.made.pop(path, None)
            self._gone.update(dict.fromkeys(found.deleted))
            self.made.update((node.path, node) for node in found.nodes)
        self.changed: Mapping[str, Node | None] = {**self._gone, **self.made}

    def find(self, path: str) -> Node | None:
        """The node at the path."""
        return self.changed[path] if path in self.changed else self.pages.node(path)

    def __getitem__(self, path: str) -> Node:
        node = self.find(path)
        if node is None:
            raise KeyError(path)
        return node

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.find(path) is not None

    def __iter__(self) -> Iterator[str]:
        new = dict(self.made)
        for maps in self.pages.all():
            for path in maps.by_path:
                if path not in self._gone:
                    new.pop(path, None)  # a node that was not deleted keeps its place
                    yield path
        yield from new

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def here(self) -> Iterator[Node]:
        """The nodes in pages that are loaded, and those in live deltas."""
        for maps in self.pages.loaded():
            yield from (n for path, n in maps.by_path.items() if path not in self.changed)
        yield from self.made.values()

    def __reduce__(self) -> NoReturn:
        raise TypeError("the nodes of a snapshot are not pickled")


class PagedPaths:
    """The paths of a snapshot by directory: those in pages, and those in live deltas.

    They include paths of nodes that live deltas have deleted.
    """

    def __init__(self, nodes: PagedNodes) -> None:
        self._pages, self._changed = nodes.pages, nodes.changed

    @cached_property
    def _live(self) -> PathIndex:
        return PathIndex(self._changed)

    def paths(self, directory: str) -> Mapping[str, None]:
        """The paths right in the directory, as keys."""
        found: dict[str, None] = {}
        for maps in self._pages.load(self._pages.members(directory)):
            found.update(maps.paths.paths(directory))
        return {**found, **self._live.paths(directory)}

    def directories(self, directory: str) -> Mapping[str, None]:
        """The directories right in the directory that have paths at any depth, as keys."""
        return self._directories(directory, self._pages.below(directory))

    def unlisted(self, directory: str) -> Mapping[str, None]:
        """Those of its directories that may have paths though there is no node at their own."""
        if directory.startswith("/"):  # no directory of opaque entries has a node
            return self.directories(directory)
        links = self._pages.base.pages
        below = self._pages.below(directory)
        found = self._directories(directory, [at for at in below if not links or links[at].orphans])
        gone = [p for p in self._live.paths(directory) if self._changed[p] is None]
        return {**found, **{f"{path}/": None for path in gone}}

    def _directories(self, directory: str, numbers: Sequence[int]) -> dict[str, None]:
        found: dict[str, None] = {}
        for maps in self._pages.load(numbers):
            found.update(maps.paths.directories(directory))
        return {**found, **self._live.directories(directory)}


type Corner = Sequence[int]


class NodeIds(Mapping[bytes, Node]):
    """The nodes of a snapshot by id.

    Looking up the node of a page that is not loaded yet loads all pages.
    """

    def __init__(self, nodes: PagedNodes) -> None:
        self._nodes = nodes
        self._changed = {node.node_id: node for node in nodes.made.values()}
        self._searched = False

    def page_of(self, node_id: bytes) -> int | None:
        """The number of the page of the base that has the node, at whatever path."""
        # A node that a live delta has changed or moved had a path that the delta names.
        node = self._changed.get(node_id)
        pages, changed = self._nodes.pages, self._nodes.changed
        if node is None:
            return pages.page_with(node_id, None)
        found = pages.page_with(node_id, (node.path,))
        if found is None and not self._searched:
            found = pages.page_with(node_id, changed)
            self._searched = True  # nodes at all these paths are known now
        return found

    def __getitem__(self, node_id: bytes) -> Node:
        node = self._changed.get(node_id)
        if node is None:
            pages = self._nodes.pages
            at = pages.page_with(node_id, None)
            node = None if at is None else pages.page(at).by_id[node_id]
            if node is None or node.path in self._nodes.changed:
                raise KeyError(node_id)
        return node

    def __iter__(self) -> Iterator[bytes]:
        return (node.node_id for node in self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)


class PagedIndex(BaseIndex):
    """The leaves of a base with pages: questions about one node load the pages that it needs."""

    def __init__(self, pages: BasePages, ids: NodeIds) -> None:
        super().__init__(())
        self._pages, self._ids = pages, ids

    def through(self, objects: ObjectReader) -> PagedIndex:
        """The same index, which loads its pages through these objects."""
        pages = copy.copy(self._pages)
        pages._objects = objects
        return PagedIndex(pages, self._ids)

    def _at(self, node_id: bytes, lo: Corner = (), hi: Corner = ()) -> BaseIndex:
        """An index that has all leaves of the node; with corners, those that overlap [lo, hi)."""
        large = self._pages.large(node_id)
        if large:
            due = [link for link in large if _touches(link.box, lo, hi)]
            return self._pages.leaves(due) if due else EMPTY
        at = self._ids.page_of(node_id)
        return EMPTY if at is None else self._pages.page(at).index

    def refs(self, node_id: bytes) -> int:
        """The number of refs in all leaves of the node."""
        return self._at(node_id).refs(node_id)

    def placed(self, node_id: bytes) -> Sequence[PlacedLeaf]:
        """The leaves of the node."""
        return self._at(node_id).placed(node_id)

    def overlapping(self, node_id: bytes, lo: IndexArray, hi: IndexArray) -> list[PlacedLeaf]:
        """The leaves of the node that overlap [lo, hi), which may be larger than a box."""
        return self._at(node_id, lo.tolist(), hi.tolist()).overlapping(node_id, lo, hi)

    def holding(self, node_id: bytes, coords: Coords) -> list[PlacedLeaf]:
        """The leaves of the node that hold a chunk: one at most, unless leaves overlap."""
        return self._at(node_id, coords, [c + 1 for c in coords]).holding(node_id, coords)

    def around(self, node_id: bytes) -> Box | None:
        """The smallest box around the node's leaves; None if it has none."""
        large = self._pages.large(node_id)
        return (
            Box.around(link.box for link in large) if large else self._at(node_id).around(node_id)
        )

    def merged_at(self, node_id: bytes, coords: IndexArray) -> IndexArray:
        """What the leaf of each coordinate (int64[n, ndim]) is merged to; -1 where none is."""
        return self._around(node_id, coords).merged_at(node_id, coords)

    def _around(self, node_id: bytes, coords: IndexArray) -> BaseIndex:
        """An index that has all leaves around these coordinates."""
        if not len(coords):
            return EMPTY
        return self._at(node_id, coords.min(0).tolist(), (coords.max(0) + 1).tolist())


def _touches(box: Box, lo: Corner, hi: Corner) -> bool:
    """Whether they overlap; not `overlaps`, which says no for boxes without coordinates."""
    if box.ndim != len(lo):
        return True  # whoever looks into the leaves says what is wrong
    sides = zip(box.lo, box.hi, lo, hi, strict=True)
    return all(a < d and c < b for a, b, c, d in sides)
