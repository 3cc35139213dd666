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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import pack
from zarr_manifests.format.root import Branch, Page, PageRef, Root
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


def _entries(root: Root, section: Section) -> dict[str, Any]:
    """What the root itself says of each name; None if it is deleted."""
    match section:
        case "branches":
            return {**dict.fromkeys(root.deleted_branches), **root.branches}
        case "tags":
            return {**dict.fromkeys(root.deleted_tags), **root.tags}
        case "leases":
            own = {lease.name: lease for lease in root.leases}
            return {**dict.fromkeys(root.deleted_leases), **own}


def _with_entries(root: Root, section: Section, entries: Mapping[str, Any]) -> Root:
    """The root that itself says this of the names of a section."""
    own = {name: value for name, value in entries.items() if value is not None}
    gone = tuple(name for name, value in entries.items() if value is None)
    match section:
        case "branches":
            return replace(root, branches=own, deleted_branches=gone)
        case "tags":
            return replace(root, tags=own, deleted_tags=gone)
        case "leases":
            return replace(root, leases=tuple(own.values()), deleted_leases=gone)


def page_at(root: Root, section: Section, name: str) -> int | None:
    """Position of the page that may have the name; None if the root itself has it."""
    own = name in _entries(root, section)
    return None if own else _place(root.pages.get(section, ()), name)


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
    names = page.section(section)
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
    entries = {section: _entries(root, section) for section in SECTIONS}
    for stays in ("main", written):
        if stays not in root.deleted_branches:
            entries["branches"].pop(stays, None)
    weights = {section: _weight(section, each) for section, each in entries.items()}
    section = max(SECTIONS, key=lambda section: weights[section])
    groups: dict[int | None, list[str]] = {}
    for name in entries[section]:
        groups.setdefault(_place(root.pages.get(section, ()), name), []).append(name)
    spills = [PageSpill(section, page, tuple(group)) for page, group in groups.items()]
    spills.sort(key=lambda spill: (-len(spill.names), spill.page or 0))
    return spills if weights[section] > _BULK_BYTES else spills[:1]


def _weight(section: Section, entries: Mapping[str, Any]) -> int:
    """About the bytes that these entries take in the root."""
    held = {name: value for name, value in entries.items() if value is not None}
    packed: list[Any] = [value.pack() for value in held.values()]
    if section == "tags":
        packed = [[name, ref.bare().pack()] for name, ref in held.items()]
    return len(pack(packed)) + sum(map(len, entries))


def absorb(root: Root, spill: PageSpill, old: Page | None) -> list[tuple[str, int, Page]]:
    """Return the pages that replace `old`: first name, number of entries, page."""
    section, own = spill.section, _entries(root, spill.section)
    held = {} if old is None else dict(old.section(section))
    for name in spill.names:
        held.pop(name, None)
        value = own[name]
        if value is not None or section == "tags":  # the names of deleted tags stay
            held[name] = value.bare() if isinstance(value, Branch) else value
    total = max(len(held), sum(page.count for page in root.pages.get(section, ())))
    most = max(_ENTRIES_LEAST, 2 * total // PAGES_MOST)
    names, found = sorted(held), []
    parts = -(-len(names) // most)
    for i in range(parts):
        part = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        entries: Any = {section: {name: held[name] for name in part}}
        found.append((part[0], len(part), Page(**entries)))
    return found


def without(root: Root, spill: PageSpill) -> Root:
    """The root without the names that have moved to a page."""
    gone, own = set(spill.names), _entries(root, spill.section)
    left = {name: value for name, value in own.items() if name not in gone}
    return _with_entries(root, spill.section, left)


def merge_at(pages: Sequence[PageRef]) -> int | None:
    """The position of the smallest two neighbouring pages, if there are too many pages."""
    if len(pages) <= PAGES_MOST:
        return None
    return min(range(len(pages) - 1), key=lambda i: pages[i].count + pages[i + 1].count)


def pulled(root: Root, pages: Iterable[Page], only: str | None = None) -> Root:
    """The root with the entries of these pages, or of the name `only`; its own take precedence."""
    pages = [*pages]
    for section in SECTIONS:
        own = _entries(root, section)
        for page in pages:
            for name, value in page.section(section).items():
                if only in (None, name):
                    own.setdefault(name, value)
        root = _with_entries(root, section, own)
    return root
