"""Sessions: one snapshot to read, or one set of changes to commit.

A session is pinned to a snapshot. A read-only one never sees anything else. A writable one lays
its changes over the snapshot; `commit` makes them a new snapshot on the branch and goes on from
there, all or nothing. Forks carry a copy of the session to other processes, and `merge` brings
their changes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import numpy as np
import numpy.typing as npt

from zarr_manifests.display import html_page
from zarr_manifests.engine.bulk_chunks import find_chunks, stream_table
from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.forks import Pin, fork_state, merge_forks
from zarr_manifests.engine.overlay import status_of
from zarr_manifests.engine.totals import totals_of
from zarr_manifests.engine.workspace import Workspace, move_node, reindex_chunks, shift_chunks
from zarr_manifests.errors import ReadOnlyError, plain_text
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.conflict import Policy, Txn
from zarr_manifests.planning.regions import Bounds, Places, ResolvedChunks
from zarr_manifests.runtime import SYSTEM, Run, Runtime
from zarr_manifests.store import ManifestStore, finish_writes, freeze_store, workspace_of

if TYPE_CHECKING:
    from zarr_manifests.commits import SessionCommits
    from zarr_manifests.engine.chunk_statistics import ChunkStatistics
    from zarr_manifests.reports import ChunkSelection, Diff, Usage

_SHOWN_CHARS: Final = 500
_GAP_BYTES: Final = 64 * 1024
_WINDOW_BYTES: Final = 64 * 1024**2


class Fork:
    """A copy of a session for another process: pickle it, write to its `store`, send it back.

    Made by `Session.fork`, or by `fork` of another copy; its changes reach a commit only through
    `Session.merge`.

    Examples
    --------
    A worker gives a part of its work to a worker of its own:

    >>> import pickle, zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://fork-example")
    >>> session = repo.writable_session()
    >>> a = zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    >>> worker = pickle.loads(pickle.dumps(session.fork()))
    >>> part = pickle.loads(pickle.dumps(worker.fork()))
    >>> zarr.open_array(worker.store, path="a")[:2] = 1
    >>> zarr.open_array(part.store, path="a")[2:] = 2
    >>> worker.merge(part)
    >>> session.merge(worker)
    >>> a[:]
    array([1, 1, 2, 2], dtype=int32)
    """

    def __init__(self, state: ForkState, runtime: Runtime = SYSTEM) -> None:
        self._store = ManifestStore(state, read_only=False, runtime=runtime)

    def __repr__(self) -> str:
        return f"<Fork {self._store!r}>"

    @property
    def store(self) -> ManifestStore:
        """The Zarr store to write to."""
        return self._store

    def fork(self) -> Fork:
        """A copy of this one, as it is now, for a process that this one starts.

        Merge it into this fork, into another copy of the same session, or into the session itself.
        If it changes what this fork has made, merge this fork first, or together with it.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://fork-of-fork-example").writable_session()
        >>> fork = session.fork()
        >>> _ = zarr.create_group(fork.store, path="air")
        >>> inner = fork.fork()
        >>> _ = zarr.create_group(inner.store, path="air/daily")
        >>> session.merge(inner, fork)
        >>> sorted(zarr.open_group(session.store, mode="r")["air"])
        ['daily']
        """
        workspace = workspace_of(self._store)
        return Fork(fork_state(workspace), workspace.runtime)

    def merge(self, *forks: Fork | ManifestStore) -> None:
        """Bring the changes of other copies of the same session, or of their stores, into this one.

        So workers can combine what others have written before the session gets it. Parameters and
        errors are those of `Session.merge`.

        Raises
        ------
        InvalidArgumentError
            If a copy belongs to another repository, session or base.
        ConflictError
            If two copies changed the same chunk or document differently. Nothing was merged.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://merge-forks-example").writable_session()
        >>> _ = zarr.create_group(session.store)
        >>> left, right = session.fork(), session.fork()
        >>> _ = zarr.create_group(left.store, path="left")
        >>> _ = zarr.create_group(right.store, path="right")
        >>> left.merge(right)
        >>> session.merge(left)
        >>> sorted(zarr.open_group(session.store, mode="r"))
        ['left', 'right']
        """
        merge_forks(workspace_of(self._store), _states(forks))

    def __reduce__(self) -> tuple[Any, ...]:
        return Fork, (freeze_store(self._store),)


class Session:
    """A view of one snapshot, and of the changes made on top of it.

    Made by `Repository.readonly_session`, `Repository.writable_session` or
    `Repository.transaction`.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://session-example")
    >>> session = repo.writable_session("main")
    >>> _ = zarr.create_group(session.store, path="air")
    >>> print(session.status())
    + /
    + /air
    >>> snapshot_id = session.commit("make a group for air temperature")
    >>> bool(session.status())
    False
    """

    def __init__(self, pin: Pin, commits: SessionCommits | None = None) -> None:
        self._pin, self._commits = pin, commits
        self._contents = pin.contents

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        url = plain_text(self._contents.context.storage.url)
        return f"<Session {url} at {self.snapshot_id}, {self._mode()}>"

    def _repr_html_(self) -> str:
        view = self._contents.view
        facts = [
            ("at", self._contents.context.storage.url),
            ("snapshot", view.snapshot_id),
            ("message", view.snapshot.message),
            ("mode", self._mode()),
        ]
        if self._commits is not None:
            changes = plain_text(self.status(), lines=True, most=_SHOWN_CHARS)
            facts.append(("changes", changes))
        return html_page("Session", facts, self._contents.nodes())

    def _mode(self) -> str:
        return "read-only" if self._commits is None else f"writable on {self.branch!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a session cannot be pickled: pickle session.fork(), or session.store for reading"
        )

    # --- properties --------------------------------------------------------------------------

    @property
    def branch(self) -> str | None:
        """The branch a writable session commits to."""
        return None if self._commits is None else self._commits.writer.branch

    @property
    def snapshot_id(self) -> str:
        """Id of the snapshot the session reads, or that its changes are made on."""
        return self._contents.view.snapshot_id

    @property
    def store(self) -> ManifestStore:
        """The session's contents as a Zarr store.

        A writable store is for this process and its threads. A pickled store, as dask makes it to
        write from other processes, is a copy, and its writes are not committed unless it is merged.
        So pickling warns (`PickledStoreWarning`), and a commit that would leave such writes out
        raises `UnmergedForksError`. Instead, write datasets with `zarr_manifests.write`; give each
        task `Session.fork()` and merge what comes back; or open the session with `copies="report"`.
        The store of a read-only session can be pickled.
        """
        if self._commits is None:
            return ManifestStore(self._contents, read_only=True)
        return ManifestStore(self._commits.writer.workspace, read_only=False)

    def status(self) -> Diff:
        """The uncommitted changes, by path; false if there are none."""
        return status_of(self._contents)

    # --- committing --------------------------------------------------------------------------

    def commit(
        self,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        rebase: bool | Policy = True,
        discard_unmerged: bool = False,
        txn: Txn | tuple[str, int] | None = None,
        allow_empty: bool = False,
    ) -> str:
        """Commit the changes to the branch, all or nothing; the new snapshot's id.

        If other commits came first, this one is put on top of them where that is safe, as
        `rebase` does.

        Parameters
        ----------
        message : str, optional
            Why; by default it says which nodes have changed. Shown by `ancestry` and
            `zarr-manifests log`.
        metadata : mapping, optional
            Stored with the snapshot. Values are None, numbers, strings, bytes, lists and maps.
            NumPy scalars become plain numbers, and `datetime64` becomes ISO 8601 text.
        rebase : bool, {"fail", "ours", "theirs"} or callable, default True
            What to do when other commits came first. True (the same as "fail") puts this commit on
            top of them unless they conflict; False gives up; else this policy decides conflicts,
            see `rebase`.
        discard_unmerged : bool, default False
            Commit although pickled copies of the store, or children of `os.fork`, changed
            something that was not merged.
        txn : Txn or tuple of str and int, optional
            The name of an application and the number of its step. The step is committed to the
            branch at most once, however often and by whomever it is tried, and also if it changes
            nothing. A step with a lower number than the last one counts as committed. See `Txn`.
        allow_empty : bool, default False
            Make a commit also if nothing has changed, such as one that only has a message.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        InvalidArgumentError
            If there is nothing to commit, or the message, metadata or transaction cannot be stored.
        TransactionAlreadyCommitted
            If the step was committed before. The session is closed, and its changes are dropped.
        TransactionGapError
            If the last step is not the one that `Txn.after` says. The session keeps its changes.
        ConflictError
            If the changes cannot be put on top of what came first. The session keeps them.
        UnmergedForksError
            If copies of the store changed anything and none was merged.
        FencedError
            If the session is older than the repository's fence, or than another writer's claim
            on the branch.
        CommitOutcomeUnknownError
            If it cannot be found out whether the commit took effect. The session is closed.
        StorageError
            If an upload failed; nothing was committed and the session keeps its changes.
        """
        return self._writable().commit(
            message,
            metadata,
            rebase=rebase,
            discard_unmerged=discard_unmerged,
            txn=txn,
            allow_empty=allow_empty,
        )

    def amend(
        self,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        discard_unmerged: bool = False,
    ) -> str:
        """Replace the branch's head by a commit that adds the session's changes; its id.

        The new snapshot's parent is the head's parent. The old head leaves the branch's history;
        tags and other branches that point to it keep it.

        Parameters
        ----------
        message : str, optional
            The head's own if none is given.
        metadata : mapping, optional
            The head's own if none is given.
        discard_unmerged : bool, default False
            As in `commit`.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        InvalidArgumentError
            If nothing is to be changed; or if the session's snapshot is the first of the
            repository or a rewrite, which cannot be replaced.
        ConflictError
            If the session's snapshot is not the branch's head any more.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://amend-example")
        >>> session = repo.writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> _ = session.commit("make a gruop")
        >>> _ = session.amend("make a group")
        >>> [info.message for info in repo.ancestry()]
        ['make a group', 'create repository']
        """
        return self._writable().amend(message, metadata, discard_unmerged=discard_unmerged)

    def rebase(self, policy: Policy = "fail") -> str:
        """Move the session to the branch's head, its changes on top; the id of that snapshot.

        Nothing is committed. Afterwards the session reads the others' commits too, with its own
        changes over them. Forks made before cannot be merged any more. A session that only reads
        moves, too, unless it was opened by a tag or an id.

        Parameters
        ----------
        policy : {"fail", "ours", "theirs"} or callable, default "fail"
            Who wins where both sides wrote other bytes to a chunk or another value to an
            attribute, or where this session deleted what others wrote to. "ours" is this session's
            change and "theirs" what others have committed, as in a `git merge` run on one's own
            branch; `git rebase` uses the two words the other way round. A function is given each
            `Conflict` and answers with one of the words.

        Returns
        -------
        str
            Id of the snapshot that the session reads, and its changes are made on, now.

        Raises
        ------
        ConflictError
            If the changes cannot be put on top of what came first. The session is as it was.
        NotFoundError
            If the branch was deleted, and the session has no changes.
        UnmergedForksError
            If the session has no changes, and a copy of its store has some.
        InvalidArgumentError
            If the policy is unknown, or the session reads a tag or a snapshot by its id.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://rebase-example")
        >>> with repo.transaction(message="make a") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")
        >>> session = repo.writable_session()
        >>> a = zarr.open_array(session.store, path="a")
        >>> a[:2] = 1
        >>> with repo.transaction(message="the other chunk") as store:
        ...     zarr.open_array(store, path="a")[2:] = 2
        >>> snapshot_id = session.rebase()
        >>> a[:]
        array([1, 1, 2, 2], dtype=int32)
        """
        if self._commits is None:
            self._pin.refresh()
            return self.snapshot_id
        return self._commits.rebase(policy)

    def discard_changes(self) -> None:
        """Drop all uncommitted changes."""
        writer = self._writable().writer
        finish_writes()
        writer.discard_changes()

    def close(self) -> None:
        """Refuse further changes, stop background fetches and give up the lease.

        Uncommitted changes are lost. What was opened from the session's store can still be read.
        A `with` block closes its session. A session that is garbage collected need not be closed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://close-example")
        >>> with repo.writable_session() as session:
        ...     _ = zarr.create_group(session.store, path="air")
        ...     _ = session.commit("make a group")
        >>> with repo.readonly_session() as session:
        ...     list(zarr.open_group(session.store, mode="r"))
        ['air']
        """
        if self._commits is None:
            self._pin.preload.cancel()
        else:
            self._commits.writer.close("close() was called")

    # --- copies ------------------------------------------------------------------------------

    def fork(self) -> Fork:
        """A copy of the session for another process, to be merged later.

        Raises
        ------
        ReadOnlyError
            If the session is read-only: pickle its store instead.
        """
        workspace = self._changeable()
        return Fork(fork_state(workspace), workspace.runtime)

    def merge(self, *forks: Fork | ManifestStore) -> None:
        """Bring the changes of forks, or of their stores, into this session.

        Merging the same copy twice counts once. Forks that wrote the same bytes to the same
        chunk (as retried tasks do) agree. Forks of forks can be merged here too, in any order
        within one call.

        Raises
        ------
        InvalidArgumentError
            If a fork belongs to another repository, session or base.
        ConflictError
            If two writers changed the same chunk or document differently. Nothing was merged.
        """
        self._changeable()
        self._writable().writer.copies.merge(_states(forks))

    # --- moving nodes and chunks -------------------------------------------------------------

    def move(self, old: str, new: str) -> None:
        """Move a group or array, with everything below it, to another path.

        Only metadata changes: no chunk is read or written, and every node keeps its history.
        What documents say (dimension names, attributes) stays as it is.

        Parameters
        ----------
        old, new : str
            Paths, with or without a leading slash. The group that `new` lies in must exist.

        Raises
        ------
        NotFoundError
            If there is nothing at `old`, or no group for `new`.
        AlreadyExistsError
            If there is something at or below `new`.
        InvalidArgumentError
            If `old` is the root, or `new` lies below `old` or below an array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://move-example").writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> session.move("air", "water")
        >>> list(zarr.open_group(session.store, mode="r"))
        ['water']
        """
        move_node(self._changeable(), old, new)

    def shift_array(self, path: str, offset_in_chunks: Sequence[int]) -> None:
        """Move all chunks of an array by whole chunks; none is read or written.

        Chunks moved outside the array are dropped, and vacated places read as fill value. The array
        keeps its shape; resize it first to make room. A chunk at the array's
        edge moves with all it holds, including what lies beyond the edge.

        Parameters
        ----------
        path : str
            The array.
        offset_in_chunks : sequence of int
            How far, one number an axis, in chunks; negative towards the beginning.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If there is not one whole number for each axis.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://shift-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.shift_array("a", (-1,))
        >>> a[:]
        array([3, 4, 5, 6, 0, 0], dtype=int32)
        """
        shift_chunks(self._changeable(), path, offset_in_chunks)

    def reindex_array(self, path: str, places: Places) -> None:
        """Move the chunks of an array to other places in it; none is read or written.

        Parameters
        ----------
        path : str
            The array.
        places : mapping or callable
            From a chunk's coordinate to its new one, or to None to drop the chunk. A callable is
            asked once for each chunk that is there. Chunks that a mapping does not name stay; named
            chunks that do not exist are ignored. A million chunks take seconds.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If a chunk would lie outside the array, or two at one place, or a coordinate has not
            one whole number for each axis; nothing is changed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.create("memory://reindex-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.reindex_array("a", lambda chunk: (2 - chunk[0],))
        >>> a[:]
        array([5, 6, 3, 4, 1, 2], dtype=int32)
        """
        reindex_chunks(self._changeable(), path, places)

    # --- contents ----------------------------------------------------------------------------

    @overload
    def chunk_refs(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
        statistics: Literal[False] = False,
    ) -> ResolvedChunks: ...

    @overload
    def chunk_refs(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
        statistics: Literal[True],
    ) -> ChunkStatistics: ...

    def chunk_refs(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
        statistics: bool = False,
    ) -> ResolvedChunks | ChunkStatistics:
        """Where an array's initialized chunks are, or bounds of their values, as columns.

        Uncommitted changes are included; chunks that still wait in memory for their pack count as
        inline. No chunk is read, nor any manifest without refs in the box. Of a sharded array,
        these are the shards.

        Parameters
        ----------
        path : str
            The array.
        box : sequence, optional
            Chunk coordinates on each axis, as a slice without step or as (start, stop); all chunks
            if none are given.
        cells : sequence, optional
            Instead of a box: cells on each axis, likewise. The chunks that hold any of them.
        statistics : bool, default False
            Give bounds and counts of the values instead, from zone maps, which writers make. Chunks
            that were written without them have no row. Values are those that are stored: packed
            ones are not unpacked.

        Returns
        -------
        ResolvedChunks or ChunkStatistics
            A row for each initialized chunk, in C order.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the box or the cells have other axes than the array, or a step, or both are given.

        Examples
        --------
        >>> import numpy as np, zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://chunk-refs-example")
        >>> with repo.transaction(message="fill a part") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4, 300), chunks=(2, 300), dtype="f8")
        ...     a[:2] = np.random.default_rng(1).random((2, 300))
        >>> found = repo.readonly_session().chunk_refs("a")
        >>> len(found), found.coords.tolist(), found.kind.tolist()
        (1, [[0, 0]], [2])
        >>> len(repo.readonly_session().chunk_refs("a", [slice(1, 2), slice(None)]))
        0
        >>> len(repo.readonly_session().chunk_refs("a", cells=[(0, 4), (10, 20)]))
        1
        """
        if statistics:
            from zarr_manifests.engine import chunk_statistics as found  # rarely needed

            return found.chunk_statistics(self._contents, path, box, cells, self._pin.branch)
        node, table = find_chunks(self._contents, path, box, cells)
        return ResolvedChunks.from_table(f"/{node.path}", len(node.array_meta.shape), table)

    def read_chunks(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
        coords: npt.ArrayLike | None = None,
    ) -> Iterator[tuple[Coords, bytes]]:
        r"""The encoded bytes of an array's initialized chunks, as they are stored.

        For decoded values, use `zarr.open_array(session.store, path=path)`. Ranges of one object or
        file that lie near each other are fetched together, 64 MiB at a time, and every checksum is
        verified. The chunks are those of the session when this is called; they are fetched as they
        are iterated.

        Parameters
        ----------
        path, box, cells
            As for `chunk_refs`.
        coords : int64[n, ndim], optional
            Instead of a box: coordinates of chunks, in any order. Those without a chunk are
            passed over.

        Yields
        ------
        tuple of int, bytes
            A chunk's coordinates, and what is stored of it; in C order.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If box, cells or coordinates have other axes than the array, or a step, or more than
            one of them is given.
        MissingChunkError
            If an object or file that holds a chunk is not there.
        CorruptObjectError
            If it is too short, or a chunk does not match its checksum.
        VirtualContainerError, VirtualSourceChangedError
            If a file elsewhere may not be read, or is not what it was.
        SnapshotExpiredError
            If the snapshot has expired meanwhile, and chunks of it are gone.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://read-chunks-example")
        >>> with repo.transaction(message="fill half") as store:
        ...     a = zarr.create_array(
        ...         store, name="a", shape=(8,), chunks=(2,), dtype="u1", compressors=None
        ...     )
        ...     a[4:] = 7
        >>> list(repo.readonly_session().read_chunks("a"))
        [((2,), b'\x07\x07'), ((3,), b'\x07\x07')]
        >>> list(repo.readonly_session().read_chunks("a", coords=[(0,), (3,)]))
        [((3,), b'\x07\x07')]
        """
        at = None if coords is None else np.asarray(coords)
        _, table = find_chunks(self._contents, path, box, cells, at)
        return stream_table(self._contents, table, gap_bytes=_GAP_BYTES, window_bytes=_WINDOW_BYTES)

    def chunks_where(
        self,
        path: str,
        where: Any,
        *,
        nan_matches: bool = False,
        time_zone: str = "UTC",
        decode_times: bool = True,
    ) -> ChunkSelection:
        """The chunks of an array that may hold cells that a where selects; no chunk is read.

        All other chunks hold no such cell. Chunks are left out by the values of coordinates, which
        are read, and by statistics of their values: the least, the greatest and the number of
        missing ones, which `zarr_manifests.write` and `Repository.compute_statistics` make.
        A missing value (NaN, NaT or what `_FillValue` says) matches only `IS NULL`. Values are
        compared as xarray decodes them.

        Parameters
        ----------
        path : str
            The array.
        where : str, mapping or sequence
            Comparisons that must all hold, such as `"depth > 4000 AND lat BETWEEN -30 AND 30"`; or
            `{"depth": (">", 4000)}`; or `[("depth", ">", 4000)]`. They name the array itself,
            arrays of its group with the same dimensions and chunks, and coordinates along its
            dimensions. A dimension without a coordinate has positions from 0 on. As a label, in
            `{"time": "2000-02"}`, a date means its whole period; in a comparison its first instant.
        nan_matches : bool, default False
            Missing values count as NaN and as greater than every number, as NaN in Spark.
        time_zone : str, default "UTC"
            The zone of times that name none.
        decode_times : bool, default True
            If False, CF times are compared as the numbers that are stored.

        Returns
        -------
        ChunkSelection
            Boxes of chunks, how many chunks are left out and why. `str` says it in words.

        Raises
        ------
        NotFoundError
            If there is no such array or column.
        WhereError, InvalidArgumentError
            If the where cannot be read, a column has other dimensions or chunks, or its values
            cannot be compared with the literals.

        Examples
        --------
        >>> import numpy as np, xarray as xr, zarr_manifests as zm
        >>> repo = zm.create("memory://chunks-where-example")
        >>> ds = xr.Dataset({"depth": ("x", np.arange(8.0))}, {"x": np.arange(8)})
        >>> _ = zm.write(ds.chunk(x=2), repo, message="depths")
        >>> found = repo.readonly_session().chunks_where("depth", "depth > 4 AND x < 6")
        >>> found.boxes.tolist(), found.cells
        ([[[2], [3]]], ((slice(4, 6, None),),))
        """
        from zarr_manifests.selecting import chunks_where

        return chunks_where(
            self.store,
            path,
            where,
            branch=self._pin.branch,
            nan_matches=nan_matches,
            time_zone=time_zone,
            decode_times=decode_times,
        )

    def summarize(
        self,
        path: str,
        indexers: Mapping[str, Any] | str | None = None,
        *,
        by: str | Sequence[str] | None = None,
        weights: Mapping[str, Any] | None = None,
        run: Run | None = None,
    ) -> Any:
        """Count, extremes, sum and mean of an array's values; chunks are read only where they must.

        A chunk all of whose values are selected for one group is answered by its statistics, which
        `zarr_manifests.write` and `Repository.compute_statistics` make. Others are read.
        Missing values (NaN, or what `_FillValue` says) are left out. Chunks that are not stored
        count as the fill value says. `ds.zm.summarize(name, ...)` answers for what a dataset
        selects that xarray opened from a repository and has not loaded.

        Parameters
        ----------
        path : str
            The array: numbers or booleans, packed or not.
        indexers : mapping of str to labels, or str, optional
            What is selected along dimensions, as in `xarray.Dataset.sel`; or a where of
            `chunks_where` that names coordinates, such as `"lat > 30"`. All, if it is left out.
        by : str or sequence of str, optional
            Dimensions of which each label has its own answer, or the labels in groups: by a part of
            their time, `"time.month"`, as in `groupby("time.month")`; or by a frequency,
            `"time.MS"`, as in `resample(time="MS")`.
        weights : mapping, optional
            For the mean, the weights of cells along dimensions: numbers, the name of a variable, or
            `"cos"`, as in `{"lat": "cos"}`: the cosine of a coordinate in degrees. Chunks whose
            cells have different weights are read, unless the array declared the same weights when
            they were written, by its attribute `statistics_weights = "lat: cos"`.
        run : callable, optional
            Runs tasks, as `map` does: they read what is more than a few chunks.

        Returns
        -------
        Dataset
            The variables `count` and `missing` (int64), `min` and `max` (of the type that xarray
            decodes to, NaN where there is no value), `sum` and `mean`. Integers are added exactly,
            and are float64 where a sum has more than 64 bits; all else is added as float64, also
            where xarray decodes to float32. With weights, `weight` is their sum, and only `mean` is
            weighted. `attrs` say how many chunks were answered, how many were read, and their
            bytes.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the array holds no numbers, or has no such dimension, label or group.

        Examples
        --------
        >>> import numpy as np, xarray as xr, zarr_manifests as zm
        >>> repo = zm.create("memory://summarize-example")
        >>> air = xr.Dataset({"air": (("time", "x"), np.arange(12.0).reshape(4, 3))})
        >>> _ = zm.write(air.chunk(time=1), repo, message="four times")
        >>> session = repo.readonly_session()
        >>> found = session.summarize("air", {"time": slice(0, 2)})
        >>> float(found["mean"]), int(found["count"]), found.attrs["chunks_read"]
        (2.5, 6, 0)
        >>> session.summarize("air", by="time")["max"].values.tolist()
        [2.0, 5.0, 8.0, 11.0]
        """
        from zarr_manifests.summarizing import summarize

        return summarize(self.store, path, indexers, by, weights, self._pin.branch, run)

    def plot_chunks(self, path: str) -> npt.NDArray[np.object_]:
        """Draw which chunks of an array exist, how large they are and when they last changed.

        Large grids are folded: a cell then stands for several chunks. No chunk is read. Times are
        those of commits; at most 1,000 are looked at, and cells that changed before are grey.
        Uncommitted changes count as made now.

        Parameters
        ----------
        path : str
            The array.

        Returns
        -------
        ndarray of matplotlib.axes.Axes
            The picture of sizes, and that of times.

        Raises
        ------
        NotFoundError
            If there is no such array.
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://plot-chunks-example")
        >>> with repo.transaction(message="fill half") as store:
        ...     air = zarr.create_array(store, name="air", shape=(8, 8), chunks=(2, 2), dtype="i2")
        ...     air[:4] = 1
        >>> sizes, times = repo.readonly_session().plot_chunks("air")
        >>> sizes.figure.get_suptitle()
        '/air: 8 of 16 chunks, ...'
        """
        from zarr_manifests.engine.chunk_statistics import chunk_map
        from zarr_manifests.picturing.draw import draw_chunks

        return draw_chunks(chunk_map(self._contents, path))

    # --- internals ---------------------------------------------------------------------------

    def _writable(self) -> SessionCommits:
        if self._commits is None:
            raise ReadOnlyError(
                "the session is read-only; open one with repo.writable_session(branch)"
            )
        return self._commits

    def _changeable(self) -> Workspace:
        """The workspace, unless the session is closed."""
        workspace = self._writable().writer.workspace
        workspace.check_open()
        return workspace


def _states(forks: Sequence[Fork | ManifestStore]) -> list[ForkState]:
    return [freeze_store(fork.store if isinstance(fork, Fork) else fork) for fork in forks]


def commits_of(session: Session) -> SessionCommits:
    """How the changes of a writable session reach its branch, for the rest of the package.

    Raises
    ------
    ReadOnlyError
        If the session is read-only.
    """
    return session._writable()


def estimate_of(session: Session) -> Usage:
    """What `Repository.du` estimates for the snapshot of a session, for the rest of the package."""
    return totals_of(session._contents.view)
