"""A group that a dataset is written to, and whether the dataset agrees with it.

Where Zarr opens a group, it fetches and parses the documents of all its arrays, in several turns of
its event loop. Here a document is parsed where its array is first asked for, without the loop.

xarray writes values into existing arrays and leaves their attributes alone. So values mean what the
attributes of the first write say: days since 1990 appended to days since 1980 are ten years off.
Times that are not whole days are written in hours, without the array saying so. An append makes
some arrays longer, and a dataset opens only if all arrays of a dimension have the same length. Such
writes are refused by `check_agreement`, before anything is written.

An append is planned from the labels that are there, and planned again on the tip that its commit is
about to land on. If the plan differs, the commit is a conflict, and `write` starts over there.
Writes from rows, which look up positions in the coordinates of one snapshot, compare these.

Invariants: to agree, no data is read but times and index coordinates; these reads do not count as
reads of the session, so its commit can still be rebased onto others'. Labels are compared as they
would be read back: given ones are encoded like the existing array and decoded together with its
labels, so that a label that was rounded when it was stored is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
import zarr
from msgspec.structs import replace
from xarray.backends.zarr import ZarrArrayWrapper, encode_zarr_variable
from xarray.conventions import decode_cf_variable
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import StorePath

from zarr_manifests.bulk import StoredArrays, document_of, keep_parsed
from zarr_manifests.decoding import REAL_CALENDARS
from zarr_manifests.engine.overlay import SessionView, unrecorded
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.engine.workspace import TipCheck
from zarr_manifests.errors import (
    AlreadyExistsError,
    Conflict,
    ConflictError,
    ConflictKind,
    InvalidArgumentError,
)
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V2_GROUP, V3_DOCUMENT, join, split
from zarr_manifests.runtime import quiet
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.texts import listed
from zarr_manifests.xarray.appended_rows import AppendPlan, plan_append
from zarr_manifests.xarray.fit import PACKED_BY, told
from zarr_manifests.xarray.parts import DatasetPart, is_virtual

_CHANGED: Final = "the labels that are there have changed"
_CLOSE: Final = 1e-6
"""Relative; coordinates that differ by less are from the same grid."""


class StoredGroup(StoredArrays):
    """A group of a snapshot or a session, as Zarr and xarray see it.

    Parameters
    ----------
    contents : SessionView
        What to read.
    path : str
        Path of the group.

    Attributes
    ----------
    exists : bool
        Whether there is a document of the group.
    zarr_format : int
        The format of the group.
    """

    def __init__(self, contents: SessionView, path: str) -> None:
        super().__init__(contents, path)
        self._path = path
        self._likes: dict[str, xr.Variable] = {}
        self._labels: dict[str, tuple[npt.NDArray[Any], xr.Variable]] = {}
        self.exists = self._group is not None
        is_v3 = self._group is None or V3_DOCUMENT in self._group.documents
        self.zarr_format: Literal[2, 3] = 3 if is_v3 else 2

    @classmethod
    def of(cls, store: ManifestStore, path: str) -> StoredGroup:
        """A group of a session's store, uncommitted changes included.

        What is read here is no read of the session, so its commit can still be rebased.
        """
        return cls(unrecorded(contents_of(store)), path)

    def like(self, name: str) -> xr.Variable:
        """One of its arrays as xarray decodes it, with the encoding for more of its values.

        Its own values and lengths mean nothing.
        """
        if name not in self._likes:
            array = self.array(name)
            dtype = ZarrArrayWrapper(array).dtype  # type: ignore[no-untyped-call]
            some = np.full((1,) * array.ndim, "" if dtype.kind in "SOTU" else 0, dtype)
            encoding = {"dtype": dtype} if dtype.kind == "T" else {}
            dims = [str(axis) for axis in range(array.ndim)]
            own = xr.Variable(dims, some, self.decoded_by(name), encoding)
            with quiet(), told(name):  # xarray itself warns when it reads
                # Of single bytes, xarray would join those along the last axis.
                self._likes[name] = decode_cf_variable(name, own, stack_char_dim=False)
        return self._likes[name]

    def encoded(self, name: str, variable: xr.Variable) -> xr.Variable:
        """Decoded values in memory as xarray would store them in the array of that name."""
        own: Any = xr.Variable(variable.dims, variable.values, {}, dict(self.like(name).encoding))
        with quiet():  # what they warn of is checked
            found: xr.Variable = encode_zarr_variable(own, name=name, zarr_format=self.zarr_format)
        return found

    def once(self, name: str, labels: npt.NDArray[Any], encode: Callable[[], Any]) -> xr.Variable:
        """The labels encoded; only once, although an append asks for them three times."""
        held = self._labels.get(name)
        if held is None or held[0].dtype != labels.dtype or not np.array_equal(held[0], labels):
            self._labels[name] = held = labels, encode()
        return held[1]

    def labels(self, dim: str, given: xr.Variable) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The labels along a dimension, and given ones as they would be read back, of one type."""
        if dim not in self.nodes or self.meta(dim).dimension_names != (dim,):
            return given.values[:0], given.values
        stored, encode = self.values(dim), partial(self.encoded, dim, given)
        encoded = np.asarray(self.once(dim, given.values, encode).values)
        if {stored.dtype.kind, encoded.dtype.kind} & set("OUT"):
            stored, encoded = stored.astype(object), encoded.astype(object)
        with quiet():  # `write` itself reports what they warn of
            variable = xr.Variable((dim,), np.append(stored, encoded), self.attributes[dim])
            labels = decode_cf_variable(dim, variable, stack_char_dim=False).values
        return labels[: len(stored)], labels[len(stored) :]

    def cells_of(
        self, name: str, variable: xr.Variable, part: DatasetPart
    ) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        """The cells of an existing array that a variable goes to, and the shape it then has."""
        region: Any = part.region or {}
        dims, shape, cells = (*self.sizes(name),), list(self.meta(name).shape), []
        if variable.dims != dims:
            raise InvalidArgumentError(
                f"{name!r} has the dimensions {variable.dims}, and the existing array has {dims}: "
                "rename them, or write the array anew"
            )
        for axis, (dim, size) in enumerate(variable.sizes.items()):
            start, stop, _ = region.get(str(dim), slice(None)).indices(shape[axis])
            if dim == part.append_dim:
                start, stop = shape[axis], shape[axis] + size
                shape[axis] = stop
            if stop - start != size:
                how = f"give append_dim={dim!r} to append, or region to write to a part"
                if part.append_dim is not None:
                    how = f"bring the dataset onto the labels of {dim!r} that are there"
                raise InvalidArgumentError(
                    f"{name!r} has {size} values along {dim!r}, and there is room for "
                    f"{max(stop - start, 0)}: {how}"
                )
            cells.append(slice(start, stop))
        return tuple(cells), tuple(shape)

    def open_in(self, store: ManifestStore) -> zarr.Group:
        """The group, which exists, in another store of the same contents."""
        assert self._group is not None
        document = document_of(self._group, V2_GROUP)
        document.pop("consolidated_metadata", None)
        return zarr.Group(zarr.AsyncGroup.from_dict(StorePath(store, self._path), document))

    def open_array_in(
        self, store: ManifestStore, name: str, shape: Sequence[int]
    ) -> zarr.Array[Any]:
        """One of its arrays in another store of the same contents, made longer to that shape.

        A session notes its documents as read.
        """
        held = self.array(name).async_array
        metadata: Any = held.metadata
        for document in [V3_DOCUMENT] if self.zarr_format == 3 else [V2_ARRAY, V2_ATTRIBUTES]:
            contents_of(store).find(join(held.path, document))
        if tuple(shape) != metadata.shape:
            metadata = metadata.update_shape(tuple(shape))
            for key, value in metadata.to_buffer_dict(default_buffer_prototype()).items():
                store.set_sync(join(held.path, key), value)
                if key == V3_DOCUMENT:
                    keep_parsed(value.to_bytes(), metadata)  # for the next append
        path = StorePath(store, held.path)
        return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=path, config=held.config))


