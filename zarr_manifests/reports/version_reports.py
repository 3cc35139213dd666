"""Values that tell of versions: snapshots, ancestries, differences, merges, the operations log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import Conflict, ManifestsError
from zarr_manifests.format.root import LogEntry
from zarr_manifests.format.snapshot import HistoryEntry
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.keys import absolute
from zarr_manifests.planning.components import Changes, Fields, field_changes
from zarr_manifests.report import Report
from zarr_manifests.texts import count_text, time_text, written_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zarr_manifests.picturing.graph import GraphRow


_SHOWN_CHUNKS: Final = 4
_SHOWN_COMMITS: Final = 60
_DRAWN_ROWS: Final = 40
_SHOWN_TEXT: Final = 60


def moved_tops(moved: Mapping[str, str]) -> dict[str, str]:
    """New path by old path of moved nodes, without those that moved along with their group.

    Examples
    --------
    >>> from zarr_manifests.reports.version_reports import moved_tops
    >>> moved_tops({"/air": "/sky", "/air/t": "/sky/t", "/air/q": "/q"})
    {'/air': '/sky', '/air/q': '/q'}
    """

    def went_along(old: str, new: str) -> bool:
        (above, _, name), (now_above, _, now_name) = old.rpartition("/"), new.rpartition("/")
        return name == now_name and moved.get(above) == now_above

    return {old: new for old, new in moved.items() if not went_along(old, new)}


class SnapshotInfo(Report, Struct, frozen=True):
    """One entry of the history.

    Parameters
    ----------
    snapshot_id : str
        The snapshot's id; also `id`.
    parent_id : str or None
        Its parent's; None for the first of a repository.
    written_at : datetime
        When, in UTC, by the committer's clock.
    kind : str
        `append`, `overwrite`, `delete`, `metadata`, or `rewrite` (changes no data).
    message : str
        Why.
    metadata : mapping
        What the committer wanted kept.
    author : str
        Who committed, by `metadata["author"]`; may be empty.
    written : mapping of str to int
        What the commit did: `refs-set`, `refs-unset`, `chunk-bytes`.
    commit_id : str
        32 hexadecimal digits, as in `CommitOutcomeUnknownError.commit_id`.
    totals : mapping of str to int
        What the snapshot holds: `arrays`, `groups`, `chunks`, `chunk-bytes`. Where the last two
        are upper bounds, they are `chunks-at-most` and `chunk-bytes-at-most`. What is not known
        is left out. `Repository.totals` gives the same per array.
    """

    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    kind: str
    message: str
    metadata: Mapping[str, Any]
    author: str
    written: Mapping[str, int]
    commit_id: str
    totals: Mapping[str, int]

    @classmethod
    def of(cls, entry: HistoryEntry) -> SnapshotInfo:
        """What the entry says."""
        return cls(
            entry.snapshot_id,
            None if entry.parent is None else entry.parent.snapshot_id,
            datetime.fromtimestamp(entry.written_ms / 1000, UTC),
            str(entry.kind),
            entry.message or "",
            entry.metadata,
            str(entry.metadata.get("author", "")),
            entry.totals,
            entry.commit_id.hex(),
            entry.sums,
        )

    @property
    def id(self) -> str:
        """The snapshot's id."""
        return self.snapshot_id

    def __hash__(self) -> int:
        return hash(self.snapshot_id)

    def _lines(self) -> Iterator[str]:
        done = written_text(self.written)
        by = f"  by {self.author}" if self.author else ""
        yield f"{self.snapshot_id}  {time_text(self.written_at)}  {self.kind}{by}"
        yield f"    {self.message}" + (f"  [{done}]" if done else "")


class Ancestry(Iterator[SnapshotInfo]):
    """The history of a version, newest first: an iterator that a notebook shows as a graph.

    Made by `Repository.ancestry`. What a notebook shows is not taken from the iterator.

    Parameters
    ----------
    found : iterator of SnapshotInfo
        The snapshots.
    graph : callable
        Rows of the graph of all branches and tags, or of a version; see `history_graph`.
    version : str
        The version.
    limit : int or None
        The most snapshots.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> history = zm.create("memory://history-example").ancestry()
    >>> "create repository" in history._repr_html_()
    True
    >>> next(history).message
    'create repository'
    """

    def __init__(
        self,
        found: Iterator[SnapshotInfo],
        graph: Callable[..., Sequence[GraphRow]],
        version: str,
        limit: int | None,
    ) -> None:
        self._found, self._graph, self._version, self._limit = found, graph, version, limit

    def __next__(self) -> SnapshotInfo:
        return next(self._found)

    def __repr__(self) -> str:
        return "<Ancestry: an iterator of SnapshotInfo, newest first>"

    def plot(self) -> Axes:
        """Draw the history of all branches and tags as a graph, newest first; return the axes.

        It has the newest 40 commits.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://plot-history-example")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> axes = repo.ancestry().plot()
        >>> axes.figure.savefig("history.png")  # doctest: +SKIP
        """
        from zarr_manifests.picturing.draw import draw_history

        return draw_history(self._graph(rows=_DRAWN_ROWS))

    def _repr_html_(self) -> str:
        from zarr_manifests.picturing.graph import graph_lines
        from zarr_manifests.rendering import html

        rows: Sequence[GraphRow] = ()
        with suppress(ManifestsError):  # what is shown to look around must not fail
            most = _SHOWN_COMMITS if self._limit is None else min(self._limit, _SHOWN_COMMITS)
            rows = self._graph(self._version, rows=most)
        older = ["... and older ones"] if rows and rows[-1].below else []
        return html("History", *graph_lines(rows), *older)


