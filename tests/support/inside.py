"""What lies behind the public names: the one place where tests reach for it.

What a store reads is `zarr_manifests.store.contents_of(store)`, what it writes to
`workspace_of(store)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from zarr_manifests import Repository
from zarr_manifests.engine.roots import Roots
from zarr_manifests.engine.upkeep import write_leaves
from zarr_manifests.format import manifest
from zarr_manifests.format.root import Root
from zarr_manifests.planning import garbage, leaves, merge, packing
from zarr_manifests.repository import context_of as context_of
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage, local


def root_of(place: Repository | Storage) -> Root:
    """The root, read from storage now."""
    roots = place._context.roots if isinstance(place, Repository) else Roots(place, SYSTEM)
    return roots.read().root


def change_root(
    repository: Repository, operation: str, change: Callable[[Root], Root], snapshot_id: str = ""
) -> None:
    """Replace the root, and log it as that operation on `main`."""
    repository._context.roots.update(change, operation, "main", snapshot_id, 1)


def close_files() -> int:
    """Close the files that this process holds open to read from, and return how many there were."""
    count = local._file.cache_info().currsize
    local._file.cache_clear()
    return count


@contextmanager
def short_pages(page: int = 2, fan_out: int = 2) -> Iterator[None]:
    """Commits move entries of history to pages early, so that few commits make many pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "PAGE", page)
        patch.setattr(garbage, "FAN_OUT", fan_out)
        yield


@contextmanager
def small_node_pages() -> Iterator[None]:
    """Compactions put two nodes into each page of a base, so that few nodes make many pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LIMITS", packing.PageLimits(inline=0, nodes=2, leaves=2))
        yield


@contextmanager
def small_blocks() -> Iterator[None]:
    """Leaves have at most 32 refs and manifests blocks of 1 kB, so that few refs make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_WHOLE_BYTES", 2000)
        patch.setattr(manifest, "_BLOCK_BYTES", 1000)
        for module in (leaves, merge):
            patch.setattr(module, "LEAF_ROWS", 32)
        yield


@contextmanager
def apart_ids() -> Iterator[None]:
    """Each table of a manifest has the ids of its sessions, even if others name the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_ID_BYTES", 0)
        yield


@contextmanager
def small_steps(rows: int) -> Iterator[None]:
    """Compactions work on so many refs at a time, so that few refs take many steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_leaves, "BATCH_ROWS", rows)
        patch.setattr(write_leaves, "_PIECE_ROWS", rows)
        yield
