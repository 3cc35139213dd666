"""`write` and `to_session`: datasets go to a repository in one commit, or into an open session.

`parts_of` parses the arguments. For each dataset, `prepare` looks at what is in the group,
uncommitted changes included, refuses what does not go with it, and plans an append; `put` encodes,
checks and writes the values, as `Dataset.to_zarr` does; then `write` commits.

Invariants: reads made to prepare do not count as reads of the session, so that its commit can be
rebased onto others'; the labels of an append are compared again with the tip it lands on; all
values in memory are checked before a chunk is written, and dask values once, when and where they
are computed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import xarray as xr
import zarr
from msgspec import Struct
from msgspec.structs import replace
from xarray.backends import ZarrStore
from xarray.backends.chunks import grid_rechunk, validate_grid_chunks_alignment
from xarray.backends.zarr import encode_zarr_attr_value, encode_zarr_variable
from xarray.conventions import encode_dataset_coordinates
from zarr.core.group import ConsolidatedMetadata

from zarr_manifests.decoding import meaning_of_bounds
from zarr_manifests.engine.commit_changes import checked_message, checked_metadata
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.keys import DOCUMENTS, V3_DOCUMENT
from zarr_manifests.planning.conflict import Txn, txn_of
from zarr_manifests.repositories import Location, target_of, write_into
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session, commits_of
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.texts import listed
from zarr_manifests.xarray.appended_rows import AppendPlan, OnExisting
from zarr_manifests.xarray.array_target import DatasetWriter
from zarr_manifests.xarray.fit import Fit, explained, is_time, of_first_label
from zarr_manifests.xarray.parts import (
    DatasetPart,
    Encodings,
    Given,
    Region,
    WriteMode,
    changes_nothing,
    drop_unchanged,
    is_virtual,
    parts_of,
    pieces_of,
)
from zarr_manifests.xarray.stored_group import (
    StoredGroup,
    append_check,
    check_agreement,
    check_lengths,
    located,
    planned_on,
)
from zarr_manifests.xarray.virtual_datasets import planned_references, without_virtual


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
    on_existing: OnExisting = "error",
    sort: Literal["keep"] | None = None,
    check: bool = True,
    statistics: bool = True,
    txn: Txn | tuple[str, int] | None = None,
    scheduler: Any = None,
    storage_options: Mapping[str, object] | None = None,
) -> str:
    """Write a dataset to a repository in one commit; make the repository if necessary.

    If anything fails, nothing is committed, and a repository that was made for it stays empty. To
    write several datasets in one commit, use `to_session`.

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
    mode : {"w", "w-", "a", "r+"}, optional
        As in `Dataset.to_zarr`. `w` replaces the group and everything below it, `a` writes over
        existing variables and adds others. By default nothing existing is overwritten, unless
        `append_dim` or `region` says where.
    append_dim : hashable, optional
        Append along this dimension, behind what others append in the meantime; if the group has no
        data yet, it is created, with 64 labels of the dimension to a chunk. Nodes of a tree without
        the dimension are written over.
    region : mapping or "auto", optional
        Write to this part of the existing arrays, as in `Dataset.to_zarr`. Not of a tree.
    encoding : mapping, optional
        Encodings of new variables, by name. Not of a tree, whose variables have their own.
    metadata : mapping, optional
        Stored with the commit: strings, numbers, lists and maps.
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
        If others have committed to the same chunks or metadata in the meantime, of an append
        again and again; or if two tasks wrote to the same chunk.
    TransactionAlreadyCommitted, TransactionGapError
        If the step was written before, or is not the next one, as for `Session.commit`.
    ValueError
        From xarray, if the dataset does not match the existing arrays.

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
    how = mode, append_dim, region, encoding or {}, on_existing, sort, check, statistics
    parts = parts_of(ds, group, *how)
    message = _said_of(parts) if message is None else checked_message(message)
    metadata = checked_metadata({} if metadata is None else metadata)
    step = txn_of(txn)

    def into(repository: Repository) -> str:
        attempts = 0
        while True:
            attempts += 1
            session = repository.writable_session(branch)
            commits_of(session).begin(step)
            if append_dim is not None:
                commits_of(session).relocate_appends(append_dim)
            for each in _prepared(parts, session):
                put(each, session, scheduler)
            try:
                return _commit(session, message, metadata, step)
            except ConflictError:
                # An append is planned anew, on top of what came first.
                if append_dim is None or attempts > repository.config.commits.attempts:
                    raise

    only_there = region is not None or mode == "r+" or branch != "main"
    return write_into(target_of(location, storage_options), into, make=not only_there)


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
    how = mode, append_dim, region, encoding or {}, on_existing, sort, check, statistics
    parts = parts_of(ds, group, *how)
    if isinstance(session, Fork):
        if append_dim is not None:
            raise InvalidArgumentError(
                "a fork cannot append: append in its session, then write regions to forks"
            )
    else:
        commits_of(session).writer.workspace.check_open()
    for each in _prepared(parts, session):
        put(each, session, scheduler)


