"""What a write from rows does before its tasks begin: it makes or resizes arrays, and plans.

All of it happens in a session that is not committed yet, so nothing is left of it if the write
fails. Tasks get forks of that session: a fork made before a resize would have the wrong shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import tzinfo
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xarray as xr
import zarr
from xarray.coding.strings import create_vlen_dtype

from zarr_manifests.display import fields_of
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import join, split
from zarr_manifests.planning.cells import Bins, common_unit, default_chunks
from zarr_manifests.planning.conflict.append_labels import OnExisting
from zarr_manifests.planning.zones.skipping import matching_runs
from zarr_manifests.planning.zones.time_zone import zone_of
from zarr_manifests.planning.zones.where import parse_where
from zarr_manifests.session import Session
from zarr_manifests.spark.cell_values import AlongAxis, Values, encoded, to_numpy
from zarr_manifests.spark.plan import span_of
from zarr_manifests.spark.source import Source
from zarr_manifests.spark.write_plan import WriteOptions, WritePlan
from zarr_manifests.store import workspace_of
from zarr_manifests.xarray.appending import Append, SameLabels
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.encoding import begin_write, explained, fit_of, fits_of
from zarr_manifests.xarray.fit import Fit, MisfitError
from zarr_manifests.xarray.stored_group import StoredGroup, check_agreement
from zarr_manifests.xarray.writers import zarr_format_at

__all__ = ["Begun", "Target", "begin"]

_PACKING: Final = frozenset({"scale_factor", "add_offset"})
_WHOLE: Final = {"dtype": "int64", "_FillValue": -(2**63)}
_TIMES: Final = {**_WHOLE, "units": "microseconds since 1970-01-01"}
_DURATIONS: Final = {**_WHOLE, "units": "microseconds"}

type Labels = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """What a write goes to: a group, and the names of its variables.

    Parameters
    ----------
    group : str
        Path of the group, without slashes around it.
    names : tuple of str
        The variables, which are the columns besides dims.
    """

    group: str
    names: tuple[str, ...]

    @staticmethod
    def of(session: Session, options: WriteOptions, columns: Sequence[str]) -> Target:
        """What the path of the options and these columns stand for.

        Raises
        ------
        NotFoundError
            If there is no such array, group or variable, and it is not to be created.
        AlreadyExistsError
            If a variable is to be created that is there.
        InvalidArgumentError
            If columns lack, or do not go with an array.
        """
        lacking = [name for name in options.dims if name not in columns]
        if options.order_by is not None and options.order_by not in columns:
            lacking.append(options.order_by)
        if lacking:
            raise InvalidArgumentError(
                f"there is no column {lacking[0]!r}; there are: {', '.join(columns)}"
            )
        used = {*options.dims, options.order_by}
        names = tuple(name for name in columns if name not in used)
        if not names:
            raise InvalidArgumentError("all columns are dims: there are no values to write")
        path = options.target.strip("/")
        nodes = workspace_of(session.store).contents.nodes()
        node, (parent, last) = nodes.get(path), split(path)
        is_array = node.array is not None if node is not None else names == (last,)
        if is_array:
            if names != (last,):
                raise InvalidArgumentError(
                    f"/{path} is an array, so there has to be one column besides dims, named "
                    f"{last!r}; there are: {', '.join(names)}"
                )
            path = parent
        there = [name for name in names if join(path, name) in nodes]
        if options.mode == "create":
            if there:
                raise AlreadyExistsError(
                    f"/{join(path, there[0])} is there already; nothing was written. Pass "
                    "mode='append' or 'overwrite-region' to write to it"
                )
        elif len(there) < len(names):
            missing = next(name for name in names if name not in there)
            raise NotFoundError(
                f"there is no variable {missing!r} in group /{path}; mode='create' makes it"
            )
        return Target(path, names)

    def new_labels(self, session: Session, options: WriteOptions) -> tuple[str, ...]:
        """The dims whose labels have to come from the rows."""
        if options.mode == "append":
            return (str(options.append_dim),)
        if options.mode != "create":
            return ()
        nodes = workspace_of(session.store).contents.nodes()
        given = () if options.template is None else options.template.sizes
        return tuple(
            dim for dim in options.dims if dim not in given and join(self.group, dim) not in nodes
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """A write whose session is prepared: what its tasks and its commit need.

    Parameters
    ----------
    plan : WritePlan
        The plan; its bins are those of the whole arrays if `region` is None.
    region : Box or None
        The cells to write; None if they are the smallest box that holds the rows.
    unit : tuple of int
        Cells, by dimension, that are written together.
    check_tip : callable
        Refuses a tip on which the write would be another one.
    """

    plan: WritePlan
    region: Box | None
    unit: Coords
    check_tip: Callable[[Any], None]

    def within(self, region: Box, options: WriteOptions, parallelism: int) -> WritePlan:
        """The plan of a write of that region."""
        plan = self.plan
        each = sum(one.itemsize for one in plan.variables) + 1
        each += 8 if plan.order_by is not None else 0
        bins = Bins.of(region, self.unit, cells=options.buffer_bytes // each, least=parallelism)
        return replace(plan, bins=bins, tasks=max(min(len(bins), options.max_tasks), 1))


def begin(
    session: Session,
    target: Target,
    options: WriteOptions,
    columns: pa.Schema,
    labels: Labels,
    *,
    parallelism: int = 1,
) -> Begun:
    """Prepare a session for a write, and plan it.

    Parameters
    ----------
    session : Session
        A writable session without changes.
    target : Target
        What is written to.
    options : WriteOptions
        How.
    columns : pyarrow.Schema
        The columns of the rows.
    labels : mapping of str to ndarray
        The labels that come from the rows (`Target.new_labels`), distinct and ascending.
    parallelism : int, default 1
        How many tasks can run at once.

    Raises
    ------
    ManifestsError
        As for `zarr_manifests.spark.write_dataframe`.
    """
    workspace = workspace_of(session.store)
    view = workspace.contents.view
    paths = [join(target.group, dim) for dim in options.dims]
    checks: list[Callable[[Any], None]] = [SameLabels(workspace.context, view, paths).check]
    old = None
    if options.mode == "create":
        _create(session, target, options, columns, labels)
    elif options.mode == "append":
        old, check = _append(session, target, options, columns, labels)
        checks.append(check)
    source = Source(session, target.group)
    dims = _dims_of(source, target, options)
    sizes = source.encoded(target.names[0]).sizes
    along = tuple(
        AlongAxis.of(
            dim,
            source.coordinate(dim),
            sizes[dim],
            columns.field(dim).type,
            options.tolerance.get(dim),
        )
        for dim in dims
    )
    shape = tuple(axis.size for axis in along)
    variables = tuple(_values(source, target, name, dims, columns) for name in target.names)
    unit = common_unit([_unit(source, one) for one in variables], shape)
    whole = Box((0,) * len(dims), shape)
    region: Box | None = whole
    if old is not None:
        at = dims.index(str(options.append_dim))
        region = Box(tuple(old if axis == at else 0 for axis in range(len(dims))), shape)
    elif options.region is not None:
        region = _region(source, along, options.region, zone_of(options.time_zone))
    elif options.mode == "overwrite-region":
        region = None
    plan = WritePlan(
        along=along,
        variables=variables,
        shape=shape,
        bins=Bins.of(whole, unit, cells=math.prod(shape)),
        tasks=1,
        missing=options.missing,
        duplicates=options.duplicates,
        order_by=options.order_by,
        statistics=options.statistics,
    )

    def check_tip(on: Any) -> None:
        for check in checks:
            check(on)

    begun = Begun(plan, region, unit, check_tip)
    if region is None:
        return begun
    return replace(begun, plan=begun.within(region, options, parallelism))


# --- what is there ---------------------------------------------------------------------------


def _dims_of(source: Source, target: Target, options: WriteOptions) -> list[str]:
    """The dims, in the order of the first variable's axes.

    Raises
    ------
    InvalidArgumentError
        If a variable has other dimensions.
    """
    for name in target.names:
        found = tuple(map(str, source.encoded(name).dims))
        if set(found) != set(options.dims):
            raise InvalidArgumentError(
                f"{name!r} has the dimensions ({', '.join(found)}), and dims are "
                f"({', '.join(options.dims)}): they must be the same. Write variables with other "
                "dimensions in other calls"
            )
    return [str(dim) for dim in source.encoded(target.names[0]).dims]


def _values(
    source: Source,
    target: Target,
    name: str,
    dims: Sequence[str],
    columns: pa.Schema,
) -> Values:
    """A variable, and how values of its column are stored.

    Raises
    ------
    InvalidArgumentError
        If values of the column cannot be values of the variable.
    """
    variable, kind = source.encoded(name), columns.field(name).type
    given = to_numpy(pa.array([], kind)).dtype
    decoded = source.decoded_dtype(name)
    families = {"b": "biuf", "i": "biuf", "u": "biuf", "f": "biuf", "M": "M", "m": "m", "O": "O"}
    if given.kind not in families.get(decoded.kind, "O"):
        raise InvalidArgumentError(
            f"the column {name!r} is of type {kind}, and the array has {decoded}; cast the column"
        )
    own = [str(dim) for dim in variable.dims]
    stored = variable.dtype
    if stored.kind in "biufcMmSU":
        stored = stored.newbyteorder("=")
    none = np.empty(0, {"M": "M8[us]", "m": "m8[us]"}.get(decoded.kind, "f8"))
    absent = np.empty(0, stored)
    if decoded.kind in "biufMm":
        missing = np.append(none, np.array(["NaT"], none.dtype) if decoded.kind in "Mm" else np.nan)
        try:
            absent = encoded(_fit(source, name), missing)
        except MisfitError:
            absent = np.empty(0, stored)
    return Values(
        name=name,
        path=join(target.group, name),
        axes=tuple(dims.index(dim) for dim in own),
        stored=stored,
        fit=_fit(source, name),
        attributes=dict(source.attributes(name)),
        absent=absent,
    )


def _fit(source: Source, name: str) -> Fit:
    return fit_of(name, source.encoded(name).dtype, source.attributes(name))


def _unit(source: Source, variable: Values) -> Coords:
    """The cells that are stored together, by the write's dimensions."""
    chunk = source.stored_chunk_shape(variable.name)
    return tuple(chunk[variable.axes.index(axis)] for axis in range(len(chunk)))