class Diff(Report, Struct, frozen=True, eq=False):
    """What changed from one snapshot to a later one, or in a session; false if nothing has.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths; a node that was deleted and made again is in both lists.
    chunks : mapping of str to int64[n, ndim]
        Coordinates of the chunks written or removed, by absolute path, sorted; a key that belongs
        to no array is one chunk.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted, but updated if their metadata
        changed too.
    truncated : mapping of str to tuple of int
        Of arrays that were made smaller, or whose chunks were moved, though they may have grown
        again since: the shape of the chunk grid, in chunks along each axis, beyond which all chunks
        went. Which these were is not looked up; `chunks` does not have them.
    grids : mapping of str to tuple of int
        Of the arrays in `chunks`: the shape of the chunk grid in the later snapshot.
    dimensions : mapping of str to tuple of (str or None)
        Of the arrays in `chunks` that name their dimensions: the names in the later snapshot.
    fields : mapping of str to mapping
        Of the nodes in `updated`: the fields of their metadata that differ, such as `shape` or
        `attributes.units`, with their values before and after; None where there was none.
    cells : mapping of str to int64[n]
        If values were compared: how many cells of each of these chunks have another value. Cells of
        only one version, because the array has another shape, are not compared.
    steps : mapping of str to tuple of float
        If values were compared: the least and the greatest difference, new minus old, over the
        changed cells that are numbers in both versions; an array without any is left out. Values
        are as stored: not scaled, and times not decoded.
    """

    created: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    chunks: Mapping[str, IndexArray] = {}
    moved: Mapping[str, str] = {}
    truncated: Mapping[str, Coords] = {}
    grids: Mapping[str, Coords] = {}
    dimensions: Mapping[str, tuple[str | None, ...]] = {}
    fields: Mapping[str, Fields] = {}
    cells: Mapping[str, IndexArray] = {}
    steps: Mapping[str, tuple[float, float]] = {}

    @classmethod
    def of(cls, changes: Changes) -> Diff:
        """What these changes have made of the nodes and their chunks."""
        each = [change for _, change in changes]
        now = {absolute(c.after.path): c for c in each if c.after is not None}
        pairs = [(c.before, c.after) for _, c in sorted(now.items()) if c.before and c.after]
        updated = {
            absolute(new.path): field_changes(old, new)
            for old, new in pairs
            if old.documents != new.documents
        }
        chunks = {path: c.chunks.coords() for path, c in sorted(now.items()) if c.chunks}
        arrays = {path: node.array for path in chunks if (node := now[path].after) and node.array}
        return cls(
            tuple(sorted(path for path, c in now.items() if c.before is None)),
            tuple(updated),
            tuple(sorted(absolute(c.path) for c in each if c.after is None)),
            chunks,
            {absolute(a.path): absolute(b.path) for a, b in pairs if a.path != b.path},
            {path: c.cut for path, c in sorted(now.items()) if c.cut is not None},
            {path: array.grid.shape for path, array in arrays.items()},
            {p: a.dimension_names for p, a in arrays.items() if a.dimension_names},
            updated,
        )

    def __bool__(self) -> bool:
        listed = self.created, self.updated, self.deleted, self.chunks, self.moved, self.truncated
        return any(listed)

    def _lines(self) -> Iterator[str]:
        if not self:
            yield "no changes"
        yield from (f"+ {path}" for path in self.created)
        for path in self.updated:
            yield f"~ {path}"
            yield from field_lines(self.fields.get(path, {}))
        yield from (f"- {path}" for path in self.deleted)
        for path in sorted({*self.created}.intersection(self.deleted)):
            yield f"  {path}: made again, so all that it held before is gone"
        yield from (f"> {old} to {new}" for old, new in moved_tops(self.moved).items())
        yield from (f"  {path}: cut to {shape} chunks" for path, shape in self.truncated.items())
        for path, at in self.chunks.items():
            yield f"  {path}: {_chunks_text(at)}"
            if path in self.cells:
                yield f"    {_cells_text(self.cells[path], self.steps.get(path))}"

    def plot(self) -> npt.NDArray[np.object_]:
        """Draw which chunks of each array changed, and return the axes.

        Large grids are folded: a cell then stands for several chunks, and its color says how many
        of them changed. Where no chunk changed, there is no picture.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://plot-diff-example")
        >>> with repo.transaction(message="make air") as store:
        ...     air = zarr.create_array(store, name="air", shape=(8, 8), chunks=(2, 2), dtype="i2")
        ...     air[:] = 1
        >>> with repo.transaction(message="correct a corner") as store:
        ...     zarr.open_array(store, path="air")[:2, :2] = 7
        >>> (axes,) = repo.diff("main~1", "main").plot()
        >>> axes.get_title(loc="left")
        '/air: 1 of 16 chunks'
        """
        from zarr_manifests.picturing.draw import draw_diff

        counts = [("created", self.created), ("updated", self.updated), ("deleted", self.deleted)]
        title = "Changed chunks; nodes: " + ", ".join(f"{len(n):,} {name}" for name, n in counts)
        return draw_diff(title, self.chunks, self.grids, self.dimensions)


