"""The page on the architecture: its picture is current, and its steps happen in its order."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "architecture", DOCS / "images" / "architecture.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_the_contracts_of_today(picture: ModuleType) -> None:
    saved = (DOCS / "images" / "architecture.svg").read_text(encoding="utf-8")
    assert saved == picture.drawn(), "run `python docs/images/architecture.py`"


def test_every_room_of_the_engine_is_explained(picture: ModuleType) -> None:
    rooms = {name for layer in picture.contracts()["rooms"] for name in layer}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == rooms


def steps(title: str) -> list[str]:
    """The functions that a section names, in its order."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(title))
    found = re.findall(r"^\d+\. `([\w.]+:[\w.]+)`", text, re.MULTILINE)
    assert len(found) == 10
    return found


def calls_of(call: Callable[[], object]) -> list[str]:
    """The functions of the package that a call runs, in the order of their first calls."""
    calls: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        parts = Path(frame.f_code.co_filename).with_suffix("").parts
        if event == "call" and "zarr_manifests" in parts:
            module = ".".join(parts[len(parts) - parts[::-1].index("zarr_manifests") :])
            calls.setdefault(f"{module}:{frame.f_code.co_qualname}")

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return list(calls)


@pytest.fixture
def place(tmp_path: Path) -> str:
    url = str(tmp_path / "repo")
    repo = zm.create(url)
    with repo.transaction(message="fill an array") as store:
        a = zarr.create_array(
            store, name="air", shape=(4000,), chunks=(1000,), dtype="f8", compressors=None
        )
        a[:] = np.random.default_rng(1).random(4000)
    return url


def values() -> cpu.Buffer:
    return cpu.Buffer.from_bytes(np.random.default_rng(2).random(1000).tobytes())


def in_order(title: str, call: Callable[[], object]) -> None:
    named = steps(title)
    called = calls_of(call)
    assert [step for step in called if step in named] == named


def test_a_chunk_goes_the_way_to_the_disk_that_the_page_describes(place: str) -> None:
    session = zm.open(place).writable_session()

    def write() -> None:
        asyncio.run(session.store.set("air/c/1", values()))
        session.commit("write a chunk")

    in_order("One chunk", write)


def test_a_key_goes_the_way_to_bytes_that_the_page_describes(place: str) -> None:
    nothing_ahead = {"chunk-manifests": {"preload": {"max-manifests": 0}}}
    store = zm.open(place, nothing_ahead).readonly_session().store
    in_order("One key", lambda: asyncio.run(store.get("air/c/1", default_buffer_prototype())))


def test_a_commit_goes_the_way_that_the_page_describes(place: str) -> None:
    session = zm.open(place).writable_session()
    asyncio.run(session.store.set("air/c/1", values()))
    in_order("One commit", lambda: session.commit("write a chunk"))
