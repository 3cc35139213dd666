"""A configuration that is valid survives YAML, plain values and pickles; the schema agrees."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import (
    Cache,
    ChunkManifests,
    Commits,
    Compaction,
    Config,
    Interval,
    ManifestSet,
    Preload,
    Rule,
    Split,
    config_schema,
)
from zarr_manifests.config import yaml_text as text_module
from zarr_manifests.config.repository_config import config_of_root
from zarr_manifests.error_cases import ConfigError

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
LONG = (HERE / "long.yaml").read_text(encoding="utf-8")
SHORT = (HERE / "short.yaml").read_text(encoding="utf-8")
COORDINATES = (".*/time", ".*/latitude", ".*/longitude")

# --- any valid configuration --------------------------------------------------------------------

_PATHS = st.sampled_from([".*", "/a/b", ".*/(lat|lon)", r"/\d+.*", "(a+)+$", "/é/.*", ": #'\""])
_REFS = st.text("abz019_-./", min_size=1, max_size=5).map(lambda text: f"r{text}")
_SIZES = st.none() | st.integers(1, 10**12)
_ENDS = st.none() | st.integers(0, 10**12)
_INTERVALS = st.none() | st.tuples(_ENDS, _ENDS).map(
    lambda ends: Interval(*ends) if None in ends else Interval(min(ends), max(ends))
)
_DIMENSIONS = st.integers(0, 31) | st.text(min_size=1, max_size=5)
_ALONG = st.dictionaries(_DIMENSIONS, st.integers(1, 10**12), min_size=1, max_size=3)
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
        _lists(_REFS),
        _lists(_REFS),
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
    )


@pytest.mark.slow
@given(repository_configs())
def test_yaml_and_plain_values(config: Config) -> None:
    assert Config.from_yaml(config.to_yaml()) == config
    assert Config.from_yaml(config.to_yaml().encode()) == config
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(json_keys_kept(config.to_dict())) == config
    assert config_of_root(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


@pytest.mark.parametrize("name", ["\x85", "a\u2028b", "\u2029", " a ", "~", "0x1", "a: b"])
def test_names_come_back_from_yaml_as_they_are(name: str) -> None:
    config = Config(chunk_manifests=ChunkManifests(splitting=(Split(".*", ((name, 5),)),)))
    assert Config.from_yaml(config.to_yaml()) == config
    config = Config(commits=Commits(metadata=((name, name), ("n", 1.5), ("no", False))))
    assert Config.from_yaml(config.to_yaml()) == config
    assert config_of_root(config.to_dict()) == pickle.loads(pickle.dumps(config)) == config
    hash(config)


def json_keys_kept(value: object) -> object:
    """Plain values as another library would hand them: tuples for lists."""
    if isinstance(value, dict):
        return {key: json_keys_kept(inner) for key, inner in value.items()}
    return tuple(map(json_keys_kept, value)) if isinstance(value, list) else value


@given(repository_configs())
def test_the_schema_accepts_what_is_valid(config: Config) -> None:
    SCHEMA.validate(json.loads(json.dumps(config.to_dict())))


@given(repository_configs(), repository_configs())
def test_an_overlay_of_everything_replaces_everything(below: Config, above: Config) -> None:
    assert below.overlaid(above.to_dict()) == above
    assert below.overlaid({}) == below


# --- the two examples ---------------------------------------------------------------------------


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def _loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read YAML with PyYAML's loader in C, and with the one that is always there."""
    monkeypatch.setattr(text_module, "_PARSER", getattr(yaml, request.param))


@pytest.mark.usefixtures("_loader")
def test_the_long_example() -> None:
    assert Config.from_yaml(LONG).chunk_manifests == ChunkManifests(
        (
            ManifestSet("coord1", 10_000, None, "coord2", 2),
            ManifestSet("coord2", 10_000, None, "default", 1),
            ManifestSet("big-array", None, 1, "default", None),
            ManifestSet("default", 1_000_000, None, None, None),
        ),
        (
            Rule("coord1", ".*/(latitude|longitude|time)", Interval(0, 500)),
            Rule("coord2", None, Interval(0, 200)),
            Rule("big-array", None, Interval(2_000_000, None)),
        ),
        (),
        Preload(50_000, 10, COORDINATES),
    )