def write_virtual(
    vds: xr.Dataset | xr.DataTree,
    location: Session | Location,
    *,
    group: str | None = None,
    mode: WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    check: bool = True,
    message: str = "write virtual references",
    branch: str = "main",
) -> str | None:
    """Write a virtual dataset of VirtualiZarr: references to its chunks, and loadable variables.

    A later change of a file is an error when it is read. Of files below a container, etag or time
    of modification are noted; others must not change from now on.

    Parameters
    ----------
    vds : Dataset or DataTree
        From `virtualizarr.open_virtual_dataset` and the like.
    location : Session, str, path, Storage or Repository
        A session, which is not committed; or where the repository is, or is to be made, for one
        commit.
    group : str, optional
        Path of the group; by default the root.
    mode : {"w", "w-", "a", "r+"}, optional
        `w-`, the default, writes where no arrays are; `w` replaces the group and all below it; `a`
        writes over existing variables and adds others; `r+` writes over existing ones only.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created. Its labels must be
        loadable, to be compared with those that are there.
    region : mapping of str to slice or "auto", or "auto", optional
        Write to whole chunks of existing arrays, by dimension. With `"auto"`, where the existing
        coordinate has the values of the dataset's; a dimension without one is written whole.
    check : bool, default True
        As in `write`, of values that are loaded.
    message, branch : str
        The message of the commit, and the branch to commit to.

    Returns
    -------
    str or None
        The new snapshot's id; None if a session was given.

    Raises
    ------
    AlreadyExistsError
        If something is there, and neither `mode`, `append_dim` nor `region` says what to do; or if
        labels of an append exist already.
    NotFoundError
        If the group or array to write to does not exist.
    InvalidArgumentError
        If what is appended does not fit what is there: another type, codec, chunk shape, encoding
        or shape, or a last chunk that is only partly filled; or if labels to append are virtual, or
        `write` would refuse values.
        Also if options exclude each other.
    MissingChunkError
        If a file below a container is not there.

    Examples
    --------
    >>> import numpy as np, xarray as xr, zarr, zarr_manifests as zm
    >>> from virtualizarr.manifests import ChunkManifest, ManifestArray
    >>> made = zarr.create_array({}, shape=(4,), chunks=(4,), dtype="u1", compressors=None)
    >>> entry = {"path": "s3://bucket/winds.bin", "offset": 8, "length": 4}
    >>> array = ManifestArray(made.metadata, ChunkManifest({"0": entry}))
    >>> vds = xr.Dataset({"wind": ("x", array)})
    >>> repo = zm.create("memory://virtual-write")
    >>> snapshot_id = zm.virtual.write(vds, repo, message="refer to winds")
    >>> repo.readonly_session().store.get_virtual_refs("wind").locations
    ('s3://bucket/winds.bin',)
    """
    how: Any = {"group": group, "mode": mode, "append_dim": append_dim, "region": region}
    if isinstance(location, Session):
        to_session(vds, location, check=check, **how)
        return None
    return write(vds, location, message=message, branch=branch, check=check, **how)


