"""Containers of virtual chunks that are saved with a repository: where its files elsewhere are.

They contain no secrets, and allow nothing: a reader decides which of them are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from zarr_manifests.config.kinds import Text, YesNo
from zarr_manifests.config.sections import check_options

__all__ = ["SavedContainer"]

_NAME: Final = Text(r"[A-Za-z0-9._-]{1,64}", "a name of at most 64 letters, digits and _ . -")


class _Url(Text):
    """A URL without secrets; what is refused may have some, so it is not repeated."""

    def faults(self, value: object) -> Iterator[str]:
        yield from (f": expected {self.meaning}" for _ in super().faults(value))


_URL: Final = _Url(
    r"(?:s3|gs|az|https?|file|memory)://[^\x00-\x20\x7f\\@?#]{1,1000}",
    "a URL such as s3://bucket/prefix, without a user, a password or a query",
)


@dataclass(frozen=True, slots=True)
class SavedContainer:
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

    name: Annotated[str, _NAME, "the name that locations of virtual chunks refer to"]
    url: Annotated[str, _URL, "the URL of a folder or a prefix"]
    region: Annotated[
        str | None, Text(r"[A-Za-z0-9-]{1,64}", "the name of a region"), "the region of a bucket"
    ] = None
    anonymous: Annotated[bool, YesNo(), "whether it is read without credentials"] = False

    def __post_init__(self) -> None:
        check_options(self)