def _region(
    source: Source, along: Sequence[AlongAxis], given: Mapping[str, Any], zone: tzinfo
) -> Box:
    """The cells in ranges of labels.

    Raises
    ------
    InvalidArgumentError
        If a range selects nothing, or labels that are apart from each other.
    """
    lo, hi = [], []
    for axis in along:
        first, end = 0, axis.size
        if axis.name in given:
            (labels,) = parse_where([(axis.name, "within", given[axis.name])]).comparisons
            coordinate = source.coordinate(axis.name)
            runs = matching_runs([labels], coordinate, axis.size, zone=zone)
            if not len(runs):
                raise InvalidArgumentError(
                    f"the range {given[axis.name]!r} of {axis.name!r} selects nothing: its "
                    f"{span_of(coordinate, axis.size)}"
                )
            if len(runs) != 1:
                raise InvalidArgumentError(
                    f"the range {given[axis.name]!r} of {axis.name!r} selects {len(runs)} separate "
                    "runs of labels, and a region is one run; write one after the other"
                )
            first, end = runs[0].tolist()
        lo.append(first)
        hi.append(end)
    return Box(tuple(lo), tuple(hi))


# --- append ----------------------------------------------------------------------------------


def _append(
    session: Session, target: Target, options: WriteOptions, columns: pa.Schema, labels: Labels
) -> tuple[int, Callable[[Any], None]]:
    """Make the arrays longer; the first position to write, and what refuses another tip.

    Raises
    ------
    AlreadyExistsError
        If labels are there already, and cells without a row are not to be kept.
    InvalidArgumentError
        If they do not go behind what is there, or arrays would differ in length.
    """
    dim, store = str(options.append_dim), session.store
    given, source = labels[dim], Source(session, target.group)
    dims = _dims_of(source, target, options)
    there = source.coordinate(dim)
    size = source.encoded(target.names[0]).sizes[dim]
    nothing = {
        name: (source.encoded(name).dims, np.empty((0,) * len(dims), _dtype(columns, name)))
        for name in target.names
    }
    coordinate = {} if there is None else {dim: (dim, given[:0])}
    workspace = workspace_of(store)
    group = StoredGroup.of(store, target.group)
    check_agreement(xr.Dataset({**nothing, **coordinate}), group, dim)
    check: Callable[[Any], None] = _no_check
    # Filled, the region would lose what is there.
    existing: OnExisting = "replace" if options.missing == "keep" else "error"
    if there is None:
        length = max(size, _behind(dim, size, given, options))
        first = min(size, int(given.min(initial=size)))
    else:
        _check_labels(dim, there, given)
        if len(there) > 1 and there[0] > there[-1]:
            given = given[::-1]
        append = Append.of(xr.Dataset({dim: (dim, given)}), dim, target.group, existing, None)
        assert append is not None
        with _own_advice():
            planned = append.plan(group)
        check = append.tip_check(workspace.contents, planned, relocate=False)
        given = given[list(planned.appended)]
        length = size + len(given)
        first = min((run.start for run in planned.replaced), default=size)
    for name in [*target.names, *coordinate]:
        array = zarr.open_array(store, path=join(target.group, name), mode="r+")
        own = [str(one) for one in source.encoded(name).dims]
        array.resize(
            tuple(length if one == dim else n for one, n in zip(own, array.shape, strict=True))
        )
    if there is not None:
        _write_labels(session, source, target, dim, given, size)
    return first, check