def _said_of(parts: Sequence[DatasetPart]) -> str:
    """The message of a write without one."""
    first, where = parts[0], f"/{parts[0].top}"
    dims = [part.append_dim for part in parts if part.append_dim is not None]
    if dims:
        return f"append to {where} along {dims[0]}"
    if first.region is not None:
        return f"write a part of {where}"
    names = [str(name) for part in parts for name in part.ds.data_vars]
    return f"write {listed(names) if names else 'attributes'} to {where}"


def _prepared(parts: Sequence[DatasetPart], session: Session | Fork) -> list[PreparedPart]:
    node = contents_of(session.store).node
    due = [part for part in parts if not part.only_group or node(part.group) is None]
    return [prepare(part, session.store) for part in due]


def _commit(session: Session, message: str, metadata: Mapping[str, Any], txn: Txn | None) -> str:
    """Commit and return the snapshot's id; the session's own if there is nothing to commit."""
    workspace = workspace_of(session.store)
    if changes_nothing(workspace):
        if txn is None:
            # Who has committed it may have been killed before it was durable.
            workspace.context.storage.sync([ROOT_KEY])
            return session.snapshot_id
        checks = workspace.tip_checks
        session.discard_changes()  # an empty commit, with its mark
        workspace.tip_checks = checks
    return commits_of(session).commit(message, metadata, txn=txn)


# --- one dataset -----------------------------------------------------------------------------


class PreparedPart(Struct, frozen=True):
    """A dataset whose group has been looked at.

    Parameters
    ----------
    part : DatasetPart
        The dataset, with the mode, the dimension to append along and the slices of the region
        that are left to it.
    fits : mapping
        How each variable to check is stored, by name.
    there : StoredGroup
        The group.
    planned : AppendPlan, optional
        What an append does with each row.
    references : list of callable
        What writes the virtual variables, which the dataset is without.
    """

    part: DatasetPart
    fits: Mapping[str, Fit]
    there: StoredGroup
    planned: AppendPlan | None
    references: Sequence[Callable[[], None]]


def prepare(part: DatasetPart, store: ManifestStore) -> PreparedPart:
    """Look at what the group has, and refuse what does not go with it.

    Raises
    ------
    AlreadyExistsError, NotFoundError, InvalidArgumentError
        As for `write`.
    """
    there, ds, dim = StoredGroup.of(store, part.group), part.ds, part.append_dim
    part = _decided(part, there, store)
    _check_names(ds)
    if part.mode != "w":
        ds = _turned(ds, there)
        if part.check:
            check_agreement(ds, there, part.append_dim)
    virtual = {name: variable for name, variable in ds.variables.items() if is_virtual(variable)}
    whole, encoding = ds, part.encoding
    if virtual:
        if given := sorted(map(str, encoding.keys() & virtual.keys())):
            raise InvalidArgumentError(
                f"encoding names {listed(given)}: virtual variables keep that of their files, so "
                "leave them out of it"
            )
        ds = without_virtual(ds, virtual, {} if part.mode == "w" else there.own_attributes)
    if dim is not None and str(dim) not in there.nodes:
        ds, encoding = of_first_label(ds, dim, encoding)
    part = replace(part, ds=ds, encoding=encoding)
    fits = _fits_of(part, there) if part.check else {}
    with explained(ds, fits):
        for name, variable in ds.variables.items():
            fit, compared = fits.get(str(name)), name == dim or part.region is not None
            if compared and variable.dims == (name,) and fit is not None and fit.stored is not None:
                _encoded(str(name), variable, there, fits)  # labels are checked, then compared
        if part.region is not None:
            part = replace(part, region=located(replace(part, ds=whole), store))
    planned = planned_on(there, part)
    if virtual and planned is not None and len(planned.appended) < whole.sizes[dim]:
        raise InvalidArgumentError(
            f"some labels of {dim!r} are there already, and rows of virtual variables are appended "
            'all together: leave those rows out, and append with on_existing="error"'
        )
    if planned is not None and planned.replaced and not ds.variables.keys() <= there.nodes.keys():
        check_lengths(ds, there, part.append_dim)  # whatever is checked: it has no place
    references = [
        planned_references(str(name), variable, part, there, store)
        for name, variable in virtual.items()
    ]
    return PreparedPart(part, fits, there, planned, references)


