"""`write`: writing a dataset to a repository in one commit.

If dask computes in threads of this process, its tasks write to the session's own store. Otherwise
`distributed` writes the dataset to forks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final, Literal

import xarray as xr

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.commit.describe import checked_message, checked_metadata
from zarr_manifests.engine.commit.request import TipCheck
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
)
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import V3_DOCUMENT, join
from zarr_manifests.making import write_into
from zarr_manifests.planning.conflict.append_labels import AppendPlan, OnExisting
from zarr_manifests.planning.conflict.transactions import Txn, txn_of
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session, commits_of
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.xarray.agreement import check_agreement
from zarr_manifests.xarray.appending import Append
from zarr_manifests.xarray.backend import Location
from zarr_manifests.xarray.distributed import computed_elsewhere, write_elsewhere
from zarr_manifests.xarray.encoding import begin_write, explained, fits_of
from zarr_manifests.xarray.fit import Fit
from zarr_manifests.xarray.stored_group import StoredGroup
from zarr_manifests.xarray.unchanged import changes_nothing, drop_unchanged
from zarr_manifests.xarray.virtual_datasets import is_virtual

__all__ = ["write", "zarr_format_at"]

type _Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]
type _WriteMode = Literal["w", "w-", "a", "a-", "r+"]

_MODES: Final = ("w", "w-", "a", "a-", "r+")
_ON_EXISTING: Final = ("error", "skip", "replace")
_LISTED: Final = 20


def write(
    ds: xr.Dataset,
    location: Location,
    *,
    message: str,
    branch: str = "main",
    group: str | None = None,
    mode: _WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: _Region | None = None,
    encoding: Mapping[Hashable, Mapping[str, Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RepositoryConfig | Mapping[str, Any] | None = None,
    relocate: bool = False,
    on_existing: OnExisting = "error",
    sort: Literal["keep"] | None = None,
    check: Literal["values", "encoding"] | None = "values",
    statistics: bool = True,
    txn: Txn | tuple[str, int] | None = None,
    scheduler: Any = None,
    storage_options: Mapping[str, object] | None = None,
) -> str:
    """Write a dataset to a repository in one commit; make the repository if necessary.

    If anything fails, nothing is committed and no repository is made.

    Parameters
    ----------
    ds : Dataset
        The dataset. It may be lazy, even if it is read from the same repository, and its dask
        arrays may be computed in threads, processes or on a distributed cluster that reaches the
        storage. Each chunk must lie within one dask block.
    location : str, path, Storage or Repository
        Where the repository is, or is to be made.
    message : str
        The commit message.
    branch : str
        The branch to commit to.
    group : str, optional
        Path of the group; by default the root.
    mode : {"w", "w-", "a", "a-", "r+"}, optional
        As in `Dataset.to_zarr`. `w` replaces the group and everything below it, `a` writes over
        existing variables and adds others. By default nothing existing is overwritten, unless
        `append_dim` or `region` says where.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created.
    region : mapping or "auto", optional
        Write to this part of the existing arrays, as in `Dataset.to_zarr`.
    encoding : mapping, optional
        Encodings of new variables, by name.
    metadata : mapping, optional
        Stored with the commit: strings, numbers, lists and maps.
    config : RepositoryConfig or mapping, optional
        The configuration of a new repository; for an existing one, used instead of its own in this
        write.
    relocate : bool, default False
        Only with `append_dim`: if others append in the meantime, append behind them, as in
        `Session.relocate_appends`, or by writing again.
    on_existing : {"error", "skip", "replace"}, default "error"
        Only with `append_dim`: what to do with rows whose labels in that dimension's index
        coordinate exist already. `skip` leaves these rows out, `replace` writes them over the
        existing ones; other rows are appended. With both, repeating a call makes no second commit.
    sort : {"keep"}, optional
        Only with `append_dim`: `keep` appends in the order given, even if the index coordinate is
        then unsorted. By default that is an error.
    check : {"values", "encoding"} or None, default "values"
        What to refuse. `values`: values that would be read back differently, and encodings that
        contradict the existing arrays. `encoding`: the latter only. None: nothing. Values of dask
        arrays are checked when they are computed.
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
    """
    _check_arguments(ds, location, mode, append_dim, region, encoding, config)
    if check not in ("values", "encoding", None):
        raise InvalidArgumentError(f"check must be 'values', 'encoding' or None, not {check!r}")
    _check_append(append_dim, region, on_existing, sort, relocate=relocate)
    message, metadata = (
        checked_message(message),
        checked_metadata({} if metadata is None else metadata),
    )
    encoding = {name: dict(how) for name, how in (encoding or {}).items()}
    path = (group or "").strip("/")
    append = None
    if append_dim is not None and region is None:
        append = Append.of(ds, append_dim, path, on_existing, sort, relocate=relocate)
    step = txn_of(txn)
    put = partial(_write, statistics=statistics, scheduler=scheduler)
    commit = partial(_commit, message=message, metadata=metadata, txn=step)

    def into(repository: Repository) -> str:
        def begin() -> tuple[Session, StoredGroup, dict[str, Any], dict[str, Fit]]:
            """The session and the group to write to, the options, and how variables are stored."""
            session = repository.writable_session(branch)
            commits_of(session).begin(step)
            if relocate:
                session.relocate_appends(append_dim)  # type: ignore[arg-type]  # checked there
            options = _zarr_options(session.store, path, mode, append_dim, region)
            contents = contents_of(session.store)
            there = StoredGroup(contents.context, contents.view, path)
            known = frozenset[str]()
            if check is not None and options["mode"] != "w":
                known = check_agreement(ds, there, options["append_dim"])
            fits = fits_of(ds, there, options, encoding, known) if check == "values" else {}
            return session, there, options, fits

        if append is not None:
            return _append(ds, append, begin, encoding, put, commit)
        session, _, options, fits = begin()
        place = dict(region) if isinstance(region, Mapping) else region
        with explained(ds, fits):
            put(ds, session, options, place, encoding, fits)
        return commit(session)

    if isinstance(location, Repository):
        refuse_options("a repository", storage_options)
        return into(location)
    storage = storage_of(location, storage_options)
    only_there = region is not None or mode == "r+" or branch != "main"
    return write_into(storage, config, into, make=not only_there)


def _append(
    ds: xr.Dataset,
    append: Append,
    begin: Callable[[], tuple[Session, StoredGroup, dict[str, Any], dict[str, Fit]]],
    encoding: Mapping[Hashable, Mapping[str, Any]],
    put: Callable[..., None],
    commit: Callable[..., str],
) -> str:
    """Plan, write and commit an append; repeat if others have changed what the plan is based on."""
    planned: AppendPlan | None = None
    conflict: ConflictError | None = None
    attempts = 0
    while True:
        attempts += 1
        session, there, options, fits = begin()
        workspace = workspace_of(session.store)
        context, nodes = workspace.context, workspace.contents.view.nodes
        before, planned = planned, append.plan(there)
        if conflict is not None and before is not None:
            tried = attempts > context.config.commit_attempts
            if tried or not append.goes_on(before, planned):
                raise conflict
        new = {k: how for k, how in encoding.items() if join(append.group, str(k)) not in nodes}
        for part, at, rows in append.parts(ds, planned, nodes):
            over = {} if at is None else {"mode": "a", "append_dim": None}
            place = None if at is None else {append.dim: at}
            with explained(ds, fits, {append.dim: rows}):
                how = {**options, **over}
                put(part, session, how, place, new, fits)
        if planned.replaced:
            drop_unchanged(workspace)
        try:
            return commit(session, check_tip=partial(append.check, context, planned))
        except ConflictError as error:
            conflict = error


def _commit(
    session: Session,
    message: str,
    metadata: Mapping[str, Any],
    txn: Txn | None,
    check_tip: TipCheck | None = None,
) -> str:
    """Commit and return the snapshot's id; the session's own if there is nothing to commit."""
    if changes_nothing(workspace_of(session.store)):
        if txn is None:
            return session.snapshot_id
        session.discard_changes()  # an empty commit, with its mark
    return commits_of(session).commit(message, metadata, check_tip=check_tip, txn=txn)


def _check_arguments(
    ds: object,
    location: object,
    mode: object,
    append_dim: object,
    region: object,
    encoding: Mapping[Hashable, Mapping[str, Any]] | None,
    config: object,
) -> None:
    if isinstance(ds, xr.Dataset) and any(map(is_virtual, ds.variables.values())):
        raise InvalidArgumentError(
            "the dataset has references of VirtualiZarr in place of data: write it with "
            "zarr_manifests.virtual.write"
        )
    if not isinstance(ds, xr.Dataset):
        hint = "; use its to_dataset(name=...)" if isinstance(ds, xr.DataArray) else ""
        raise InvalidArgumentError(f"write takes a Dataset, not a {type(ds).__name__}{hint}")
    if mode is not None and mode not in _MODES:
        raise InvalidArgumentError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
    if append_dim is not None:
        if append_dim not in ds.dims:
            listed = ", ".join(map(str, ds.dims)) or "none"
            raise InvalidArgumentError(
                f"append_dim {append_dim!r} is not a dimension of the dataset; there are: {listed}"
            )
        if mode not in (None, "a", "a-"):
            raise InvalidArgumentError(f"append_dim goes with mode 'a' or 'a-', not {mode!r}")
    if region is not None and mode not in (None, "a", "a-", "r+"):
        raise InvalidArgumentError(f"region goes with mode 'r+', 'a' or 'a-', not {mode!r}")
    unknown = [name for name in encoding or () if name not in ds.variables]
    if unknown:
        listed = ", ".join(map(str, list(ds.variables)[:_LISTED])) or "none"
        raise InvalidArgumentError(
            f"encoding names {unknown[0]!r}, which is not a variable of the dataset; there are: "
            f"{listed}"
        )
    for name, how in (encoding or {}).items():
        if not isinstance(how, Mapping):
            raise InvalidArgumentError(f"the encoding of {name!r} is a mapping, not {how!r}")
    if config is not None and isinstance(location, Repository):
        raise InvalidArgumentError("config goes with a path, URL or storage, not a Repository")


def _check_append(
    append_dim: Hashable | None,
    region: _Region | None,
    on_existing: object,
    sort: object,
    *,
    relocate: bool,
) -> None:
    if on_existing not in _ON_EXISTING:
        listed = ", ".join(_ON_EXISTING)
        raise InvalidArgumentError(f"on_existing must be one of {listed}, not {on_existing!r}")
    if sort not in (None, "keep"):
        raise InvalidArgumentError(f"sort must be 'keep' or None, not {sort!r}")
    if append_dim is None and relocate:
        raise InvalidArgumentError("relocate goes with append_dim: it only moves appends")
    if append_dim is None and (on_existing != "error" or sort is not None):
        raise InvalidArgumentError("on_existing and sort go with append_dim")
    if region is not None and on_existing != "error":
        raise InvalidArgumentError(
            f"on_existing={on_existing!r} finds the places of rows itself; leave out region"
        )


def _zarr_options(
    store: ManifestStore,
    path: str,
    mode: _WriteMode | None,
    append_dim: Hashable | None,
    region: _Region | None,
) -> dict[str, Any]:
    """Arguments for xarray's Zarr backend, depending on what exists already."""
    url = contents_of(store).context.storage.url
    arrays = sorted(
        node_path.rpartition("/")[2]
        for node_path, node in contents_of(store).members(path).items()
        if node.kind is NodeKind.ARRAY
    )
    if region is not None and not arrays:
        raise NotFoundError(
            f"group '/{path}' of {url} has no arrays that a region could be part of; "
            "write without region first"
        )
    if arrays and mode in (None, "w-") and append_dim is None and region is None:
        raise AlreadyExistsError(
            f"group '/{path}' of {url} has data already ({', '.join(arrays[:_LISTED])}): give "
            "append_dim to append, region to write to a part, mode='a' to add or write over "
            "variables, or mode='w' to replace the group"
        )
    if append_dim is not None and not arrays:
        mode, append_dim = "a", None
    default = "r+" if region is not None and append_dim is None else "a"
    return {
        "group": path or None,
        "mode": mode or default,
        "append_dim": append_dim,
        "zarr_format": zarr_format_at(store, path, replaced=mode == "w"),
    }


def zarr_format_at(store: ManifestStore, path: str, *, replaced: bool) -> int:
    """The format of the group or its nearest parent; nodes of different formats do not mix."""
    if replaced and not path:
        return 3
    contents = contents_of(store)
    nearest = None if replaced else contents.node(path)
    nearest = nearest or next(contents.above(path), None)
    return 2 if nearest is not None and V3_DOCUMENT not in nearest.documents else 3


def _write(
    ds: xr.Dataset,
    session: Session,
    options: Mapping[str, Any],
    region: _Region | None,
    encoding: Mapping[Hashable, Mapping[str, Any]],
    fits: Mapping[str, Fit],
    *,
    statistics: bool,
    scheduler: Any,
) -> None:
    how = options, region, encoding, fits
    try:
        if computed_elsewhere(ds, scheduler):
            write_elsewhere(ds, session, *how, statistics=statistics, scheduler=scheduler)
        else:
            writer = begin_write(ds, session.store, *how, statistics=statistics)
            writer.sync(chunkmanager_store_kwargs={"scheduler": scheduler})
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
