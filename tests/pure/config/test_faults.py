"""What is wrong with a YAML document is said all at once, each fault with its place and mend."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.errors import ConfigError

WRONG = """
pack-bytes: 0
compaction: {interval: 4}
colour: blue
chunk-manifests:
  sets:
    - coord1:
        max-size: 3
        arrays-per-manifest: 4
        overflow-to: coord2
    - coord2: {overflow-to: coord1, cardinalty: 3}
    - coord3: {max-manifest-size: a}
    - default: {cardinality: 3, overflow-to: coord1}
    - a:
      max-size: 4
    - coord3: {max-size: 1, max-manifest-size: 2}
  rules:
    - path: "(?=x)"
      target: coord3
      metadata-chunks: [5, 3]
    - metadata-chunks: [5]
    - {target: nowhere, initialized-chunks: [-1, a], patch: x}
  splitting: yes
  preload: {max-manifests: -1, arrays: [{path: "("}]}
"""

WRONG_BETWEEN = """
chunk-manifests:
  sets:
    - coord1: {overflow-to: coord2}
    - coord2: {overflow-to: coord1}
    - coord3: {overflow-to: cord1}
    - coord3:
  rules:
    - target: coord33
"""

PLACES_BETWEEN = """
sets[0].coord1.overflow-to
sets[2].coord3.overflow-to
sets[3].coord3
rules[0].target
"""

PLACES = """
pack-bytes
compaction.interval
colour
sets[0].coord1.arrays-per-manifest
sets[1].coord2.cardinalty
sets[2].coord3.max-manifest-size
sets[3].default.overflow-to
sets[3].default.cardinality
sets[4]
sets[5].coord3.max-manifest-size
sets[5].coord3
rules[0].path
rules[0].metadata-chunks
rules[1].target
rules[1].metadata-chunks
rules[2].patch
rules[2].initialized-chunks
rules[2].initialized-chunks
rules[2].target
splitting
preload.max-manifests
preload.arrays[0].path
"""
"""In the order of their lines."""


def faults(document: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(document)
    return tuple(re.sub(r"^line \d+: ", "", problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("document", "due", "near"),
    [
        (WRONG, PLACES, ("interval-commits", "cardinality", "path")),
        (WRONG_BETWEEN, PLACES_BETWEEN, ("coord1", "coord3")),
    ],
)
def test_every_fault_is_told_at_once_in_order_with_its_place_and_a_near_name(
    document: str, due: str, near: tuple[str, ...]
) -> None:
    found = faults(document)
    places = [problem.partition(":")[0].removeprefix("chunk-manifests.") for problem in found]
    assert places == due.split()
    for name in near:
        assert any(f"did you mean {name}?" in problem for problem in found)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("chunk-manifests: {sets: [a, {a: {}}]}", "chunk-manifests.sets[1].a"),
        ("chunk-manifests: {splitting: [{path: /a}]}", "chunk-manifests.splitting[0].along"),
        ("chunk-manifests: {preload: {arrays: .*}}", "chunk-manifests.preload.arrays"),
        ("- a", ""),
    ],
)
def test_a_fault_is_told_with_its_place(document: str, place: str) -> None:
    (found,) = faults(document)
    assert found.startswith(place)


def test_what_is_left_empty_has_its_default() -> None:
    for empty in ("", "# nothing", "chunk-manifests:", "commits:", "chunk-manifests: {preload: }"):
        assert Config.from_yaml(empty) == Config()


NAMES = (
    "chunk-manifests sets rules preload splitting path target along arrays metadata-chunks "
    "max-manifest-size cardinality overflow-to default none commits mode compaction"
)
_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with halves of surrogate pairs
_KEYS = st.sampled_from(NAMES.split()) | _TEXT | st.integers() | st.none()
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


def test_what_one_machine_keeps_in_memory_is_not_saved() -> None:
    with pytest.raises(ConfigError, match="cache: expected options"):
        Config(cache=CacheOptions(chunk_bytes=5))