def _decided(part: DatasetPart, there: StoredGroup, store: ManifestStore) -> DatasetPart:
    """The part with a mode, and a dimension to append along only if there is something."""
    mode, append_dim, region, arrays = part.mode, part.append_dim, part.region, sorted(there.nodes)
    where = f"group '/{part.group}' of {contents_of(store).context.storage.url}"
    node = contents_of(store).node(part.group)
    if mode != "w" and node is not None and node.array is not None:
        raise AlreadyExistsError(f"{where} is an array: give another group=")
    if region is not None and not arrays:
        raise NotFoundError(
            f"{where} has no arrays that a region could be part of; write without region first"
        )
    if arrays and mode in (None, "w-") and append_dim is None and region is None:
        raise AlreadyExistsError(
            f"{where} has data already ({listed(arrays, 20)}): give append_dim to append, "
            "region to write to a part, mode='a' to add or write over variables, or mode='w' to "
            "replace the group"
        )
    if not arrays and append_dim is not None:
        mode, append_dim = "a", None
    mode = mode or ("a" if region is None else "r+")
    zarr_format = _zarr_format_at(store, part.top if mode == "w" else part.group, mode == "w")
    return replace(part, mode=mode, append_dim=append_dim, zarr_format=zarr_format)


def _zarr_format_at(store: ManifestStore, path: str, replaced: bool) -> Literal[2, 3]:
    """The format of the group or its nearest parent; nodes of different formats do not mix."""
    contents = contents_of(store)
    nearest = None if replaced else contents.node(path)
    nearest = nearest or next(contents.above(path), None)
    return 2 if nearest is not None and V3_DOCUMENT not in nearest.documents else 3


def _check_names(ds: xr.Dataset) -> None:
    """Refuse names under which a variable would be written, and never be found."""
    for name in ds.variables:
        text = name if isinstance(name, str) else ""
        if text in ("", ".", "..", *DOCUMENTS) or {*"/\\"} & {*text}:
            raise InvalidArgumentError(
                f"{name!r} cannot be the name of an array: rename the variable, or write it to a "
                "group, with group=..."
            )


def _turned(ds: xr.Dataset, there: StoredGroup) -> xr.Dataset:
    """The dataset with axes as those of the existing arrays."""
    turned = {}
    for key, variable in ds.variables.items():
        if str(key) in there.nodes and not is_virtual(variable):
            dims = (*there.sizes(str(key)),)
            if variable.dims != dims and {*variable.dims} == {*dims}:
                turned[key] = variable.transpose(*dims)
    return ds.assign(turned) if turned else ds


def _fits_of(part: DatasetPart, there: StoredGroup) -> dict[str, Fit]:
    """How each variable is stored, by name."""
    known = there.attributes if there.exists and part.mode != "w" else {}
    fits = {}
    bounding = [
        {**variable.attrs, "units": "days since 1970-01-01"}
        for variable in part.ds.variables.values()
        if "bounds" in variable.attrs and is_time(variable)
    ]
    for key, variable in part.ds.variables.items():
        name, own = str(key), dict(variable.attrs)
        if name in known:
            stored, attributes = there.array(name).dtype, there.decoded_by(name)
            fits[name] = Fit(name, own, there.like(name).encoding, stored, attributes)
            continue
        bounds = own.get("bounds")
        if bounds in known and is_time(variable) and "units" not in known[bounds]:
            raise InvalidArgumentError(
                f"{name!r} holds times and names {bounds!r} as their bounds: a reader would "
                "decode the numbers stored there as times. Write the bounds anew together with "
                "the times, with mode='w', or leave the attribute out"
            )
        how = part.encoding.get(key, variable.encoding)
        more = meaning_of_bounds(name, [*bounding, *known.values()])
        if part.zarr_format == 2 and how.get("fill_value") is not None:
            more["_FillValue"] = how["fill_value"]
        fits[name] = Fit(name, own, how, None, more)
    return fits