# --- whether a dataset agrees with it -------------------------------------------------------------


def check_agreement(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable | None) -> None:
    """Refuse a dataset whose values would change their meaning in the group's arrays.

    Parameters
    ----------
    ds : Dataset
        The dataset to write.
    group : StoredGroup
        The group to write to.
    append_dim : hashable, optional
        The dimension to append along.

    Raises
    ------
    InvalidArgumentError
        If units or calendar differ from an existing array's; if values are packed already and the
        existing ones are not; or if after the append arrays would differ in length, or a
        coordinate without the dimension would not match the existing one.
    """
    check_lengths(ds, group, append_dim)
    for key, variable in ds.variables.items():
        name = str(key)
        if name in group.nodes:
            _check_meaning(name, variable.attrs, group.meaning(name))
            in_memory = variable.chunks is None and not is_virtual(variable)
            fixed = append_dim is not None and variable.ndim and append_dim not in variable.dims
            if fixed and in_memory and (variable.dims == (name,) or key in ds.coords):
                _check_coordinate(name, variable, group)


def check_lengths(ds: xr.Dataset, group: StoredGroup, append_dim: Hashable | None) -> None:
    """Refuse a write after which a dimension would have two lengths.

    Raises
    ------
    InvalidArgumentError
        If one would, that is appended along or that a new array has.
    """
    given = {str(name): variable.sizes for name, variable in ds.variables.items()}
    along = None if append_dim is None else str(append_dim)
    lengths: dict[str | None, dict[str, list[str]]] = {}
    for name in sorted({*group.nodes, *given}):
        # No rows stand for some: what comes later is written to the same arrays.
        after: dict[Any, int]
        after = {str(dim): size or dim == append_dim for dim, size in given.get(name, {}).items()}
        if name in group.nodes:
            more, after = after.get(along, 0), group.sizes(name)
            after |= {along: after[along] + more} if along in after else {}
        told = {dim: f"{size:d} long" for dim, size in after.items()} or {name: "a scalar"}
        for dim, what in told.items():
            lengths.setdefault(dim, {}).setdefault(what, []).append(name)
    for dim, arrays in lengths.items():
        new = {name for names in arrays.values() for name in names} - group.nodes.keys()
        if len(arrays) > 1 and (dim == along or new):
            both = ", ".join(
                f"{what} in {listed(map(repr, names))}" for what, names in arrays.items()
            )
            raise InvalidArgumentError(
                f"{dim!r} would be {both}, and the group could not be opened as a dataset any "
                f"more: append all variables along {dim!r} together, write new ones at full length "
                "first, or rename the dimension, or the variables that do not belong to it"
            )


