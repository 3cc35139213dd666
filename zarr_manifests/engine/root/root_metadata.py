"""Metadata of the repository as a whole: kept in the root, and changed by swaps of their own."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.envelope import pack
from zarr_manifests.format.root import METADATA, Root

_MOST_BYTES: Final = 16 * 1024
_ATTEMPTS: Final = 100


def metadata_of(root: Root) -> dict[str, Any]:
    """The metadata; changing what is returned changes nothing else."""
    return deepcopy(dict(root.metadata))


def set_metadata(roots: Roots, metadata: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Swap in a root with that metadata, over what there is if it is to be kept; all of it.

    Raises
    ------
    InvalidArgumentError
        If it becomes too large; every commit writes it.
    """

    def change(root: Root) -> Root:
        new = {**root.metadata, **metadata} if keep else {**metadata}
        size = len(pack(new))
        if size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"the metadata of the repository would take {size:,} bytes, and {_MOST_BYTES:,} "
                "are allowed, since every commit writes it; store the rest as attributes of the "
                "root group"
            )
        changed = replace(root, metadata=new)
        return changed.with_feature(METADATA) if new else changed

    return metadata_of(roots.update(change, "set metadata", "", "", _ATTEMPTS).root)
