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
from zarr_manifests.config import yaml_text as text_module
from zarr_manifests.config.yaml_text import MAX_TEXT_BYTES, dump_yaml, load_yaml
from zarr_manifests.error_cases import ConfigError

BILLION_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in pairwise("abcdefghi")
)


class Events:
    """Counts the events that are taken from the parser."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
        self.count = 0
        parse = yaml.parse

        def counted(*args: Any, **kwargs: Any) -> Any:
            for event in parse(*args, **kwargs):
                self.count += 1
                yield event

        monkeypatch.setattr(yaml, "parse", counted)
        monkeypatch.setattr(text_module, "_PARSER", getattr(yaml, loader))


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Events:
    return Events(monkeypatch, request.param)


@pytest.mark.parametrize(
    ("document", "fault", "most_events"),
    [
        ("x" * (10 << 20), "longer than 1,048,576 bytes", 0),
        ("é" * (MAX_TEXT_BYTES // 2 + 1), "longer than 1,048,576 bytes", 0),
        (b"[" * (10 << 20), "longer than 1,048,576 bytes", 0),
        (BILLION_LAUGHS, r"line 1, column 4: an anchor \(&a\)", 5),
        ("a: *a", r"line 1, column 4: an alias \(\*a\)|undefined alias", 5),
        ("&a a: 1", r"an anchor \(&a\)", 4),
        ("&a [*a]", r"an anchor \(&a\)", 4),
        ("<<: {commits: 1}", "'<<' has no meaning", 4),
        ("[" * 500_000, "nested more than 24 deep", 30),
        ("{a: " * 100_000, "nested more than 24 deep", 60),
        ("- " * 100_000, "nested more than 24 deep", 30),
        ("a:\n" + "- a\n" * 100_000, "more than 20,000 values", 20_010),
        ("a: " + "9" * 1_000_000, "a value of more than 4,096 characters", 6),
        ("a: " + ":".join(["59"] * 100_000), "a value of more than 4,096 characters", 6),
        ("pack-bytes: 0x" + "f" * 4_000, "pack-bytes: .* is not within 1 to", 9),
        ("pack-bytes: 0b" + "1" * 4_000, "pack-bytes: .* is not within 1 to", 9),
        ("!!python/object/apply:os.system [ls]", "a tag .*; remove it", 4),
        ("a: !!binary aGk=", "a tag", 6),
        ("a: !x y", "a tag", 6),
        ("? 0x" + "f" * 4_000 + "\n: 1", "a number that is too large: unknown option", 9),
        ("commits: {}\ncommits: {}", "line 2, column 1: the key 'commits' is given twice", 10),
        ("1: a\n0x1: b", "line 2, column 1: the key 1 is given twice", 10),
        ("? [a]\n: b", "a key is a map or a list", 5),
        ("a: 1\n---\nb: 2", "line 2, column 1: a second document begins", 10),
        ("a: 2001-99-99", "'2001-99-99' has no meaning; quote it", 6),
        ("a: b: c", r"this is not YAML: .* \(line 1, column 5\)", 9),
        ("a: [1, 2", "this is not YAML", 9),
        ("\x00", "this is not YAML", 9),
        (b"\xff\xff", "this is not YAML", 9),
        ("a: \ud800", "this is not YAML", 9),
    ],
)
def test_what_is_refused_is_refused_at_once(
    events: Events, document: str | bytes, fault: str, most_events: int
) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        Config.from_yaml(document)
    assert len(caught.value.problems) == 1
    assert all(len(problem) < 400 for problem in caught.value.problems)
    assert events.count <= most_events


def test_regexes_that_hang_other_engines_do_no_harm() -> None:
    for regex in ("(a+)+$", "(a|a)*b", "(.*a){20}", "((a*)*)*c"):
        rule = f"chunk-manifests: {{rules: [{{target: default, path: '{regex}'}}]}}"
        (found,) = Config.from_yaml(rule).chunk_manifests.rules
        assert found.matches("a" * 4_000 + "!", 1, 1) is False
    for regex, fault in (
        ("a" * 3_000, "3000 characters"),
        ("(((x{99}){99}){99}", "repetition|miss"),
    ):
        rule = f"chunk-manifests: {{rules: [{{target: default, path: '{regex}'}}]}}"
        with pytest.raises(ConfigError, match=fault):
            Config.from_yaml(rule)


def test_scalars_mean_what_they_mean_in_yaml(events: Events) -> None:
    document = "- 1_000\n- 0x10\n- ~\n-\n- yes\n- a\n- '5'\n- 1.5\n- \"x\\ny\"\n- |\n  b\n"
    assert load_yaml(document) == [1000, 16, None, None, True, "a", "5", 1.5, "x\ny", "b\n"]
    assert load_yaml("") is None
    assert load_yaml("# nothing") is None
    assert events.count > 0


@given(st.text() | st.binary() | st.text("-:,[]{}&*!|>'\"%@ \nab1~?#", max_size=30))
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert Config.from_yaml(text)


_VALUES = st.none() | st.booleans() | st.integers() | st.text("ab: #-'\"\n[]{}&*!|>%@é", max_size=6)
_TREES = st.recursive(
    _VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_VALUES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("ab-:", max_size=4), _TREES, max_size=3))
def test_what_is_written_is_read(values: dict[str, Any]) -> None:
    assert load_yaml(dump_yaml(values)) == values
    assert load_yaml(yaml.safe_dump(values)) == values
