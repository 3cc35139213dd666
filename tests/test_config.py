"""The configuration of a repository."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests import RepositoryConfig
from zarr_manifests.errors import ConfigError, InvalidArgumentError


@given(
    st.integers(0, 65_536),
    st.integers(1, 1_000),
    st.integers(1, 10_000),
    st.integers(0, 1 << 26),
    st.integers(1, 1 << 30),
)
def test_round_trip(inline: int, deltas: int, attempts: int, small: int, pack: int) -> None:
    config = RepositoryConfig(inline, deltas, attempts, small, pack)
    assert RepositoryConfig.from_dict(config.to_dict()) == config
    underscored = {name.replace("-", "_"): value for name, value in config.to_dict().items()}
    assert RepositoryConfig.from_dict(underscored) == config


def test_names_are_hyphened() -> None:
    assert list(RepositoryConfig().to_dict()) == [
        "inline-chunk-bytes",
        "max-delta-count",
        "commit-attempts",
        "pack-chunk-bytes",
        "pack-bytes",
    ]


def test_what_is_left_out_has_its_default() -> None:
    assert RepositoryConfig.from_dict({}) == RepositoryConfig()
    assert RepositoryConfig.from_dict({"max-delta-count": 3}).inline_chunk_bytes == 512


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"inline-chunk-bytes": -1}, "inline-chunk-bytes: -1 is not within 0 to 65536"),
        ({"inline-chunk-bytes": 65_537}, "inline-chunk-bytes: 65537 is not within"),
        ({"max-delta-count": 0}, "max-delta-count: 0 is not within 1 to 1000"),
        ({"commit-attempts": 0}, "commit-attempts: 0 is not within"),
        ({"pack-bytes": 0}, "pack-bytes: 0 is not within 1 to 1073741824"),
        ({"pack-chunk-bytes": 67_108_865}, "pack-chunk-bytes: 67108865 is not within 0 to"),
        ({"max-delta-count": "3"}, "max-delta-count: expected a whole number, got '3'"),
        ({"max-delta-count": True}, "max-delta-count: expected a whole number, got True"),
        ({"max-delta-count": 3.0}, "max-delta-count: expected a whole number"),
        ({"max-delta-count": None}, "max-delta-count: expected a whole number"),
        ({"max-deltas": 3}, "max-deltas: unknown option; known are commit-attempts, inline"),
        ({5: 3}, "5: unknown option"),
    ],
)
def test_faults_name_their_place(options: dict[Any, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RepositoryConfig.from_dict(options)
    assert [found.startswith(problem) for found in caught.value.problems] == [True]


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RepositoryConfig.from_dict({"a": 1, "b": 2, "max-delta-count": 0, "commit_attempts": "x"})
    assert len(caught.value.problems) == 4
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_it_cannot_be_built_invalid_nor_changed() -> None:
    with pytest.raises(InvalidArgumentError):
        RepositoryConfig(max_delta_count=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RepositoryConfig().pack_bytes = 1  # type: ignore[misc]
