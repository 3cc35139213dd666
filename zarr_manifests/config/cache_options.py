"""What may be kept of a repository: metadata, in memory and in a folder of the local disk; chunks.

How much memory is saved with the repository (`Cache`), for whoever opens it and does not say
otherwise. A folder never is: it would be one on the machine of whoever opens the repository, who
may not even have made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from zarr_manifests.config.kinds import Kind, Whole, YesNo, shown
from zarr_manifests.config.sections import check_options

__all__ = ["Cache", "CacheOptions"]

_MAX: Final = 2**62
_MAX_SIZE: Final = 256 << 20
_EXPIRE_MS: Final = 300_000


@dataclass(frozen=True, slots=True)
class Cache:
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

    max_size: Annotated[
        int,
        Whole(0, _MAX),
        "bytes of memory for decoded metadata, unless `cache=` says otherwise on opening",
    ] = _MAX_SIZE
    expire_ms: Annotated[
        int, Whole(0, _MAX), "milliseconds after which unused entries are dropped; 0 for never"
    ] = _EXPIRE_MS

    misplaced: ClassVar = dict.fromkeys(
        ("directory", "directory-bytes", "chunk-bytes", "chunks"),
        "is not saved with a repository, since it is about one machine; give it as cache= to "
        "zm.open",
    )

    def __post_init__(self) -> None:
        check_options(self)


class _Folder(Kind):
    """The path of a folder."""

    schema: Mapping[str, Any] = {"type": "string", "minLength": 1}

    def faults(self, value: object) -> Iterator[str]:
        if not (isinstance(value, str) and value):
            yield f": expected a path, got {shown(value)}"

    def read(self, plain: Any) -> Any:
        return plain.__fspath__() if hasattr(plain, "__fspath__") else plain


@dataclass(frozen=True, slots=True)
class CacheOptions:
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
        Bytes of memory for whole chunks as they are stored; 0 for none. Virtual chunks are kept if
        they are remote, and their refs record an etag, a time or a checksum.

    chunks : bool
        Whether `directory` also keeps whole chunks, those that `chunk_bytes` would keep.

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

    max_size: Annotated[int, Whole(0, _MAX), "bytes of memory for decoded metadata"] = _MAX_SIZE
    expire_ms: Annotated[
        int, Whole(0, _MAX), "milliseconds after which unused entries are dropped; 0 for never"
    ] = _EXPIRE_MS
    directory: Annotated[
        str | None, _Folder(), "a folder of a local disk in which to keep metadata objects"
    ] = None
    directory_bytes: Annotated[int, Whole(0, _MAX), "bytes of that folder"] = 1 << 30
    chunk_bytes: Annotated[int, Whole(0, _MAX), "bytes of memory for chunks; 0 for none"] = 0
    chunks: Annotated[bool, YesNo(), "whether the folder also keeps chunks"] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", _Folder().read(self.directory))
        check_options(self)

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
        default = cls() if saved is None else cls(saved.max_size, saved.expire_ms)
        if options is None:
            return default
        from zarr_manifests.config.parsing import parse

        return parse(cls, options, "cache", default)
