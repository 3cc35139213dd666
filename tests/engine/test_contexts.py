"""Who only reads is handed nothing that writes; where the handles are made."""

from __future__ import annotations

import ast
import pickle
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import zarr_manifests
import zarr_manifests as zm
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.objects.metadata import ObjectReader, Objects
from zarr_manifests.engine.root.roots import RootReader, Roots
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.errors import ReadOnlyError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import ReadableStorage
from zarr_manifests.store import contents_of, workspace_of

PACKAGE = Path(zarr_manifests.__file__).parent
READS = {"url", "capabilities", "get", "get_ranges", "get_tagged", "head", "list", "stray"}
WRITES = {"put", "create", "cas", "delete_many", "sync", "create_async"}
PARTS = {"storage", "runtime", "objects", "roots", "heart", "chunks"}
SWAPS = {"archive", "archiving", "create", "install", "swap", "update", "update_leases", "turn"}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("reader", "writer", "writes"),
    [
        (ReadableStorage, Storage, WRITES),
        (ObjectReader, Objects, {"create"}),
        (RootReader, Roots, SWAPS),
        (ReadContext, Context, {"heart"}),
    ],
)
def test_a_reader_offers_nothing_that_writes(reader: type, writer: type, writes: set[str]) -> None:
    assert not writes & public(reader)
    assert writes <= public(writer)


def test_what_a_storage_reads_with_is_complete() -> None:
    assert public(ReadableStorage) == READS | {"get_async"}
    assert public(Storage) == public(ReadableStorage) | WRITES


def test_the_parts_of_a_reading_context_are_readers() -> None:
    """That nobody hands more on than this is what mypy checks."""
    hints = get_type_hints(ReadContext)
    parts = {hints["storage"], hints["objects"], hints["roots"]}
    assert parts == {ReadableStorage, ObjectReader, RootReader}
    hints = get_type_hints(Context)
    assert {hints["storage"], hints["objects"], hints["roots"]} == {Storage, Objects, Roots}
    assert "heart" not in {field.name for field in fields(ReadContext)}


def test_a_read_only_session_holds_no_workspace() -> None:
    hints = get_type_hints(SessionView.__init__), get_type_hints(Workspace.__init__)
    assert [hint["context"] for hint in hints] == [ReadContext, Context]
    repository = zm.create("memory://read-only-holds-no-workspace")
    session = repository.readonly_session()
    stores = [session.store, pickle.loads(pickle.dumps(session.store))]
    stores.append(repository.writable_session().store)
    for store in stores[:2]:
        assert isinstance(contents_of(store), SessionView)
        with pytest.raises(ReadOnlyError):
            workspace_of(store)
    assert isinstance(workspace_of(stores[2]), Workspace)


@pytest.mark.slow
def test_contexts_are_made_in_one_place() -> None:
    made = []
    for path in PACKAGE.rglob("*.py"):
        if path.match("engine/snapshot/context.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            first = ast.unparse(node.args[0]) if node.args else ""
            new = PARTS & {keyword.arg for keyword in node.keywords}
            copied = node.func.id == "replace" and first.endswith("context") and new
            if copied or node.func.id in ("Context", "ReadContext"):
                made.append(f"{path.name}:{node.lineno}")
    assert not made
