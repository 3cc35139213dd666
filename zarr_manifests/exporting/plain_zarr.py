"""Exporting to a plain Zarr store, which can be continued if it is interrupted.

Invariants:

- Metadata documents are written when all chunks are there, and that of the root last. So nobody can
  open an unfinished export.
- A mark says which snapshot an unfinished export is of. Only an export of the same snapshot goes on
  with what is there.
- Without `overwrite`, nothing that is there is changed; with it, only a Zarr store is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from zarr_manifests.engine.edit.overlay import OPAQUE
from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError
from zarr_manifests.exporting.export_request import ExportCount, ExportRequest
from zarr_manifests.exporting.places import Place, check_apart, place_of
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.keys import DOCUMENTS, directory
from zarr_manifests.reports import ExportReport

__all__ = ["export_zarr"]

_MARK: Final = "__zarr_manifests_export.json"
"""No node of Zarr has a name that starts like this."""
_CLEARING: Final = b'{"clearing": true}'


def export_zarr(source: SnapshotSource, dest: Any, request: ExportRequest) -> ExportReport:
    """Copy documents and chunks to a folder, a bucket or a store of Zarr.

    Raises
    ------
    AlreadyExistsError
        If there is anything at the destination that is not to be replaced.
    InvalidArgumentError
        If the destination is in the repository or holds it, or an option does not go with this.
        If an opaque entry has the name of the mark.
    """
    request.check_copies()
    if source.contents.node(OPAQUE + directory(source.path) + _MARK) is not None:
        raise InvalidArgumentError(
            f"the snapshot has an entry {_MARK!r}, which is the name of the mark of an export that "
            "is not finished; delete that entry first"
        )
    place = place_of(dest, request.storage_options)
    check_apart(source.contents.context.storage, place)
    stored = _begin(place, source, overwrite=request.overwrite)
    count = ExportCount(request)
    for batch in source.chunks(stored, count.add_reused):
        place.put(batch)
        count.add(batch)
    documents = list(source.documents().items())
    place.put(documents[:-1])
    place.flush()
    place.put(documents[-1:])
    if place.deletes:
        place.delete(_MARK)
    place.flush()
    return count.report(source, place.name)


def _begin(place: Place, source: SnapshotSource, *, overwrite: bool) -> Mapping[str, int]:
    """Take the place; what is there already of the same export, by key."""
    mark = json.dumps(
        {
            "repository-id": source.contents.context.repository_id,
            "snapshot-id": source.snapshot_id,
            "path": source.path,
        }
    ).encode()
    if not place.is_empty():
        found = place.get(_MARK)
        if found == mark:
            return place.sizes()
        _clear(place, found, overwrite=overwrite)
    if place.deletes:
        place.put([(_MARK, mark)])
    return {}


def _clear(place: Place, mark: bytes | None, *, overwrite: bool) -> None:
    """Delete what is there, if it may be."""
    what = "an unfinished export of another snapshot or path" if mark else "data"
    if not overwrite:
        raise AlreadyExistsError(f"{place.name} holds {what}; overwrite=True replaces a Zarr store")
    roots = [name for name in DOCUMENTS if place.get(name) is not None]
    if not roots and mark is None:
        raise AlreadyExistsError(
            f"{place.name} holds something that is no Zarr store, which is not replaced; export to "
            "another place, or delete it yourself"
        )
    if not place.deletes:
        raise InvalidArgumentError(f"{place.name} cannot delete what is there; give another place")
    place.put([(_MARK, _CLEARING)])
    for name in roots:
        place.delete(name)
    place.clear(_MARK)
