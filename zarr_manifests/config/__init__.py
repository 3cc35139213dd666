"""The configuration of a repository: kept in its root state, overlaid when it is opened.

Names are written with hyphens, as in YAML (`inline-chunk-bytes`), in sections (`compaction`).
Validation reports every fault at once, each with its place.

To add an option, add a field. To add a section, add a `Section` and a field for it. Both have a
schema in `docs/config.schema.json`, for editors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, Any, Final

from msgspec import Struct, msgpack

from zarr_manifests.config.manifest_sets import ChunkManifests as ChunkManifests
from zarr_manifests.config.manifest_sets import ManifestSet as ManifestSet
from zarr_manifests.config.manifest_sets import Preload as Preload
from zarr_manifests.config.manifest_sets import Rule as Rule
from zarr_manifests.config.manifest_sets import Split as Split
from zarr_manifests.config.sections import (
    ANY_NAME,
    YES_NO,
    Faults,
    Kind,
    ListOf,
    Nested,
    Pairs,
    Scalar,
    Section,
    matches,
    overlaid,
    plain_values,
    read_options,
    text,
    whole,
    word,
)
from zarr_manifests.errors import ConfigError
from zarr_manifests.texts import shown

_MAX_CONFIG_BYTES: Final = 16 * 1024
_MAX: Final = 2**62


def _is_label_value(value: Any) -> bool:
    if isinstance(value, str):
        return matches(r"[^\ud800-\udfff]*", value)
    return type(value) in (int, float, bool) and -(2**63) <= value < 2**63  # which no NaN is


class Commits(Section, frozen=True):
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

    mode: Annotated[str, word("delta", "rewrite")] = "delta"
    attempts: Annotated[int, whole(1, 10_000)] = 100
    metadata: Annotated[
        tuple[tuple[str, str | int | float | bool], ...],
        Pairs(
            text(ANY_NAME, "a name of 1 to 255 characters"),
            Scalar("a text, a finite number, true or false", _is_label_value),
            "names and their values, such as {host: a}",
            least=0,
            most=64,
        ),
    ] = ()


_SHARE: Final = Scalar(
    "a number from 0 to 100", lambda value: type(value) in (int, float) and 0 <= value <= 100
)


class Compaction(Section, frozen=True):
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

    mode: Annotated[str, word("auto", "async", "manual")] = "auto"
    min_delta_count: Annotated[int, whole(1, 1_000)] = 10
    max_delta_count: Annotated[int, whole(1, 1_000)] = 50
    interval_commits: Annotated[int, whole(1, 1_000_000)] = 100
    fan_in: Annotated[int, whole(2, 100)] = 4
    size_ratio: Annotated[float, _SHARE] = 0.25
    async_threads: Annotated[int, whole(1, 64)] = 2


class Cache(Section, frozen=True):
    """How much metadata is kept in memory by whoever opens the repository and does not say.

    Parameters
    ----------
    max_size : int
        Bytes of memory for decoded metadata. The value used last stays, whatever its size.
    expire_ms : int
        Milliseconds after which what was not used is dropped; 0 for never.

    Raises
    ------
    ConfigError
        If a value is out of range; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests import Config
    >>> from zarr_manifests.config import Cache
    >>> Config(cache=Cache(max_size=1_000_000)).to_dict()["cache"]["max-size"]
    1000000
    """

    max_size: Annotated[int, whole(0, _MAX)] = 256 << 20
    expire_ms: Annotated[int, whole(0, _MAX)] = 300_000


class CacheOptions(Cache, frozen=True):
    """What a repository object may keep of what it has read.

    Parameters
    ----------
    max_size : int
        Bytes of memory for decoded metadata. The value used last stays, whatever its size.
    expire_ms : int
        Milliseconds after which what was not used is dropped; 0 for never.
    chunk_bytes : int
        Bytes of memory for whole chunks as they are stored; 0 for none. Virtual chunks are kept if
        they are remote, and their refs record an etag, a time or a checksum.

    Raises
    ------
    ConfigError
        If a value is out of range; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests.config import CacheOptions
    >>> CacheOptions.of({"max-size": 1_000_000}).max_size
    1000000
    """

    chunk_bytes: Annotated[int, whole(0, _MAX)] = 0

    @classmethod
    def of(
        cls, options: CacheOptions | Mapping[str, Any] | None, saved: Cache | None = None
    ) -> CacheOptions:
        """The options of a mapping, named with hyphens or underscores.

        What it leaves out is as it is saved, or has its default.

        Raises
        ------
        ConfigError
            For unknown options and values out of range.
        """
        below = cls() if saved is None else cls(saved.max_size, saved.expire_ms)
        return overlaid(below, options, "cache")


_DURATION: Final = r"(\d{1,10}(?:\.\d{1,9})?)([smhdw])"
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MOST: Final = timedelta(days=36_525)


def duration_of(text: str) -> timedelta | None:
    """What a text such as `30d`, `24h`, `10m` or `0s` means; None if it is none.

    Examples
    --------
    >>> from zarr_manifests.config import duration_of
    >>> duration_of("36h"), duration_of("long")
    (datetime.timedelta(days=1, seconds=43200), None)
    """
    found = re.fullmatch(_DURATION, text.strip(), re.ASCII)
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        return None


class _Duration(Kind):
    """A time of whole seconds up to a hundred years, written as `30d`."""

    def read(self, given: Any, faults: Faults) -> Any:
        age = duration_of(given) if isinstance(given, str) else given
        if not isinstance(age, timedelta) or not timedelta(0) <= age <= _MOST or age.microseconds:
            expected = f"a time of whole seconds up to {_MOST.days}d, such as 30d, 24h or 10m"
            faults(f"expected {expected}, got {shown(given)}")
        return age

    def write(self, value: Any) -> Any:
        seconds = value // timedelta(seconds=1)
        for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
            if seconds and seconds % size == 0:
                return f"{seconds // size}{unit}"
        return f"{seconds}s"


class Snapshots(Section, frozen=True):
    """What `Repository.expire_snapshots` keeps by default: what either of the two options says.

    Parameters
    ----------
    keep_last : int or None
        That many of the newest snapshots of each branch. 1 to 1,000,000,000.
    max_age : timedelta or None
        What is not older; as text `30d`, `24h`, `10m` or `0s`, in whole seconds.

    Examples
    --------
    >>> from zarr_manifests import Config
    >>> config = Config.from_yaml("snapshots: {keep-last: 100, max-age: 30d}")
    >>> config.snapshots.max_age.days
    30
    """

    keep_last: Annotated[int | None, whole(1, 1_000_000_000)] = None
    max_age: Annotated[timedelta | None, _Duration()] = None


# What is refused may have secrets, so it is not repeated.
_URL: Final = text(
    r"(?:s3|gs|az|https?|file|memory)://[^\x00-\x20\x7f\\@?#]{1,1000}",
    "a URL such as s3://bucket/prefix, without a user, a password or a query",
    secret=True,
)


class SavedContainer(Section, frozen=True):
    """A place of virtual chunks that is saved with the repository, without secrets.

    It takes effect only for those who open the repository with `authorize=[name]`.

    Parameters
    ----------
    name : str
        Its name, which locations of virtual chunks refer to.
    url : str
        The URL of a folder or a prefix.
    region : str, optional
        The region of an S3 bucket.
    anonymous : bool
        Whether it is read without credentials.

    Raises
    ------
    ConfigError
        If a value is malformed; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests import Config
    >>> from zarr_manifests.config import SavedContainer
    >>> era5 = SavedContainer("era5", "s3://era5-pds", region="us-east-1", anonymous=True)
    >>> Config(virtual_containers=(era5,)).to_dict()["virtual-containers"][0]["name"]
    'era5'
    """

    name: Annotated[
        str, text(r"[A-Za-z0-9._-]{1,64}", "a name of at most 64 letters, digits and _ . -")
    ]
    url: Annotated[str, _URL]
    region: Annotated[str | None, text(r"[A-Za-z0-9-]{1,64}", "the name of a region")] = None
    anonymous: Annotated[bool, YES_NO] = False


class Config(Struct, frozen=True):
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

    inline_chunk_bytes: Annotated[int, whole(0, 65_536)] = 512
    pack_chunk_bytes: Annotated[int, whole(0, 67_108_864)] = 262_144
    pack_bytes: Annotated[int, whole(1, 1_073_741_824)] = 8_388_608
    spill_refs: Annotated[int, whole(1, 1_000_000_000)] = 4_000_000
    commits: Commits = Commits()
    compaction: Compaction = Compaction()
    cache: Cache = Cache()
    chunk_manifests: ChunkManifests = ChunkManifests()
    snapshots: Snapshots = Snapshots()
    virtual_containers: Annotated[
        tuple[SavedContainer, ...], ListOf(Nested(SavedContainer), most=64)
    ] = ()

    def __post_init__(self) -> None:
        read_options(self)
        names = [container.name for container in self.virtual_containers]
        twice = sorted({name for name in names if names.count(name) > 1})
        faults = [f"virtual-containers: {name} is there twice" for name in twice]
        size = len(json.dumps(self.to_dict(), ensure_ascii=False).encode("utf-8", "replace"))
        if size > _MAX_CONFIG_BYTES:
            faults.append(
                f"the configuration takes {size:,} bytes as JSON and {_MAX_CONFIG_BYTES:,} are "
                "allowed, since every commit writes it; use fewer or shorter rules"
            )
        if faults:
            raise ConfigError(faults)

    def to_dict(self) -> dict[str, Any]:
        """The options under their hyphenated names, in sections; without empty lists."""
        plain = plain_values(self)
        # So that a root without any stays as small as it is.
        if not self.virtual_containers:
            del plain["virtual-containers"]
        if not self.commits.metadata:
            del plain["commits"]["metadata"]
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (msgpack.encode(self.to_dict()),)

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
        return overlaid(self, options)

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
        from zarr_manifests.config.yaml_text import load_yaml, with_lines

        options, lines = load_yaml(text)
        try:
            return cls.from_dict({} if options is None else options)
        except ConfigError as error:
            raise ConfigError(with_lines(error.problems, lines)) from None


@lru_cache(maxsize=32)
def _unpickled(options: bytes) -> Config:
    """The configuration; cached, since all forks of a session bring the same."""
    return Config.from_dict(msgpack.decode(options))