def field_lines(fields: Fields) -> Iterator[str]:
    """Fields that differ as lines, with their values before and after.

    Examples
    --------
    >>> from zarr_manifests.reports.version_reports import field_lines
    >>> list(field_lines({"attributes.units": ("K", "degC"), "shape": ([2], [3])}))
    ["    attributes.units: 'K' to 'degC'", '    shape: [2] to [3]']
    """
    for name, (was, now) in fields.items():
        texts = [repr(value) for value in (was, now)]
        before, after = (t if len(t) <= _SHOWN_TEXT else f"{t[:_SHOWN_TEXT]}..." for t in texts)
        gone = f"{before} removed" if now is None else f"{before} to {after}"
        yield f"    {name}: {f'{after} added' if was is None else gone}"


def _cells_text(counts: IndexArray, steps: tuple[float, float] | None) -> str:
    """How many cells have changed, and by how much."""
    told = count_text(int(counts.sum()), "changed cell")
    return told if steps is None else f"{told} by {steps[0]:g} to {steps[1]:g}"


def _chunks_text(chunks: IndexArray) -> str:
    """How many chunks, and the first of them."""
    told = count_text(len(chunks), "chunk")
    if chunks.shape[1] == 0:  # it has no coordinates
        return told
    first = ", ".join(str(tuple(at)) for at in chunks[:_SHOWN_CHUNKS].tolist())
    return f"{told}: {first}{', ...' if len(chunks) > _SHOWN_CHUNKS else ''}"


class MergeReport(Report, Struct, frozen=True):
    """What a merge did, or would do.

    Parameters
    ----------
    source, base : str
        Ids of the snapshot that was merged, and of the newest one whose changes both sides had.
    into : str
        The branch.
    snapshot_id : str or None
        The head of the branch now; None for a dry run.
    commits : int
        Commits of the source that the branch did not have.
    fast_forward : bool
        Whether the branch was moved to the source, because it had nothing else to keep.
    conflicts : tuple of Conflict
        All places where both sides have different changes; only a dry run has any.
    dry_run : bool
        Whether nothing was changed.
    """

    source: str
    base: str
    into: str
    snapshot_id: str | None
    commits: int
    fast_forward: bool
    conflicts: tuple[Conflict, ...] = ()
    dry_run: bool = False

    @property
    def merges(self) -> bool:
        """Whether there was, or is, anything to merge."""
        return self.source != self.base

    def _lines(self) -> Iterator[str]:
        if not self.merges:
            yield f"{self.into} has all changes of {self.source}"
        elif self.conflicts:
            yield f"{self.source} cannot be merged into {self.into}, because of conflicts:"
            yield from (f"  {conflict}" for conflict in self.conflicts)
        else:
            would = "would bring" if self.dry_run else "brought"
            how = "by moving the branch there" if self.fast_forward else "in one commit"
            count = count_text(self.commits, "commit")
            yield f"{would} {count} of {self.source} to {self.into}, {how}"


class LoggedOperation(Struct, frozen=True):
    """One operation on the root.

    Parameters
    ----------
    version : int
        The version of the root that it made; `zarr_manifests.recover` takes one.
    at : datetime
        When, in UTC, by the clock of who did it.
    operation : str
        What: `commit append`, `create branch`, `expire snapshots`, ...
    ref : str
        The branch or tag it was about; empty if about none.
    snapshot_id : str
        The snapshot concerned; may be empty.
    operation_id : str
        Its random id in hexadecimal; of a commit that is `SnapshotInfo.commit_id`.
    by : str
        Who, as they said: the user and the host, or what the environment variable
        `ZARR_MANIFESTS_WHO` was set to; may be empty.
    before : str
        Of an amend, a reset or a deletion: id of the snapshot that the branch or tag was at. It can
        be opened by that id until it is collected. Else empty.
    """

    version: int
    at: datetime
    operation: str
    ref: str
    snapshot_id: str
    operation_id: str
    by: str = ""
    before: str = ""

    @classmethod
    def from_entry(cls, entry: LogEntry) -> LoggedOperation:
        """What an entry of the log says."""
        at = datetime.fromtimestamp(entry.at_ms / 1000, UTC)
        operation, _, before = entry.operation.partition(" from ")
        ids = entry.snapshot, entry.commit_id.hex()
        return cls(entry.version, at, operation, entry.ref, *ids, entry.by, before)
