"""The root: the only object that is ever overwritten, always by compare-and-swap.

It holds what must change atomically: refs, configuration, the fence, epochs, leases and the tail of
the operations log. Each swap increments its version and carries a random write id, by which a
writer that got no answer recognises its own swap.

Each version that logs an operation is archived under `root/<version>` in canonical form, without
copies of other objects. Everybody who archives a version writes the same value.

Invariant: a root that needs an unknown feature is refused.

What the root has no room for is in *pages*: the branches, tags or leases in a range of names.
Invariants: pages never change; the root overrides its pages; a deleted tag stays in its page as a
deleted name, so that the name is never used again.

Branches, tags and leases have full names: `refs/heads/`, `refs/tags/` or `leases/` comes before
their own. Pages are in order of full names, each with its own range. When the root is too large, it
moves entries to the page into whose range most of them fall. Only that page is rewritten, and split
if it has become too large. Pages grow with their number of entries, and neighbours are joined, so
that there are never many more than `PAGES_MOST`. Invariants: `main` and the branch that was written
last stay in the root; an entry in the root takes precedence over one in a page.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final

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
from zarr_manifests.versions import HEADS, TAGS

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
        Bundles and deltas that opening the head needs and of which it carries no copies.
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
    """Pointer to a page, which has the full names from `first` up to the next page's `first`."""

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
        """Its full name; leases of one session are neighbours."""
        return f"leases/{self.session}/{self.lease_id.hex()}"


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
    deleted : tuple of str
        Full names of deleted tags, which are never used again, and of deleted branches and leases
        that a page may still list.
    log : tuple of LogEntry
        The newest operations, oldest first, at most 32.
    leases : tuple of Lease
        A lease is valid while it is listed, whatever its expiry time.
    fence : int
        A session that began before this version and holds no lease may not commit.
    epochs : mapping of str to int
        Versions of the newest claims by a compactor and a collector.
    pages : tuple of PageRef
        Pages with the branches, tags and leases that the root has no room for; in the order of full
        names.
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
    deleted: tuple[str, ...] = ()
    log: tuple[LogEntry, ...] = ()
    leases: tuple[Lease, ...] = ()
    fence: Number = 0
    epochs: Mapping[str, Number] = {}
    pages: tuple[PageRef, ...] = ()
    collected: Number = 0
    features: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _checked_features(self.features)
        if len(self.write_id) != WRITE_ID_BYTES or self.version < 1:
            raise CorruptObjectError("root: invalid write id or version")
        check_numbers("root", self.version, self.fence, self.collected, *self.epochs.values())
        check_numbers("root.at_ms", self.written_ms, most=MAX_MS)
        check_texts("root", self.repository_id, *self.deleted)
        if not _REPOSITORY_ID.fullmatch(self.repository_id):
            raise CorruptObjectError("root: invalid repository id")
        for name in (*self.branches, *self.tags):
            check_ref_name(name)
        names = [page.first for page in self.pages]
        if names != sorted(set(names)):
            raise CorruptObjectError("root: pages are out of order")

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
        """Size as msgpack without copies, configuration and metadata, which have own bounds."""
        return len(pack(replace(self.bare(), config=None, metadata={})))

    def bare(self) -> Root:
        """The canonical form, without copies."""
        return replace(self, branches={name: b.bare() for name, b in self.branches.items()})

    def encode(self) -> bytes:
        """The object's bytes."""
        told = plain(self) | {"config": self.config.to_dict()}
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

LEASES: Final = "leases/"
ALL: Final = ("", "~")
"""Before and after all full names."""
ROOT_BYTES: Final = 12 * 1024
"""Size of the root as msgpack, without copies, above which refs and leases move to pages."""
PAGES_MOST: Final = 32
_ENTRIES_LEAST: Final = 256


class Page(MetadataObject, frozen=True):
    """Branches, tags and leases in a range of full names.

    Parameters
    ----------
    branches, tags, leases
        As in `Root`.
    deleted : tuple of str
        Full names of deleted tags.
    """

    branches: Mapping[str, Branch] = {}
    tags: Mapping[str, BlobRef] = {}
    leases: tuple[Lease, ...] = ()
    deleted: tuple[str, ...] = ()

    _KIND = ObjectKind.PAGE

    def __post_init__(self) -> None:
        for name in (*self.branches, *self.tags):
            check_ref_name(name)


