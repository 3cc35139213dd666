"""Files elsewhere: their locations, and the containers that the opener of a repository trusts.

A container is a name and a URL prefix. References in a repository are not trusted, since anybody
may have written them. So a file is read only if it is below a container that the opener gave.

Invariants:

- Without a container nothing is read: resolving a source does no I/O.
- Equal places have equal locations: the scheme and a web server's host are in lower case, a default
  port is left out, and escapes are resolved. So prefixes are compared by whole segments, and the
  longest one wins.
- A location cannot climb: below an object store or a web server, a path with an empty, `.` or `..`
  segment is refused, escaped or not. Paths of local files are normalized.
- Secrets are in no location, repr or error, and no message repeats a refused URL.
"""

from __future__ import annotations

import ipaddress
import os
import posixpath
import re
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import Struct

from zarr_manifests.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedStorageError,
    VirtualContainerError,
    plain_text,
)
from zarr_manifests.format.chunk_table import VirtualSource, check_container_name
from zarr_manifests.keys import is_inside, join
from zarr_manifests.storage.local import LocalFiles
from zarr_manifests.storage.url import from_url, refuse_slipped

if TYPE_CHECKING:
    from zarr_manifests.config import SavedContainer
    from zarr_manifests.storage.protocol import Files

type Authorized = Iterable[str] | bool
"""Names of saved containers that may be read; True for all."""

WEB: Final = ("http", "https")
"""Schemes of web servers."""
REMOTE: Final = ("s3", "gs", "az", *WEB)
"""Schemes of places that are read by requests."""

_CALLED: Final = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_PORTS: Final = {"http": 80, "https": 443}
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_HOST: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ODD: Final = re.compile(r"[\x00-\x1f\x7f\\]")
_MACHINE_SERVICES: Final = ipaddress.ip_network("fd00:ec2::/32")

# --- locations -------------------------------------------------------------------------------


class VirtualLocation(Struct, frozen=True):
    """A file or folder outside the repository.

    Parameters
    ----------
    scheme : str
        The kind of place: `file`, `memory`, or one of `REMOTE`.
    root : str
        A folder's absolute path, the name of a memory storage, a bucket, or a web server's host.
    path : str
        The file's path below the root; empty for the root itself.
    """

    scheme: str
    root: str
    path: str = ""

    @property
    def url(self) -> str:
        """The URL of the place."""
        return url_at(self.scheme, posixpath.join(self.root, self.path) if self.path else self.root)


def location_of(given: str | os.PathLike[str]) -> str:
    """Return the normalized URL of a URL or a local path; errors are those of `parse_location`."""
    text = os.fspath(given)
    if isinstance(given, str) and "://" in text:
        return url_at(*parse_location(text))
    refuse_slipped(text)
    return url_at("file", os.path.abspath(text))  # noqa: PTH100 - a str is due


def url_at(scheme: str, path: str) -> str:
    """The URL of a normalized path, as `parse_location` returns it."""
    root, slash, rest = path.partition("/") if scheme in WEB else ("", "", path)
    kept = "/=:+,@" if scheme in REMOTE else "/"
    try:
        return f"{scheme}://{root}{slash}{urllib.parse.quote(rest, safe=kept)}"
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a {scheme}:// location is not valid Unicode text") from error


