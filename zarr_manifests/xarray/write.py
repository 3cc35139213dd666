"""`write`: a dataset into a repository, in one commit.

Where dask works in threads of this process, its tasks write to the session's own store. Anywhere
else `distributed` has it written to forks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal

import xarray as xr

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.changes import same_bytes
from zarr_manifests.engine.labels import checked_message, checked_metadata
from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import Unset
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import V3_DOCUMENT, split
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.store import ManifestStore
from zarr_manifests.xarray.agreement import check_agreement
from zarr_manifests.xarray.backend import Location
from zarr_manifests.xarray.distributed import computed_elsewhere, write_elsewhere
from zarr_manifests.xarray.fit import looked_at

__all__ = ["write"]

type _Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]
type _WriteMode = Literal["w", "w-", "a", "a-", "r+"]

_MODES: Final = ("w", "w-", "a", "a-", "r+")
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
    check: Literal["values", "encoding"] | None = "values",
) -> str:
    """Write a dataset into a repository in one commit, and make the repository if need be.

    Whatever fails, either all of the dataset is committed or nothing.

    Parameters
    ----------
    ds : Dataset
        What to write. It may be lazy, also when it is read from the same repository, and its
        dask arrays may be computed in threads, processes or on a distributed cluster that
        reaches the storage. Each chunk must lie within one dask block.
    location : str, path, Storage or Repository
        Where the repository is, or is to be made.
    message : str
        Why, for the history.
    branch : str
        The branch to commit to.
    group : str, optional
        Path of the group; the root by default.
    mode : {"w", "w-", "a", "a-", "r+"}, optional
        As in `Dataset.to_zarr`. `w` replaces the group and all below it, `a` writes over
        variables that are there and adds others. By default what is there is never written over
        unless `append_dim` or `region` says where.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created.
    region : mapping or "auto", optional
        Write to this part of the arrays that are there, as in `Dataset.to_zarr`.
    encoding : mapping, optional
        By variable, for variables that are new.
    metadata : mapping, optional
        Kept with the commit: strings, numbers, lists and maps.
    config : RepositoryConfig or mapping, optional
        For the repository if it is made; if it is there, used instead of its own for this write.
    relocate : bool, default False
        Goes with `append_dim`: if others append meanwhile, land behind them, as in
        `Session.append_mode`.
    check : {"values", "encoding"} or None, default "values"
        What is refused: values that would be read back as others, and whatever has another
        encoding than the arrays that are there; the latter only; or nothing. Values of dask
        arrays are looked at when they are computed.

    Returns
    -------
    str
        The new snapshot's id; that of the branch's head if every byte was there already.

    Raises
    ------
    AlreadyExistsError
        If the group has data, and neither `mode`, `append_dim` nor `region` says what to do.
    NotARepositoryError
        If `region`, `mode="r+"` or another branch than `main` is given, and there is none.
    NotFoundError
        If there is no such branch, or nothing that `region` could be part of.
    InvalidArgumentError
        If arguments contradict each other; or if the values would mean something else in the
        arrays that are there, whose attributes stay (other units, or times that cannot be told in
        theirs), or an append would leave some of them shorter or replace an index coordinate;
        or if values do not fit: beyond the range of a packing or a type, NaN where nothing
        stands for it, fractions in integers, longer texts.
    ConflictError
        If somebody else has committed to the same chunks or metadata meanwhile, or two tasks
        wrote to the same chunk.
    ValueError
        From xarray, if the dataset does not go with what is there, or its dask blocks with the
        chunks.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> ds = xr.Dataset({"t": ("time", [1.0, 2.0])}, {"time": [0, 1]})
    >>> first = zm.write(ds, "memory://write-example", message="create")
    >>> more = ds.assign_coords(time=[2, 3])
    >>> second = zm.write(more, "memory://write-example", message="append", append_dim="time")
    >>> xr.open_dataset("memory://write-example", engine="zarr_manifests").sizes["time"]
    4
    """
    _check_arguments(ds, location, mode, append_dim, region, config)
    if check not in ("values", "encoding", None):
        raise InvalidArgumentError(f"check must be 'values', 'encoding' or None, not {check!r}")
    if relocate and append_dim is None:
        raise InvalidArgumentError("relocate goes with append_dim: it is appends that it moves")
    message, metadata = checked_message(message), checked_metadata(metadata)
    session = _repository(location, config, branch, mode, region).writable_session(branch)
    if relocate:
        session.append_mode(append_dim)  # type: ignore[arg-type]  # checked there
    options = _zarr_options(session.store, group, mode, append_dim, region)
    if check is not None and options["mode"] != "w":
        check_agreement(ds, session.store, (group or "").strip("/"), options["append_dim"])
    encoding = {name: dict(how) for name, how in (encoding or {}).items()}
    place = dict(region) if isinstance(region, Mapping) else region
    if check == "values":
        with looked_at(ds, session.store, options, encoding) as seen:
            _write(seen, session, options, place, encoding)
    else:
        _write(ds, session, options, place, encoding)
    if _changes_nothing(session.store):
        return session.snapshot_id
    return session.commit(message, metadata)


def _repository(
    location: Location,
    config: RepositoryConfig | Mapping[str, Any] | None,
    branch: str,
    mode: _WriteMode | None,
    region: _Region | None,
) -> Repository:
    """The repository; made, unless what is to be written can only go to one that is there."""
    if isinstance(location, Repository):
        return location
    if region is not None or mode == "r+" or branch != "main":
        return Repository.open(location, config)
    return Repository.open_or_create(location, config)


def _check_arguments(
    ds: object,
    location: object,
    mode: object,
    append_dim: object,
    region: object,
    config: object,
) -> None:
    if not isinstance(ds, xr.Dataset):
        hint = "; use its to_dataset(name=...)" if isinstance(ds, xr.DataArray) else ""
        raise InvalidArgumentError(f"write takes a Dataset, not a {type(ds).__name__}{hint}")
    if mode is not None and mode not in _MODES:
        raise InvalidArgumentError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
    if append_dim is not None:
        if append_dim not in ds.dims:
            listed = ", ".join(map(str, ds.dims)) or "none"
            raise InvalidArgumentError(
                f"append_dim {append_dim!r} is no dimension of the dataset; there are: {listed}"
            )
        if mode not in (None, "a", "a-"):
            raise InvalidArgumentError(f"append_dim goes with mode 'a' or 'a-', not {mode!r}")
    if region is not None and mode not in (None, "a", "a-", "r+"):
        raise InvalidArgumentError(f"region goes with mode 'r+', 'a' or 'a-', not {mode!r}")
    if config is not None and isinstance(location, Repository):
        raise InvalidArgumentError("config goes with a path, URL or storage, not a Repository")


def _zarr_options(
    store: ManifestStore,
    group: str | None,
    mode: _WriteMode | None,
    append_dim: Hashable | None,
    region: _Region | None,
) -> dict[str, Any]:
    """Arguments for xarray's Zarr backend, by what is there already."""
    path, url = (group or "").strip("/"), store.workspace.storage.url
    arrays = sorted(
        node_path.rpartition("/")[2]
        for node_path, node in store.workspace.nodes().items()
        if node.kind is NodeKind.ARRAY and node_path and node_path.rpartition("/")[0] == path
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
        "zarr_format": _zarr_format(store, path, replaced=mode == "w"),
    }