def _no_check(on: Any) -> None:
    """Nothing has to be compared: appends of positions conflict by their shapes."""


@contextmanager
def _own_advice() -> Iterator[None]:
    """Say what is wrong with labels without options that a write of rows does not have."""
    try:
        yield
    except AlreadyExistsError as error:
        what = str(error).partition("; nothing was written")[0]
        raise AlreadyExistsError(
            f"{what}; nothing was written. mode='overwrite-region' overwrites existing cells"
        ) from None
    except InvalidArgumentError as error:
        what = str(error).partition(". Nothing was written")[0]
        raise InvalidArgumentError(
            f"{what}. Nothing was written: labels to append must come after the existing ones"
        ) from None


def _dtype(columns: pa.Schema, name: str) -> np.dtype[Any]:
    return to_numpy(pa.array([], columns.field(name).type)).dtype


def _behind(dim: str, size: int, given: npt.NDArray[Any], options: WriteOptions) -> int:
    """The length after an append of positions."""
    if given.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{dim!r} has no coordinate, so its column must have positions, not {given.dtype}"
        )
    there = given[given < size]
    if there.size and options.missing != "keep":
        raise AlreadyExistsError(
            f"{dim!r} has no coordinate and {size} positions, so rows to append have positions "
            f"from {size} on, not {', '.join(map(str, there[:3]))}; nothing was written"
        )
    return int(given[-1]) + 1 if given.size else size


