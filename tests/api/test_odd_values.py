"""Odd values at a handful of entrances: an error that says so, and a sound repository."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import zarr_manifests as zm
from effort import examples
from zarr_manifests.cli import app
from zarr_manifests.errors import ManifestsError
from zarr_manifests.storage.memory import MemoryStorage

DS = xr.Dataset({"t": ("x", np.arange(4.0))}, {"x": np.arange(4)})
TEXTS = ["", ".", "..", "a/../b", "a//b", "\0", "\x1b[31m", "\udcff", "-1", "x" * 4_000, "main~9"]
ODD = st.one_of(
    st.sampled_from([*TEXTS, None, True, b"", 1 << 70, -1, math.nan, math.inf, object, {}, [], ()]),
    st.text(max_size=8),
    st.integers(),
    st.floats(),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=2),
)
CALLS: dict[str, Callable[[zm.Repository, Any], object]] = {
    "open": lambda _, odd: zm.open(odd),
    "config": lambda _, odd: zm.Config.from_dict(odd),
    "a version": lambda repo, odd: repo.readonly_session(odd),
    "a branch": lambda repo, odd: repo.create_branch(odd),
    "metadata": lambda repo, odd: repo.metadata({"a": odd}),
    "du": lambda repo, odd: repo.du(path=odd),
    "a step": lambda repo, odd: repo.writable_session().commit("m", txn=("app", odd)),
    "a place": lambda repo, odd: repo.writable_session().move("/t", odd),
    "a box": lambda repo, odd: repo.readonly_session().chunk_refs("/t", odd),
    "a summary": lambda repo, odd: repo.readonly_session().summarize("/t", odd, by=odd),
    "a where": lambda repo, odd: repo.readonly_session().chunks_where("/t", odd),
    "write": lambda repo, odd: zm.write(odd, repo),
    "an encoding": lambda repo, odd: zm.write(DS, repo, mode="w", encoding={"t": odd}),
    "a file": lambda repo, odd: zm.ingest([odd], repo, append_dim="x"),
}
THEIRS = {"write", "an encoding"}
"""Of which xarray and Zarr may refuse something in their own words."""


def made() -> zm.Repository:
    repo = zm.create(MemoryStorage())
    zm.write(DS, repo, message="made")
    return repo


@pytest.mark.hypothesis
@pytest.mark.filterwarnings("ignore")
def test_an_odd_value_is_refused_or_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([*CALLS]), ODD)
    def one(name: str, odd: Any) -> None:
        also = (ValueError, KeyError, NotImplementedError) if name in THEIRS else ()
        repo = made()
        first = repo.list_branches()["main"]
        said = ""
        try:
            CALLS[name](repo, odd)
        except ManifestsError as error:
            said = str(error)
        except (TypeError, AttributeError, *also):  # as the annotations say
            pass
        assert not re.search(r"[\0\x1b\ud800-\udfff]", said)
        assert len(said) < 5000
        again = zm.open(repo.storage)
        assert again.verify().ok
        found = xr.open_dataset(again, engine="zarr_manifests", version=first)
        xr.testing.assert_equal(found, DS)

    one()


def verbs(group: Any, above: str = "") -> Iterator[str]:
    """Those of the command line that take a URL: `log`, `config set`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{above}{name} ")
        elif any(parameter.name == "url" for parameter in command.params):
            yield above + name


@pytest.mark.hypothesis
def test_an_odd_word_is_refused_by_a_verb(tmp_path: Path) -> None:
    zm.write(DS, tmp_path / "winds", message="made")

    @settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted({*verbs(typer.main.get_command(app))} - {"serve"})),
        st.sampled_from([word for word in TEXTS if not {"\0", "\udcff"} & {*word}]),
    )
    def one(verb: str, odd: str) -> None:
        result = CliRunner().invoke(app, [*verb.split(), str(tmp_path / "winds"), odd, odd])
        assert result.exit_code in (0, 1, 2)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "\x1b" not in result.output

    one()
    assert zm.open(tmp_path / "winds").verify().ok
