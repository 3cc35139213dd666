"""Containers: the places outside the repository that its opener allows it to read.

A container is a name and a URL prefix. References in a repository are not trusted, since anybody
may have written them. So a file is read only if it is below a container that the opener gave.

Invariants:

- Without a container nothing is read: resolving a source does no I/O.
- Prefixes and locations are normalized and compared by whole segments; the longest prefix wins.
- Credentials are in no URL, repr or error.
"""

from __future__ import annotations

import ipaddress
import os
import posixpath
import re
import socket
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from zarr_manifests.config import SavedContainer
from zarr_manifests.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedStorageError,
    VirtualContainerError,
)
from zarr_manifests.format.columns import Column
from zarr_manifests.format.virtual_sources import VirtualSource, check_container_name
from zarr_manifests.keys import is_inside
from zarr_manifests.plain import plain_text
from zarr_manifests.storage.url import environment_mark, from_url
from zarr_manifests.virtual.locations import (
    REMOTE,
    WEB,
    VirtualLocation,
    location_of,
    parse_location,
    url_at,
)

if TYPE_CHECKING:
    from zarr_manifests.storage.object_store import ObjectStorage

__all__ = [
    "Authorized",
    "Containers",
    "VirtualContainer",
    "check_reachable",
    "container_of",
    "storage_of",
]

type Authorized = Iterable[str] | bool
"""Names of saved containers that may be read; True for all."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
"""Names that are the same in a URL and in a path."""
_SAME: Final = b"/-._~" + f"{string.ascii_letters}{string.digits}".encode()
_SAME_REMOTE: Final = _SAME + b"=:+,@"
"""Characters that are the same in a URL and in a path of a local file, or of a remote one."""
_MACHINE_SERVICES: Final = ipaddress.ip_network("fd00:ec2::/32")
_TOGETHER: Final = 1 << 14
"""Files that are located together."""
_NUMBER: Final = r"(?:0|[1-9][0-9]*)"
_CHUNK: Final = re.compile(
    rf"(.+?)/[^/]+/(?:c(?:(?:/{_NUMBER})+|(?:\.{_NUMBER})+)?|{_NUMBER}(?:[./]{_NUMBER})*)"
)
"""A chunk of an array in a Zarr store, and the folder of the array's group."""


_LOCAL: Final = (
    "a web server on this machine, or on a link-local address, is refused: services there often "
    "trust whoever reaches them. Pass VirtualContainer(..., allow_local=True) if it is meant"
)


