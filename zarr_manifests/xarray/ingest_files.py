"""`ingest`: files become rows of a group, read and written by tasks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import xarray as xr

from zarr_manifests import repositories
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.reports import IngestProgress, IngestReport
from zarr_manifests.repository import Repository, containers_of
from zarr_manifests.storage import Storage
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.xarray.ingest_run import Ingestion, TaskRunner, listed
from zarr_manifests.xarray.source_files import SourceFiles, source_url

__all__ = ["ingest"]

_KINDS: Final = ("netcdf", "hdf5", "zarr", "grib")
_CHUNK_ENCODING: Final = ("chunks", "shards", "compressors", "filters", "serializer", "fill_value")


def ingest(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    url: str | os.PathLike[str] | Storage | Repository,
    *,
    append_dim: str,
    open: Literal["netcdf", "hdf5", "zarr", "grib"]  # noqa: A002 - the word for it
    | Callable[[str], xr.Dataset] = "netcdf",
    virtual: bool = False,
    variables: Sequence[str] | None = None,
    open_options: Mapping[str, Any] | None = None,
    group: str | None = None,
    branch: str = "main",
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    on_error: Literal["fail", "report"] = "fail",
    on_changed: Literal["error", "replace"] = "error",
    files_per_commit: int | None = None,
    message: str | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
    storage_options: Mapping[str, object] | None = None,
    runner: TaskRunner | None = None,
) -> IngestReport:
    """Append files to a group, along one dimension, in one commit.

    Files are sorted by their labels along the dimension. They have to agree with what the group
    has, or with the first file: dimensions, types, units, calendars, packing, and all values that
    do not grow with the files. Values are stored as the files store them.

    The repository remembers the files, so the same call with the same list does nothing, and with a
    longer list it appends what is new.

    Parameters
    ----------
    files : str, path or iterable of them
        A path or URL, or many, in any order.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made.
    append_dim : str
        The dimension along which the files are joined. A file that has it only as a scalar is one
        row.
    open : {"netcdf", "hdf5", "zarr", "grib"} or callable, default "netcdf"
        What the files are. A function takes a local path or a URL, and returns a dataset, whose
        values are stored as they are.
    virtual : bool, default False
        Refer to the chunks of the files instead of copying their values. The files must stay as
        they are, and lie below a container of the repository.
    variables : sequence of str, optional
        What to take besides the coordinates; all variables by default.
    open_options : mapping, optional
        Arguments of `xarray.open_dataset`, such as `engine` or `group`.
    group : str, optional
        Path of the group; by default the root.
    branch : str, default "main"
        The branch to commit to.
    encoding : mapping, optional
        Of new arrays, by name: chunks, shards, compressors, filters, serializer and fill value. By
        default an array has the chunks of the first file, or chunks as long as that file.
    on_error : {"fail", "report"}, default "fail"
        What to do about files that cannot be opened or do not agree: raise an error that names them
        and commit nothing, or leave them out and list them in the report.
    on_changed : {"error", "replace"}, default "error"
        What to do about files that have changed since they were ingested: raise an error that names
        them, or write their rows again. A changed file must have the labels it had.
    files_per_commit : int, optional
        Commit after so many files; by default all files are one commit.
    message : str, optional
        The commit message.
    progress : callable, optional
        Called with an `IngestProgress` as tasks end.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.
    runner : TaskRunner, optional
        What runs the tasks that read and write; by default, this process does, one after the other.
        `zarr_manifests.spark.ingest` spreads them over Spark's workers.

    Returns
    -------
    IngestReport
        What went where; `str` says it.

    Raises
    ------
    InvalidArgumentError
        If files cannot be opened, do not agree or have changed, or if an argument is invalid. The
        commit that was being made is not made; with `files_per_commit`, earlier ones remain.
    ConflictError
        If others keep changing the group at the same time.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).
    ImportError
        If `virtual=True` needs a package that is not installed.

    Examples
    --------
    >>> from pathlib import Path
    >>> import zarr_manifests as zm
    >>> year = Path("era5").glob("2024-*.nc")
    >>> report = zm.ingest(year, "era5.zarr", append_dim="time")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
    366 files added, in 1 commit: 9.12 GB in 71.2 s, 128 MB/s
    """
    _check(open, virtual, on_error, on_changed, files_per_commit, open_options, encoding)
    runner = runner or TaskRunner()
    given = [files] if isinstance(files, str | os.PathLike) else files
    urls = [source_url(file) for file in given]
    twice = sorted(each for each, times in Counter(urls).items() if times > 1)
    if twice:
        raise InvalidArgumentError(f"{listed(twice)} in the list more than once")
    repository = None
    if isinstance(url, Repository):
        refuse_options("a repository", storage_options)
        repository, storage = url, url.storage
    else:
        storage = storage_of(url, storage_options)
    if runner.elsewhere and not storage.capabilities.shared:
        raise UnsupportedStorageError(
            "the repository is in the memory of this process, and Spark's workers cannot reach it: "
            "use a path or URL"
        )
    if repository is None and repositories.exists(storage):
        repository = repositories.open(storage)
    containers = None
    if virtual:
        containers = {} if repository is None else containers_of(repository)
        known = Containers.of(containers)
        outside = next((each for each in urls if not known.locate(each)[0]), None)
        if outside is not None:
            raise InvalidArgumentError(
                f"{outside} lies below no container of the repository, so that its chunks could "
                "not be read: pass zm.open(..., virtual_containers={<a name>: <its folder>})"
            )
    source = SourceFiles(
        kind=open,
        dim=append_dim,
        variables=None if variables is None else tuple(variables),
        options=dict(open_options or {}),
        containers=containers,
    )
    work = Ingestion(
        runner=runner,
        source=source,
        group=(group or "").strip("/"),
        branch=branch,
        encoding=dict(encoding or {}),
        reports=on_error == "report",
        replaces=on_changed == "replace",
        files_per_commit=files_per_commit,
        message=message,
        heard=progress or (lambda told: None),
    )
    return work.run(repository, storage, urls)


def _check(
    kind: object,
    virtual: object,
    on_error: object,
    on_changed: object,
    files_per_commit: object,
    open_options: object,
    encoding: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    known = (
        ("virtual", virtual, (True, False)),
        ("on_error", on_error, ("fail", "report")),
        ("on_changed", on_changed, ("error", "replace")),
    )
    for name, value, values in known:
        if value not in values:
            listed = " or ".join(map(repr, values))
            raise InvalidArgumentError(f"{name} must be {listed}, not {value!r}")
    if not callable(kind) and kind not in _KINDS:
        listed = ", ".join(map(repr, _KINDS))
        raise InvalidArgumentError(f"open must be one of {listed}, or a function, not {kind!r}")
    if callable(kind) and virtual:
        raise InvalidArgumentError(
            "virtual=True refers to chunks of files, and a function makes values"
        )
    if files_per_commit is not None and (type(files_per_commit) is not int or files_per_commit < 1):
        raise InvalidArgumentError(f"files_per_commit must be 1 or more, not {files_per_commit!r}")
    if not isinstance(open_options, Mapping | None):
        raise InvalidArgumentError(f"open_options must be a mapping, not {open_options!r}")
    for name, how in (encoding or {}).items():
        other = next((key for key in how if key not in _CHUNK_ENCODING), None)
        if other is not None:
            raise InvalidArgumentError(
                f"the encoding of {name!r} has {other!r}: values are stored as the files store "
                f"them, and only {', '.join(_CHUNK_ENCODING)} can be chosen"
            )
