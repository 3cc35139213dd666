"""What is left after trouble: the repository as it should be, and a commit so many times."""

from __future__ import annotations

from datetime import timedelta

import zarr_manifests as zm


def landed(url: str, message: str) -> int:
    """How often a commit has landed; all else is as it should be, and what is left over goes."""
    repo = zm.open(url)
    repo.garbage_collect(timedelta(0))
    report = repo.verify()
    assert report.ok, report.problems
    assert len(list(repo.storage.list("chunks/"))) == report.chunk_objects
    history = list(repo.ancestry())
    assert len(list(repo.storage.list("snapshots/"))) == len(history)
    return [info.message for info in history].count(message)
