"""What this process may keep of a repository's metadata: options that are never saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zarr_manifests.errors import ConfigError

__all__ = ["CacheOptions"]


@dataclass(frozen=True, slots=True)
class CacheOptions:
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

    max_size: int = 256 << 20
    expire_ms: int = 300_000
    directory: str | None = None
    directory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        problems = []
        for name in ("max_size", "expire_ms", "directory_bytes"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 2**62:
                place = name.replace("_", "-")
                problems.append(f"cache.{place}: expected a whole number from 0, got {value!r}")
        if self.directory is not None:
            given: Any = self.directory
            path = given.__fspath__() if hasattr(given, "__fspath__") else given
            if isinstance(path, str) and path:
                object.__setattr__(self, "directory", path)
            else:
                problems.append(f"cache.directory: expected a path, got {self.directory!r}")
        if problems:
            raise ConfigError(problems)

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
        known = {field.name for field in fields(cls)}
        given = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
        unknown = sorted(given.keys() - known)
        if unknown:
            listed = ", ".join(sorted(name.replace("_", "-") for name in known))
            raise ConfigError(
                [f"cache.{name.replace('_', '-')}: unknown; known are {listed}" for name in unknown]
            )
        return cls(**given)
