"""Importing the history of an icechunk repository: snapshots become commits, in their order.

A commit says in its metadata which icechunk snapshot it is. So a later import, also after one that
was interrupted, finds where to continue, and imports no snapshot twice. It also says which session
has made it, with whose name its id begins: that of an amended commit, or of a copy, does not.

Invariant: a branch is only continued from a commit that is an ancestor of its icechunk head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.commits import SessionCommits
from zarr_manifests.engine.edit.import_icechunk import apply_snapshot
from zarr_manifests.engine.edit.pin import SessionWriter
from zarr_manifests.engine.history.refs import DEFAULT_BRANCH, Refs
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.errors import (
    ConflictError,
    HistoryExpiredError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.root import check_ref_name
from zarr_manifests.ids import lineage_of
from zarr_manifests.keys import V3_DOCUMENT
from zarr_manifests.progress import expect, tell
from zarr_manifests.reports import SnapshotInfo
from zarr_manifests.storage import Storage
from zarr_manifests.versions import HEADS, TAGS
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.icechunk_files import IcechunkFiles
from zarr_manifests.virtual.references import check_bound

if TYPE_CHECKING:
    import icechunk

_NAME: Final = "icechunk-snapshot"
_TIME: Final = "icechunk-time"
_BY: Final = "icechunk-import"


def import_history(
    context: Context,
    storage: Storage,
    max_bytes: int,
    history: str,
    branches: Iterable[str] | None,
    authorize: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Import the branches and tags; the snapshot that each icechunk snapshot has become."""
    if history not in ("all", "heads"):
        raise InvalidArgumentError(f"history={history!r}: give 'all' or 'heads'")
    if not isinstance(authorize, Mapping | None):
        raise InvalidArgumentError(f"authorize={authorize!r}: give a mapping of names to places")
    trusted = Containers({**context.containers.places, **Containers.of(authorize).places})
    most = check_bound("max_bytes", max_bytes)
    with TemporaryDirectory(prefix="zarr-manifests-") as folder:
        files = IcechunkFiles(storage, Path(folder), trusted, most, context.runtime)
        return _IcechunkHistory(context, files).run(branches, heads_only=history == "heads")


