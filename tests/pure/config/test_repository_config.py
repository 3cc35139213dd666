"""The configuration of a repository: its rules, its bounds, and what is not saved with it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from zarr_manifests import Config
from zarr_manifests.config import ChunkManifests, ManifestSet, Rule, Snapshots
from zarr_manifests.errors import ConfigError, InvalidArgumentError

LAST = ManifestSet("default", 1_000_000, None, None, None)


def test_it_cannot_be_built_invalid_nor_changed() -> None:
    with pytest.raises(InvalidArgumentError):
        Config(pack_bytes=0)
    with pytest.raises(InvalidArgumentError):
        Snapshots(max_age=timedelta(seconds=-1))
    with pytest.raises(AttributeError, match="immutable"):
        Config().pack_bytes = 1  # type: ignore[misc]


def test_it_is_bounded_since_every_commit_writes_it() -> None:
    def with_rules(count: int) -> Config:
        rules = tuple(Rule("default", f"/{'x' * 500}/{i}") for i in range(count))
        return Config(chunk_manifests=ChunkManifests(rules=rules))

    assert len(with_rules(20).chunk_manifests.rules) == 20
    with pytest.raises(ConfigError, match="16,384"):
        with_rules(40)


def test_an_overlay_is_checked_against_what_is_below() -> None:
    sets = (ManifestSet("a", 10), ManifestSet("b", 20))
    saved = Config(chunk_manifests=ChunkManifests(sets, (Rule("a", "/a"), Rule("b", "/b"))))
    with pytest.raises(ConfigError, match="known are a, b, default"):
        saved.overlaid({"chunk-manifests": {"rules": [{"target": "c"}]}})


def test_an_overlay_changes_the_names_in_the_metadata_of_commits_that_it_has() -> None:
    saved = Config.from_dict({"commits": {"metadata": {"host": "a", "team": "b"}}})
    changed = saved.overlaid({"commits": {"metadata": {"team": None, "run": 5}}})
    assert changed.commits.metadata == (("host", "a"), ("run", 5))


@pytest.mark.parametrize("place", ["me:geheim@bucket/a", "bucket/a?sig=geheim", "bucket/a#geheim"])
def test_no_secret_is_saved_in_the_url_of_a_container(place: str) -> None:
    container = {"name": "raw", "url": f"s3://{place}"}
    with pytest.raises(ConfigError, match="url") as caught:
        Config.from_dict({"virtual-containers": [container]})
    assert "geheim" not in str(caught.value)


def test_a_rule_sends_an_array_to_its_set_where_all_its_conditions_hold() -> None:
    # The first rule that matches wins, also over the last.
    rules = (Rule("few", "/a", (5, 9), (0, 3)), Rule("any", "/c"), Rule("default", "/a", (5, 5)))
    planned = ChunkManifests((ManifestSet("few"), ManifestSet("any")), rules)
    for array, due in (
        (("/a", 5, 3), "few"),
        (("/a", 9, 0), "few"),
        (("/b", 5, 3), "default"),
        (("/ab", 5, 3), "default"),
        (("/a", 4, 3), "default"),
        (("/a", 5, 4), "default"),
        (("/c", 10**9, 0), "any"),
    ):
        assert planned.set_for(*array)[0].name == due
    with pytest.raises(InvalidArgumentError, match="no valid Unicode"):
        planned.set_for("\ud800", 1, 1)