def _zarr_format(store: ManifestStore, path: str, *, replaced: bool) -> int:
    """That of the group, or of the nearest above it; no node is seen from one of another format."""
    nodes = store.workspace.nodes()
    if replaced and not path:
        return 3
    path = split(path)[0] if replaced else path
    while path and path not in nodes:
        path, _ = split(path)
    return 2 if path in nodes and V3_DOCUMENT not in nodes[path].documents else 3


def _write(
    ds: xr.Dataset,
    session: Session,
    options: Mapping[str, Any],
    region: _Region | None,
    encoding: Mapping[Hashable, Mapping[str, Any]],
) -> None:
    if computed_elsewhere(ds):
        write_elsewhere(ds, session, options, region, encoding)
        return
    ds.to_zarr(
        session.store,
        **options,
        region=region,
        encoding=encoding,
        consolidated=False,
    )


def _changes_nothing(store: ManifestStore) -> bool:
    """Whether all that was written is what the snapshot has at these places already.

    Checksums almost always tell that it is not; only if none of them does, bytes are compared.
    """
    workspace = store.workspace
    changes, reader = workspace.changes, workspace.reader
    if changes.nodes or changes.truncated or changes.tables:
        return False
    pairs = []
    for node_id, coords, new in changes.refs():
        old = workspace.view.lookup(node_id, coords)
        if old is None or isinstance(new, Unset) or not same_bytes(old, new):
            return False
        pairs.append((old, new))
    return all(
        old == new or reader.read(old, 0, old.length) == reader.read(new, 0, new.length)
        for old, new in pairs
    )