@dataclass(slots=True)
class _IcechunkHistory:
    """Imports branches and tags of an icechunk repository.

    Parameters
    ----------
    context : Context
        The repository to import to.
    files : IcechunkFiles
        The icechunk repository.

    Attributes
    ----------
    ours : dict of str to str
        The snapshot that each icechunk snapshot has become.
    """

    context: Context
    files: IcechunkFiles
    ours: dict[str, str] = field(default_factory=dict)
    _refs: Refs = field(init=False)
    _first: str = ""
    _due: set[str] = field(default_factory=set)
    _total: int = 0
    _names: dict[str, str | None] = field(default_factory=dict)

    def run(self, branches: Iterable[str] | None, *, heads_only: bool) -> dict[str, str]:
        """Import the branches, by default all of them, and the tags; `ours`.

        With `heads_only`, only the snapshots that these name are imported.

        Raises
        ------
        NotFoundError
            If the icechunk repository has no such branch.
        ConflictError
            If a branch has other commits than those of its icechunk branch, or a tag is elsewhere.
        """
        self._refs = Refs(self.context)
        files = self.files
        chosen = _chosen(files.branches, branches)
        self._find_ours()
        heads = [files.branches[name] for name in chosen]
        lineages = [files.lineage(head) for head in heads]
        tagged = [files.lineage(one) for one in files.tags.values()] if branches is None else []
        due = {each.id for lineage in (*lineages, *tagged) for each in lineage} - self.ours.keys()
        self._due = due & {*heads, *files.tags.values()} if heads_only else due
        self._total = len(self._due)
        expect("snapshots", self._total)
        self._tell()
        for name, lineage in zip(chosen, lineages, strict=True):
            self._import_branch(name, lineage)
        for tag, snapshot in sorted(files.tags.items()):
            if branches is None or snapshot in self.ours:
                self._import_tag(tag, snapshot)
        return self.ours

    def _tell(self, *done: str) -> None:
        """Tell how many of the snapshots that were due are there, with these."""
        self._due.difference_update(done)
        tell("snapshots", self._total - len(self._due))

    def _find_ours(self) -> None:
        """Find what was imported before, and the first snapshot of the repository."""
        versions = [HEADS + name for name in self._refs.branches()]
        versions += [TAGS + name for name in self._refs.tags()]
        for version in versions:
            rewritten: list[str] = []
            for info in starmap(SnapshotInfo, self._refs.history(version, None)):
                snapshot_id, name = info.snapshot_id, info.metadata.get(_NAME)
                by = info.metadata.get(_BY)
                seen = snapshot_id in self._names
                if seen:
                    name = self._names[snapshot_id]
                elif info.parent_id is None:
                    name, self._first = "", snapshot_id
                elif info.kind == CommitKind.REWRITE.value:
                    rewritten.append(snapshot_id)
                    continue
                elif by is not None and by != lineage_of(snapshot_id):
                    name = None  # amended here, or a copy
                elif (
                    isinstance(name, str) and self.ours.setdefault(name, snapshot_id) != snapshot_id
                ):
                    name = None  # a copy that says the same
                self._names |= dict.fromkeys((*rewritten, snapshot_id), name)
                rewritten = []
                if seen:
                    break

    def _import_branch(self, name: str, lineage: Sequence[icechunk.SnapshotInfo]) -> None:
        check_ref_name(name)
        files = self.files
        root = lineage[0].id
        if root not in self.ours and not files.nodes(root) and self._first:
            self.ours[root] = self._first  # both are where a history begins, and empty
            self._tell(root)
        known = [at for at, each in enumerate(lineage) if each.id in self.ours]
        begin = known[-1] if known else -1
        self._place(name, lineage, [lineage[at].id for at in known])
        due = [each for each in lineage[begin + 1 :] if each.id in self._due]
        if not due:
            return
        before = files.nodes(lineage[begin].id) if known else {}
        version, view = self._refs.begin(name)
        commits = SessionCommits(SessionWriter(self.context, view, name, version))
        if {n.path: n.document for n in before.values()} != {
            path: node.documents.get(V3_DOCUMENT) for path, node in view.nodes.items()
        }:
            raise ConflictError(
                f"branch {name!r} has an imported commit that was changed since; import to another "
                "repository"
            )
        for each in due:
            after = files.nodes(each.id)
            apply_snapshot(commits.writer.workspace, files, before, after)
            self.ours[each.id] = commits.commit(
                each.message if each.message.strip() else f"icechunk snapshot {each.id}",
                _metadata(each, commits.writer.workspace.keys),
                rebase=False,
                allow_empty=True,
            )
            self._names[self.ours[each.id]] = each.id
            before = after
            self._tell(each.id)

    def _place(
        self, name: str, lineage: Sequence[icechunk.SnapshotInfo], known: Sequence[str]
    ) -> None:
        """See that the branch is at the last of the known snapshots, having been at one of them."""
        start = self.ours[known[-1]] if known else self._first
        if not start:
            raise HistoryExpiredError(
                "the first snapshot of this repository has expired, so that no other history can "
                "begin there; import to a new repository"
            )
        head = self._refs.branches().get(name)
        at = None if head is None else self._names.get(head)
        if head is None:
            self._refs.create_branch(name, start)
        elif at not in ("", *known) and self._has_expired(head, lineage):
            raise ConflictError(
                f"branch {name!r} is at the icechunk snapshot {at}, which has expired there, so "
                "that what came between it and the present ones is not known. Import to another "
                "repository, and next time before icechunk's snapshots expire"
            )
        elif at is None or at not in ("", *known):
            raise ConflictError(
                f"branch {name!r} has commits that its icechunk branch does not have: it was reset "
                "or amended there, or written to here. Import to another repository, or move the "
                f"branch with reset_branch({name!r}, {start!r}, expected={head!r}), which drops "
                "these commits"
            )
        elif at != self._names[start]:
            self._refs.reset_branch(name, start, force=False, expected=None)

    def _has_expired(self, head: str, lineage: Sequence[icechunk.SnapshotInfo]) -> bool:
        """Whether an imported snapshot is older than what icechunk still has of the branch.

        icechunk's expiry makes the oldest snapshot that it keeps the child of the first one.
        """
        ((parts, at),) = self._refs.history(head, 1)
        written = SnapshotInfo(parts, at).metadata.get(_TIME)
        return len(lineage) > 1 and isinstance(written, str) and written < _written(lineage[1])

    def _import_tag(self, tag: str, snapshot: str) -> None:
        check_ref_name(tag)
        there, helper = self._refs.tags().get(tag), f"icechunk-tag/{tag}"
        if there not in (None, self.ours.get(snapshot)) and self._names.get(there) != snapshot:
            raise ConflictError(f"tag {tag!r} exists, and is not the icechunk snapshot {snapshot}")
        if snapshot not in self.ours:
            self._import_branch(helper, self.files.lineage(snapshot))
        if there is None:
            self._refs.create_tag(tag, self.ours[snapshot])
        if self._refs.branches().get(helper) == self.ours[snapshot]:
            self._refs.delete_branch(helper)


def _chosen(known: Mapping[str, str], wanted: Iterable[str] | None) -> list[str]:
    """The branches to import, the default one first, since others may continue it."""
    due: object = known if wanted is None else wanted
    names = list(due) if isinstance(due, Iterable) and not isinstance(due, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError("branches: a list of names is due")
    chosen = {str(name) for name in names}
    absent = sorted(chosen - set(known))
    if absent:
        raise NotFoundError(
            f"the icechunk repository has no branch {absent[0]!r}; it has "
            f"{', '.join(sorted(known))}"
        )
    return sorted(chosen, key=lambda name: (name != DEFAULT_BRANCH, name))


def _metadata(snapshot: icechunk.SnapshotInfo, keys: SessionKeys) -> dict[str, Any]:
    own = {_NAME: snapshot.id, _TIME: _written(snapshot), _BY: lineage_of(keys.session_id)}
    return {**snapshot.metadata, **own}


def _written(snapshot: icechunk.SnapshotInfo) -> str:
    """When the snapshot was written; of two texts, the earlier time comes first."""
    return snapshot.written_at.isoformat(timespec="microseconds")
