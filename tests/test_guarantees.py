"""Every guarantee names its tests, and these are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"

_TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)(?:::(?P<name>\w+))?`")


def rows() -> list[list[str]]:
    """Guarantee, what it fails without, and tests, of all tables."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] != "guarantee"]


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    return frozenset(name for name in names if name.startswith("test_"))


def test_there_are_guarantees() -> None:
    assert len(rows()) > 40
    assert {len(row) for row in rows()} == {3}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:50])
def test_a_guarantee_names_tests_that_there_are(row: list[str]) -> None:
    assert row[1], "what does its test fail without?"
    named = [(found["file"], found["name"]) for found in _TEST.finditer(row[2])]
    assert named, "which test shows it?"
    assert len(named) == row[2].count("tests/")
    for file, name in named:
        assert names_in(file), file
        assert name is None or name in names_in(file), f"{file} has no {name}"
