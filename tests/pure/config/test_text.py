"""YAML from anybody: what is refused, and where reading stops."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import Config
from zarr_manifests.config.yaml_text import MAX_TEXT_BYTES, dump_yaml, load_yaml
from zarr_manifests.errors import ConfigError

BILLION_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("document", "fault", "most_events"),
    [
        ("é" * (MAX_TEXT_BYTES // 2 + 1), "longer than", 0),
        (BILLION_LAUGHS, "an anchor", 5),
        ("{a: " * 100_000, "nested more than", 60),
        ("a:\n" + "- a\n" * 100_000, "more than 20,000 values", 20_010),
        ("a: " + ":".join(["59"] * 100_000), "more than 4,096 characters", 6),
        ("!!python/object/apply:os.system [ls]", "a tag", 4),
    ],
    ids=["long", "laughs", "deep", "many", "large", "tag"],
)
def test_what_would_take_much_is_refused_at_once(
    document: str, fault: str, most_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, events = yaml.parse, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal events
        for event in parse(*args, **kwargs):
            events += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counted)
    with pytest.raises(ConfigError, match=fault) as caught:
        Config.from_yaml(document)
    (problem,) = caught.value.problems
    assert len(problem) < 400
    assert events <= most_events


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ("commits: {}\ncommits: {}", "line 2, column 1: the key 'commits' is given twice"),
        ("1: a\n0x1: b", "line 2, column 1: the key 1 is given twice"),
        ("? [a]\n: b", "a key is a map or a list"),
        ("a: 1\n---\nb: 2", "another document at line 2, column 1"),
        ("a: [1, 2", "not YAML"),
        ("pack-bytes: 0x" + "f" * 4_000, "pack-bytes"),
    ],
)
def test_what_may_mean_two_things_or_none_is_refused(document: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Config.from_yaml(document)


def test_regexes_that_hang_other_engines_do_no_harm() -> None:
    for regex in ("(a+)+$", "(a|a)*b", "(.*a){20}", "((a*)*)*c"):
        rule = f"chunk-manifests: {{rules: [{{target: default, path: '{regex}'}}]}}"
        planned = Config.from_yaml(rule).chunk_manifests
        assert planned.set_for("a" * 4_000 + "!", 1, 1)[1] is None
    for regex in ("a" * 3_000, "(((x{99}){99}){99}"):
        rule = f"chunk-manifests: {{rules: [{{target: default, path: '{regex}'}}]}}"
        with pytest.raises(ConfigError, match="path"):
            Config.from_yaml(rule)


@given(st.text() | st.binary() | st.text("-:,[]{}&*!|>'\"%@ \nab1~?#", max_size=30))
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert Config.from_yaml(text)


VALUES = st.none() | st.booleans() | st.integers() | st.text("ab: #-'\"\n[]{}&*!|>%@é", max_size=6)
TREES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("ab-:", max_size=4), TREES, max_size=3))
def test_what_is_written_is_read(values: dict[str, Any]) -> None:
    assert load_yaml(dump_yaml(values))[0] == values
    assert load_yaml(yaml.safe_dump(values))[0] == values
