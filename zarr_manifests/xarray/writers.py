"""`write` and `to_session`: datasets go to a repository in one commit, or into an open session.

`parts_of` parses the arguments. For each dataset, `prepare` looks at what is in the group,
uncommitted changes included, refuses what does not go with it, and plans an append; `put` encodes,
checks and writes the values; then `write` commits.

Invariants: reads made to prepare do not count as reads of the session, so that its commit can be
rebased onto others'; the labels of an append are compared again with the tip it lands on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import xarray as xr

from zarr_manifests.config import Config
from zarr_manifests.engine.commit.describe import checked_message, checked_metadata
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    ConflictKind,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
)
from zarr_manifests.keys import DOCUMENTS, V3_DOCUMENT
from zarr_manifests.planning.conflict.append_labels import AppendPlan, OnExisting
from zarr_manifests.planning.conflict.transactions import Txn, txn_of
from zarr_manifests.repositories import write_into
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Fork, Session, commits_of
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.xarray.appending import changes_nothing, drop_unchanged
from zarr_manifests.xarray.array_target import check_reachable, computed_elsewhere
from zarr_manifests.xarray.backend import Location
from zarr_manifests.xarray.encoding import begin_write, explained, fits_of, of_first_label
from zarr_manifests.xarray.fit import Fit, is_time
from zarr_manifests.xarray.parts import (
    DatasetPart,
    Encodings,
    Given,
    Region,
    WriteMode,
    parts_of,
)
from zarr_manifests.xarray.stored_group import (
    StoredGroup,
    check_agreement,
    check_lengths,
    is_virtual,
)

__all__ = ["PreparedPart", "prepare", "put", "to_session", "write", "zarr_format_at"]

_NAMED: Final = 5
_LISTED: Final = 20
_APPENDED: Final = {ConflictKind.APPEND, ConflictKind.CREATE}
"""What others have done who appended first, or made the arrays."""


def write(
    ds: Given,
    location: Location,
    *,
    message: str | None = None,
    branch: str = "main",
    group: str | None = None,
    mode: WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    encoding: Encodings | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    on_existing: OnExisting = "error",
    sort: Literal["keep"] | None = None,
    check: bool = True,
    statistics: bool = True,
    txn: Txn | tuple[str, int] | None = None,
    scheduler: Any = None,
    storage_options: Mapping[str, object] | None = None,
) -> str:
    """Write a dataset to a repository in one commit; make the repository if necessary.

    If anything fails, nothing is committed and no repository is made. To write several datasets in
    one commit, use `to_session`.

    Parameters
    ----------
    ds : Dataset, DataArray or DataTree
        What to write. It may be lazy, even if it is read from the same repository, and its dask
        arrays may be computed in threads, processes or on a distributed cluster that reaches the
        storage. Each chunk of a new array must lie within one dask block. A `DataArray` is stored
        under the name that `DataArray.to_zarr` gives it. Of a `DataTree`, each node goes to a group
        of its own.
    location : str, path, Storage or Repository
        Where the repository is, or is to be made.
    message : str, optional
        The commit message; by default what is written and where.
    branch : str
        The branch to commit to.
    group : str, optional
        Path of the group; by default the root.
    mode : {"w", "w-", "a", "a-", "r+"}, optional
        As in `Dataset.to_zarr`. `w` replaces the group and everything below it, `a` writes over
        existing variables and adds others. By default nothing existing is overwritten, unless
        `append_dim` or `region` says where.
    append_dim : hashable, optional
        Append along this dimension, behind what others append in the meantime; if the group has no
        data yet, it is created. Nodes of a tree without the dimension are written over.
    region : mapping or "auto", optional
        Write to this part of the existing arrays, as in `Dataset.to_zarr`. All nodes of a tree that
        have variables need the dimensions.
    encoding : mapping, optional
        Encodings of new variables, by name. Of a tree, these by path of the node.
    metadata : mapping, optional
        Stored with the commit: strings, numbers, lists and maps.
    config : Config or mapping, optional
        The configuration of a new repository; for an existing one, used instead of its own in this
        write.
    on_existing : {"error", "skip", "replace"}, default "error"
        Only with `append_dim`: what to do with rows whose labels in that dimension's index
        coordinate exist already. `skip` leaves these rows out, `replace` writes them over the
        existing ones; other rows are appended. With both, repeating a call makes no second commit.
    sort : {"keep"}, optional
        Only with `append_dim`: `keep` appends in the order given, even if the index coordinate is
        then unsorted. By default that is an error.
    check : bool, default True
        Refuse values that would be read back differently, and encodings that contradict the
        existing arrays. Values of dask arrays are checked when they are computed.
    statistics : bool, default True
        Record the smallest and largest value and the number of missing ones of each chunk that is
        written wholly, so that `Session.chunks_where` can leave chunks out. Arrays with a codec
        that may change values have no statistics.
    txn : Txn or tuple of str and int, optional
        The name of an application and the number of its step, which is written at most once, see
        `Session.commit`. It makes a commit also if every byte existed already.
    scheduler : str, callable or Client, optional
        What computes dask arrays, as `dask.compute` takes it; by default what dask is set to.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    str
        The id of the new snapshot; if every byte existed already, that of the branch's head.

    Raises
    ------
    AlreadyExistsError
        If the group has data, and none of `mode`, `append_dim` and `region` is given; or if labels
        of an append exist already and `on_existing` is "error".
    NotARepositoryError
        If there is no repository, and `region`, `mode="r+"` or another branch than `main` is given.
    NotFoundError
        If there is no such branch, or nothing that `region` could be part of.
    InvalidArgumentError
        If arguments contradict each other, or `encoding` has unknown names. If values would change
        their meaning in existing arrays, whose attributes stay: other units, or times that cannot
        be stored in the existing ones. If an append would leave arrays of different lengths,
        replace an index coordinate, leave its labels unsorted, or has a label twice. If values do
        not fit: beyond the range of a packing or a type, NaN without a missing value, fractions in
        integers, texts that are too long.
    ConflictError
        If others have committed to the same chunks or metadata in the meantime, or two tasks wrote
        to the same chunk.
    TransactionAlreadyCommitted, TransactionGapError
        If the step was written before, or is not the next one, as for `Session.commit`.
    ValueError
        From xarray, if the dataset does not match the existing arrays, or its dask blocks do not
        match the chunks.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    >>> first = zm.write(ds, "memory://write-example", message="create")
    >>> more = ds.assign_coords(time=[2, 3])
    >>> how = dict(message="append", append_dim="time", on_existing="skip")
    >>> second = zm.write(more, "memory://write-example", **how)
    >>> xr.open_dataset("memory://write-example", engine="zarr_manifests").sizes["time"]
    4

    The same call again finds nothing to append, and makes no commit:

    >>> zm.write(more, "memory://write-example", **how) == second
    True

    A tree with a group for each model:

    >>> tree = xr.DataTree.from_dict({"/": ds.drop_vars("t"), "/era5": ds, "/gfs": ds + 1})
    >>> _ = zm.write(tree, "memory://write-tree-example", message="two models")
    >>> read = xr.open_datatree("memory://write-tree-example", engine="zarr_manifests")
    >>> read["gfs/t"].values
    array([2., 3.])
    """
    parts = parts_of(ds, group, mode, append_dim, region, encoding, on_existing, sort, check)
    if config is not None and isinstance(location, Repository):
        raise InvalidArgumentError("config goes with a path, URL or storage, not a Repository")
    message = _said_of(parts) if message is None else checked_message(message)
    metadata = checked_metadata({} if metadata is None else metadata)
    step = txn_of(txn)
    appends = append_dim is not None

    def into(repository: Repository) -> str:
        tried: list[PreparedPart] = []
        conflict: ConflictError | None = None
        attempts = 0
        while True:
            attempts += 1
            session = repository.writable_session(branch)
            commits_of(session).begin(step)
            if appends:
                commits_of(session).relocate_appends(append_dim)
            due = _prepared(parts, session, check=check)
            if conflict is not None:
                most = workspace_of(session.store).context.config.commits.attempts
                if attempts > most or not _goes_on(conflict, tried, due):
                    raise conflict
            for each in due:
                put(each, session, statistics=statistics, scheduler=scheduler, relocate=appends)
            try:
                return _commit(session, message, metadata, step)
            except ConflictError as error:
                if not appends:
                    raise
                tried, conflict = due, error

    if isinstance(location, Repository):
        refuse_options("a repository", storage_options)
        return into(location)
    storage = storage_of(location, storage_options)
    only_there = region is not None or mode == "r+" or branch != "main"
    return write_into(storage, config, into, make=not only_there)


def to_session(
    ds: Given,
    session: Session | Fork,
    *,
    group: str | None = None,
    mode: WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    encoding: Encodings | None = None,
    on_existing: OnExisting = "error",
    sort: Literal["keep"] | None = None,
    check: bool = True,
    statistics: bool = True,
    scheduler: Any = None,
) -> None:
    """Write a dataset into an open session, which you commit: several datasets, one commit.

    Everything that `write` checks is checked against what the session has, uncommitted changes
    included. If the call fails, parts of the dataset may be in the session:
    `Session.discard_changes` drops them, with all other changes.

    Parameters
    ----------
    ds : Dataset, DataArray or DataTree
        What to write, as for `write`. Dask arrays are computed in threads, processes or on a
        cluster; what other processes write is merged before the call returns.
    session : Session or Fork
        A writable session; or a fork of one, in a worker, which cannot append.
    group, mode, append_dim, region, encoding, on_existing, sort, check, statistics, scheduler
        As for `write`. Rows are appended behind those that others append in the meantime if the
        session was opened with this `append_dim`.

    Raises
    ------
    InvalidArgumentError, AlreadyExistsError, NotFoundError, ValueError
        As for `write`; also if `session` is a fork and `append_dim` is given.
    ReadOnlyError
        If the session is read-only.
    SessionClosedError
        If the session is closed.
    ConflictError
        If two tasks wrote to the same chunk. The commit raises it if others have committed to the
        same chunks, metadata or labels in the meantime.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> repo = zm.create("memory://to-session-example")
    >>> ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    >>> with repo.writable_session() as session:
    ...     zm.to_session(ds, session, group="era5")
    ...     zm.to_session(ds.assign_coords(time=[2, 3]), session, group="era5", append_dim="time")
    ...     zm.to_session(ds + 1, session, group="gfs")
    ...     _ = session.commit("two models")
    >>> xr.open_datatree(repo, engine="zarr_manifests")["era5/t"].values
    array([1., 2., 1., 2.])
    """
    if not isinstance(session, Session | Fork):
        raise InvalidArgumentError(
            "to_session writes to a session, such as repo.writable_session(), or to a fork, not to "
            f"a {type(session).__name__}; zarr_manifests.write takes a repository"
        )
    parts = parts_of(ds, group, mode, append_dim, region, encoding, on_existing, sort, check)
    if isinstance(session, Fork):
        if append_dim is not None:
            raise InvalidArgumentError(
                "a fork cannot append: append in its session, then write regions to forks"
            )
        relocate = False
    else:
        commits = commits_of(session)
        commits.writer.check_open()
        relocate = commits.relocates(append_dim)
    for each in _prepared(parts, session, check=check):
        put(each, session, statistics=statistics, scheduler=scheduler, relocate=relocate)


def _said_of(parts: Sequence[DatasetPart]) -> str:
    """The message of a write without one."""
    first, where = parts[0], f"/{parts[0].top}"
    dims = [part.append_dim for part in parts if part.append_dim is not None]
    if dims:
        return f"append to {where} along {dims[0]}"
    if first.region is not None:
        return f"write a part of {where}"
    names = [str(name) for part in parts for name in part.ds.data_vars]
    some = f"{', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}"
    return f"write {some or 'attributes'} to {where}"


def _prepared(
    parts: Sequence[DatasetPart], session: Session | Fork, *, check: bool
) -> list[PreparedPart]:
    store = session.store
    return [found for part in parts if (found := prepare(part, store, check=check)) is not None]


def _goes_on(
    conflict: ConflictError, tried: Sequence[PreparedPart], due: Sequence[PreparedPart]
) -> bool:
    """Whether an append that met a conflict is made again."""
    if conflict.conflicts and {one.kind for one in conflict.conflicts} <= _APPENDED:
        return True
    before = {each.part.group: each.planned for each in tried}
    return any(
        each.part.append.goes_on(was, each.planned)
        for each in due
        if each.part.append is not None
        and each.planned is not None
        and (was := before.get(each.part.group)) is not None
    )


def _commit(session: Session, message: str, metadata: Mapping[str, Any], txn: Txn | None) -> str:
    """Commit and return the snapshot's id; the session's own if there is nothing to commit."""
    workspace = workspace_of(session.store)
    if changes_nothing(workspace):
        if txn is None:
            return session.snapshot_id
        checks = workspace.tip_checks
        session.discard_changes()  # an empty commit, with its mark
        workspace.tip_checks = checks
    return commits_of(session).commit(message, metadata, txn=txn)


# --- one dataset -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedPart:
    """A dataset whose group has been looked at.

    Parameters
    ----------
    part : DatasetPart
        The dataset.
    options : mapping
        Arguments for xarray's Zarr backend.
    fits : mapping
        How each variable to check is stored, by name.
    there : StoredGroup
        The group.
    planned : AppendPlan, optional
        What an append does with each row.
    """

    part: DatasetPart
    options: Mapping[str, Any]
    fits: Mapping[str, Fit]
    there: StoredGroup
    planned: AppendPlan | None


def prepare(part: DatasetPart, store: ManifestStore, *, check: bool) -> PreparedPart | None:
    """Look at what the group has, and refuse what does not go with it; None if nothing is due.

    Virtual variables are left out of the result: `virtual_datasets` writes them.

    Raises
    ------
    AlreadyExistsError, NotFoundError, InvalidArgumentError
        As for `write`.
    """
    contents, ds = contents_of(store), part.ds
    if part.only_group and contents.node(part.group) is not None:
        return None
    there = StoredGroup.of(store, part.group)
    options = _zarr_options(part, there, store)
    _check_names(ds)
    if options["mode"] != "w":
        ds = _turned(ds, there)
    if check and options["mode"] != "w":
        check_agreement(ds, there, options["append_dim"])
    virtual = [name for name, variable in ds.variables.items() if is_virtual(variable)]
    ds = ds.drop_vars(virtual) if virtual else ds
    encoding = part.encoding
    if part.append_dim is not None and str(part.append_dim) not in there.nodes:
        ds, encoding = of_first_label(ds, part.append_dim, encoding)
    part = replace(part, ds=ds, encoding=encoding)
    fits = fits_of(ds, there, options, part.encoding) if check else {}
    with explained(ds, fits):
        _check_labels(ds, there, fits)
    planned = None if part.append is None else part.append.plan(there)
    if planned is not None and planned.replaced and not ds.variables.keys() <= there.nodes.keys():
        check_lengths(ds, there, options["append_dim"])  # whatever is checked: it has no place
    return PreparedPart(part, options, fits, there, planned)


def _check_names(ds: xr.Dataset) -> None:
    """Refuse names under which a variable would be written, and never be found."""
    for name in map(str, ds.variables):
        if name in ("", ".", "..", *DOCUMENTS) or {*"/\\"} & {*name}:
            raise InvalidArgumentError(
                f"{name!r} cannot be the name of an array: rename the variable, or write it to a "
                "group, with group=..."
            )


def _check_labels(ds: xr.Dataset, there: StoredGroup, fits: Mapping[str, Fit]) -> None:
    """Check labels and times in memory that go to existing arrays, before labels are compared."""
    for name, variable in ds.variables.items():
        fit = fits.get(str(name))
        if fit is None or fit.stored is None or variable.chunks is not None or not variable.size:
            continue
        if variable.dims == (name,) or is_time(variable):
            with quiet():  # what they warn of is checked
                encoded = there.encoded(str(name), variable)
            fit.checked(variable, encoded)
            if variable.dims != (name,):
                others = partial(there.values, str(name))
                fit.check_beside(variable.values, encoded.values, others)


def _turned(ds: xr.Dataset, there: StoredGroup) -> xr.Dataset:
    """The dataset with axes as those of the existing arrays, and times as fine as there."""
    turned = {}
    for key, variable in ds.variables.items():
        name, fitting = str(key), variable
        if name in there.nodes:
            dims = (*there.sizes(name),)
            if variable.dims != dims and {*variable.dims} == {*dims} and not is_virtual(variable):
                fitting = variable.transpose(*dims)
            fitting = there.as_fine(name, fitting)
        if fitting is not variable:
            turned[key] = fitting
    return ds.assign(turned) if turned else ds


def put(
    prepared: PreparedPart,
    session: Session | Fork | ManifestStore,
    *,
    statistics: bool,
    scheduler: Any,
    relocate: bool,
) -> None:
    """Write a dataset; `relocate` says whether appends may land behind those of others.

    To a store, it has to be in memory.
    """
    part, fits, planned, there = prepared.part, prepared.fits, prepared.planned, prepared.there
    store = session if isinstance(session, ManifestStore) else session.store
    workspace, new = workspace_of(store), part.encoding
    pieces: Iterable[tuple[xr.Dataset, Any, Mapping[Hashable, Sequence[int]]]]
    pieces = [(part.ds, part.region, {})]
    if part.append is not None and planned is not None:
        new = {name: how for name, how in new.items() if str(name) not in there.nodes}
        check = part.append.tip_check(workspace.contents, planned, relocate=relocate)
        workspace.tip_checks.append(check)
        pieces = part.append.parts(part.ds, planned)
    for ds, region, rows in pieces:
        options = prepared.options
        if region is not None and planned is not None:  # rows that are written over existing ones
            options = {**options, "mode": "a", "append_dim": None}
        with explained(part.ds, fits, rows), _told(ds):
            elsewhere = None
            if not isinstance(session, ManifestStore) and computed_elsewhere(ds, scheduler):
                check_reachable(workspace.storage, scheduler)
                elsewhere = session
            writer = begin_write(
                ds, store, options, region, new, fits, there, statistics=statistics
            )
            writer.sync(elsewhere, scheduler=scheduler)
    if planned is not None and planned.replaced:
        drop_unchanged(workspace, workspace.contents.members(part.group).values())


def _zarr_options(part: DatasetPart, there: StoredGroup, store: ManifestStore) -> dict[str, Any]:
    """What `begin_write` takes, depending on what exists already."""
    mode, append_dim, region, arrays = part.mode, part.append_dim, part.region, sorted(there.nodes)
    where = f"group '/{part.group}' of {contents_of(store).context.storage.url}"
    if region is not None and not arrays:
        raise NotFoundError(
            f"{where} has no arrays that a region could be part of; write without region first"
        )
    if arrays and mode in (None, "w-") and append_dim is None and region is None:
        raise AlreadyExistsError(
            f"{where} has data already ({', '.join(arrays[:_LISTED])}): give append_dim to append, "
            "region to write to a part, mode='a' to add or write over variables, or mode='w' to "
            "replace the group"
        )
    if not arrays and append_dim is not None:
        mode, append_dim = "a", None
    replaced = mode == "w"
    return {
        "group": part.group or None,
        "mode": mode or ("r+" if region is not None and append_dim is None else "a"),
        "append_dim": append_dim,
        "zarr_format": zarr_format_at(
            store, part.top if replaced else part.group, replaced=replaced
        ),
    }


def zarr_format_at(store: ManifestStore, path: str, *, replaced: bool) -> int:
    """The format of the group or its nearest parent; nodes of different formats do not mix."""
    if replaced and not path:
        return 3
    contents = contents_of(store)
    nearest = None if replaced else contents.node(path)
    nearest = nearest or next(contents.above(path), None)
    return 2 if nearest is not None and V3_DOCUMENT not in nearest.documents else 3


@contextmanager
def _told(ds: xr.Dataset) -> Iterator[None]:
    """Say that xarray cannot write the dataset, unless it says so itself."""
    try:
        yield
    except (ArithmeticError, LookupError, RecursionError, TypeError, UnicodeError) as error:
        if isinstance(error, ManifestsError) or ds.chunksizes:  # or of what a task computes
            raise
        raise InvalidArgumentError(
            f"xarray cannot write this dataset: {type(error).__name__}: {error}"
        ) from error
    except ValueError as error:
        if "unexpected encoding parameters" not in str(error):
            raise
        raise InvalidArgumentError(
            f"{error} Known are what xarray's to_zarr takes: chunks, shards, compressors, filters, "
            "serializer and fill_value; and dtype, _FillValue, scale_factor, add_offset, units "
            "and calendar where the values are of a kind for it"
        ) from error
