"""Which refs and leases move from the root to pages, so that the root stays small.

Each section (the branches, the tags with deleted ones, or the leases) has pages in order of names,
each with its own range of names. When the root is too large, the section that takes the most room
moves names to one page: the page into whose range most of its names fall. Only that page is
rewritten, and split if it has become too large. Pages grow with the section, so that there are
never many more than `PAGES_MOST`. Invariants: `main` and the branch that was written last stay in
the root; an entry in the root takes precedence over one in a page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import pack
from zarr_manifests.format.pages import Page
from zarr_manifests.format.root import PageRef, Root
from zarr_manifests.ids import lineage_of

type Section = Literal["branches", "tags", "leases"]

SECTIONS: Final[tuple[Section, ...]] = ("branches", "tags", "leases")
ROOT_BYTES: Final = 8 * 1024
"""Size of the root, without copies, above which refs move to pages."""
PAGES_MOST: Final = 32
_ENTRIES_LEAST: Final = 256
_BULK_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class PageSpill:
    """The names that move from the root to one page of a section."""

    section: Section
    page: int | None
    names: tuple[str, ...]


def page_at(root: Root, section: Section, name: str) -> int | None:
    """Position of the page that may have the name; None if the root itself has it."""
    return None if name in _own(root, section) else _place(root.pages.get(section, ()), name)


def _own(root: Root, section: Section) -> set[str]:
    """The names that the root itself has, including deleted ones."""
    match section:
        case "branches":
            return {*root.branches, *root.deleted_branches}
        case "tags":
            return {*root.tags, *root.deleted_tags}
        case "leases":
            return {*(lease.name for lease in root.leases), *root.deleted_leases}


def lease_pages(root: Root, session: str) -> slice:
    """The pages that can have leases of the session or of its copies."""
    pages = root.pages.get("leases", ())
    # Their names start with the copies' common prefix, followed by hexadecimal digits or a slash.
    lineage = lineage_of(session)
    first, last = _place(pages, lineage), _place(pages, f"{lineage}g")
    return slice(0, 0) if first is None or last is None else slice(first, last + 1)


def checked(root: Root, section: Section, at: int, page: Page) -> Page:
    """Return the page if its names match what the root says about it.

    Raises
    ------
    CorruptObjectError
        If it has other names: they would be found in two places or in none.
    """
    refs = root.pages[section]
    names = page.names(section)
    stop = refs[at + 1].first if at + 1 < len(refs) else None
    sound = len(names) == len(page) == refs[at].count and all(
        refs[at].first <= name and (stop is None or name < stop) for name in names
    )
    if not sound:
        raise CorruptObjectError(f"{refs[at].blob.key} is not the expected page of {section}")
    return page


def _place(pages: Sequence[PageRef], name: str) -> int | None:
    if not pages:
        return None
    return max(0, bisect_right([page.first for page in pages], name) - 1)


def plan_spills(root: Root) -> list[PageSpill]:
    """Return what moves out of a root that is too large; empty if nothing can.

    It is one page's names, or all names of the section if it is very large.
    """
    written = root.log[-1].ref if root.log else ""
    movable = [name for name in root.branches if name not in ("main", written)]
    names: dict[Section, list[str]] = {
        "branches": [*movable, *root.deleted_branches],
        "tags": [*root.tags, *root.deleted_tags],
        "leases": [*(lease.name for lease in root.leases), *root.deleted_leases],
    }
    packed: dict[Section, bytes] = {
        "branches": pack([root.branches[name].pack() for name in movable]),
        "tags": pack([[name, ref.bare().pack()] for name, ref in root.tags.items()]),
        "leases": pack([lease.pack() for lease in root.leases]),
    }
    weights = {s: len(packed[s]) + sum(map(len, names[s])) for s in names}
    section = max(names, key=lambda section: weights[section])
    groups: dict[int | None, list[str]] = {}
    for name in names[section]:
        groups.setdefault(_place(root.pages.get(section, ()), name), []).append(name)
    spills = [PageSpill(section, page, tuple(group)) for page, group in groups.items()]
    spills.sort(key=lambda spill: (-len(spill.names), spill.page or 0))
    return spills if weights[section] > _BULK_BYTES else spills[:1]


def absorb(root: Root, spill: PageSpill, old: Page | None) -> list[tuple[str, int, Page]]:
    """Return the pages that replace `old`: first name, number of entries, page."""
    old = Page() if old is None else old
    branches, tags, leases = dict(old.branches), dict(old.tags), dict(old.leases)
    held = {lease.name: lease for lease in root.leases}
    for name in spill.names:
        match spill.section:
            case "branches":
                branches.pop(name, None)
                if name in root.branches:
                    branches[name] = root.branches[name].bare()
            case "tags":
                tags[name] = root.tags.get(name)
            case "leases":
                leases.pop(name, None)
                if name in held:
                    leases[name] = held[name]
    page = Page(branches, tags, leases)
    total = max(len(page), sum(page.count for page in root.pages.get(spill.section, ())))
    return _cut(page, spill.section, max(_ENTRIES_LEAST, 2 * total // PAGES_MOST))


def _cut(page: Page, section: Section, most: int) -> list[tuple[str, int, Page]]:
    names = sorted(page.names(section))
    parts = -(-len(names) // most)
    found = []
    for i in range(parts):
        part = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        found.append(
            (
                part[0],
                len(part),
                Page(
                    {name: page.branches[name] for name in part if name in page.branches},
                    {name: page.tags[name] for name in part if name in page.tags},
                    {name: page.leases[name] for name in part if name in page.leases},
                ),
            )
        )
    return found


def without(root: Root, spill: PageSpill) -> Root:
    """The root without the names that have moved to a page."""
    gone = set(spill.names)

    def left(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    match spill.section:
        case "branches":
            return replace(
                root,
                branches={name: root.branches[name] for name in left(root.branches)},
                deleted_branches=left(root.deleted_branches),
            )
        case "tags":
            return replace(
                root,
                tags={name: root.tags[name] for name in left(root.tags)},
                deleted_tags=left(root.deleted_tags),
            )
        case "leases":
            return replace(
                root,
                leases=tuple(lease for lease in root.leases if lease.name not in gone),
                deleted_leases=left(root.deleted_leases),
            )


def merge_at(pages: Sequence[PageRef]) -> int | None:
    """The position of the smallest two neighbouring pages, if there are too many pages."""
    if len(pages) <= PAGES_MOST:
        return None
    return min(range(len(pages) - 1), key=lambda i: pages[i].count + pages[i + 1].count)


def pulled(root: Root, pages: Iterable[Page], only: str | None = None) -> Root:
    """The root with the entries of these pages, or of the name `only`; its own take precedence."""
    branches, tags = dict(root.branches), dict(root.tags)
    leases = {lease.name: lease for lease in root.leases}
    deleted = dict.fromkeys(root.deleted_tags)
    for page in pages:
        for name, branch in page.branches.items():
            if only in (None, name) and name not in root.deleted_branches:
                branches.setdefault(name, branch)
        for name, ref in page.tags.items():
            if only not in (None, name) or name in deleted:
                continue
            if ref is None:
                deleted[name] = None
            else:
                tags.setdefault(name, ref)
        for name, lease in page.leases.items():
            if only in (None, name) and name not in root.deleted_leases:
                leases.setdefault(name, lease)
    return replace(
        root,
        branches=branches,
        tags=tags,
        deleted_tags=tuple(deleted),
        leases=tuple(leases.values()),
    )