@dataclass(frozen=True, init=False, repr=False)
class VirtualContainer:
    """A place outside a repository that virtual chunks may be read from, and how to reach it.

    Nothing is contacted before a chunk is read.

    Parameters
    ----------
    url : str or os.PathLike
        The URL of a folder or a prefix: `file://`, `memory://`, `s3://`, `gs://`, `az://`,
        `https://` or `http://`. A path counts as a `file://` URL.
    credentials : optional
        As for `zarr_manifests.storage.from_url`. They are never saved.
    allow_local : bool
        Allows a web server on this machine, or on a link-local address. Without it both are
        refused, since services there often trust whoever reaches them.
    **options
        Options of `from_url` for this kind of place, such as `region`, `anonymous` or `endpoint`.

    Raises
    ------
    InvalidArgumentError
        If the URL is malformed, contains a user, a password or a query, or names a local web server
        without `allow_local`.
    ConfigError
        If options are unknown or of the wrong type.
    UnsupportedStorageError
        If the scheme is not supported, or needs a package that is not installed.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> zm.VirtualContainer("s3://bucket/era5/", region="eu-central-1", anonymous=True)
    VirtualContainer('s3://bucket/era5', anonymous=True, region='eu-central-1')
    """

    url: str
    credentials: object
    allow_local: bool
    options: tuple[tuple[str, object], ...]

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        credentials: object = None,
        allow_local: bool = False,
        **options: object,
    ) -> None:
        if not isinstance(url, str | os.PathLike):
            raise InvalidArgumentError(
                f"a container takes a URL or a path, not {type(url).__name__}"
            )
        values = {
            "url": location_of(url),
            "credentials": credentials,
            "allow_local": allow_local,
            "options": tuple(sorted(options.items())),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        given = list(options) + ["credentials"] * (credentials is not None)
        scheme, path = parse_location(self.url)
        if scheme not in REMOTE and given:
            raise ConfigError(
                [f"{name}: a {scheme}:// container takes no options" for name in given]
            )
        if allow_local and scheme not in WEB:
            raise ConfigError(["allow_local: only a web server takes it"])
        if scheme in WEB and not allow_local and _is_local_host(path.partition("/")[0]):
            raise InvalidArgumentError(f"a container at {_LOCAL}")
        if scheme in REMOTE:
            storage_of(self)  # says what is wrong with the options

    def __repr__(self) -> str:
        said = [repr(plain_text(self.url))]
        said += ["allow_local=True"] * self.allow_local
        said += [f"{n}={v!r}" for n, v in self.options if isinstance(v, str | bool | int | float)]
        return f"VirtualContainer({', '.join(said)})"

    def __hash__(self) -> int:
        return hash((self.url, self.allow_local))

    @cached_property
    def place(self) -> tuple[str, str]:
        """Scheme and normalized path, as `parse_location` returns them."""
        return parse_location(self.url)


def container_of(given: object) -> VirtualContainer:
    """The container that a value means: itself, its URL, its path, or a mapping of its fields.

    Raises
    ------
    InvalidArgumentError
        If it is none of these.
    """
    if isinstance(given, VirtualContainer):
        return given
    if isinstance(given, str | os.PathLike):
        return VirtualContainer(given)
    if isinstance(given, Mapping) and isinstance(given.get("url"), str):
        return VirtualContainer(**{str(name).replace("-", "_"): v for name, v in given.items()})
    raise InvalidArgumentError(
        "a virtual container is a VirtualContainer, a URL, a path, or a mapping with a url"
    )


def storage_of(container: VirtualContainer) -> ObjectStorage:
    """The bucket, or the web server, of a remote container.

    It is opened once in a process, and again if the environment that it depends on has changed.
    """
    return _opened(container, environment_mark())


@lru_cache(maxsize=64)
def _opened(container: VirtualContainer, _: int) -> ObjectStorage:
    scheme, path = container.place
    options: dict[str, Any] = dict(container.options)
    if container.credentials is not None:
        options["credentials"] = container.credentials
    return cast("ObjectStorage", from_url(f"{scheme}://{path.partition('/')[0]}", **options))


@lru_cache(maxsize=64)
def check_reachable(container: VirtualContainer) -> None:
    """Refuse a web server whose name leads to this machine or to a link-local address.

    Raises
    ------
    VirtualContainerError
        If it does, and the container does not allow it.
    """
    scheme, path = container.place
    if scheme in WEB and not container.allow_local and _leads_to_local(path.partition("/")[0]):
        raise VirtualContainerError(f"the container {plain_text(container.url)} leads to {_LOCAL}")


@dataclass(frozen=True, slots=True)
class Containers:
    """The containers of an opened repository.

    Parameters
    ----------
    places : mapping of str to VirtualContainer
        The containers by name.
    saved : mapping of str to str
        URLs of containers that are saved with the repository and not authorized. They are only
        named in errors.
    """

    places: Mapping[str, VirtualContainer] = field(default_factory=dict)
    saved: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, object] | None) -> Containers:
        """Build containers from what `container_of` takes, by name.

        Raises
        ------
        InvalidArgumentError
            If a name or URL is malformed, or a URL contains a user or a password.
        ConfigError
            If options are unknown or of the wrong type.
        UnsupportedStorageError
            If the scheme of a URL is not supported.
        """
        places = {check_container_name(name): container_of(v) for name, v in (given or {}).items()}
        return Containers(places)

    def with_saved(self, saved: Sequence[SavedContainer], authorize: Authorized) -> Containers:
        """The same, with those saved containers that are authorized; one that was given wins.

        Raises
        ------
        InvalidArgumentError
            If no container of an authorized name is saved or was given.
        """
        known, places = {one.name: one for one in saved}, dict(self.places)
        if isinstance(authorize, bool):
            authorize = known if authorize else ()
        if isinstance(authorize, str) or not isinstance(authorize, Iterable):
            raise InvalidArgumentError("authorize must be True, or a list of names of containers")
        for name in authorize:
            if name in places:
                continue
            one = known.get(name)
            if one is None:
                raise InvalidArgumentError(
                    f"authorize: no container {str(name)[:80]!r} is saved with this repository; "
                    f"{'saved are ' + ', '.join(sorted(known)) if known else 'none is saved'}"
                )
            options: dict[str, Any] = {"region": one.region} if one.region else {}
            options |= {"anonymous": True} if one.anonymous else {}
            places[name] = VirtualContainer(one.url, **options)
        others = {one.name: one.url for one in saved if one.name not in places}
        return Containers(places, others)

    def locate(self, url: object) -> tuple[str, str]:
        """Return container (empty for none) and path of a location, as they are stored.

        A location is a URL, or `virtual://<container>/<path>`.
        """
        if isinstance(url, str) and url.startswith("virtual://"):
            name, _, path = url.removeprefix("virtual://").partition("/")
            check_container_name(name)
            surrogates = path.encode(errors="replace").decode() != path
            if surrogates or not is_inside(path):
                raise InvalidArgumentError(
                    f"a location in container {name!r} is refused: it must be a relative path "
                    "without empty, '.' or '..' segments"
                )
            return name, path
        scheme, path = parse_location(url)
        name = self._holding(scheme, path)
        if not name:
            return "", url_at(scheme, path)
        return name, _below(self.places[name], path)

    def locate_all(self, urls: Sequence[object]) -> tuple[tuple[str, ...], Column, tuple[str, ...]]:
        """Like `locate`, for many files: the containers, the number of each file's, the paths.

        Where all of a batch are below one folder, only what is below it is looked at, as one text.
        """
        folders: dict[str, tuple[str, str]] = {}
        names: dict[str, int] = {}
        container, paths = np.empty(len(urls), np.int64), list[str]()
        for start in range(0, len(urls), _TOGETHER):
            some = urls[start : start + _TOGETHER]
            found = self._below_one(some)
            if found is None:
                each = [*self._each(some, folders)]
                numbers = [names.setdefault(name, len(names)) for name, _ in each]
                container[start : start + len(some)] = numbers
                paths += [path for _, path in each]
            else:
                container[start : start + len(some)] = names.setdefault(found[0], len(names))
                paths += found[1]
        return tuple(names), container, tuple(paths)

    def _below_one(self, urls: Sequence[object]) -> tuple[str, list[str]] | None:
        """The container and the paths of files below one folder; None if each has to be looked at.

        That is so if a file may be in an inner container, or be called otherwise in its path.
        """
        if {*map(type, urls)} != {str}:
            return None
        texts = cast("Sequence[str]", urls)
        folder = posixpath.commonprefix([min(texts), max(texts)]).rpartition("/")[0]
        kind, slashes, _ = folder.lower().partition("://")
        if not slashes or kind == "memory":
            return None
        size = len(folder)
        rest = "".join([text[size:] for text in texts])  # each begins with a slash
        same = _SAME_REMOTE if kind in REMOTE else _SAME
        odd = not rest.isascii() or rest.encode().translate(None, same)
        if odd or "//" in rest or "/." in rest or rest.endswith("/"):
            return None
        name, path = self.locate(f"{folder}/x")
        if kind != "virtual":
            scheme, place = parse_location(f"{folder}/x")
            inner = (one.place for one in self.places.values())
            if any(one == scheme and root.startswith(place[:-1]) for one, root in inner):
                return None
        above = path[:-1]
        return name, [above + text[size + 1 :] for text in texts]

    def _each(
        self, urls: Iterable[object], folders: dict[str, tuple[str, str]]
    ) -> Iterator[tuple[str, str]]:
        """`locate` of each file; `folders` has those whose container is known."""
        for url in urls:
            folder, _, name = url.rpartition("/") if isinstance(url, str) else ("", "", "")
            if "://" not in folder or folder.startswith("memory:") or not _PLAIN.fullmatch(name):
                yield self.locate(url)
                continue
            known = folders.get(folder)
            if known is None:
                container, path = self.locate(f"{folder}/x")
                known = folders[folder] = container, path[:-1]
            yield known[0], known[1] + name

    def source_at(
        self, url: str, modified_ms: int | None = None, nbytes: int | None = None
    ) -> VirtualSource:
        """The source that a location means, with what is known of it."""
        return VirtualSource(*self.locate(url), None, modified_ms, nbytes)

    def _holding(self, scheme: str, path: str) -> str:
        """Name of the innermost container that holds a normalised path; empty for none."""
        return _innermost({name: one.place for name, one in self.places.items()}, scheme, path)

    def _saved_holding(self, scheme: str, path: str) -> str:
        """The same of saved containers. Anybody may have written them: malformed ones hold none."""
        places = {}
        for name, url in self.saved.items():
            with suppress(InvalidArgumentError, UnsupportedStorageError):
                places[name] = parse_location(url)
        return _innermost(places, scheme, path)

    def resolve(self, source: VirtualSource) -> tuple[VirtualContainer, VirtualLocation]:
        """Return where a source is, and the container that allows it to be read.

        Raises
        ------
        VirtualContainerError
            If it is below no container.
        """
        if source.container:
            container = self.places.get(source.container)
            if container is None and source.container in self.saved:
                raise VirtualContainerError(
                    f"a chunk lies in the file {source.path!r} of the container "
                    f"{source.container!r}, which the repository says is at "
                    f"{plain_text(self.saved[source.container])}: open it with "
                    f"authorize=[{source.container!r}] if you trust it to read there"
                )
            if container is None:
                raise VirtualContainerError(
                    f"a chunk lies in the file {source.path!r} of the container "
                    f"{source.container!r}, which this repository was not opened with: open it "
                    f"with virtual_containers={{{source.container!r}: <URL of the folder>}} if "
                    "you trust it to read there"
                )
            return container, _location(container, source.path)
        try:
            scheme, path = parse_location(source.path)
        except InvalidArgumentError as error:
            raise VirtualContainerError(
                f"a chunk lies at a location that cannot be read: {error}"
            ) from error
        name = self._holding(scheme, path)
        if not name and (saved := self._saved_holding(scheme, path)):
            raise VirtualContainerError(
                f"a chunk lies in the file {url_at(scheme, path)}, in the container {saved!r} that "
                f"is saved with this repository: open it with authorize=[{saved!r}] if you trust "
                "it to read there"
            )
        if not name:
            folder = url_at(scheme, _folder_to_trust(path))
            raise VirtualContainerError(
                f"a chunk lies in the file {url_at(scheme, path)}, below no container that this "
                f"repository was opened with: open it with virtual_containers={{<a name>: "
                f"{folder!r}}} if you trust it to read there"
            )
        container = self.places[name]
        return container, _location(container, _below(container, path))

    def url_of(self, source: VirtualSource) -> str:
        """The source's URL if its container is known, else its location as stored."""
        if source.container in self.places:
            return self.resolve(source)[1].url
        return source.location


