"""What is wrong with a YAML document is said all at once, each fault with its place and mend."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import Config
from zarr_manifests.config.repository_config import config_of_root
from zarr_manifests.error_cases import ConfigError

WRONG = """
pack-bytes: 0
compaction: {interval: 4}
commits: {mode: deltas}
colour: blue
chunk-manifest: {}
chunk-manifests:
  sets:
    - coord1:
        max-size: 3
        arrays-per-manifest: 4
        overflow-to: coord2
    - coord2: {overflow-to: coord1, cardinalty: 3}
    - coord3: {max-manifest-size: a, overflow-to: cord1}
    - default: {cardinality: 3, overflow-to: coord1}
    - a:
      max-size: 4
    - 7: {}
    - coord3: {name: coord4, max-size: 1, max-manifest-size: 2}
  rules:
    - path: "(?=x)"
      target: coord33
      metadata-chunks: [5, 3]
    - metadata-chunks: [5]
    - 5
    - {target: default, initialized-chunks: [-1, a], patch: x}
  splitting: yes
  preload: {max-manifests: -1, arrays: [{path: "("}, a, {}], branches: ["/"], tags: v1}
"""

FAULTS = [
    "pack-bytes: 0 is not within 1 to 1073741824",
    "compaction.interval: unknown option; did you mean interval-commits?",
    "commits.mode: 'deltas' is not one of delta, rewrite",
    "colour: unknown option; known are cache, chunk-manifests, commits, compaction, inline-chunk-",
    "chunk-manifest: unknown option; did you mean chunk-manifests?",
    "chunk-manifests.sets[0].coord1.arrays-per-manifest: a set is packed by this or by max-",
    "chunk-manifests.sets[1].coord2.cardinalty: unknown option; did you mean cardinality?",
    "chunk-manifests.sets[2].coord3.max-manifest-size: expected a whole number or null (unlimited)",
    "chunk-manifests.sets[3].default.overflow-to: the set default takes what is left and overflow",
    "chunk-manifests.sets[3].default.cardinality: the set default has any number of manifests; ",
    "chunk-manifests.sets[4]: expected one name and, further to the right, its options; got ['a',",
    "chunk-manifests.sets[5]: expected a name of at most 64 letters, digits and _ . - that begins",
    "chunk-manifests.sets[6].coord3.name: unknown option; the name stands before the colon",
    "chunk-manifests.sets[6].coord3.max-size: max-manifest-size is given twice, once in another s",
    "chunk-manifests.rules[0].path: '(?=x)' is not a regular expression (invalid perl operator: ",
    "chunk-manifests.rules[0].metadata-chunks: [5, 3] is empty; give the smaller number first",
    "chunk-manifests.rules[1].metadata-chunks: expected [lowest, highest], got [5]",
    "chunk-manifests.rules[1].target: is missing: the name of a set",
    "chunk-manifests.rules[2]: expected options and their values, got 5",
    "chunk-manifests.rules[3].initialized-chunks: expected a number from 0 to 1000000000000 or nu",
    "chunk-manifests.rules[3].initialized-chunks: expected a number from 0 to 1000000000000 or nu",
    "chunk-manifests.rules[3].patch: unknown option; did you mean path?",
    "chunk-manifests.splitting: expected none, or a list, got True",
    "chunk-manifests.preload.max-manifests: -1 is not within 0 to 10000",
    "chunk-manifests.preload.arrays[0].path: '(' is not a regular expression (missing ): (); the ",
    "chunk-manifests.preload.arrays[1]: expected options and their values, got 'a'",
    "chunk-manifests.preload.arrays[2].path: is missing: a regular expression",
    "chunk-manifests.preload.branches[0]: expected the name of a branch or tag, got '/'",
    "chunk-manifests.preload.tags: expected a list, got 'v1'; begin each entry with '- '",
    "chunk-manifests.sets[6].coord3: another set has this name; choose a new one",
    "chunk-manifests.sets[0].coord1.overflow-to: the sets overflow in a circle (coord1 -> coord2 ",
    "chunk-manifests.sets[2].coord3.overflow-to: there is no set 'cord1'; did you mean coord1?",
    "chunk-manifests.rules[0].target: there is no set 'coord33'; did you mean coord3?",
]


def faults(document: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(document)
    return tuple(re.sub(r"^line \d+: ", "", problem) for problem in caught.value.problems)


def test_every_fault_has_the_line_that_it_is_in() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(WRONG)
    lines = WRONG.splitlines()
    for problem in caught.value.problems:
        line, place = re.fullmatch(r"line (\d+): (.*?): .*", problem).groups()
        named = re.split(r"[.\[]", place)[-1]
        if "is missing" not in problem and not named.endswith("]"):
            assert named in lines[int(line) - 1], problem
    at = dict(zip(FAULTS, caught.value.problems, strict=True))
    assert at[FAULTS[0]].startswith("line 2: ")
    assert at[FAULTS[8]].startswith("line 15: ")
    assert at[FAULTS[11]].startswith("line 18: ")
    assert at[FAULTS[17]].startswith("line 24: "), "a missing option has the line of its map"
    with pytest.raises(ConfigError, match=r"^line 3: chunk-manifests.sets\[1\]\.b\.cardinality: "):
        Config.from_yaml("chunk-manifests:\n sets: {a: {},\n  b: {cardinality: x}}\n rules: []")


def test_every_fault_at_once_with_its_place() -> None:
    found = faults(WRONG)
    assert [problem[: len(due)] for problem, due in zip(found, FAULTS, strict=True)] == FAULTS


@pytest.mark.parametrize(
    ("document", "places"),
    [
        ("chunk-manifests: {sets: 5}", ["chunk-manifests.sets"]),
        ("chunk-manifests: {sets: [[a]]}", ["chunk-manifests.sets[0]"]),
        ("chunk-manifests: {sets: [{a: 5}]}", ["chunk-manifests.sets[0].a"]),
        ("chunk-manifests: {sets: [a, {a: {}}]}", ["chunk-manifests.sets[1].a"]),
        (
            "chunk-manifests: {sets: [{default: {max-size: 5, arrays-per-manifest: 3}}]}",
            ["chunk-manifests.sets[0].default.arrays-per-manifest"],
        ),
        ("chunk-manifests: {rules: {target: a}}", ["chunk-manifests.rules"]),
        ("chunk-manifests: {splitting: }", ["chunk-manifests.splitting"]),
        ("chunk-manifests: {splitting: [{path: /a}]}", ["chunk-manifests.splitting[0].along"]),
        (
            "chunk-manifests: {splitting: [{path: /a, along: {on: 3, time: 0, 5: 1.5}}]}",
            [f"chunk-manifests.splitting[0].along.{axis}" for axis in ("True", "time", "5")],
        ),
        ("chunk-manifests: {splitting: [{path: /a, along: 3}]}", ["chunk-manifests.splitting[0]"]),
        ("chunk-manifests: {preload: {arrays: .*}}", ["chunk-manifests.preload.arrays"]),
        (
            "chunk-manifests: {preload: {arrays: [{path: a, paths: b}]}}",
            ["chunk-manifests.preload.arrays[0].paths"],
        ),
        ("- a", [""]),
        ("a", [""]),
    ],
)
def test_places(document: str, places: list[str]) -> None:
    found = faults(document)
    assert [p.startswith(place) for p, place in zip(found, places, strict=True)] == [True] * len(
        places
    ), found


@pytest.mark.parametrize(
    "document",
    [
        "chunk-manifests: {sets: [{default: }]}",
        "chunk-manifests: {sets: [default]}",
        "chunk-manifests: {sets: {default: }}",
        "chunk-manifests: {sets: }",
        "chunk-manifests:\n  sets:\n    - default:\n",
    ],
)
def test_default_may_be_a_bare_key(document: str) -> None:
    planned = Config.from_yaml(document).chunk_manifests
    assert [(one.name, one.max_manifest_size) for one in planned.sets] == [("default", 1_000_000)]


def test_sets_may_be_a_map() -> None:
    body = "{b: {overflow-to: a}, a: , default: {max-size: null}}"
    planned = Config.from_yaml(f"chunk-manifests: {{sets: {body}}}").chunk_manifests
    assert [one.name for one in planned.sets] == ["b", "a", "default"]
    assert planned.default_set.max_manifest_size is None


def test_what_is_left_empty_has_its_default() -> None:
    for empty in ("", "# nothing", "chunk-manifests:", "commits:", "chunk-manifests: {preload: }"):
        assert Config.from_yaml(empty) == Config()


def test_very_many_faults_are_cut() -> None:
    found = faults("".join(f"option{i}: 1\n" for i in range(9_000)))
    assert len(found) == 101
    assert found[-1] == "there may be more faults; mend these first"


_NAMES = (
    "chunk-manifests sets rules preload splitting path target along arrays metadata-chunks "
    "max-manifest-size cardinality overflow-to default none commits mode compaction"
)
_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with halves of surrogate pairs
_KEYS = st.sampled_from(_NAMES.split()) | _TEXT | st.integers() | st.none()
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_KEYS, _PLAIN, max_size=4))
def test_anything_is_a_configuration_or_has_faults(options: dict[Any, Any]) -> None:
    for given_options in (options, {"chunk-manifests": options}):
        with contextlib.suppress(ConfigError):
            config = Config.from_dict(given_options)
            assert Config.from_dict(config.to_dict()) == config
        with contextlib.suppress(ConfigError):
            config = config_of_root(given_options)
            assert config_of_root(config.to_dict()) == config


def test_faults_between_sets_are_found_beside_faults_of_sets() -> None:
    found = faults(
        """
        chunk-manifests:
          sets:
            - a: {max-size: x, arrays-per-manifest: 3, overflow-to: b}
            - b: {cardinality: 0, overflow-to: a}
            - default: {cardinality: x, overflow-to: a}
          rules: [{target: c, path: 5}]
        """
    )
    assert [problem.partition(":")[0].removeprefix("chunk-manifests.") for problem in found] == [
        "sets[0].a.max-size",
        "sets[1].b.cardinality",
        "sets[2].default.cardinality",
        "rules[0].path",
        "sets[2].default.overflow-to",
        "sets[0].a.overflow-to",
        "rules[0].target",
    ]
