"""Exporting to one ZIP file, stored and not deflated, as `zarr.storage.ZipStore` reads it.

Invariant: the file gets its name when it is whole, and an old one stays until then.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.exporting.export_request import ExportCount, ExportRequest
from zarr_manifests.exporting.places import check_apart, file_path, new_file
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.reports import ExportReport
from zarr_manifests.storage.local_errors import translated

__all__ = ["export_zip"]

_READABLE: Final = 0o644 << 16


def export_zip(source: SnapshotSource, dest: Any, request: ExportRequest) -> ExportReport:
    """Copy documents and chunks to a ZIP file.

    Raises
    ------
    AlreadyExistsError
        If there is a file of that name, and it is not to be replaced.
    InvalidArgumentError
        If the destination is not the path of a file, or an option does not go with this.
    """
    request.check_copies()
    path = file_path(dest, request.storage_options, overwrite=request.overwrite)
    check_apart(source.contents.context.storage, path)
    count = ExportCount(request)
    with new_file(path, overwrite=request.overwrite) as file, _archive(file, path) as archive:
        for batch in source.chunks({}, count.add_reused):
            _add(archive, path, batch)
            count.add(batch)
        _add(archive, path, list(source.documents().items()))
    return count.report(source, path)


@contextmanager
def _archive(file: BinaryIO, path: str) -> Iterator[zipfile.ZipFile]:
    """An archive, whose directory is written at the end of the block."""
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
    try:
        yield archive
    except BaseException:
        with suppress(OSError):  # the file is given up
            archive.close()
        raise
    with translated(path):
        archive.close()


def _add(archive: zipfile.ZipFile, path: str, batch: list[tuple[str, bytes]]) -> None:
    with translated(path):
        for key, data in batch:
            if "\\" in key or key[1:2] == ":":  # a folder or drive where ZIPs may be unpacked
                raise InvalidArgumentError(f"{key!r:.80} cannot be the name of a file in a ZIP")
            entry = zipfile.ZipInfo(key)  # of no time, so that equal exports are equal files
            entry.external_attr = _READABLE
            archive.writestr(entry, data)
