"""`zarr-manifests explain`: what a config would make of a repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from cli_calls import call

PLAN = b"""
chunk-manifests:
  sets:
    - few: {max-manifest-size: 300}
    - by-steps: {max-manifest-size: 2000, cardinality: null}
  rules:
    - {path: /lat, target: few}
    - {path: /sea, target: by-steps}
  splitting:
    - {path: /sea, along: {0: 2000}}
"""


def test_a_plan_shows_what_would_be_and_writes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "repository"
    repo = zm.create(place)
    with repo.transaction(message="two arrays") as store:
        for name, chunks in (("lat", 5), ("sea", 6_000)):
            zarr.create_array(store, name=name, shape=(chunks,), chunks=(1,), dtype="i1")
            at = np.arange(chunks)
            files = [f"file:///archive/{name}.bin"]
            store.set_virtual_refs(name, at[:, None], files, at * 0, at, at * 0 + 1)
    repo.compact(mode="full")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    done = call("explain", place, "--config", "-", given=PLAN)
    assert done.exit_code == 0, done.output
    found = [line.split() for line in done.stdout.partition("\nthen\n")[2].splitlines()]
    for path, rule, wanted, leaves, refs in (
        ("/lat", "0", "few", "1", "5"),
        ("/sea", "1", "by-steps", "3", "6,000"),
    ):
        (row,) = (row for row in found if row[:1] == [path])
        assert row[:4] == [path, rule, wanted, leaves]
        assert refs in row
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


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


def test_explain_shows_the_leaves_of_one_array(url: str) -> None:
    done = call("explain", url, "sea", "--at", "main")
    assert ["wanted", "default"] in rows(done.stdout)
    assert ["0", "6,000", "6,000"] in [row[:3] for row in rows(done.stdout)]
    lost = call("explain", url, "/lost")
    assert lost.exit_code == 1
    assert "there is no array '/lost'" in lost.stderr