@pytest.mark.usefixtures("_loader")
def test_the_short_example_is_the_default_but_for_what_it_preloads() -> None:
    found = Config.from_yaml(SHORT).chunk_manifests
    assert found == ChunkManifests(preload=Preload(50_000, 1, COORDINATES))
    assert found.sets == (
        ManifestSet("coordinates", 50_000, None, "default", 1),
        ManifestSet("default", 1_000_000, None, None, None),
    )
    assert found.rules == (Rule("coordinates", ".*", Interval(0, 5_000)),)


def test_everything_at_once() -> None:
    config = Config.from_yaml(
        """
        inline-chunk-bytes: 0
        pack-chunk-bytes: 1
        pack-bytes: 2
        commits: {mode: rewrite, attempts: 3}
        compaction:
          mode: manual
          min-delta-count: 3
          max-delta-count: 4
          interval-commits: 5
          fan-in: 6
          size-ratio: 0.5
          async-threads: 7
        cache: {max-size: 8, expire-ms: 9}
        chunk-manifests:
          sets:
            - small: {max-arrays-per-manifest: 5, cardinality: null}
            - default: {max-size: 1_000}
          rules:
            - {target: small, initialized-chunks: [null, 6]}
          splitting:
            - path: /a/.*
              along: {time: 720, 1: 4}
          preload: {branches: [main, x/y], tags: [v1], arrays: []}
        """
    )
    assert config == Config(
        0,
        pack_chunk_bytes=1,
        pack_bytes=2,
        commits=Commits("rewrite", 3),
        compaction=Compaction("manual", 3, 4, 5, 6, 0.5, 7),
        cache=Cache(8, 9),
        chunk_manifests=ChunkManifests(
            (
                ManifestSet("small", None, 5, "default", None),
                ManifestSet("default", 1_000, None, None, None),
            ),
            (Rule("small", None, None, Interval(None, 6)),),
            (Split("/a/.*", (("time", 720), (1, 4))),),
            Preload(arrays=(), branches=("main", "x/y"), tags=("v1",)),
        ),
    )


# --- the schema for editors -----------------------------------------------------------------------

SCHEMA = jsonschema.Draft202012Validator(config_schema())


def test_the_schema_in_the_documentation_is_this_one() -> None:
    """To renew: `zarr-manifests config schema > docs/config.schema.json`."""
    written = (DOCS / "config.schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == config_schema()
    assert written == json.dumps(config_schema(), indent=2) + "\n"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())


@pytest.mark.parametrize("example", [LONG, SHORT, "chunk-manifests:", "pack-bytes: 3"])
def test_the_schema_accepts_the_examples(example: str) -> None:
    SCHEMA.validate(yaml.safe_load(example))


@pytest.mark.parametrize(
    "wrong",
    [
        "colour: blue",
        "commits: {mode: deltas}",
        "compaction: {max-delta-count: 0}",
        "compaction: {size-ratio: -0.1}",
        "compaction: {size-ratio: often}",
        "compaction: {mode: SOMETIMES}",
        "cache: {max-size: -1}",
        "cache: {expire-ms: 1.5}",
        "cache: {directory: a}",
        "chunk-manifests: {sets: [{a: {cardinalty: 1}}]}",
        "chunk-manifests: {sets: [{a: , b: }]}",
        "chunk-manifests: {rules: [{path: x}]}",
        "chunk-manifests: {rules: [{target: default, metadata-chunks: [1]}]}",
        "chunk-manifests: {splitting: some}",
        "chunk-manifests: {splitting: [{path: x, along: {}}]}",
        "chunk-manifests: {preload: {arrays: [time]}}",
    ],
)
def test_the_schema_refuses_what_reading_refuses(wrong: str) -> None:
    assert not SCHEMA.is_valid(yaml.safe_load(wrong))
    with pytest.raises(ConfigError):
        Config.from_yaml(wrong)