def _innermost(places: Mapping[str, tuple[str, str]], scheme: str, path: str) -> str:
    found, most = "", -1
    for name, (kind, root) in places.items():
        if kind == scheme and len(root) > most and path.startswith(root.rstrip("/") + "/"):
            found, most = name, len(root)
    return found


def _folder_to_trust(path: str) -> str:
    """The root of the Zarr store that the file seems to belong to, else the file's folder.

    Decided from names alone. If no folder's name ends in `.zarr`, it is the folder of the group.
    """
    folders = posixpath.dirname(path).split("/")
    for depth, folder in enumerate(folders, 1):
        if folder.endswith(".zarr"):
            return "/".join(folders[:depth])
    chunk = _CHUNK.fullmatch(path)
    return posixpath.dirname(path) if chunk is None else chunk[1]


def _below(container: VirtualContainer, path: str) -> str:
    return path[len(container.place[1]) :].lstrip("/")


def _location(container: VirtualContainer, path: str) -> VirtualLocation:
    scheme, place = container.place
    if scheme == "file":
        return VirtualLocation(scheme, place, path)
    root, _, folder = place.partition("/")
    return VirtualLocation(scheme, root, f"{folder}/{path}" if folder else path)


def _is_local_host(host: str) -> bool:
    """Whether a host, with or without its port, says by itself that it is of this machine or link.

    The services there often trust whoever reaches them.
    """
    name = _host_name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_local(ipaddress.ip_address(name))
    except ValueError:
        return False


def _leads_to_local(host: str) -> bool:
    """Whether an address of a host is local; False if it has none that is known here."""
    try:
        found = socket.getaddrinfo(_host_name(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the request fails as well, or a proxy knows the name
        return False
    return any(_is_local(ipaddress.ip_address(str(at[4][0]).partition("%")[0])) for at in found)


def _host_name(host: str) -> str:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".")  # of a name that is complete


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inner = getattr(address, "ipv4_mapped", None) or address
    local = inner.is_loopback or inner.is_link_local or inner.is_unspecified
    return local or (inner.version == 6 and inner in _MACHINE_SERVICES)
