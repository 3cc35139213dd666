"""The configuration of a repository: kept in its root state, overlaid when it is opened.

Names are written with hyphens, as in YAML (`inline-chunk-bytes`), in sections (`compaction`).
Validation reports every fault at once, each with its place.

To add an option, add a field. To add a section, add a dataclass and a field for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from zarr_manifests.config.cache_options import Cache
from zarr_manifests.config.kinds import (
    Labels,
    LabelsKind,
    ListOf,
    Number,
    Whole,
    Word,
)
from zarr_manifests.config.manifest_sets import ChunkManifests
from zarr_manifests.config.saved_containers import SavedContainer
from zarr_manifests.config.sections import (
    Nested,
    check_options,
    plain_values,
    saved_values,
)
from zarr_manifests.config.snapshots import Snapshots
from zarr_manifests.error_cases import ConfigError

__all__ = [
    "Commits",
    "Compaction",
    "Config",
    "config_of_root",
    "config_schema",
]

MAX_CONFIG_BYTES: Final = 16 * 1024
_MAX_CONTAINERS: Final = 64
_SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Commits:
    """How commits are made.

    Parameters
    ----------
    mode : {"delta", "rewrite"}
        `delta`: a commit writes what it changes. `rewrite`: after each commit the manifests that
        it touches are packed anew, which costs more then and less when reading.
    attempts : int
        How often a commit that other writers overtake is rebased and swapped again. 1 to 10,000.
    metadata : tuple of (str, str, int, float or bool), optional
        Names and values that the metadata of every commit gets; the commit's own values come first.
        In a mapping and in YAML, a map. Up to 64.
    """

    mode: Annotated[
        str,
        Word("delta", "rewrite"),
        "`delta`: a commit writes what it changes. `rewrite`: after each commit the manifests it "
        "touches are packed anew",
    ] = "delta"
    attempts: Annotated[
        int, Whole(1, 10_000), "how often a commit that others overtake is tried"
    ] = 100
    metadata: Annotated[
        Labels, LabelsKind(), "what the metadata of every commit gets, where it says nothing else"
    ] = ()

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Compaction:
    """When deltas are brought together, and how much of the base is written again for it.

    Deltas become *runs* (a minor compaction), and what has piled up for a leaf of the base is
    merged into it (a major one).

    Parameters
    ----------
    mode : {"auto", "async", "manual"}
        `auto`: after the commit that makes it due. `async`: the same on threads in the background.
        `manual`: only when asked for.
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
        Threads of `async`. 1 to 64.
    """

    mode: Annotated[
        str,
        Word("auto", "async", "manual"),
        "`auto`: the commit that makes a compaction due merges the deltas. `async`: the same, on "
        "background threads. `manual`: only `compact` does",
    ] = "auto"
    min_delta_count: Annotated[
        int, Whole(1, 1_000), "with fewer deltas than this outside of runs, no compaction is due"
    ] = 10
    max_delta_count: Annotated[
        int, Whole(1, 1_000), "from this number of deltas on, a compaction is due"
    ] = 50
    interval_commits: Annotated[
        int, Whole(1, 1_000_000), "between the two, one is due every so many commits"
    ] = 100
    fan_in: Annotated[int, Whole(2, 100), "how many runs of similar size become one"] = 4
    size_ratio: Annotated[
        float,
        Number(0, 100),
        "a manifest is rewritten when the changes pending for it reach this share of its content",
    ] = 0.25
    async_threads: Annotated[int, Whole(1, 64), "threads of `async`"] = 2

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Config:
    """Options of a repository.

    Parameters
    ----------
    inline_chunk_bytes : int
        Chunks of at most this many bytes are kept in the manifest itself, not in an object of
        their own. 0 to 65,536.
    pack_chunk_bytes : int
        Chunks of at most this many bytes that are not inline share objects, packs, with others.
        0 to 67,108,864.
    pack_bytes : int
        Size of a pack at which it is written before the commit. 1 to 1,073,741,824.
    spill_refs : int
        How many chunk refs a session keeps in memory, about; more are written to manifests before
        the commit. 1 to 1,000,000,000.
    commits : Commits
        How commits are made.
    compaction : Compaction
        When deltas are brought together.
    cache : Cache
        How much metadata is kept in memory, where nothing else is said at opening.
    chunk_manifests : ChunkManifests
        How manifests are planned.
    snapshots : Snapshots
        How long snapshots stay in the history.
    virtual_containers : tuple of SavedContainer
        Where the files of virtual chunks are. They are read only by those who open the repository
        with `authorize`.

    Raises
    ------
    ConfigError
        If a value is out of range, or all together are more than 16 KiB; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests import Config
    >>> Config(inline_chunk_bytes=1024).to_dict()["inline-chunk-bytes"]
    1024
    """

    inline_chunk_bytes: Annotated[
        int,
        Whole(0, 65_536),
        "chunks of at most this size are stored inline with the metadata, not in objects",
    ] = 512
    pack_chunk_bytes: Annotated[
        int,
        Whole(0, 67_108_864),
        "other chunks of at most this size share objects (packs)",
    ] = 262_144
    pack_bytes: Annotated[
        int, Whole(1, 1_073_741_824), "size at which a pack is written; the commit writes the rest"
    ] = 8_388_608
    spill_refs: Annotated[
        int,
        Whole(1, 1_000_000_000),
        "how many chunk refs a session keeps in memory, about; it writes more of them to "
        "manifests before the commit",
    ] = 4_000_000
    commits: Annotated[Commits, "how commits are made"] = field(default=Commits())
    compaction: Annotated[Compaction, "when deltas are brought together"] = field(
        default=Compaction()
    )
    cache: Annotated[
        Cache, "how much metadata is kept in memory, unless `cache=` says otherwise on opening"
    ] = field(default=Cache())
    chunk_manifests: Annotated[
        ChunkManifests, "which chunk refs are packed together, split and preloaded"
    ] = field(default=ChunkManifests())
    snapshots: Annotated[Snapshots, "how long snapshots stay in the history"] = field(
        default=Snapshots()
    )
    virtual_containers: Annotated[
        tuple[SavedContainer, ...],
        ListOf(Nested(SavedContainer), _MAX_CONTAINERS),
        "where the files of virtual chunks are; read only by those who authorize them",
    ] = ()

    def __post_init__(self) -> None:
        check_options(self, self._faults_between)

    def _faults_between(self) -> Iterator[str]:
        names = [container.name for container in self.virtual_containers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"virtual-containers: {name} is there twice"
        size = len(json.dumps(self.to_dict(), ensure_ascii=False).encode("utf-8", "replace"))
        if size > MAX_CONFIG_BYTES:
            yield (
                f"the configuration takes {size:,} bytes as JSON and {MAX_CONFIG_BYTES:,} are "
                "allowed, since every commit writes it; use fewer or shorter rules"
            )

    def to_dict(self) -> dict[str, Any]:
        """The options under their hyphenated names, in sections; without empty lists."""
        plain = plain_values(self)
        # So that a root without any stays as small as it is.
        if not self.virtual_containers:
            del plain["virtual-containers"]
        if not self.commits.metadata:
            del plain["commits"]["metadata"]
        return plain

    def to_yaml(self) -> str:
        """The options as YAML, which `from_yaml` reads.

        Examples
        --------
        >>> print(Config().to_yaml())
        inline-chunk-bytes: 512
        ...
        """
        from zarr_manifests.config.yaml_text import dump_yaml

        return dump_yaml(self.to_dict())

    def overlaid(self, options: Mapping[str, Any]) -> Config:
        """The same with these options, named with hyphens or underscores, in sections.

        Sections are gone into; a list, such as `sets`, replaces the whole list. Of `sets` and
        `rules`, which belong together, `sets` without `rules` also replaces the rules, by those
        that there are by default.

        Raises
        ------
        ConfigError
            For unknown options and wrong values, all in one error.
        """
        from zarr_manifests.config.parsing import parse

        return parse(Config, options, "", self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Config:
        """The configuration with these options, named with hyphens or underscores, in sections.

        Raises
        ------
        ConfigError
            For unknown options and wrong values, all in one error.
        """
        return cls().overlaid(options)

    @classmethod
    def from_yaml(cls, text: str | bytes) -> Config:
        """The configuration that a YAML document holds.

        Raises
        ------
        ConfigError
            For all faults at once, each with its line and place; and for texts over 1 MiB, aliases,
            anchors, tags, keys given twice and deep nesting.

        Examples
        --------
        >>> config = Config.from_yaml("compaction: {max-delta-count: 20}")
        >>> config.compaction.max_delta_count
        20
        """
        from zarr_manifests.config.yaml_text import load_yaml_lines, with_line

        options, lines = load_yaml_lines(text)
        try:
            return cls.from_dict({} if options is None else options)
        except ConfigError as error:
            raise ConfigError([with_line(fault, lines) for fault in error.problems]) from None


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration, for editors.

    Examples
    --------
    >>> config_schema()["$defs"]["Commits"]["properties"]["mode"]["enum"]
    ['delta', 'rewrite']
    """
    from zarr_manifests.config.parsing import json_schema

    title = "Configuration of a zarr_manifests repository"
    return {"$schema": _SCHEMA_DIALECT} | json_schema(Config) | {"title": title}


def config_of_root(options: Mapping[str, Any]) -> Config:
    """The configuration from the map that `to_dict` wrote to a root, checked without pydantic.

    Raises
    ------
    ConfigError
        For unknown options and wrong values; not always for all of them.
    """
    return Config(**saved_values(Config, options))
