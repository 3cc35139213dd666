"""What this process may keep of a repository's metadata: options that are never saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_manifests.config.options import Faults, Kind, Section, Whole, described, shown

__all__ = ["CacheOptions"]

_MAX: int = 2**62


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
    """What a repository object may keep of the metadata it has read.

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

    max_size: int = field(
        default=256 << 20,
        metadata=described(Whole(0, _MAX), "bytes of memory for decoded metadata"),
    )
    expire_ms: int = field(
        default=300_000,
        metadata=described(
            Whole(0, _MAX), "milliseconds after which what was not used is dropped; 0 for never"
        ),
    )
    directory: str | None = field(
        default=None,
        metadata=described(_Folder(), "a folder of a local disk in which to keep metadata objects"),
    )
    directory_bytes: int = field(
        default=1 << 30, metadata=described(Whole(0, _MAX), "bytes of that folder")
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", _plain(self.directory))
        Section.__post_init__(self)  # without arguments, super() misses a class with slots

    @classmethod
    def of(cls, options: CacheOptions | Mapping[str, Any] | None) -> CacheOptions:
        """The options of a mapping, named with hyphens or underscores.

        Raises
        ------
        ConfigError
            For unknown options and values out of range.
        """
        if isinstance(options, CacheOptions):
            return options
        faults, default = Faults(), cls()
        found = cls.read(options, "cache", faults, default)
        faults.throw()
        return default if found is None else found
