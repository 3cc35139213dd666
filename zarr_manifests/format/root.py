"""The root: the only object that is ever overwritten, always by compare-and-swap.

It holds what must change atomically: refs, configuration, the fence, epochs, leases and the tail of
the operations log. Each swap increments its version and carries a random write id, by which a
writer that got no answer recognises its own swap.

Each version that logs an operation is archived under `root/<version>` in canonical form, without
copies of other objects. Everybody who archives a version writes the same value.

Invariant: a root that needs an unknown feature is refused.

What the root has no room for is in *pages*: the branches, tags or leases in a range of names.
Invariants: pages never change; the root overrides its pages; a deleted tag stays in its page as a
name without a snapshot, so that the name is never used again.

Each section of the root (the branches, the tags with deleted ones, or the leases) has pages in
order of names, each with its own range of names. When the root is too large, the section that takes
the most room moves names to one page: the page into whose range most of its names fall. Only that
page is rewritten, and split if it has become too large. Pages grow with the section, so that there
are never many more than `PAGES_MOST`. Invariants: `main` and the branch that was written last stay
in the root; an entry in the root takes precedence over one in a page.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.config import Config
from zarr_manifests.errors import (
    ConfigError,
    CorruptObjectError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedFormatError,
)
from zarr_manifests.format.records import (
    MAX_MS,
    ROOT_COPY_BYTES,
    BlobRef,
    ListRecord,
    MetadataObject,
    Number,
    ObjectKind,
    Record,
    TimeMs,
    check_numbers,
    check_texts,
    decode,
    drop_copies,
    encode,
    pack,
    plain,
    record,
    unpack,
    with_copies,
)
from zarr_manifests.ids import is_session_id, lineage_of, snapshot_key
from zarr_manifests.keys import is_inside

COMPACTOR: Final = "compactor"
COLLECTOR: Final = "collector"
ROOT_KEY: Final = "current"
CLONING_KEY: Final = "cloning"
"""Where an unfinished clone says of which repository it is one."""
LOG_TAIL: Final = 32
WRITE_ID_BYTES: Final = 16
_LOG_NAMES_BYTES: Final = 2_560
FEATURES: Final[tuple[str, ...]] = ()
"""The additions to the format that this package knows."""
_REPOSITORY_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REF_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,254}", re.ASCII)


def archive_key(version: int) -> str:
    """Key of the archive of that root version."""
    return f"root/{version:020d}"


def known_ref[T](refs: Mapping[str, T], name: str, what: str) -> T:
    """The branch or tag of that name.

    Raises
    ------
    NotFoundError
        If there is none. The message lists those there are.
    """
    if name not in refs:
        listed = ", ".join(sorted(refs)[:10]) or "none"
        raise NotFoundError(f"there is no {what} {name!r}; there are: {listed}")
    return refs[name]


def leaving(operation: str, snapshot_id: str) -> str:
    """The text of a logged operation that leaves a snapshot: a reset, an amend, a deletion."""
    return f"{operation} from {snapshot_id}"


def check_ref_name(name: object) -> str:
    """Return `name` if it is a valid branch or tag name.

    Raises
    ------
    InvalidArgumentError
        Unless it has letters, digits and `_ . / -` only, starts with a letter, digit or `_`, and no
        segment is empty, `.` or `..`.
    """
    if isinstance(name, str) and _REF_NAME.fullmatch(name) and is_inside(name):
        return name
    raise InvalidArgumentError(
        f"{str(name)[:80]!r} is not a valid branch or tag name: use letters, digits and _ . / -, "
        "start with a letter, a digit or _, and leave no part between slashes empty, . or .."
    )


class Branch(Record, frozen=True):
    """A branch.

    Parameters
    ----------
    head : BlobRef
        The newest snapshot.
    base : BlobRef or None
        That snapshot's base, so that both can be fetched at once.
    epoch : int
        The root version at which an exclusive writer claimed the branch; 0 for none.
    floor : str or None
        Id of the oldest snapshot in the branch's history; None if nothing has expired.
    ahead : tuple of BlobRef
        Digests and deltas that opening the head needs and of which it carries no copies.
    index : BlobRef or None
        Directory of the branch's zone maps.

    Raises
    ------
    InvalidArgumentError
        If `floor` is not a snapshot id, or a number is out of range.
    """

    head: BlobRef
    base: BlobRef | None = None
    epoch: int = 0
    floor: str | None = None
    ahead: tuple[BlobRef, ...] = ()
    index: BlobRef | None = None

    def __post_init__(self) -> None:
        if self.floor is not None:
            snapshot_key(self.floor)
        drop_copies(self, "index")
        check_numbers("branch", self.epoch)

    def bare(self) -> Branch:
        """The same without copies."""
        base = None if self.base is None else self.base.bare()
        return replace(self, head=self.head.bare(), base=base)


class PageRef(ListRecord, frozen=True):
    """Pointer to a page, which has the names from `first` up to the next page's `first`."""

    first: str
    blob: BlobRef
    count: int

    def __post_init__(self) -> None:
        drop_copies(self, "blob")
        check_texts("root.pages", self.first)
        check_numbers("root.pages", self.count)


