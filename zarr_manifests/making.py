"""Repositories that their first commit makes: a write that fails leaves none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zarr_manifests import opening
from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.root.deferred_create import Unmade
from zarr_manifests.errors import AlreadyExistsError, ManifestsError
from zarr_manifests.ids import object_key
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import workspace_of

__all__ = ["let_others_open", "write_into"]


def write_into[Written](
    storage: Storage,
    config: RepositoryConfig | Mapping[str, Any] | None,
    write: Callable[[Repository], Written],
    *,
    make: bool,
    virtual_containers: Mapping[str, Any] | None = None,
) -> Written:
    """Write into an existing repository, or into one that the first commit makes.

    Parameters
    ----------
    storage : Storage
        Where the repository is, or is to be made.
    config : RepositoryConfig or mapping, optional
        Its configuration.
    write : callable
        Writes and commits; called again if somebody else makes the repository in the meantime.
    make : bool
        Whether a repository may be made.
    virtual_containers : mapping, optional
        Places elsewhere whose files may be read, as for `zarr_manifests.open`.
    """
    if make and not opening.exists(storage):
        unmade = Unmade(storage)
        try:
            made = opening.create(unmade, config, virtual_containers=virtual_containers)
            written = write(made)
            unmade.make()
            return written
        except BaseException as error:
            if not _made_by_others(unmade, error):
                raise
    return write(opening.open(storage, config, virtual_containers=virtual_containers))


def _made_by_others(unmade: Unmade, error: BaseException) -> bool:
    """Withdraw what was written; return whether somebody else has made a repository."""
    try:
        others = unmade.withdraw() or isinstance(error, AlreadyExistsError)
        return others and isinstance(error, ManifestsError) and opening.exists(unmade.storage)
    except ManifestsError as another:
        error.add_note(f"what was written to {unmade.url} may be left there: {another}")
        return False


def let_others_open(session: Session | Fork) -> None:
    """Let other processes open forks of a session, though there may be no repository yet."""
    workspace = workspace_of(session.store)
    if isinstance(workspace.storage, Unmade):  # they need the objects that it holds back
        workspace.storage.begin(object_key("chunks", workspace.keys.session_id, 0))
