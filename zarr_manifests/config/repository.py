"""The configuration of a repository: kept in its root state, overlaid when it is opened.

Names are written with hyphens, as in YAML (`inline-chunk-bytes`), in sections (`compaction`).
Validation reports every fault at once, each with its place.

To add an option is to add a field; to add a section is to add a `Section` and a field for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from zarr_manifests.config.cache import Cache
from zarr_manifests.config.manifests import ChunkManifests
from zarr_manifests.config.options import (
    Choice,
    Faults,
    Nested,
    Ratio,
    Section,
    Whole,
    described,
    options_of,
    spelled,
)
from zarr_manifests.config.snapshots import Snapshots
from zarr_manifests.config.text import dump_yaml, load_yaml
from zarr_manifests.errors import ConfigError

__all__ = ["Commits", "Compaction", "RepositoryConfig", "config_schema"]

MAX_CONFIG_BYTES: Final = 16 * 1024
_SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Commits(Section):
    """How commits are made.

    Parameters
    ----------
    mode : {"delta", "rewrite"}
        `delta`: a commit writes what it changes. `rewrite`: after each commit the manifests that
        it touches are packed anew, which costs more then and less when reading.
    attempts : int
        How often a commit that other writers overtake is rebased and swapped again. 1 to 10,000.
    """

    mode: str = field(
        default="delta",
        metadata=described(
            Choice(("delta", "rewrite")),
            "delta: write what changes; rewrite: pack touched manifests anew after each commit",
        ),
    )
    attempts: int = field(
        default=100,
        metadata=described(
            Whole(1, 10_000), "how often a commit that others overtake is tried again"
        ),
    )


@dataclass(frozen=True, slots=True)
class Compaction(Section):
    """When deltas are brought together, and how much of the base is written again for it.

    Deltas become *runs* (a minor compaction), and what has piled up for a leaf of the base is
    merged into it (a major one).

    Parameters
    ----------
    mode : {"AUTO", "ASYNC", "MANUAL"}
        `AUTO`: after the commit that makes it due. `ASYNC`: the same on threads in the background.
        `MANUAL`: only when asked for.
    min_delta_count : int
        Below this number of deltas that are in no run none is due. 1 to 1,000.
    max_delta_count : int
        From this number on one is due after every commit. 1 to 1,000.
    interval_commits : int
        Between the two, one is due at every so many commits. 1 to 1,000,000.
    fan_in : int
        How many runs of similar size become one. 2 to 100.
    size_ratio : float
        A leaf is written again when its pending refs are this share of what it holds. 0 to 100.
    async_threads : int
        Threads of `ASYNC`. 1 to 64.
    """

    mode: str = field(
        default="AUTO",
        metadata=described(
            Choice(("AUTO", "ASYNC", "MANUAL")),
            "AUTO: after the commit that makes it due; ASYNC: then, in the background; MANUAL: "
            "only when asked for",
        ),
    )
    min_delta_count: int = field(
        default=10,
        metadata=described(Whole(1, 1_000), "with fewer deltas than this no compaction is due"),
    )
    max_delta_count: int = field(
        default=50,
        metadata=described(Whole(1, 1_000), "from this number of deltas on a compaction is due"),
    )
    interval_commits: int = field(
        default=100,
        metadata=described(
            Whole(1, 1_000_000), "between these two it is due at every so many commits"
        ),
    )
    fan_in: int = field(
        default=4,
        metadata=described(Whole(2, 100), "how many runs of similar size become one"),
    )
    size_ratio: float = field(
        default=0.25,
        metadata=described(
            Ratio(0, 100), "share of a leaf's refs that is pending when it is written again"
        ),
    )
    async_threads: int = field(
        default=2, metadata=described(Whole(1, 64), "threads that compact in the background")
    )


_FLAT: Final = {
    "max-delta-count": ("compaction", "max-delta-count"),
    "commit-attempts": ("commits", "attempts"),
}
"""Options that are also read, and in Python given, outside of their section."""


@dataclass(frozen=True, slots=True, init=False)
class RepositoryConfig(Section):
    """Options of a repository.

    Parameters
    ----------
    inline_chunk_bytes : int
        Chunks of at most this many bytes are kept in the manifest itself, not in an object of
        their own. 0 to 65,536.
    max_delta_count : int, optional
        The same as `compaction.max_delta_count`.
    commit_attempts : int, optional
        The same as `commits.attempts`.
    pack_chunk_bytes : int
        Chunks of at most this many bytes that are not inline share objects, packs, with others.
        0 to 67,108,864.
    pack_bytes : int
        Size of a pack at which it is written before the commit. 1 to 1,073,741,824.
    spill_refs : int
        How many chunk refs a session keeps in memory, about; more are written to manifests before
        the commit. 1 to 1,000,000,000.
    commits : Commits, optional
        How commits are made.
    compaction : Compaction, optional
        When deltas are brought together.
    cache : Cache, optional
        How much metadata is kept in memory, where nothing else is said at opening.
    chunk_manifests : ChunkManifests, optional
        How manifests are planned.
    snapshots : Snapshots, optional
        How long snapshots stay in the history.

    Raises
    ------
    ConfigError
        If a value is out of range, or all together are more than 16 KiB; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests import RepositoryConfig
    >>> RepositoryConfig(inline_chunk_bytes=1024).to_dict()["inline-chunk-bytes"]
    1024
    """

    inline_chunk_bytes: int = field(
        default=512,
        metadata=described(
            Whole(0, 65_536), "chunks of at most this many bytes are kept in the manifest itself"
        ),
    )
    pack_chunk_bytes: int = field(
        default=262_144,
        metadata=described(
            Whole(0, 67_108_864),
            "chunks of at most this many bytes that are not inline share objects with others",
        ),
    )
    pack_bytes: int = field(
        default=8_388_608,
        metadata=described(
            Whole(1, 1_073_741_824), "bytes of shared chunks that are written as one object"
        ),
    )
    spill_refs: int = field(
        default=4_000_000,
        metadata=described(
            Whole(1, 1_000_000_000),
            "chunk refs that a session keeps in memory, about; more are written to manifests",
        ),
    )
    commits: Commits = field(
        default=Commits(), metadata=described(Nested(Commits), "how commits are made")
    )
    compaction: Compaction = field(
        default=Compaction(),
        metadata=described(Nested(Compaction), "when deltas are brought together"),
    )
    cache: Cache = field(
        default=Cache(),
        metadata=described(
            Nested(Cache), "how much metadata is kept in memory by whoever does not say at opening"
        ),
    )
    chunk_manifests: ChunkManifests = field(
        default=ChunkManifests(),
        metadata=described(
            Nested(ChunkManifests), "which chunk refs are packed together, split and preloaded"
        ),
    )
    snapshots: Snapshots = field(
        default=Snapshots(),
        metadata=described(Nested(Snapshots), "how long snapshots stay in the history"),
    )

    def __init__(
        self,
        inline_chunk_bytes: int = 512,
        max_delta_count: int | None = None,
        commit_attempts: int | None = None,
        pack_chunk_bytes: int = 262_144,
        pack_bytes: int = 8_388_608,
        *,
        spill_refs: int = 4_000_000,
        commits: Commits | None = None,
        compaction: Compaction | None = None,
        cache: Cache | None = None,
        chunk_manifests: ChunkManifests | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        faults = Faults()
        values: dict[str, Any] = {
            "inline_chunk_bytes": inline_chunk_bytes,
            "pack_chunk_bytes": pack_chunk_bytes,
            "pack_bytes": pack_bytes,
            "spill_refs": spill_refs,
            "commits": Commits() if commits is None else commits,
            "compaction": Compaction() if compaction is None else compaction,
            "cache": Cache() if cache is None else cache,
            "chunk_manifests": ChunkManifests() if chunk_manifests is None else chunk_manifests,
            "snapshots": Snapshots() if snapshots is None else snapshots,
        }
        flat = {"max-delta-count": max_delta_count, "commit-attempts": commit_attempts}
        for name, value in flat.items():
            section, option = _FLAT[name]
            if value is not None and isinstance(values[section], Section):
                values[section] = _with_flat(values[section], option, value, name, faults)
        for field_name, value in values.items():
            object.__setattr__(self, field_name, value)
        try:
            Section.__post_init__(self)
        except ConfigError as error:
            faults.add_within("", error.problems)
        faults.throw()

    def _check_together(self, faults: Faults) -> None:
        size = len(json.dumps(self.to_dict(), ensure_ascii=False).encode("utf-8", "replace"))
        if size > MAX_CONFIG_BYTES:
            faults.add(
                "",
                f"the configuration takes {size:,} bytes as JSON and {MAX_CONFIG_BYTES:,} are "
                "allowed, since every commit writes it; use fewer or shorter rules",
            )

    @property
    def max_delta_count(self) -> int:
        """The same as `compaction.max_delta_count`."""
        return self.compaction.max_delta_count

    @property
    def commit_attempts(self) -> int:
        """The same as `commits.attempts`."""
        return self.commits.attempts

    def to_dict(self) -> dict[str, Any]:
        """The options under their hyphenated names, in sections."""
        return self.write()

    def to_yaml(self) -> str:
        """The options as YAML, which `from_yaml` reads.

        Examples
        --------
        >>> print(RepositoryConfig().to_yaml())
        inline-chunk-bytes: 512
        ...
        """
        return dump_yaml(self.to_dict())

    def overlaid(self, options: Mapping[str, Any]) -> RepositoryConfig:
        """The same with these options, named with hyphens or underscores, in sections.

        Sections are gone into; a list, such as `sets`, replaces the whole list. Of `sets` and
        `rules`, which belong together, `sets` without `rules` also replaces the rules, by those
        that there are by default.

        Raises
        ------
        ConfigError
            For unknown options and wrong values, all in one error.
        """
        faults = Faults()
        if not isinstance(options, Mapping):
            faults.add("", "expected options and their values")
            faults.throw()
        sections, base = _into_sections(options, self, faults)
        found = RepositoryConfig.read(sections, "", faults, base)
        faults.throw()
        return cast("RepositoryConfig", found)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> RepositoryConfig:
        """The configuration with these options, named with hyphens or underscores, in sections.

        Raises
        ------
        ConfigError
            For unknown options and wrong values, all in one error.
        """
        return cls().overlaid(options)

    @classmethod
    def from_yaml(cls, text: str | bytes) -> RepositoryConfig:
        """The configuration that a YAML document holds.

        Raises
        ------
        ConfigError
            For all faults at once, each with its place; and for texts over 1 MiB, aliases,
            anchors, tags, keys given twice and deep nesting.

        Examples
        --------
        >>> config = RepositoryConfig.from_yaml("compaction: {max-delta-count: 20}")
        >>> config.compaction.max_delta_count
        20
        """
        options = load_yaml(text)
        return cls.from_dict({} if options is None else options)


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration, for editors.

    Examples
    --------
    >>> config_schema()["properties"]["commits"]["properties"]["mode"]["enum"]
    ['delta', 'rewrite']
    """
    schema = RepositoryConfig.schema()
    for name, (section, option) in _FLAT.items():
        same = schema["properties"][section]["properties"][option]
        about = f"the same as {option} in {section}, where it is better written"
        schema["properties"][name] = same | {"description": about}
    title = "Configuration of a zarr_manifests repository"
    return {"$schema": _SCHEMA_DIALECT, "title": title} | schema


def _with_flat[S: Section](section: S, option: str, value: object, place: str, faults: Faults) -> S:
    """The section with an option that is given outside of it."""
    field_name = option.replace("-", "_")
    kind = options_of(type(section))[option].kind
    found = kind.read(value, place, faults, getattr(section, field_name))
    changed: S = replace(cast("Any", section), **{field_name: found})
    return changed


def _into_sections(
    options: Mapping[str, Any], base: RepositoryConfig, faults: Faults
) -> tuple[dict[Any, Any], RepositoryConfig]:
    """The options but those given flat, and the base with these in their sections."""
    left: dict[Any, Any] = {}
    moved: dict[str, Any] = {}
    for key, value in options.items():
        flat = _FLAT.get(spelled(key).replace("_", "-"))
        if flat is None:
            left[key] = value
            continue
        name, option = flat
        section = moved.get(name) or getattr(base, name)
        moved[name] = _with_flat(section, option, value, spelled(key), faults)
        inside = options.get(name)
        if isinstance(inside, Mapping) and any(
            spelled(other).replace("_", "-") == option for other in inside
        ):
            faults.add(spelled(key), f"given twice, also as {name}.{option}; keep that")
    return left, replace(base, **moved)