def _check_labels(dim: str, there: npt.NDArray[Any], given: npt.NDArray[Any]) -> None:
    if there.dtype.kind == "O" and there.size and hasattr(there[0], "calendar"):
        raise InvalidArgumentError(
            f"{dim!r} has a calendar that Spark's timestamps cannot represent; append with "
            "zarr_manifests.write"
        )
    kinds = {"M": "M", "m": "m", "O": "O"}
    if given.dtype.kind not in kinds.get(there.dtype.kind, "biuf"):
        raise InvalidArgumentError(
            f"the column {dim!r} has values of type {given.dtype}, and the coordinate "
            f"{there.dtype}; cast the column"
        )


def _write_labels(
    session: Session,
    source: Source,
    target: Target,
    dim: str,
    given: npt.NDArray[Any],
    start: int,
) -> None:
    """Write the labels behind those that are there."""
    store, path = session.store, join(target.group, dim)
    array = zarr.open_array(store, path=path, mode="r+")
    try:
        codes = encoded(_fit(source, dim), given)
    except MisfitError as error:
        told = "; ".join(f"{one.given} would be read back as {one.read}" for one in error.misfits)
        raise InvalidArgumentError(
            f"labels of {dim!r} do not fit the existing coordinate: {told}. Nothing was written"
        ) from None
    to = ArrayTarget(array, workspace_of(store), statistics=True)
    to[(slice(start, start + len(given)),)] = codes
    to.record()


# --- create ----------------------------------------------------------------------------------


def _create(
    session: Session, target: Target, options: WriteOptions, columns: pa.Schema, labels: Labels
) -> None:
    """Make the arrays, without values, and the coordinates that are not there.

    Raises
    ------
    InvalidArgumentError
        If the template lacks a variable or a dimension, or has other labels than what is there.
    """
    store, template = session.store, options.template
    if template is not None:
        _check_template(template, target, options)
    there = _labels_there(session, target, options)
    new = (
        {}
        if template is None
        else {
            str(name): variable.variable.copy(deep=False).load()
            for name, variable in template.coords.items()
        }
    )
    new |= {dim: xr.Variable((dim,), given) for dim, given in labels.items()}
    sizes = {} if template is None else {str(dim): n for dim, n in template.sizes.items()}
    sizes |= {dim: len(given) for dim, given in {**labels, **there}.items()}
    how = {
        "group": target.group or None,
        "mode": "a",
        "append_dim": None,
        "zarr_format": zarr_format_at(store, target.group, replaced=False),
    }
    nothing = {
        name: _blank(options, columns, name, sizes, [each for each in new if each not in sizes])
        for name in target.names
    }
    attributes = _attributes(session, target) | ({} if template is None else dict(template.attrs))
    empty = xr.Dataset(nothing, attrs=attributes)
    begin_write(empty, store, how, None, {}, {}, statistics=False).sync()
    for name in target.names:
        array = zarr.open_array(store, path=join(target.group, name), mode="r+")
        array.resize(tuple(sizes[str(dim)] for dim in nothing[name].dims))
    nodes = workspace_of(store).contents.nodes()
    new = {name: one for name, one in new.items() if join(target.group, name) not in nodes}
    if new:
        ds = xr.Dataset(coords=new, attrs=attributes)
        group = StoredGroup.of(store, target.group)
        fits = fits_of(ds, group, how, {})
        with explained(ds, fits):
            begin_write(ds, store, how, None, {}, fits, statistics=options.statistics).sync()


