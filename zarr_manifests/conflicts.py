"""What a `ConflictError` lists: the places where the changes of two writers conflict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zarr_manifests.texts import plain_text

__all__ = ["Conflict", "ConflictKind"]


class ConflictKind(StrEnum):
    """What collided, as a word for programs."""

    CHUNK = "chunk"
    """Both sides wrote the same chunk."""
    SHAPE = "shape"
    """One side resized an array that the other wrote to or resized."""
    APPEND = "append"
    """Both sides appended along one dimension."""
    ATTRIBUTE = "attribute"
    """Both sides gave one attribute a value."""
    STRUCTURE = "structure"
    """One side changed how an array is encoded."""
    METADATA = "metadata"
    """The documents of a node, or its place, are not what the change was made on."""
    CREATE = "create"
    """Both sides created something at one path, or one below the array of the other."""
    DELETE = "delete"
    """One side deleted or moved what the other changed or created."""
    READ = "read"
    """The other side changed what this one had read."""
    TXN = "txn"
    """The last version that an application has committed is not the one expected."""
    HISTORY = "history"
    """The branch was moved or reset, or its history has expired."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """One place where changes of two writers conflict.

    Parameters
    ----------
    kind : ConflictKind
        What collided, as a word for programs.
    path : str
        Absolute path of the node, such as `/air/temperature`.
    component : str
        What this side changed: `"chunks"`, `"metadata"`, `"history"`, ...
    reason : str
        What the other side did.
    chunks : tuple of tuple of int
        The chunk coordinates in conflict, at most 20; empty if not about chunks.
    """

    kind: ConflictKind
    path: str
    component: str
    reason: str
    chunks: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        where = f" {list(self.chunks)}" if self.chunks else ""
        return plain_text(f"{self.path}: {self.component}{where}: {self.reason}")
