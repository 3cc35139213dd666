"""The page on the architecture: its picture is current, and what it names exists."""

from __future__ import annotations

import importlib.util
import operator
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_every_module_of_the_engine_is_explained(picture: ModuleType) -> None:
    rows = re.findall(r"^\| [a-z ]+ \| (`.*`) \|", PAGE, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == picture.engine_modules()


def test_the_functions_that_the_page_follows_exist() -> None:
    """One chunk, one key, one commit: seven functions each."""
    steps = re.findall(r"^\d+\. `([\w.]+):([\w.]+)`", PAGE, re.MULTILINE)
    assert len(steps) == 21
    for module, name in steps:
        operator.attrgetter(name)(importlib.import_module(f"zarr_manifests.{module}"))
