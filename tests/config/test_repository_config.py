"""The configuration of a repository."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests import Config
from zarr_manifests.config import (
    ChunkManifests,
    Commits,
    Compaction,
    Interval,
    ManifestSet,
    Preload,
    Rule,
)
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError


@given(
    st.integers(0, 65_536),
    st.integers(1, 1_000),
    st.integers(1, 10_000),
    st.integers(0, 1 << 26),
    st.integers(1, 1 << 30),
)
def test_round_trip(inline: int, deltas: int, attempts: int, small: int, pack: int) -> None:
    commits, compaction = Commits(attempts=attempts), Compaction(max_delta_count=deltas)
    config = Config(inline, small, pack, commits=commits, compaction=compaction)
    assert Config.from_dict(config.to_dict()) == config
    underscored = {name.replace("-", "_"): value for name, value in config.to_dict().items()}
    assert Config.from_dict(underscored) == config


def test_names_are_hyphened() -> None:
    options = Config().to_dict()
    assert list(options) == [
        "inline-chunk-bytes",
        "pack-chunk-bytes",
        "pack-bytes",
        "spill-refs",
        "commits",
        "compaction",
        "cache",
        "chunk-manifests",
        "snapshots",
    ]
    assert options["commits"] == {"mode": "delta", "attempts": 100}
    assert options["compaction"] == {
        "mode": "auto",
        "min-delta-count": 10,
        "max-delta-count": 50,
        "interval-commits": 100,
        "fan-in": 4,
        "size-ratio": 0.25,
        "async-threads": 2,
    }
    assert options["cache"] == {"max-size": 256 << 20, "expire-ms": 300_000}


@pytest.mark.parametrize("mode", ["manual", "MANUAL", "Manual"])
def test_a_mode_is_read_in_any_case_and_written_in_lower_case(mode: str) -> None:
    config = Config.from_dict({"compaction": {"mode": mode}, "commits": {"mode": "Delta"}})
    assert config == Config(compaction=Compaction(mode))
    assert config.compaction.mode == config.to_dict()["compaction"]["mode"] == "manual"
    assert config.commits.mode == "delta"


def test_what_is_left_out_has_its_default() -> None:
    assert Config.from_dict({}) == Config()
    assert Config.from_dict({"pack-bytes": 3}).inline_chunk_bytes == 512


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"inline-chunk-bytes": -1}, "inline-chunk-bytes: -1 is not within 0 to 65536"),
        ({"inline-chunk-bytes": 65_537}, "inline-chunk-bytes: 65537 is not within"),
        (
            {"compaction": {"max-delta-count": 0}},
            "compaction.max-delta-count: 0 is not within 1 to 1000",
        ),
        ({"max-delta-count": 3}, "max-delta-count: unknown option"),
        ({"pack-bytes": 0}, "pack-bytes: 0 is not within 1 to 1073741824"),
        ({"pack-chunk-bytes": 67_108_865}, "pack-chunk-bytes: 67108865 is not within 0 to"),
        (
            {"compaction": {"max-delta-count": "3"}},
            "compaction.max-delta-count: expected a whole number, got '3'",
        ),
        (
            {"compaction": {"max-delta-count": True}},
            "compaction.max-delta-count: expected a whole number, got True",
        ),
        (
            {"compaction": {"max-delta-count": 3.0}},
            "compaction.max-delta-count: expected a whole number",
        ),
        (
            {"compaction": {"max-delta-count": None}},
            "compaction.max-delta-count: expected a whole number",
        ),
        ({"max-deltas": 3}, "max-deltas: unknown option; known are cache, chunk-manifests, com"),
        ({"inline_chunk_byte": 3}, "inline_chunk_byte: unknown option; did you mean inline-chunk-"),
        ({5: 3}, "5: unknown option"),
        ({"commits": {"mode": "deltas"}}, "commits.mode: 'deltas' is not one of delta, rewrite"),
        ({"commits": {"attempts": 0}}, "commits.attempts: 0 is not within 1 to 10000"),
        ({"compaction": {"size-ratio": 101}}, "compaction.size-ratio: 101 is not within 0 to 100"),
        (
            {"compaction": {"size-ratio": float("nan")}},
            "compaction.size-ratio: nan is not within 0 to 100",
        ),
        (
            {"compaction": {"size-ratio": True}},
            "compaction.size-ratio: expected a number, got True",
        ),
        ({"compaction": {"size-ratio": "1"}}, "compaction.size-ratio: expected a number, got '1'"),
        (
            {"compaction": {"mode": "sometimes"}},
            "compaction.mode: 'sometimes' is not one of auto, async, manual",
        ),
        ({"cache": {"max-size": -1}}, "cache.max-size: -1 is not within 0 to 4611686018427387904"),
        ({"cache": {"expire-ms": "1s"}}, "cache.expire-ms: expected a whole number, got '1s'"),
        ({"cache": {"max-sise": 1}}, "cache.max-sise: unknown option; did you mean max-size?"),
        (
            {"cache": {"directory": "cache"}},
            "cache.directory: is not saved with a repository, since it is about one machine; give",
        ),
        ({"cache": {"directory_bytes": 1}}, "cache.directory_bytes: is not saved with a repos"),
        ({"commits": 3}, "commits: expected options and their values, got 3"),
        (
            {"pack-bytes": 3, "pack_bytes": 3},
            "pack_bytes: pack-bytes is given twice, once in another spelling; keep one",
        ),
    ],
)
def test_faults_name_their_place(options: dict[Any, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(options)
    assert [found.startswith(problem) for found in caught.value.problems] == [True]


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"a": 1, "b": 2, "pack-bytes": 0, "spill_refs": "x"})
    assert len(caught.value.problems) == 4
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_it_cannot_be_built_invalid_nor_changed() -> None:
    with pytest.raises(InvalidArgumentError):
        Config(pack_bytes=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().pack_bytes = 1  # type: ignore[misc]


def test_faults_of_arguments_are_all_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(-1, compaction=3, chunk_manifests={})  # type: ignore[arg-type]
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "inline-chunk-bytes",
        "compaction",
        "chunk-manifests",
    ]


def test_it_is_bounded_since_every_commit_writes_it() -> None:
    def with_rules(count: int) -> Config:
        rules = tuple(Rule("default", f"/{'x' * 500}/{i}") for i in range(count))
        return Config(chunk_manifests=ChunkManifests(rules=rules))

    assert len(with_rules(20).chunk_manifests.rules) == 20
    with pytest.raises(ConfigError, match=r"the configuration takes .* bytes as JSON and 16,384"):
        with_rules(40)


# --- overlays -----------------------------------------------------------------------------------

SAVED = Config(
    7,
    commits=Commits("rewrite", 8),
    compaction=Compaction(max_delta_count=9),
    chunk_manifests=ChunkManifests(
        (ManifestSet("a", 10), ManifestSet("b", 20)),
        (Rule("a", "/a"), Rule("b", "/b")),
        None,
        Preload(30, 40, ("/a",)),
    ),
)


def test_an_overlay_goes_into_sections() -> None:
    found = SAVED.overlaid({"commits": {"attempts": 3}, "compaction": {"max-delta-count": 4}})
    assert found.commits == Commits("rewrite", 3)
    assert found.compaction == Compaction(max_delta_count=4)
    assert found.chunk_manifests == SAVED.chunk_manifests
    preload = {"chunk-manifests": {"preload": {"max_manifests": 5}}}
    assert SAVED.overlaid(preload).chunk_manifests.preload == Preload(30, 5, ("/a",))


def test_an_overlay_replaces_lists() -> None:
    rules = [{"target": "b", "metadata-chunks": [0, 5]}]
    found = SAVED.overlaid({"chunk-manifests": {"rules": rules}}).chunk_manifests
    assert found.rules == (Rule("b", None, Interval(0, 5)),)
    assert found.sets == SAVED.chunk_manifests.sets


def test_sets_of_an_overlay_do_not_get_rules_about_other_sets() -> None:
    found = SAVED.overlaid({"chunk-manifests": {"sets": [{"c": None}]}}).chunk_manifests
    assert [one.name for one in found.sets] == ["c", "default"]
    assert found.rules == ()
    named = SAVED.overlaid({"chunk-manifests": {"sets": ["coordinates"]}}).chunk_manifests
    assert [rule.target for rule in named.rules] == ["coordinates"]


def test_an_overlay_is_checked_against_what_is_below() -> None:
    with pytest.raises(ConfigError) as caught:
        SAVED.overlaid({"chunk-manifests": {"rules": [{"target": "c"}]}, "pack-bytes": 0})
    assert caught.value.problems == (
        "chunk-manifests.rules[0].target: there is no set 'c'; known are a, b, default",
        "pack-bytes: 0 is not within 1 to 1073741824",
    )


@pytest.mark.parametrize("options", [[], "max-delta-count", 5, None])
def test_options_are_a_map(options: Any) -> None:
    with pytest.raises(ConfigError, match="expected options and their values"):
        Config.from_dict(options)