class Lease(ListRecord, frozen=True):
    """A lease, which keeps a snapshot and a session's objects from being deleted."""

    lease_id: bytes
    session: str
    snapshot: str
    expires_ms: int
    owner: str

    def __post_init__(self) -> None:
        check_texts("lease", self.session, self.snapshot, self.owner)
        check_numbers("lease.expires_ms", self.expires_ms)
        snapshot_key(self.snapshot)
        if len(self.lease_id) != 16 or not is_session_id(self.session):
            raise CorruptObjectError("root.leases: invalid lease or session id")

    @property
    def name(self) -> str:
        """Its name in pages, where leases of one session are neighbours."""
        return f"{self.session}/{self.lease_id.hex()}"


class LogEntry(ListRecord, frozen=True):
    """One logged operation: what was done to which ref, when, by which commit and by whom."""

    version: Number
    at_ms: TimeMs
    operation: str
    ref: str
    snapshot: str
    commit_id: bytes = b""
    by: str = ""

    def __post_init__(self) -> None:
        check_numbers("root.log", self.version)
        check_numbers("root.log: a time", self.at_ms, most=MAX_MS)


_NO_CONFIG: Final = Config()


@lru_cache(maxsize=32)
def _config_of(packed: bytes) -> Config:
    """The saved configuration; cached, since most roots have the same."""
    try:
        return Config.from_dict(unpack(packed))
    except ConfigError as error:
        raise UnsupportedFormatError(
            f"the saved configuration is not understood ({error}); upgrade the package"
        ) from error


def _checked_features(features: tuple[Any, ...]) -> tuple[str, ...]:
    unknown = [feature for feature in features if feature not in FEATURES]
    if unknown:
        raise UnsupportedFormatError(
            f"the repository needs the features {unknown!r}, which this version of "
            "zarr-manifests does not know; upgrade the package"
        )
    return features


_NAMES: Final = {"repository_id": "repository", "write_id": "write", "written_ms": "at_ms"}
"""What attributes are called in the object."""