def parse_location(url: object) -> tuple[str, str]:
    """Return scheme and normalized path of a URL.

    The path of a local file is absolute. Others start with the name of the memory storage, the
    bucket, or the web server's host.

    Raises
    ------
    InvalidArgumentError
        If it is malformed, has `..` segments, or contains a user, a password or a query. The
        message repeats only its scheme.
    UnsupportedStorageError
        If the scheme is not supported.
    """
    split = _SCHEME.fullmatch(url) if isinstance(url, str) else None
    if split is None:
        raise InvalidArgumentError(
            "a location is a URL, such as s3://bucket/winds.nc; for a local file use "
            "pathlib.Path(...).absolute().as_uri()"
        )
    scheme, rest = split[1].lower(), split[2]
    scheme = _CALLED.get(scheme, scheme)
    host = rest.partition("/")[0]
    if "@" in host:
        raise InvalidArgumentError(
            f"a {scheme}:// location with a user or password in it is refused: what is referenced "
            "is written to the repository. Take them out of the URL"
        )
    if scheme not in ("file", "memory", *REMOTE):
        raise UnsupportedStorageError(
            f"{scheme}:// locations are not supported; use file://, memory://, s3://, gs://, az:// "
            "or https://"
        )
    if scheme in REMOTE and ("?" in rest or "#" in rest):
        raise InvalidArgumentError(
            f"a {scheme}:// location with a query is refused: what is signed in a query is a "
            "secret. Write a ? in a file's name as %3F, and a # as %23"
        )
    root = _root(scheme, host)
    if root is None or _ESCAPE.search(rest):
        raise _malformed(scheme)
    try:
        text = urllib.parse.unquote(rest, errors="strict")
    except UnicodeDecodeError as error:
        raise _malformed(scheme) from error
    if scheme == "file" and "\0" not in text:
        return "file", "/" + posixpath.normpath(text[len(host) :]).lstrip("/")
    key = text[len(host) + 1 :].removesuffix("/")
    if key and (_ODD.search(key) or not is_inside(key)):
        raise _malformed(scheme)
    return scheme, join(root, key) if key else root


def _malformed(scheme: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"a {scheme}:// location is malformed: it is such as file:///data/winds.nc, "
        "memory://name/key, s3://bucket/key or https://data.org/winds.nc, without empty, '.' or "
        "'..' segments, backslashes and control characters, and with %25 for each % of a name"
    )


def _root(scheme: str, host: str) -> str | None:
    """What a path starts with: a storage's name, a bucket, a host and port; None if malformed."""
    if scheme == "file":
        return "" if host in ("", "localhost") else None
    if scheme not in WEB:
        return host if _BUCKET.fullmatch(host) else None
    found = _HOST.fullmatch(host)
    if found is None or (found[2] and not 0 < int(found[2]) < 65_536):
        return None
    name, port = found[1].lower(), int(found[2] or _PORTS[scheme])
    return name if port == _PORTS[scheme] else f"{name}:{port}"


# --- containers ------------------------------------------------------------------------------


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
        Allows reading from a web server on this machine, or on a link-local address. Without it
        both are refused, since services there often trust whoever reaches them.
    **options
        Options of `from_url` for this kind of place, such as `region`, `anonymous` or `endpoint`.

    Raises
    ------
    InvalidArgumentError
        If the URL is malformed, or contains a user, a password or a query.
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
        object.__setattr__(self, "url", location_of(url))
        object.__setattr__(self, "credentials", credentials)
        object.__setattr__(self, "allow_local", allow_local)
        object.__setattr__(self, "options", tuple(sorted(options.items())))
        given = list(options) + ["credentials"] * (credentials is not None)
        scheme = self.place[0]
        if scheme not in REMOTE and given:
            raise ConfigError([f"{given[0]}: a {scheme}:// container takes no options"])
        if allow_local and scheme not in WEB:
            raise ConfigError(["allow_local: only a web server takes it"])
        if scheme in REMOTE:
            self.storage  # noqa: B018 - says what is wrong with the options

    def __repr__(self) -> str:
        said = [repr(plain_text(self.url))]
        said += ["allow_local=True"] * self.allow_local
        said += [f"{n}={v!r}" for n, v in self.options if isinstance(v, str | bool | int | float)]
        return f"VirtualContainer({', '.join(said)})"

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "storage"}

    def __hash__(self) -> int:
        return hash((self.url, self.allow_local))

    @cached_property
    def place(self) -> tuple[str, str]:
        """Scheme and normalized path, as `parse_location` returns them."""
        return parse_location(self.url)

    @cached_property
    def storage(self) -> Files:
        """The bucket, the web server, the memory storage or the folder that files are in."""
        scheme, path = self.place
        if scheme == "file":
            return LocalFiles(path)
        options: dict[str, Any] = {"credentials": self.credentials, **dict(self.options)}
        return cast("Files", from_url(f"{scheme}://{path.partition('/')[0]}", **options))


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
        raise VirtualContainerError(
            f"the container {plain_text(container.url)} leads to a web server on this machine, or "
            "on a link-local address: services there often trust whoever reaches them. Pass "
            "VirtualContainer(..., allow_local=True) if it is meant"
        )


