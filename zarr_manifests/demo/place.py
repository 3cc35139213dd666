"""The demo's directory: made by the demo, and cleared only of what it made.

A directory belongs to the demo if it was missing or empty when the demo first used it. A marker
file is written there first and records that. Any other directory is refused. In its own directory,
a new run removes by name what a run writes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zarr_manifests.errors import AlreadyExistsError, StorageError

__all__ = ["MARKER", "DemoPlace"]

MARKER: Final = ".made-by-zarr-manifests-demo"
_NOTE: Final = (
    "This directory was made by `zarr-manifests demo`. When the demo is run here again it replaces "
    "winds/, rewritten/, stream/, requests.txt and winds.png, and leaves everything else as it "
    "is.\n"
)


@dataclass(frozen=True, slots=True)
class DemoPlace:
    """Where a run of the demo writes.

    Parameters
    ----------
    directory : Path
        The demo's own directory.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from zarr_manifests.demo import DemoPlace
    >>> with tempfile.TemporaryDirectory() as tmp:
    ...     DemoPlace.claim(Path(tmp) / "demo").repository.name
    'winds'
    """

    directory: Path

    @property
    def repository(self) -> Path:
        """The repository's folder."""
        return self.directory / "winds"

    @property
    def scratch(self) -> Path:
        """The folder for rewrites of everything; removed at the end."""
        return self.directory / "rewritten"

    @property
    def stream(self) -> Path:
        """The folder of the stream: its files, its checkpoint and its repository; removed."""
        return self.directory / "stream"

    @property
    def picture(self) -> Path:
        """The picture's file."""
        return self.directory / "winds.png"

    @classmethod
    def claim(cls, directory: Path) -> DemoPlace:
        """Use a new or empty directory, or that of an earlier run, and clear it.

        Raises
        ------
        AlreadyExistsError
            If it has anything that the demo did not make.
        StorageError
            If the directory cannot be written.
        """
        place, marker = cls(directory), directory / MARKER
        try:
            if directory.exists() and (marker.is_symlink() or not marker.is_file()):
                _check_empty(directory)
            directory.mkdir(parents=True, exist_ok=True)
            marker.write_text(_NOTE, encoding="utf-8")
            place.clear()
        except AlreadyExistsError:
            raise
        except OSError as error:
            raise StorageError(
                f"the demo cannot write to {directory} ({error.strerror or error}); name another "
                "directory: zarr-manifests demo DIRECTORY"
            ) from error
        return place

    def clear(self) -> None:
        """Remove what a run writes."""
        self.picture.unlink(missing_ok=True)
        for folder in (self.repository, self.scratch, self.stream):
            if folder.is_symlink() or folder.exists():
                shutil.rmtree(folder)  # refuses a symbolic link


def _check_empty(directory: Path) -> None:
    if not directory.is_dir() or any(directory.iterdir()):
        raise AlreadyExistsError(
            f"{directory} is there and was not made by the demo, which therefore leaves it alone; "
            "name a new directory: zarr-manifests demo DIRECTORY"
        )