def _attributes(session: Session, target: Target) -> dict[str, Any]:
    """The attributes of the group; xarray would replace them."""
    node = workspace_of(session.store).contents.node(target.group)
    return {} if node is None else dict(fields_of(node).get("attributes") or {})


def _check_template(template: Any, target: Target, options: WriteOptions) -> None:
    if not isinstance(template, xr.Dataset):
        raise InvalidArgumentError(f"template is a Dataset, not a {type(template).__name__}")
    names = {str(name) for name in template.data_vars}
    if names != set(target.names):
        raise InvalidArgumentError(
            f"the template has the variables {', '.join(sorted(names))}, and the rows have "
            f"{', '.join(target.names)}"
        )
    for name in target.names:
        dims = tuple(map(str, template[name].dims))
        if set(dims) != set(options.dims):
            raise InvalidArgumentError(
                f"{name!r} has the dimensions ({', '.join(dims)}) in the template, and dims are "
                f"({', '.join(options.dims)})"
            )


def _labels_there(session: Session, target: Target, options: WriteOptions) -> Labels:
    """The labels of the dims that the group has a coordinate of.

    Raises
    ------
    InvalidArgumentError
        If the template has others.
    """
    nodes = workspace_of(session.store).contents.nodes()
    dims = [dim for dim in options.dims if join(target.group, dim) in nodes]
    if not dims:
        return {}
    source = Source(session, target.group)
    there = {dim: source.coordinate(dim) for dim in dims}
    for dim, found in there.items():
        if found is None:
            raise InvalidArgumentError(
                f"/{target.group} has an array {dim!r} that is not a coordinate of {dim!r}"
            )
        given = None if options.template is None else options.template.coords.get(dim)
        if given is not None and not np.array_equal(given.values, found):
            raise InvalidArgumentError(
                f"the labels of {dim!r} in the template differ from the existing ones in "
                f"/{target.group}; leave it out of the template, or create in another group"
            )
    return {dim: found for dim, found in there.items() if found is not None}


def _blank(
    options: WriteOptions,
    columns: pa.Schema,
    name: str,
    sizes: Mapping[str, int],
    auxiliary: Sequence[str],
) -> xr.Variable:
    """A variable as it is to be, without any cell.

    It is written so, and its array resized, since that takes no memory.
    """
    template = options.template
    if template is None:
        dims, attributes = tuple(options.dims), {}
        dtype, encoding = _dtype(columns, name), dict(options.encoding.get(name, {}))
    else:
        like = template.variables[name]
        dims, dtype, attributes = tuple(map(str, like.dims)), like.dtype, dict(like.attrs)
        encoding = {**like.encoding, **options.encoding.get(name, {})}
        of_it = [each for each in auxiliary if set(template[each].dims) <= set(dims)]
        if of_it:
            attributes["coordinates"] = " ".join(of_it)
    if dtype.kind == "O":
        dtype = create_vlen_dtype(str)  # type: ignore[no-untyped-call]
    if dtype.kind in "mM":
        encoding = {**_TIMES, **encoding} if dtype.kind == "M" else {**_DURATIONS, **encoding}
    shape = tuple(sizes[dim] for dim in dims)
    itemsize = np.dtype(encoding.get("dtype", dtype)).itemsize
    if encoding.get("chunks") is None:
        encoding["chunks"] = default_chunks(shape, itemsize)
    encoding.pop("preferred_chunks", None)
    return xr.Variable(dims, np.empty((0,) * len(dims), dtype), attributes, encoding)
