"""`zarr-manifests explain`: what it prints, and the pictures it draws."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result

import zarr_manifests as zm
from zarr_manifests.cli import app


def call(*arguments: object, given: bytes | None = None) -> Result:
    """Call `zarr-manifests` with these arguments, without a terminal."""
    return CliRunner().invoke(app, [*map(str, arguments)], input=given)


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


def test_explain_shows_where_each_array_is(url: str) -> None:
    done = call("explain", url)
    assert done.exit_code == 0, done.output
    found = rows(done.stdout)
    assert found[0] == [zm.open(url).list_branches()["main"]]
    assert ["/lat", "0", "coordinates", "1", "1", "5"] in found
    assert ["/air", "0", "coordinates", "1", "1", "300"] in found
    assert ["/sea", "default", "2", "1", "6,000"] in found
    assert ["1", "coordinates", "2", "305"] in [row[:4] for row in found]
    assert "manifests/" in done.stdout


def test_explain_shows_the_leaves_of_one_array(url: str) -> None:
    done = call("explain", url, "sea", "--at", "main")
    assert "/sea: no rule matched, so it belongs to set default" in done.stdout
    assert ["[0]", "[6000]", "6,000", "2", "default"] in rows(done.stdout)
    lost = call("explain", url, "/lost")
    assert lost.exit_code == 1
    assert "there is no array '/lost'" in lost.stderr


PLAN = b"""
chunk-manifests:
  sets:
    - few: {max-manifest-size: 300}
    - by-steps: {max-manifest-size: 2000, cardinality: null}
  rules:
    - {path: "/(lat|air)", target: few}
    - {path: /sea, target: by-steps}
  splitting:
    - {path: /sea, along: {0: 2000}}
"""


def test_plan_shows_what_would_be_and_writes_nothing(url: str, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}
    picture = tmp_path / "plan.png"
    done = call("explain", url, "--config", "-", "--plot", picture, given=PLAN)
    assert done.exit_code == 0, done.output
    found = rows(done.stdout)
    assert ["/lat", "0", "few", "1", "1", "5"] in found
    row = next(row for row in found if row[:1] == ["/air"])
    assert row[:6] == ["/air", "0", "default", "5", "1", "300"]
    assert " ".join(row[6:]) == "few: the set has its 1 manifests already"
    assert ["/sea", "1", "by-steps", "2-4", "3", "6,000"] in found
    assert "now:    2 manifests, 6,305 refs" in done.stdout
    assert "then:   5 manifests, 6,305 refs" in done.stdout
    costs = [
        re.findall(r"(\d+) requests?, ([\d.]+ \w+)", line) for line in done.stdout.splitlines()
    ]
    opening, coordinates, step = costs[-3:]
    assert [count for count, _ in opening] == ["1", "1"], "it fits into the root"
    assert coordinates == [("0", "0 B")] * 2, "copies of them lie beside the nodes"
    assert [count for count, _ in step] == ["1", "2"], "air is in a manifest of its own then"
    assert all(nbytes.endswith(" kB") for _, nbytes in opening)
    assert {path: path.read_bytes() for path in Path(url).rglob("*") if path.is_file()} == before
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_faults_of_a_plan_are_said_line_by_line(url: str) -> None:
    done = call("explain", url, "--config", "-", given=b"colour: blue")
    assert done.exit_code == 2
    assert "colour: unknown option" in done.stderr


def test_explain_draws(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "now.png"
    assert call("explain", url, "--plot", picture).exit_code == 0
    assert picture.stat().st_size > 1_000
    nowhere = call("explain", url, "--plot", tmp_path / "no" / "now.png")
    assert nowhere.exit_code == 2
    assert "cannot be written" in nowhere.stderr
