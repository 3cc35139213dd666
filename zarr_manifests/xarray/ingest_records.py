"""Which files were ingested into a group, kept beside its data and committed with it.

The records are lines of JSON in an array of bytes, `_ingest/files` below the group. A commit
appends its lines, so its cost does not depend on how many there are. The last line of a file
counts. Two commits that append at the same time conflict, as with any other array.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
import zarr

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.keys import join
from zarr_manifests.store import ManifestStore

__all__ = ["FileRecord", "add_records", "read_records"]

_GROUP: Final = "_ingest"
_FILES: Final = "files"
_CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was ingested.

    Parameters
    ----------
    url : str
        Where it was.
    nbytes : int
        Its size.
    stamp : str
        Its time or etag.
    how : str
        A hash of the variables and options it was opened with.
    start, rows : int
        Where its rows are, if they were not moved since.
    """

    url: str
    nbytes: int
    stamp: str
    how: str
    start: int
    rows: int

    @property
    def stamps(self) -> tuple[int, str, str]:
        """What is the same as long as the file and how it is opened are."""
        return self.nbytes, self.stamp, self.how


def read_records(store: ManifestStore, group: str) -> dict[str, FileRecord]:
    """Return what was ingested into a group, by URL.

    Raises
    ------
    CorruptObjectError
        If the records cannot be read.
    """
    array = _array(store, group)
    if array is None:
        return {}
    lines = np.asarray(array[:]).tobytes().decode().splitlines()
    try:
        return {record.url: record for record in (FileRecord(*json.loads(line)) for line in lines)}
    except (TypeError, ValueError) as error:
        raise CorruptObjectError(
            f"the records of ingested files in /{_place(group)} cannot be read ({error})"
        ) from error


def add_records(
    store: ManifestStore, group: str, records: Iterable[FileRecord], zarr_format: int
) -> None:
    """Append records; they are committed with the rest of the session."""
    text = "".join(f"{json.dumps(astuple(record))}\n" for record in records)
    data = np.frombuffer(text.encode(), np.uint8)
    array = _array(store, group)
    if array is None:
        form: Any = zarr_format
        # Without a name for the axis, xarray could not open the groups as a tree.
        named: Any = {"dimension_names": ["byte"]} if form == 3 else {}
        zarr.create_group(store, path=join(group, _GROUP), zarr_format=form)
        array = zarr.create_array(
            store,
            name=_place(group),
            shape=(0,),
            chunks=(_CHUNK_BYTES,),
            dtype="u1",
            zarr_format=form,
            **named,
        )
    start = array.shape[0]
    array.resize((start + len(data),))
    array[start:] = data


def _place(group: str) -> str:
    return join(group, join(_GROUP, _FILES))


def _array(store: ManifestStore, group: str) -> zarr.Array[Any] | None:
    try:
        return zarr.open_array(store, path=_place(group), mode="r+" if not store.read_only else "r")
    except FileNotFoundError:
        return None