def entries(of: Root | Page) -> dict[str, Any]:
    """What it says itself of each full name; None if that is deleted."""
    found: dict[str, Any] = dict.fromkeys(of.deleted)
    found |= {HEADS + name: branch for name, branch in of.branches.items()}
    found |= {TAGS + name: tag for name, tag in of.tags.items()}
    return found | {lease.name: lease for lease in of.leases}


def with_entries[T: (Root, Page)](of: T, entries: Mapping[str, Any]) -> T:
    """The same, saying this; what is deleted is named if it is a tag, or may be in a page."""
    held: dict[str, dict[str, Any]] = {HEADS: {}, TAGS: {}, LEASES: {}}
    for section, some in held.items():
        for name, value in entries.items():
            if value is not None and name.startswith(section):
                some[name.removeprefix(section)] = value
    paged = bool(getattr(of, "pages", ()))
    gone = (name for name, value in entries.items() if value is None)
    return replace(
        of,
        branches=held[HEADS],
        tags=held[TAGS],
        leases=tuple(held[LEASES].values()),
        deleted=tuple(name for name in gone if paged or name.startswith(TAGS)),
    )


def without(root: Root, *names: str) -> Root:
    """The root without what has these full names."""
    return with_entries(root, entries(root) | dict.fromkeys(names))


def _place(pages: Sequence[PageRef], name: str) -> int:
    """Position of the page that the full name belongs to."""
    return max(0, bisect_right([page.first for page in pages], name) - 1)


def pages_with(root: Root, *spans: tuple[str, str]) -> list[int]:
    """Positions of the pages with full names in these ranges, of which both ends are part.

    Not for a single name of which the root itself tells.
    """
    own = entries(root) if root.pages else {}
    due = [span for span in spans if span[0] != span[1] or span[0] not in own]
    places = {
        at
        for first, last in due
        for at in range(_place(root.pages, first), _place(root.pages, last) + 1)
    }
    return sorted(places) if root.pages else []


def pulled(root: Root, pages: Iterable[Page], *spans: tuple[str, str]) -> Root:
    """The root with what these pages have in these ranges of names; its own takes precedence."""
    there = chain.from_iterable(entries(page).items() for page in pages)
    found = {n: v for n, v in there if any(first <= n <= last for first, last in spans)}
    return with_entries(root, found | entries(root))


def checked(root: Root, at: int, page: Page) -> Page:
    """Return the page if its names match what the root says about it.

    Raises
    ------
    CorruptObjectError
        If it has other names: they would be found in two places or in none.
    """
    ref, names = root.pages[at], entries(page)
    if len(names) != ref.count or any(
        name < ref.first or _place(root.pages, name) != at for name in names
    ):
        raise CorruptObjectError(f"{ref.blob.key} is not the page that the root expects")
    return page


def plan_spill(root: Root) -> tuple[range, dict[str, Any]]:
    """Which pages of a root that is too large to write anew, and which of its entries move there.

    It is one page, to which most entries move; or two neighbours, if there are too many pages.
    """
    pages = root.pages
    if len(pages) > PAGES_MOST:
        at = min(range(len(pages) - 1), key=lambda at: pages[at].count + pages[at + 1].count)
        return range(at, at + 2), {}
    stay = HEADS + "main", HEADS + (root.log[-1].ref if root.log else "")
    own = {n: value for n, value in entries(root).items() if value is None or n not in stay}
    places = {name: _place(pages, name) for name in own}
    at = max(Counter(places.values()).items(), key=itemgetter(1), default=(0, 0))[0]
    return range(at, at + 1), {name: own[name] for name, place in places.items() if place == at}


def absorb(root: Root, moved: Mapping[str, Any], old: Iterable[Page]) -> list[Page]:
    """The pages that replace the old ones, with what moves there from the root."""
    held: dict[str, Any] = {}
    for page in old:
        held |= entries(page)
    held |= moved
    names = sorted(name for name, v in held.items() if v is not None or name.startswith(TAGS))
    total = max(len(names), sum(page.count for page in root.pages))
    most = max(_ENTRIES_LEAST, 2 * total // PAGES_MOST)
    parts = -(-len(names) // most)
    found = []
    for i in range(parts):
        part = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        bare = {n: v.bare() if isinstance(v := held[n], Branch) else v for n in part}
        found.append(with_entries(Page(), bare))
    return found
