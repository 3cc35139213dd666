"""Which refs leave the root for pages, so that the root stays small however many there are.

A section (the branches, or the tags with the deleted ones) has its pages in the order of names,
each with a range of its own. When the root is too large, the section that takes more room in it
gives up those of its refs that fall into one page: into which most of them fall. That page alone
is written anew, split if it has become too large. The size of pages grows with the section, so
that there are never many more than `PAGES_MOST` of them. Invariants: `main` and the branch that
was written last stay in the root; what is in the root counts before what is in a page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import pack
from zarr_manifests.format.pages import Page
from zarr_manifests.format.root import Branch, PageRef, Root

__all__ = [
    "ROOT_BYTES",
    "Section",
    "Spill",
    "absorb",
    "merge_at",
    "page_at",
    "plan_spills",
    "pulled",
    "without",
]

type Section = Literal["branches", "tags"]

ROOT_BYTES: Final = 8 * 1024
"""Bytes of the root, without copies, beyond which refs leave it."""
PAGES_MOST: Final = 32
_ENTRIES_LEAST: Final = 256
_BULK_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Spill:
    """Refs that leave the root: into which page of the section, and their names."""

    section: Section
    page: int | None
    names: tuple[str, ...]


def page_at(root: Root, section: Section, name: str) -> int | None:
    """Position of the page that tells about the name; None if the root itself does."""
    own = (
        name in root.branches or name in root.deleted_branches
        if section == "branches"
        else name in root.tags or name in root.deleted_tags
    )
    return None if own else _place(root.pages.get(section, ()), name)


def _place(pages: Sequence[PageRef], name: str) -> int | None:
    if not pages:
        return None
    return max(0, bisect_right([page.first for page in pages], name) - 1)


def plan_spills(root: Root) -> list[Spill]:
    """What leaves a root that is too large; empty if nothing can.

    That is one page's refs, but all refs of the section where they would fill several pages.
    """
    written = root.log[-1].ref if root.log else ""
    movable = [name for name in root.branches if name not in ("main", written)]
    names: dict[Section, list[str]] = {
        "branches": [*movable, *root.deleted_branches],
        "tags": [*root.tags, *root.deleted_tags],
    }
    packed = {
        "branches": pack([root.branches[name].pack() for name in movable]),
        "tags": pack([[name, ref.bare().pack()] for name, ref in root.tags.items()]),
    }
    weights = {s: len(packed[s]) + sum(map(len, names[s])) for s in names}
    section: Section = "branches" if weights["branches"] > weights["tags"] else "tags"
    groups: dict[int | None, list[str]] = {}
    for name in names[section]:
        groups.setdefault(_place(root.pages.get(section, ()), name), []).append(name)
    spills = [Spill(section, page, tuple(group)) for page, group in groups.items()]
    spills.sort(key=lambda spill: (-len(spill.names), spill.page or 0))
    return spills if weights[section] > _BULK_BYTES else spills[:1]


def absorb(root: Root, spill: Spill, old: Page | None) -> list[tuple[str, int, Page]]:
    """The pages that replace `old`: first name, number of entries, page."""
    branches: dict[str, Branch] = dict(old.branches) if old else {}
    tags: dict[str, BlobRef | None] = dict(old.tags) if old else {}
    if spill.section == "branches":
        for name in spill.names:
            branches.pop(name, None)
            if name in root.branches:
                branches[name] = root.branches[name].bare()
    else:
        for name in spill.names:
            tags[name] = root.tags.get(name)
    total = sum(page.count for page in root.pages.get(spill.section, ()))
    total = max(total, len(branches) + len(tags))
    return _cut(branches, tags, max(_ENTRIES_LEAST, 2 * total // PAGES_MOST))


def _cut(
    branches: Mapping[str, Branch], tags: Mapping[str, BlobRef | None], most: int
) -> list[tuple[str, int, Page]]:
    names = sorted({*branches, *tags})
    parts = -(-len(names) // most)
    found = []
    for i in range(parts):
        part = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        page = Page(
            {name: branches[name] for name in part if name in branches},
            {name: tags[name] for name in part if name in tags},
        )
        found.append((part[0], len(part), page))
    return found


def without(root: Root, spill: Spill) -> Root:
    """The root without the refs that have left it."""
    gone = set(spill.names)
    if spill.section == "branches":
        return replace(
            root,
            branches={name: b for name, b in root.branches.items() if name not in gone},
            deleted_branches=tuple(n for n in root.deleted_branches if n not in gone),
        )
    return replace(
        root,
        tags={name: ref for name, ref in root.tags.items() if name not in gone},
        deleted_tags=tuple(n for n in root.deleted_tags if n not in gone),
    )


def merge_at(pages: Sequence[PageRef]) -> int | None:
    """Where two neighbouring pages become one, if there are too many; the smallest two."""
    if len(pages) <= PAGES_MOST:
        return None
    return min(range(len(pages) - 1), key=lambda i: pages[i].count + pages[i + 1].count)


def pulled(root: Root, pages: Iterable[Page], only: str | None = None) -> Root:
    """The root with refs of pages as well, all or those of one name; its own count first."""
    branches, tags = dict(root.branches), dict(root.tags)
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
    return replace(root, branches=branches, tags=tags, deleted_tags=tuple(deleted))
