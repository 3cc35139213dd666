"""The configuration in the repository: saved by a swap of the root, carried over, bounded."""

from __future__ import annotations

import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Config, Repository
from zarr_manifests.config import (
    Cache,
    CacheOptions,
    ChunkManifests,
    Commits,
    Compaction,
    Interval,
    ManifestSet,
    Rule,
    Split,
)
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.format.envelope import ObjectKind, decode
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage


def test_configuration_is_saved_for_whoever_opens_from_now_on() -> None:
    storage = MemoryStorage()
    here, there = zm.create(storage), zm.open(storage)
    config = Config(
        commits=Commits("rewrite"),
        chunk_manifests=ChunkManifests(
            (ManifestSet("a", 5),),
            (Rule("a", ".*/t", Interval(0, None)),),
            (Split("/x", (("time", 4), (1, 2))),),
        ),
    )
    session = here.writable_session()
    assert here.save_config(config) == here.config == config
    assert zm.open(storage).config == config
    assert there.config == Config()
    session.store.set_sync("k", cpu.Buffer.from_bytes(b"v"))
    session.commit("a session that was open goes on")
    assert zm.open(storage).config == config, "a commit carries it over"
    log = root_of(storage).log
    assert [entry.operation for entry in log][:2] == ["create", "save config"]


def test_saving_options_changes_only_these_of_what_is_saved() -> None:
    storage = MemoryStorage()
    zm.create(storage, {"compaction": {"max-delta-count": 5}})
    overlaid = zm.open(storage, {"inline-chunk-bytes": 0})
    zm.open(storage).save_config({"commits": {"attempts": 6}})
    saved = overlaid.save_config({"pack_bytes": 7})
    assert saved == Config(
        compaction=Compaction(max_delta_count=5), commits=Commits(attempts=6), pack_bytes=7
    )
    assert zm.open(storage).config == saved
    assert overlaid.config == Config(0, compaction=Compaction(max_delta_count=5), pack_bytes=7), (
        "the overlay stays in use"
    )
    assert overlaid.save_config() == overlaid.config == zm.open(storage).config


def limits(repository: Repository) -> tuple[int, int]:
    """What bounds the memory in use: the effect of the options, not their copy."""
    options, cache = context_of(repository).cache, context_of(repository).objects.cache
    assert cache.max_size == options.max_size
    return cache.max_size, options.expire_ms


def test_a_saved_cache_is_used_where_nothing_else_is_said() -> None:
    storage = MemoryStorage()
    created = zm.create(storage, {"cache": {"max-size": 7_000}})
    assert limits(created) == (7_000, 300_000), "whoever makes it does not say otherwise"
    created.save_config({"cache": {"expire-ms": 9}})
    assert limits(created) == (7_000, 300_000), "what is open goes on as it was"
    assert limits(zm.open(storage)) == (7_000, 9)
    assert limits(zm.open(storage, {"cache": {"max-size": 5}})) == (5, 9), "overlaid"
    assert limits(zm.open(storage, cache={"max-size": 6})) == (6, 9), "the caller says"
    assert limits(zm.open(storage, cache=CacheOptions())) == (256 << 20, 300_000)
    assert limits(zm.open(storage, create=True)) == (7_000, 9)
    assert zm.open(storage).config.cache == Cache(7_000, 9)


def test_a_saved_cache_bounds_what_is_kept(tmp_path: Path) -> None:
    """With no room, what was read is read again; and nobody is told to write to a folder."""
    place = tmp_path / "repository"
    repository = zm.create(place, {"cache": {"max-size": 0}, "inline-chunk-bytes": 0})
    session = repository.writable_session()
    for name in ("a", "b"):
        session.store.set_sync(name, cpu.Buffer.from_bytes(name.encode() * 99_999))
    session.commit("two keys")
    reads = []
    for cache in (None, {"max-size": 1 << 20}):
        found = zm.open(place, cache=cache)
        for _ in range(3):
            found.readonly_session(session.snapshot_id).close()
        reads.append(found.metrics().cache_hits)
    assert reads[0] < reads[1]
    with pytest.raises(ConfigError, match=r"cache\.directory: is not saved with a repository"):
        repository.save_config({"cache": {"directory": str(tmp_path / "cache")}})
    assert not (tmp_path / "cache").exists()


def test_a_pickle_keeps_the_cache_it_had() -> None:
    repository = zm.create("memory://pickled-cache", {"cache": {"max-size": 8_000}})
    given = zm.open("memory://pickled-cache", cache={"max-size": 3})
    for one in (repository, given):
        assert limits(pickle.loads(pickle.dumps(one))) == limits(one)


def test_a_configuration_with_faults_is_not_saved() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    repository.save_config({"chunk-manifests": {"sets": ["a"]}})
    before = storage.get("current")
    stale = zm.open(storage, {"chunk-manifests": {"sets": ["b"]}})
    for options in ({"colour": "blue"}, {"chunk-manifests": {"rules": [{"target": "c"}]}}):
        with pytest.raises(ConfigError):
            repository.save_config(options)
    with pytest.raises(ConfigError, match="there is no set 'b'; known are a, default"):
        stale.save_config({"chunk-manifests": {"rules": [{"target": "b"}]}})
    assert storage.get("current") == before
    assert stale.config.chunk_manifests.rules == ()


def test_a_large_configuration_takes_no_room_from_refs() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    for i in range(20):
        repository.create_tag(f"tag-{i}")
    words = [sha256(bytes([i])).hexdigest() for i in range(220)]
    rules = tuple(Rule("default", "/" + "".join(words[i : i + 10])) for i in range(0, 220, 10))
    repository.save_config(Config(chunk_manifests=ChunkManifests(rules=rules)))
    root = root_of(storage)
    assert len(root.bare().encode()) > 8_192 > root.refs_bytes
    assert not any(root.pages.values())
    assert len(root.tags) == 20
    repository.create_tag("tag-20")
    assert not any(root_of(storage).pages.values())
    assert zm.open(storage).config.chunk_manifests.rules == rules


def test_saving_reads_no_page_of_refs() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = zm.create(counting)
    for i in range(250):
        repository.create_tag(sha256(bytes([i])).hexdigest())
    fresh = zm.open(counting)
    assert any(root_of(counting).pages.values())
    before = len(counting.log)
    fresh.save_config({"pack-bytes": 5})
    assert [record.op for record in counting.log[before:] if record.key.startswith("pages/")] == []
    assert len(counting.log) > before


def unpack_root(data: bytes) -> dict[str, Any]:
    fields = decode(data, ObjectKind.ROOT, lambda fields: fields, "current")
    return dict(fields.value)
