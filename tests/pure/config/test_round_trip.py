"""A configuration that is valid survives YAML, plain values and pickles; the schema agrees."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import (
    Cache,
    ChunkManifests,
    Commits,
    Compaction,
    Config,
    ManifestSet,
    Preload,
    Rule,
    Snapshots,
    Split,
)

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = jsonschema.Draft202012Validator(json.loads((DOCS / "config.schema.json").read_text()))
_PATHS = st.sampled_from([".*", "/a/b", ".*/(lat|lon)", r"/\d+.*", "(a+)+$", "/é/.*", ": #'\""])
_SIZES = st.none() | st.integers(1, 10**12)
_ENDS = st.none() | st.integers(0, 10**12)
_INTERVALS = st.none() | st.tuples(_ENDS, _ENDS).map(
    lambda ends: ends if None in ends else (min(ends), max(ends))
)
_DIMENSIONS = st.integers(0, 31) | st.text(min_size=1, max_size=5)
_ALONG = st.dictionaries(_DIMENSIONS, st.integers(1, 10**12), min_size=1, max_size=3)
_AGES = st.integers(0, 3 * 10**9).map(lambda seconds: timedelta(seconds=seconds))
_SPLITS = st.builds(Split, _PATHS, _ALONG.map(lambda along: tuple(along.items())))


def _lists(one: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    return st.lists(one, max_size=most).map(tuple)


@st.composite
def manifest_sets(draw: st.DrawFn) -> tuple[ManifestSet, ...]:
    """Sets that overflow to later ones in a hidden order; with or without `default`."""
    names = draw(st.lists(st.text("ab0_", min_size=1, max_size=3), unique=True, max_size=5))
    names = [name for name in names if name != "default"]
    sets = []
    for i, name in enumerate(names):
        size = draw(_SIZES)
        arrays = draw(st.none() | st.integers(1, 1_000_000)) if size is None else None
        target = draw(st.sampled_from([*names[i + 1 :], "default"]))
        cardinality = draw(st.none() | st.integers(1, 1_000_000))
        sets.append(ManifestSet(name, size, arrays, target, cardinality))
    if draw(st.booleans()):
        size = draw(_SIZES)
        arrays = draw(st.none() | st.integers(1, 9)) if size is None else None
        sets.append(ManifestSet("default", size, arrays, None, None))
    return tuple(draw(st.permutations(sets)))


@st.composite
def chunk_manifests(draw: st.DrawFn) -> ChunkManifests:
    """Any valid planning."""
    sets = draw(manifest_sets())
    targets = st.sampled_from([*(one.name for one in sets), "default"])
    rule = st.builds(Rule, targets, st.none() | _PATHS, _INTERVALS, _INTERVALS)
    preload = st.builds(
        Preload,
        st.integers(0, 10**12),
        st.integers(0, 10_000),
        st.none() | _lists(_PATHS),
    )
    splitting = draw(st.none() | _lists(_SPLITS))
    return ChunkManifests(sets, draw(_lists(rule)), splitting, draw(preload))


def repository_configs() -> st.SearchStrategy[Config]:
    """Any valid configuration of a size that is usual."""
    return st.builds(
        Config,
        st.integers(0, 65_536),
        pack_chunk_bytes=st.integers(0, 1 << 26),
        pack_bytes=st.integers(1, 1 << 30),
        spill_refs=st.integers(1, 1_000_000_000),
        commits=st.builds(Commits, st.sampled_from(["delta", "rewrite"]), st.integers(1, 10_000)),
        compaction=st.builds(
            Compaction,
            st.sampled_from(["auto", "async", "manual"]),
            st.integers(1, 1_000),
            st.integers(1, 1_000),
            st.integers(1, 1_000_000),
            st.integers(2, 100),
            st.floats(0, 100) | st.integers(0, 100),
            st.integers(1, 64),
        ),
        cache=st.builds(Cache, st.integers(0, 1 << 62), st.integers(0, 1 << 62)),
        chunk_manifests=chunk_manifests(),
        snapshots=st.builds(Snapshots, st.none() | st.integers(1, 10**9), st.none() | _AGES),
    )


@given(repository_configs())
def test_a_configuration_comes_back_from_all_that_it_is_written_as(config: Config) -> None:
    plain = config.to_dict()
    assert Config.from_yaml(config.to_yaml()) == config
    assert Config.from_dict(with_tuples(plain)) == config
    assert Config.from_dict({n.replace("-", "_"): one for n, one in plain.items()}) == config
    assert Config.from_dict(plain) == config
    again = pickle.loads(pickle.dumps(config))
    assert (again, hash(again)) == (config, hash(config))
    SCHEMA.validate(json.loads(json.dumps(plain)))


def test_the_schema_has_every_option_and_its_default() -> None:
    defaults = {name: one["default"] for name, one in SCHEMA.schema["properties"].items()}
    plain = Config().to_dict()
    plain["commits"]["metadata"], plain["virtual-containers"] = {}, []  # left out if empty
    assert defaults == plain


def with_tuples(value: object) -> object:
    """Plain values as another library would hand them."""
    if isinstance(value, dict):
        return {key: with_tuples(inner) for key, inner in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["\x85", "a\u2028b", " a ", "0x1", "a: b"])
def test_names_come_back_from_yaml_as_they_are(name: str) -> None:
    config = Config(
        commits=Commits(metadata=((name, name), ("n", 1.5), ("no", False))),
        chunk_manifests=ChunkManifests(splitting=(Split(".*", ((name, 5),)),)),
    )
    assert Config.from_yaml(config.to_yaml()) == config
    assert Config.from_dict(config.to_dict()) == pickle.loads(pickle.dumps(config)) == config


@given(repository_configs(), repository_configs())
def test_an_overlay_of_everything_replaces_everything(below: Config, above: Config) -> None:
    assert below.overlaid(above.to_dict()) == above
    assert below.overlaid({}) == below
