"""The page on places and credentials: what it does in a bucket is done beside a test server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests.storage import from_url
from zarr_manifests.storage.url import _OPTIONS

PAGE = Path(__file__).parents[2] / "docs/guide/places.md"
_BLOCK = re.compile(
    r"^(?:<!-- skip: (?P<why>[^\n]*) -->\n+)?```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def test_the_code_of_the_page_runs_in_a_bucket(
    server_named: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_named("ministack")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = list(_BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    here = "the tests of storages run it beside a server"
    assert [block["why"] for block in found].count(here) == 2
    code = "\n".join(block["code"] for block in found if block["why"] in (None, here))
    code = code.replace("s3://winds/", f"s3://{server.url.split('/')[2]}/page/")
    code = code.replace("eu-central-1", "us-east-1")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page", "ENDPOINT": server.endpoint})  # noqa: S102
    place = f"s3://{server.url.split('/')[2]}/page/ours"
    here = {"endpoint": server.endpoint, "allow_http": True}
    repo = zm.Repository.open(place, storage_options=here)
    assert [info.message for info in repo.ancestry()] == ["copied", "create repository"]
    sys.modules.pop("winds_accounts")


def test_the_page_lists_every_option() -> None:
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    listed: dict[str, set[str]] = {}
    for names, kinds in rows:
        for name in re.findall(r"`(\w+)`", names):
            listed.setdefault(name, set()).update(re.findall(r"`(\w+)`", kinds) or {"file"})
    real: dict[str, set[str]] = {}
    for kind, options in _OPTIONS.items():
        for name in options:
            real.setdefault(name, set()).add("https" if kind == "http" else kind)
    assert {name: listed.get(name) for name in real} == real


def test_the_examples_of_the_page_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## One example for each store")[2]
    code = _BLOCK.search(text)
    assert code is not None
    lines = [line.partition("  #")[0] for line in code["code"].splitlines()]
    assert len(lines) > 5
    for line in lines:
        place = eval(line, {"from_url": from_url})  # noqa: S307
        assert "ObjectStorage" in repr(place)
    assert os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") is None