class Root(Record, frozen=True, rename=_NAMES):
    """One version of the root state.

    Parameters
    ----------
    repository_id : str
        32 random hexadecimal digits.
    version : int
        1 at creation; each swap increments it.
    write_id : bytes
        16 random bytes, new for each swap.
    written_ms : int
        Time of the swap by the writer's clock, in milliseconds since 1970 UTC.
    config : Config
        The saved configuration.
    branches, tags : mapping
        Refs by name, those in pages excluded. A tag is the pointer to its snapshot.
    deleted_tags : tuple of str
        Names of deleted tags, which are never used again.
    log : tuple of LogEntry
        The newest operations, oldest first, at most 32.
    leases : tuple of Lease
        A lease is valid while it is listed, whatever its expiry time.
    fence : int
        A session that began before this version and holds no lease may not commit.
    epochs : mapping of str to int
        Versions of the newest claims by a compactor and a collector.
    pages : mapping of str to tuple of PageRef
        Pages with the branches, tags and leases that the root has no room for; in the order of
        names.
    deleted_branches, deleted_leases : tuple of str
        Names that a page still lists and that are deleted.
    collected : int
        The version at which the last collection began; refs of older versions cannot be restored.
    features : tuple of str
        The additions to the format that the repository uses.
    metadata : mapping of str to object
        Metadata of the repository as a whole.
    """

    repository_id: str
    version: int
    write_id: bytes
    written_ms: TimeMs
    config: Config
    branches: Mapping[str, Branch] = {}
    tags: Mapping[str, BlobRef] = {}
    deleted_tags: tuple[str, ...] = ()
    log: tuple[LogEntry, ...] = ()
    leases: tuple[Lease, ...] = ()
    fence: Number = 0
    epochs: Mapping[str, Number] = {}
    pages: Mapping[str, tuple[PageRef, ...]] = {}
    deleted_branches: tuple[str, ...] = ()
    deleted_leases: tuple[str, ...] = ()
    collected: Number = 0
    features: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _checked_features(self.features)
        if len(self.write_id) != WRITE_ID_BYTES or self.version < 1:
            raise CorruptObjectError("root: invalid write id or version")
        check_numbers("root", self.version, self.fence, self.collected, *self.epochs.values())
        check_numbers("root.at_ms", self.written_ms, most=MAX_MS)
        gone = *self.deleted_tags, *self.deleted_branches, *self.deleted_leases
        check_texts("root", self.repository_id, *gone)
        if not _REPOSITORY_ID.fullmatch(self.repository_id):
            raise CorruptObjectError("root: invalid repository id")
        for name in (*self.branches, *self.tags):
            check_ref_name(name)
        for section, pages in self.pages.items():
            names = [page.first for page in pages]
            if section not in SECTIONS or names != sorted(set(names)):
                raise CorruptObjectError("root: pages of an unknown list, or out of order")

    def holds_lease(self, session: str) -> bool:
        """Whether the root itself, pages excluded, lists a lease of the session or a copy of it.

        Copies share leases, since one of them commits what others have written.
        """
        lineage = lineage_of(session)
        return any(lineage_of(lease.session) == lineage for lease in self.leases)

    def with_log(self, entry: LogEntry) -> Root:
        """The same with one more operation; drops the oldest where the log gets too long.

        Each operation is also the last in the archive of its version, so none is lost.
        """
        log = (*self.log, entry)[-LOG_TAIL:]
        while len(log) > 1 and sum(len(one.ref) for one in log) > _LOG_NAMES_BYTES:
            log = log[1:]
        return replace(self, log=log)

    def with_copies(self, known: Mapping[str, bytes], first: str) -> Root:
        """The same with copies of heads and bases while they fit.

        A branch gets copies of everything that opening it needs, or none, since fewer would save no
        round. Only `first` and `main` get any, since each swap writes all copies again.
        """
        branches = {name: branch.bare() for name, branch in self.branches.items()}
        room = ROOT_COPY_BYTES
        for name in dict.fromkeys((first, "main")):
            branch = self.branches.get(name)
            if branch is None or branch.ahead:
                continue
            refs = [branch.head] if branch.base is None else [branch.head, branch.base]
            copied = with_copies(refs, known, room)
            if any(ref.copy is None for ref in copied):
                continue
            room -= sum(len(ref.copy or b"") for ref in copied)
            base = None if branch.base is None else copied[1]
            branches[name] = replace(branch, head=copied[0], base=base)
        return replace(self, branches=branches)

    @property
    def refs_bytes(self) -> int:
        """Size of the canonical form without configuration and metadata, which have own bounds."""
        return len(replace(self.bare(), config=_NO_CONFIG, metadata={}).encode())

    def bare(self) -> Root:
        """The canonical form, without copies."""
        return replace(self, branches={name: b.bare() for name, b in self.branches.items()})

    def encode(self) -> bytes:
        """The object's bytes."""
        told = plain(self, ordered=True) | {"config": self.config.to_dict()}
        return encode(ObjectKind.ROOT, told)

    @classmethod
    def parse(cls, value: Any) -> Root:
        """From an untrusted map that `encode` made; unknown features are refused before all."""
        told = record(dict[str, Any], value, "root")
        _checked_features(record(tuple[Any, ...], told.get("features", ()), "root.features"))
        config = _config_of(pack(record(dict[str, Any], told.get("config", {}), "root.config")))
        return record(cls, {**told, "config": config}, "root")

    @classmethod
    def from_object(cls, data: bytes, where: str = ROOT_KEY) -> Root:
        """Decode a root."""
        return decode(data, ObjectKind.ROOT, cls.parse, where)


