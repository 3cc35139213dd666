"""The configuration of a repository: kept in its root state, overlaid when it is opened.

Names are written with hyphens, as in YAML (`inline-chunk-bytes`). Validation reports every fault
at once, each with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zarr_manifests.errors import ConfigError

__all__ = ["RepositoryConfig"]


@dataclass(frozen=True, slots=True)
class RepositoryConfig:
    """Options of a repository.

    Parameters
    ----------
    inline_chunk_bytes : int
        Chunks of at most this many bytes are kept in the manifest itself, not in an object of
        their own. 0 to 65,536.
    max_delta_count : int
        Number of deltas since the base at which a commit is followed by a fold, which rewrites
        them into a new base. 1 to 1,000.
    commit_attempts : int
        How often a commit that other writers overtake is rebased and swapped again. 1 to 10,000.
    pack_chunk_bytes : int
        Chunks of at most this many bytes that are not inline share objects, packs, with others.
        0 to 67,108,864.
    pack_bytes : int
        Size of a pack at which it is written before the commit. 1 to 1,073,741,824.

    Raises
    ------
    ConfigError
        If a value is out of range; `problems` names each.

    Examples
    --------
    >>> from zarr_manifests import RepositoryConfig
    >>> RepositoryConfig(inline_chunk_bytes=1024).to_dict()["inline-chunk-bytes"]
    1024
    """

    inline_chunk_bytes: int = 512
    max_delta_count: int = 50
    commit_attempts: int = 100
    pack_chunk_bytes: int = 262_144
    pack_bytes: int = 8_388_608

    def __post_init__(self) -> None:
        bounds = {
            "inline_chunk_bytes": (0, 65_536),
            "max_delta_count": (1, 1_000),
            "commit_attempts": (1, 10_000),
            "pack_chunk_bytes": (0, 67_108_864),
            "pack_bytes": (1, 1_073_741_824),
        }
        problems = []
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            place = name.replace("_", "-")
            if type(value) is not int:
                problems.append(f"{place}: expected a whole number, got {value!r}")
            elif not low <= value <= high:
                problems.append(f"{place}: {value} is not within {low} to {high}")
        if problems:
            raise ConfigError(problems)

    def to_dict(self) -> dict[str, int]:
        """The options under their hyphenated names."""
        return {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> RepositoryConfig:
        """The configuration with these options, named with hyphens or underscores.

        Raises
        ------
        ConfigError
            For unknown options and values out of range, all in one error.
        """
        known = {f.name for f in fields(cls)}
        given = {str(name).replace("-", "_"): value for name, value in options.items()}
        listed = ", ".join(sorted(name.replace("_", "-") for name in known))
        problems = [
            f"{name.replace('_', '-')}: unknown option; known are {listed}"
            for name in sorted(given.keys() - known)
        ]
        try:
            config = cls(**{name: given[name] for name in given.keys() & known})
        except ConfigError as error:
            problems.extend(error.problems)
        if problems:
            raise ConfigError(problems)
        return config
