"""Checks that several functions of `zarr_manifests.spark` share."""

from __future__ import annotations

from collections.abc import Sequence

from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.storage import Storage

__all__ = ["check_counts", "check_shared", "check_words"]


def check_shared(storage: Storage) -> None:
    """Refuse a storage that Spark's workers cannot reach.

    Raises
    ------
    UnsupportedStorageError
        If it is in the memory of this process.
    """
    if not storage.capabilities.shared:
        raise UnsupportedStorageError(
            f"{storage.url} is in the memory of this process, and Spark's tasks run in others; put "
            "the repository on a local disk or a storage they can see"
        )


def check_words(options: object, **known: Sequence[str]) -> None:
    """Refuse attributes of the options that are none of the words known for them.

    Raises
    ------
    InvalidArgumentError
        If one is another; the error lists the words.
    """
    for name, words in known.items():
        value = getattr(options, name)
        if value not in words:
            listed = ", ".join(map(repr, words))
            raise InvalidArgumentError(f"{name} cannot be {value!r}; known: {listed}")


def check_counts(options: object, *names: str) -> None:
    """Refuse attributes of the options that are no whole numbers from 1 on.

    Raises
    ------
    InvalidArgumentError
        If one is not.
    """
    for name in names:
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise InvalidArgumentError(f"{name} must be 1 or more, not {value!r}")
