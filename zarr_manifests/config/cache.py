"""What may be kept of a repository: metadata, in memory and in a folder of the local disk; chunks.

How much memory is saved with the repository (`Cache`), for whoever opens it and does not say
otherwise. A folder never is: it would be one on the machine of whoever opens the repository, who
may not even have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zarr_manifests.config.options import (
    Faults,
    Kind,
    Section,
    Whole,
    described,
    options_of,
    shown,
    spelled,
    within,
)

__all__ = ["Cache", "CacheOptions"]

_MAX: Final = 2**62
_MAX_SIZE: Final = 256 << 20
_EXPIRE_MS: Final = 300_000
_MEMORY: Final = described(Whole(0, _MAX), "bytes of memory for decoded metadata")
_EXPIRY: Final = described(
    Whole(0, _MAX), "milliseconds after which what was not used is dropped; 0 for never"
)


@dataclass(frozen=True, slots=True)
class Cache(Section):
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
    >>> from zarr_manifests import RepositoryConfig
    >>> from zarr_manifests.config import Cache
    >>> RepositoryConfig(cache=Cache(max_size=1_000_000)).to_dict()["cache"]["max-size"]
    1000000
    """

    max_size: int = field(default=_MAX_SIZE, metadata=_MEMORY)
    expire_ms: int = field(default=_EXPIRE_MS, metadata=_EXPIRY)

    @classmethod
    def read_options(
        cls, value: object, place: str, faults: Faults, base: Section | None
    ) -> dict[str, Any]:
        left = value
        if isinstance(value, Mapping):
            left = {key: entry for key, entry in value.items() if _name(key) not in _LOCAL}
            for key in (key for key in value if key not in left):
                faults.add(
                    within(place, spelled(key)),
                    "is not saved with a repository, since it is about one machine; give it as "
                    "cache= to Repository.open",
                )
        # Without arguments, super() misses a class with slots.
        return super(Cache, cls).read_options(left, place, faults, base)


@dataclass(frozen=True, slots=True)
class _Folder(Kind[str | None]):
    """The path of a folder; null for none."""

    def read(self, value: object, place: str, faults: Faults, base: str | None) -> str | None:
        found = _plain(value)
        before = len(faults.problems)
        self.check(found, place, faults)
        return base if len(faults.problems) > before else found  # type: ignore[return-value]

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is not None and not (isinstance(value, str) and value):
            faults.add(place, f"expected a path, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"], "minLength": 1}


def _plain(path: object) -> object:
    return path.__fspath__() if hasattr(path, "__fspath__") else path


@dataclass(frozen=True, slots=True)
class CacheOptions(Section):
    """What a repository object may keep of what it has read.

    Parameters
    ----------
    max_size : int
        Bytes of memory for decoded metadata. The value used last stays, whatever its size.
    expire_ms : int
        Milliseconds after which what was not used is dropped; 0 for never.
    directory : str, optional
        A folder of a local disk (a `pathlib.Path`, too) in which to keep metadata objects, for
        all processes of this user.
    directory_bytes : int
        Bytes of that folder, of which those read longest ago are dropped first.
    chunk_bytes : int
        Bytes of memory for whole chunks as they are stored; 0 for none. Virtual chunks are not
        kept.

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

    max_size: int = field(default=_MAX_SIZE, metadata=_MEMORY)
    expire_ms: int = field(default=_EXPIRE_MS, metadata=_EXPIRY)
    directory: str | None = field(
        default=None,
        metadata=described(_Folder(), "a folder of a local disk in which to keep metadata objects"),
    )
    directory_bytes: int = field(
        default=1 << 30, metadata=described(Whole(0, _MAX), "bytes of that folder")
    )
    chunk_bytes: int = field(
        default=0, metadata=described(Whole(0, _MAX), "bytes of memory for chunks; 0 for none")
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", _plain(self.directory))
        Section.__post_init__(self)  # without arguments, super() misses a class with slots

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
        if isinstance(options, CacheOptions):
            return options
        faults = Faults()
        default = cls() if saved is None else cls(saved.max_size, saved.expire_ms)
        found = cls.read(options, "cache", faults, default)
        faults.throw()
        return default if found is None else found


_LOCAL: Final = frozenset(options_of(CacheOptions)) - frozenset(options_of(Cache))


def _name(key: object) -> str:
    return spelled(key).replace("_", "-")