class Containers(Struct, frozen=True, dict=True):
    """The containers of an opened repository.

    Parameters
    ----------
    places : mapping of str to VirtualContainer
        The containers by name.
    saved : mapping of str to str
        URLs of containers that are saved with the repository and not authorized. They are only
        named in errors.
    """

    places: Mapping[str, VirtualContainer] = {}
    saved: Mapping[str, str] = {}

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Containers:
        """Build containers from `VirtualContainer`, or what one is made of, by name.

        Raises
        ------
        InvalidArgumentError
            If there are no names, a name or URL is malformed, or a URL contains a user or a
            password.
        ConfigError
            If options are unknown or of the wrong type.
        UnsupportedStorageError
            If the scheme of a URL is not supported.
        """
        if not isinstance(given, Mapping | None):
            raise InvalidArgumentError(
                "virtual containers have names: give a mapping such as "
                f'{{"era5": "s3://era5-pds"}}, not a {type(given).__name__}'
            )
        places = {}
        for name, one in (given or {}).items():
            own = one if isinstance(one, VirtualContainer) else VirtualContainer(one)
            places[check_container_name(name)] = own
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
        return Containers(places, {one.name: one.url for one in saved if one.name not in places})

    @cached_property
    def _roots(self) -> Mapping[str, tuple[str, str]]:
        return {name: container.place for name, container in self.places.items()}

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
        holding = {
            name: len(root)
            for name, (kind, root) in self._roots.items()
            if kind == scheme and path.startswith(root.rstrip("/") + "/")
        }
        if not holding:
            return "", url_at(scheme, path)
        name = max(holding, key=holding.__getitem__)  # the innermost one
        return name, path[holding[name] :].lstrip("/")

    def resolve(self, source: VirtualSource) -> tuple[VirtualContainer, VirtualLocation]:
        """Return where a source is, and the container that allows it to be read.

        Raises
        ------
        VirtualContainerError
            If it is below no container.
        """
        name, path = source.container, source.path
        try:
            name, path = (name, path) if name else self.locate(path)
        except InvalidArgumentError as error:
            raise VirtualContainerError(
                f"a chunk lies at a location that cannot be read: {error}"
            ) from error
        if name in self.places:
            scheme, place = self.places[name].place
            root, _, folder = (place, "", "") if scheme == "file" else place.partition("/")
            return self.places[name], VirtualLocation(scheme, root, join(folder, path))
        file = repr(path) if name else path
        if name in self.saved:
            where = f"in the container {name!r}, which the repository says is at "
            where += plain_text(self.saved[name])
            how = f"authorize=[{name!r}]"
        elif name:
            where = f"in the container {name!r}, which this repository was not opened with"
            how = f"virtual_containers={{{name!r}: <URL of the folder>}}"
        else:
            where = "below no container that this repository was opened with"
            how = "virtual_containers={<a name>: <URL of a folder above it>}"
            if self.saved:
                how += f" or, if a saved container has it, with authorize={[*self.saved]}"
        raise VirtualContainerError(
            f"a chunk lies in the file {file}, {where}: open it with {how} if you trust it to read "
            "there"
        )

    def url_of(self, source: VirtualSource) -> str:
        """The source's URL if its container is known, else its location as stored."""
        if source.container in self.places:
            return self.resolve(source)[1].url
        return source.location


def _leads_to_local(host: str) -> bool:
    """Whether an address of a host is of this machine or link; False if none is known here.

    The services there often trust whoever reaches them. The host may be an address itself.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the request fails as well, or a proxy knows the name
        return False
    return any(_is_local(ipaddress.ip_address(str(at[4][0]).partition("%")[0])) for at in found)


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inner = getattr(address, "ipv4_mapped", None) or address
    local = inner.is_loopback or inner.is_link_local or inner.is_unspecified
    return local or (inner.version == 6 and inner in _MACHINE_SERVICES)