def _is_there(name: str, encoded: xr.Variable, part: DatasetPart, there: StoredGroup) -> bool:
    """Whether an append would store again what does not grow, and is there bit by bit.

    A coordinate may differ by rounding, as `check_agreement` has found: what is stored stays.
    """
    grows = part.append_dim is None or part.append_dim in encoded.dims
    if grows or encoded.chunks is not None:
        return False
    agrees = part.check and (encoded.dims == (name,) or name in part.ds.coords)
    if agrees and encoded.ndim and encoded.shape == there.meta(name).shape:
        return True
    if encoded.dtype.kind in "OT":
        return False
    old, new = there.values(name), np.asarray(encoded.values)
    return (new.shape, new.dtype) == (old.shape, old.dtype) and new.tobytes() == old.tobytes()


# --- into the session ------------------------------------------------------------------------


def put(prepared: PreparedPart, session: Session | Fork, scheduler: Any = None) -> None:
    """Write a dataset."""
    part, fits, planned, there = prepared.part, prepared.fits, prepared.planned, prepared.there
    store = session.store
    workspace = workspace_of(store)
    pieces: Iterable[DatasetPart] = [part]
    if planned is not None and part.labels is not None and isinstance(session, Session):
        relocate = commits_of(session).relocates(part.labels.dims[0])
        check = append_check(part, workspace.contents, planned, relocate=relocate)
        workspace.tip_checks.append(check)
        new = {name: how for name, how in part.encoding.items() if str(name) not in there.nodes}
        pieces = pieces_of(replace(part, encoding=new), planned)
    for piece in pieces:
        with explained(piece.ds, fits):
            _begun(piece, store, fits, there).compute(session, scheduler)
    for refer in prepared.references:
        refer()
    if planned is not None and planned.replaced:
        drop_unchanged(workspace, workspace.contents.members(part.group).values())


def _begun(
    part: DatasetPart, store: ManifestStore, fits: Mapping[str, Fit], there: StoredGroup
) -> DatasetWriter:
    """Do what `Dataset.to_zarr` does, except for dask arrays, which are left in the result."""
    mode: Any = part.mode
    if not there.exists or mode not in ("a", "r+"):
        zarr.open_group(store, path=part.group, mode=mode, zarr_format=part.zarr_format)
        there = StoredGroup.of(store, part.group)
    ds = part.ds.copy()
    for variable in ds.variables.values():
        if variable.size == 0 and variable.chunks is not None:
            # Zarr accepts no chunks of length 0, and a block of a dask array would be computed.
            variable.data = np.empty(variable.shape, variable.dtype)
    if part.region is not None:
        ds = ds.drop_vars(ds.indexes)
    _check_arrays(ds, part, there)
    variables, attributes = encode_dataset_coordinates(ds)
    for key, given in part.encoding.items():
        variables[key].encoding = dict(given)
    # All is checked before any of it is written.
    encoded = {name: _encoded(str(name), v, there, fits) for name, v in variables.items()}
    old = {
        str(name): _fitted(str(name), variable, part, there)
        for name, variable in encoded.items()
        if str(name) in there.nodes and not _is_there(str(name), variable, part, there)
    }
    new = {name: _in_chunks(v) for name, v in encoded.items() if str(name) not in there.nodes}
    group, writer = there.open_in(store), DatasetWriter(statistics=part.statistics)
    if mode != "r+":
        _set_attributes(group, attributes)
    if new:
        # What else is in the group is nothing to these: xarray would open all of it.
        alone: Any = dataclasses.replace(
            group.metadata, consolidated_metadata=ConsolidatedMetadata({})
        )
        only = zarr.Group(zarr.AsyncGroup(metadata=alone, store_path=group.store_path))
        to = ZarrStore(only, "a", use_zarr_fill_value_as_mask=there.zarr_format == 2)
        to.set_variables(new, {*part.encoding}, writer)
    for name, (data, cells, shape) in old.items():
        writer.add(data, there.open_array_in(store, name, shape), cells)
    return writer