def _check_meaning(name: str, given: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    if "units" in given and "units" in kept:
        (one, own), (other, there) = _meaning(given), _meaning(kept)
        if one != other:
            raise InvalidArgumentError(
                f"{name!r} has {own}, and the existing array keeps {there}: convert the values, or "
                "drop the attribute if it means the same"
            )
    for key in PACKED_BY:
        if key in given and key not in kept:  # if it is in both, xarray refuses
            raise InvalidArgumentError(
                f"{name!r} has the attribute {key!r}, so its values are encoded already, and the "
                "existing array has no such attribute: decode the dataset first, with "
                "xr.decode_cf, or drop the attribute if it means nothing"
            )


def _meaning(attributes: Mapping[str, Any]) -> tuple[object, str]:
    """What units and calendar mean, to compare, and how to name them.

    A reference date can be written in several ways.
    """
    units, calendar = str(attributes["units"]), attributes.get("calendar", "standard")
    if " since " not in units:
        return units, f"units {units!r}"
    found: object = units
    with suppress(ValueError):
        numbers = xr.Variable("t", [0, 1], {"units": units, "calendar": calendar})
        found = [str(time) for time in decode_cf_variable("t", numbers).values]
    told = f"units {units!r} with calendar {calendar!r}"
    return (calendar in REAL_CALENDARS or calendar, found), told


def _check_coordinate(name: str, variable: xr.Variable, group: StoredGroup) -> None:
    """Refuse other values than the stored ones; floats may be rounded in another way."""
    if variable.shape != group.meta(name).shape:
        return
    new, old = np.asarray(group.encoded(name, variable).values), group.values(name)
    units = str(group.attributes[name].get("units"))
    if new.dtype.kind == old.dtype.kind == "f" and " since " not in units:
        close = _CLOSE * np.ptp(old) / old.size if old.size else 0.0
        same = np.allclose(new, old, rtol=_CLOSE, atol=close, equal_nan=True)
    else:
        same = bool(((new == old) | ((new != new) & (old != old))).all())
    if not same:
        raise InvalidArgumentError(
            f"the values of {name!r} differ from the existing ones, which an append would replace "
            f"for all earlier data: bring the dataset onto the same {name!r} (such as by sortby or "
            f"reindex), or drop {name!r} if only its values are wrong"
        )


# --- where rows go ------------------------------------------------------------------------------


def planned_on(there: StoredGroup, part: DatasetPart) -> AppendPlan | None:
    """What becomes of each row that is appended to a group; None if no labels are compared.

    Raises
    ------
    AlreadyExistsError, InvalidArgumentError
        Like `plan_append`.
    """
    if part.labels is None:
        return None
    dim = str(part.labels.dims[0])
    labels = there.labels(dim, part.labels)
    return plan_append(dim, *labels, part.on_existing, keep_order=part.sort == "keep")


def append_check(
    part: DatasetPart, contents: SessionView, planned: AppendPlan, *, relocate: bool
) -> TipCheck:
    """What refuses a tip on which a plan would differ that was made on these contents.

    If the session itself has changed the labels before, every change of others is refused. With
    `relocate`, rows may be put behind those that others append in the meantime.
    """
    labels, context = part.labels, contents.context
    assert labels is not None
    part = replace(part, ds=xr.Dataset())  # a session keeps many checks, and no values
    dim = str(labels.dims[0])
    path, changes = join(part.group, dim), contents.changes
    node, before = contents.node(path), None
    if path in changes.nodes or (node is not None and node.node_id in changes.touched()):
        before = StoredGroup(SessionView(context, contents.view), part.group).labels(dim, labels)[0]

    def conflict(kind: ConflictKind, component: str, reason: str) -> ConflictError:
        return ConflictError(
            f"other commits came first and changed arrays along {dim!r}; nothing was committed. "
            "Write again, on top of the newest snapshot",
            [Conflict(kind, f"/{path}", component, reason)],
        )

    def check(on: SnapshotView) -> None:
        there = StoredGroup(SessionView(context, on), part.group)
        if before is not None:
            if not np.array_equal(there.labels(dim, labels)[0], before):
                raise conflict(ConflictKind.READ, "read", _CHANGED)
            return
        try:
            now = planned_on(there, part)
        except (AlreadyExistsError, InvalidArgumentError) as error:
            reason = f"with the labels that are there now, {error}"
            raise conflict(ConflictKind.READ, "read", reason) from None
        assert now is not None
        if (now.appended, now.replaced) != (planned.appended, planned.replaced):
            raise conflict(ConflictKind.READ, "read", _CHANGED)
        if now.start != planned.start and planned.appended and not relocate:
            reason = f"both commits append along {dim!r}"
            raise conflict(ConflictKind.APPEND, "growth", reason)

    return check


def same_labels(context: ReadContext, view: SnapshotView, paths: Iterable[str]) -> TipCheck:
    """What refuses a tip on which a coordinate has other labels; it may have more.

    Parameters
    ----------
    context : ReadContext
        What reads the repository.
    view : SnapshotView
        The snapshot whose labels count.
    paths : iterable of str
        Paths of the coordinates; those that are not there are left out.
    """

    def stored(view: SnapshotView, path: str) -> npt.NDArray[Any]:
        group, name = split(path)
        return StoredGroup(SessionView(context, view), group).values(name)

    before = {path: stored(view, path) for path in paths if path in view.nodes}

    def check(on: SnapshotView) -> None:
        for path, labels in before.items():
            now = stored(on, path) if path in on.nodes else labels[:0]
            alike, floats = now.dtype == labels.dtype, now.dtype.kind in "fc"
            if not alike or not np.array_equal(now[: len(labels)], labels, equal_nan=floats):
                raise ConflictError(
                    f"another commit came first and changed the coordinate {path!r}, by which rows "
                    "were looked up; nothing was committed. Write again",
                    [Conflict(ConflictKind.READ, f"/{path}", "read", _CHANGED)],
                )

    return check


def located(part: DatasetPart, store: ManifestStore) -> dict[str, slice]:
    """Return the region of a part with slices in place of "auto", which are found by the labels.

    Raises
    ------
    InvalidArgumentError
        If the region is none of this dataset, or labels are not there, or not beside each other.
    """
    group = StoredGroup(contents_of(store), part.group)  # a session notes it as read
    ds, region = part.ds, part.region
    found: dict[Hashable, Any]
    found = dict.fromkeys(ds.dims, "auto") if region == "auto" else region  # type: ignore[assignment]
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(f"region is a mapping or 'auto', not {region!r}")
    for dim, at in found.items():
        if dim not in ds.dims:
            raise InvalidArgumentError(
                f"region names {dim!r}, which is not a dimension of the dataset; there are: "
                f"{listed(ds.dims, 20)}"
            )
        if at != "auto" and (not isinstance(at, slice) or at.step not in (None, 1)):
            raise InvalidArgumentError(
                f"the region of {dim!r} is a slice with step 1 or 'auto', not {at!r}"
            )
    found = {dim: _run_of(ds, dim, group) if at == "auto" else at for dim, at in found.items()}
    apart = [name for name, v in ds.variables.items() if found and found.keys().isdisjoint(v.dims)]
    if apart:
        raise InvalidArgumentError(
            f"{apart[0]!r} has none of the region's dimensions ({', '.join(map(str, found))}): "
            f"leave such variables out, by ds.drop_vars({apart!r})"
        )
    return {str(dim): at for dim, at in found.items()}


def _run_of(ds: xr.Dataset, dim: Hashable, group: StoredGroup) -> slice:
    """Where the labels of a dataset are in the group."""
    if dim not in ds.variables:
        long = {group.sizes(name).get(str(dim)) for name in map(str, ds) if name in group.nodes}
        if long != {ds.sizes[dim]}:
            raise InvalidArgumentError(
                f"region: the dataset has no labels of {dim!r} by which its place is found, and is "
                f"not as long as the group: give a slice, or add the coordinate {dim!r}"
            )
        return slice(0, ds.sizes[dim])
    if str(dim) not in group.nodes:
        raise InvalidArgumentError(f"region: the group has no labels of {dim!r}; give a slice")
    there, given = group.labels(str(dim), ds.variables[dim])
    at = pd.Index(there).get_indexer(pd.Index(given))
    if (at < 0).any():
        raise InvalidArgumentError(
            f"region: the label {given[at < 0][0]} of {dim!r} is not in the group; append it"
        )
    if (np.diff(at) != 1).any():
        raise InvalidArgumentError(
            f"region: the labels of {dim!r} are not beside each other, in this order, in the group"
        )
    return slice(int(at[0]), int(at[-1]) + 1) if at.size else slice(0, 0)
