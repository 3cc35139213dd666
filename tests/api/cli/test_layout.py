"""`zarr-manifests explain`: which manifests the refs of an array are in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from cli_calls import call


@pytest.fixture
def url(tmp_path: Path) -> str:
    repository = zm.create(tmp_path / "repository")
    session = repository.writable_session()
    for name, chunks in (("lat", 5), ("air", 300), ("sea", 6_000)):
        zarr.create_array(
            session.store, name=name, shape=(chunks,), chunks=(1,), dtype="i1",
            dimension_names=(name if name == "lat" else "x",),
        )  # fmt: skip
        session.store.set_virtual_refs(
            name,
            np.arange(chunks).reshape(-1, 1),
            [f"file:///archive/{name}.bin"],
            np.zeros(chunks, np.int64),
            np.arange(chunks),
            np.ones(chunks, np.int64),
        )
    session.commit("three arrays")
    repository.compact(mode="full")
    return str(tmp_path / "repository")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_explain_shows_the_rule_and_the_set_of_each_array(url: str) -> None:
    found = rows(call("explain", url, "main").stdout)
    assert ["/lat", "0", "coordinates"] in [row[:3] for row in found]
    assert ["/sea", "default"] in [row[:2] for row in found]
