"""Putting datasets into an open session: what exists is looked at first, then values are written.

`prepare` reads what is in the group, uncommitted changes included, and plans an append. `put`
writes. If dask computes in threads of this process, its tasks write to the session's own store.
Otherwise `distributed` writes the dataset to forks.

Invariants: reads made to prepare do not count as reads of the session, so that its commit can be
rebased onto others'; the labels of an append are compared again with the tip it lands on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import xarray as xr

from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
)
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import DOCUMENTS, V3_DOCUMENT, join
from zarr_manifests.planning.conflict.append_labels import AppendPlan
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Fork, Session
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.xarray.agreement import check_agreement, check_not_new
from zarr_manifests.xarray.appending import drop_unchanged
from zarr_manifests.xarray.distributed import computed_elsewhere, write_elsewhere
from zarr_manifests.xarray.encoding import (
    begin_write,
    explained,
    fits_of,
    located,
    of_first_label,
)
from zarr_manifests.xarray.fit import Fit, is_time
from zarr_manifests.xarray.parts import DatasetPart, Encodings, is_virtual
from zarr_manifests.xarray.stored_group import StoredGroup

__all__ = ["PreparedPart", "check_checks", "located", "prepare", "put", "zarr_format_at"]


_LISTED: Final = 20


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


def check_checks(check: object) -> None:
    """Raise `InvalidArgumentError` unless `check` is what `write` takes."""
    if not isinstance(check, bool):
        raise InvalidArgumentError(f"check must be True or False, not {check!r}")


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
    options = _zarr_options(store, part)
    there = StoredGroup.of(store, part.group)
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
    if planned is not None and planned.replaced:  # whatever is checked: in parts it has no place
        check_not_new(ds, there, options["append_dim"])
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
    for name, variable in ds.variables.items():
        node = there.nodes.get(str(name))
        if node is None or node.array is None:
            continue
        dims, fitting = node.array.dimension_names or (), variable
        turns = variable.dims != dims and {*variable.dims} == {*dims}
        if turns and not is_virtual(variable):
            fitting = variable.transpose(*dims)
        fitting = there.as_fine(str(name), fitting)
        if fitting is not variable:
            turned[name] = fitting
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
    part, fits, planned = prepared.part, prepared.fits, prepared.planned
    how = {"there": prepared.there, "statistics": statistics, "scheduler": scheduler}
    if part.append is None or planned is None:
        region = dict(part.region) if isinstance(part.region, Mapping) else part.region
        with explained(part.ds, fits):
            _write(part.ds, session, prepared.options, region, part.encoding, fits, **how)
        return
    append, workspace = part.append, workspace_of(_store(session))
    contents = workspace.contents
    workspace.tip_checks.append(append.tip_check(contents, planned, relocate=relocate))
    new = {
        name: encoding
        for name, encoding in part.encoding.items()
        if contents.node(join(part.group, str(name))) is None
    }
    for piece, at, rows in append.parts(part.ds, planned):
        over = {} if at is None else {"mode": "a", "append_dim": None}
        place = None if at is None else {append.dim: at}
        with explained(part.ds, fits, {append.dim: rows}):
            _write(piece, session, {**prepared.options, **over}, place, new, fits, **how)
    if planned.replaced:
        drop_unchanged(workspace, contents.members(part.group).values())


def _zarr_options(store: ManifestStore, part: DatasetPart) -> dict[str, Any]:
    """Arguments for xarray's Zarr backend, depending on what exists already."""
    contents, path = contents_of(store), part.group
    mode, append_dim, region = part.mode, part.append_dim, part.region
    url = contents.context.storage.url
    arrays = sorted(
        node_path.rpartition("/")[2]
        for node_path, node in contents.members(path).items()
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
    replaced = mode == "w"
    return {
        "group": path or None,
        "mode": mode or default,
        "append_dim": append_dim,
        "zarr_format": zarr_format_at(store, part.top if replaced else path, replaced=replaced),
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
    session: Session | Fork | ManifestStore,
    options: Mapping[str, Any],
    region: Any,
    encoding: Encodings,
    fits: Mapping[str, Fit],
    *,
    there: StoredGroup,
    statistics: bool,
    scheduler: Any,
) -> None:
    how = options, region, encoding, fits, there
    with _told(ds):
        if not isinstance(session, ManifestStore) and computed_elsewhere(ds, scheduler):
            write_elsewhere(ds, session, *how, statistics=statistics, scheduler=scheduler)
        else:
            writer = begin_write(ds, _store(session), *how, statistics=statistics)
            writer.sync(chunkmanager_store_kwargs={"scheduler": scheduler})


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


def _store(target: Session | Fork | ManifestStore) -> ManifestStore:
    return target if isinstance(target, ManifestStore) else target.store