def _check_arrays(ds: xr.Dataset, part: DatasetPart, there: StoredGroup) -> None:
    """Refuse variables and encodings that do not go with the arrays that are there."""
    for name in part.encoding:
        if str(name) in there.nodes:
            raise InvalidArgumentError(
                f"{name!r} exists already and keeps its encoding: leave it out of encoding"
            )
    for name in ds.variables:
        if part.mode == "r+" and str(name) not in there.nodes:
            raise InvalidArgumentError(
                f"{name!r} does not exist yet, and mode='r+', as with region, makes no arrays: "
                "write it with mode='a', or drop it"
            )


def _encoded(
    name: str, variable: xr.Variable, there: StoredGroup, fits: Mapping[str, Fit]
) -> xr.Variable:
    """The variable as it is stored; raises `MisfitError` if values in memory do not fit."""
    fit, how = fits.get(name), variable.encoding
    if name in there.nodes:
        like = there.like(name)
        how = dict(like.encoding)
        texts = variable.dtype.kind in "SUT" and like.dtype != object
        if texts and variable.dtype != like.dtype:
            raise InvalidArgumentError(
                f"{name!r} has texts of type {variable.dtype}, and the existing array has "
                f"{like.dtype}: cast them, by astype"
            )
    if variable.dtype.kind in "iu" and how.get("add_offset") is not None:
        variable = variable.astype(np.float64)  # xarray adds no offset to whole numbers
    given: Any = variable.copy(deep=False)
    given.encoding = how
    encode = partial(encode_zarr_variable, zarr_format=there.zarr_format)
    if fit is None:
        found: xr.Variable = encode(given, name=name)
        return found
    if given.chunks is None:
        given.load()  # once, if it is of a file

    checked = partial(fit.checked, given, encode)
    if fit.stored is None or given.chunks is not None:
        return checked()
    codes = there.once(name, given.values, checked) if given.dims == (name,) else checked()
    fit.check_beside(given.values, codes.values, partial(there.values, name))
    return codes


def _set_attributes(group: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Replace the group's attributes, if they differ as JSON: 1 and 1.0 do."""
    given = {key: encode_zarr_attr_value(value) for key, value in attributes.items()}  # type: ignore[no-untyped-call]
    both = (
        json.dumps(each, sort_keys=True, default=repr) for each in (group.attrs.asdict(), given)
    )
    if len({*both}) > 1:
        group.attrs.put(given)


def _fitted(
    name: str, variable: xr.Variable, part: DatasetPart, there: StoredGroup
) -> tuple[Any, tuple[slice, ...], tuple[int, ...]]:
    """The data for an existing array, and `cells_of` it; no two dask blocks write to a chunk."""
    cells, shape = there.cells_of(name, variable, part)
    chunk_shape = there.meta(name).chunk_shape
    variable = grid_rechunk(variable, chunk_shape, cells)
    validate_grid_chunks_alignment(
        nd_v_chunks=variable.chunks,
        enc_chunks=chunk_shape,
        region=cells,
        allow_partial_chunks=part.mode != "r+",
        name=name,
        backend_shape=shape,
    )
    return variable.data, cells, shape


def _in_chunks(variable: xr.Variable) -> xr.Variable:
    """A variable for a new array; no two dask blocks write to a chunk, or a shard, of it."""
    shape: Any = variable.encoding.get("shards") or variable.encoding.get("chunks")
    given = isinstance(shape, tuple | list) and len(shape) == variable.ndim
    if variable.chunks is None or not given or any(type(n) is not int or n < 1 for n in shape):
        return variable  # xarray says what is wrong, if anything is
    return grid_rechunk(variable, shape, tuple(map(slice, variable.shape)))