# --- pages -------------------------------------------------------------------------------------


class Page(MetadataObject, frozen=True):
    """Entries of one of the root's lists, in a range of names.

    Parameters
    ----------
    branches : mapping of str to Branch
        Branches by name.
    tags : mapping of str to BlobRef or None
        Tags by name; None for a deleted one.
    leases : mapping of str to Lease
        Leases by name.
    """

    branches: Mapping[str, Branch] = {}
    tags: Mapping[str, BlobRef | None] = {}
    leases: Mapping[str, Lease] = {}

    _KIND = ObjectKind.PAGE

    def __post_init__(self) -> None:
        if any(lease.name != name for name, lease in self.leases.items()):
            raise CorruptObjectError("page: a lease has another name than its own")
        for name in (*self.branches, *self.tags):
            check_ref_name(name)

    def pack(self) -> Any:
        """As a map for msgpack, in order of names."""
        return plain(self, ordered=True)

    def section(self, name: str) -> Mapping[str, Any]:
        """Its entries of that section, by name."""
        found: Mapping[str, Any] = getattr(self, name)
        return found

    def __len__(self) -> int:
        return len(self.branches) + len(self.tags) + len(self.leases)

    def __or__(self, other: Page) -> Page:
        return Page(*({**self.section(name), **other.section(name)} for name in SECTIONS))


# --- pages of the root -------------------------------------------------------------------------

type Section = Literal["branches", "tags", "leases"]

SECTIONS: Final[tuple[Section, ...]] = ("branches", "tags", "leases")
ROOT_BYTES: Final = 8 * 1024
"""Size of the root, without copies, above which refs move to pages."""
PAGES_MOST: Final = 32
_ENTRIES_LEAST: Final = 256
_BULK_BYTES: Final = 64 * 1024


class PageSpill(Struct, frozen=True):
    """The names that move from the root to one page of a section."""

    section: Section
    page: int | None
    names: tuple[str, ...]


def _entries(root: Root, section: Section) -> dict[str, Any]:
    """What the root itself says of each name; None if it is deleted."""
    own = getattr(root, section)
    if section == "leases":
        own = {lease.name: lease for lease in own}
    return {**dict.fromkeys(getattr(root, f"deleted_{section}")), **own}


def _with_entries(root: Root, section: Section, entries: Mapping[str, Any]) -> Root:
    """The root that itself says this of the names of a section."""
    own: Any = {name: value for name, value in entries.items() if value is not None}
    if section == "leases":
        own = tuple(own.values())
    gone = tuple(name for name, value in entries.items() if value is None)
    return replace(root, **{section: own, f"deleted_{section}": gone})


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
    held: list[Any] = [value for value in entries.values() if value is not None]
    if section == "tags":
        held = [[name, ref] for name, ref in entries.items() if ref is not None]
    return len(pack(held)) + sum(map(len, entries))


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
