"""Taking in what lies elsewhere: plain Zarr stores and kerchunk references.

Invariants: an import is one commit, or none; what it takes from is only read; a Zarr store is
trusted with no place but its own, and references with none but the repository's containers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zarr_manifests.engine.edit.import_references import import_references
from zarr_manifests.layouts import Layouts
from zarr_manifests.store import workspace_of
from zarr_manifests.versions import DEFAULT_BRANCH
from zarr_manifests.virtual.budget import MAX_BYTES, MAX_REFERENCES
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk import read_kerchunk
from zarr_manifests.virtual.references import References, list_zarr, location_of

__all__ = ["Imports"]


class Imports(Layouts):
    """Takes into one repository what lies elsewhere; what `Repository` is besides."""

    def import_zarr(
        self,
        url: str | os.PathLike[str],
        path: str = "/",
        copy: bool = False,
        *,
        message: str | None = None,
        branch: str = DEFAULT_BRANCH,
        max_bytes: int = MAX_BYTES,
    ) -> str:
        """Take a plain Zarr store in, in one commit: its metadata, and refs to its chunks.

        The store's files must stay as they are: each is noted with its size and time of
        modification, and reading one that has changed is an error.

        Parameters
        ----------
        url : str or path
            Path or URL (`file://`, `memory://`) of the store.
        path : str
            Where to; nothing may be there. Groups above it are made.
        copy : bool
            Copy the chunks instead, so that the store is not needed any more.
        message : str, optional
            Of the commit.
        branch : str
            What to commit to.
        max_bytes : int
            Bytes that all metadata documents together, and each chunk that is copied, may have.

        Returns
        -------
        str
            The new snapshot's id.

        Raises
        ------
        NotFoundError
            If there is no Zarr store at the URL.
        AlreadyExistsError
            If there is something at the path.
        InvalidArgumentError
            If there is more than `max_bytes`, consolidated metadata knows of documents that are
            not there, a folder in the store
            is a symbolic link, or a file is one that leads out of the store.
        UnsupportedFormatError
            If the store has metadata that is not understood, or is a file, such as a ZIP.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> from zarr_manifests.storage import MemoryStorage
        >>> plain = MemoryStorage("plain-zarr")
        >>> plain.put("zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        >>> repo = zm.Repository.create("memory://import-example")
        >>> snapshot_id = repo.import_zarr("memory://plain-zarr", message="take it in")
        >>> list(zarr.open_group(repo.readonly_session().store, mode="r"))
        []
        """
        references, location = list_zarr(url, max_bytes=max_bytes), location_of(url)
        return self._import(
            references,
            path,
            Containers.of({"source": location}),
            message or f"import {location}",
            branch,
            copy=copy,
            max_bytes=max_bytes,
        )

    def import_kerchunk(
        self,
        references: str | os.PathLike[str] | Mapping[str, Any],
        path: str = "/",
        *,
        message: str | None = None,
        branch: str = DEFAULT_BRANCH,
        max_bytes: int = MAX_BYTES,
        max_references: int = MAX_REFERENCES,
    ) -> str:
        """Take kerchunk references in, in one commit: metadata, and refs to chunks.

        Parameters
        ----------
        references : str, path or mapping
            A JSON file, or what is in one, or a folder of parquet files (this needs pyarrow). Of
            files that lie below a container, size and time of modification are noted, and reading
            one that has changed is an error.
        path, message, branch
            As for `import_zarr`; so is what is returned.
        max_bytes : int
            Bytes that may be read and made: files, what templates become, locations, inline
            chunks, and some 32 for each reference in parquet files.
        max_references : int
            References that `gen` may generate.

        Raises
        ------
        NotFoundError
            If there is no such file.
        AlreadyExistsError
            If there is something at the path.
        InvalidArgumentError
            If a reference is malformed, a location is a relative path or has a user or a password
            in it, or there is more than `max_bytes` or `max_references`.
        UnsupportedFormatError
            If there is a template or metadata that is not understood.
        UnsupportedStorageError
            If the scheme of a location is not supported.
        VirtualContainerError
            If a chunk is a whole file that lies below no container, so that its size is not known.
        ImportError
            If pyarrow is due and not installed.
        """
        found = read_kerchunk(
            references,
            self._context.containers,
            max_bytes=max_bytes,
            max_references=max_references,
        )
        return self._import(
            found,
            path,
            self._context.containers,
            message or "import kerchunk references",
            branch,
            copy=False,
            max_bytes=max_bytes,
        )

    def _import(
        self,
        references: References,
        path: str,
        trusted: Containers,
        message: str,
        branch: str,
        *,
        copy: bool,
        max_bytes: int,
    ) -> str:
        session = self.writable_session(branch)
        import_references(
            workspace_of(session.store),
            path,
            references,
            trusted,
            copy=copy,
            max_bytes=max_bytes,
        )
        return session.commit(message)
