"""Running the application on a port of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import uvicorn

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository
from zarr_manifests.serving.application import LOOPBACK, create_app
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import Authorized

__all__ = ["serve"]

_MOST_CONNECTIONS: Final = 1000
_END_S: Final = 5


def serve(
    location: str | os.PathLike[str] | Storage | Repository,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | None = None,
    origins: Sequence[str] = (),
    authorize: Authorized = (),
    storage_options: Mapping[str, object] | None = None,
    started: Callable[[str], None] | None = None,
) -> None:
    """Serve a repository over HTTP, read-only, until the process is interrupted.

    Parameters
    ----------
    location : str, path, Storage or Repository
        The repository.
    host : str
        Address to listen on. Another than one of this machine needs a token.
    port : int
        The port; 0 for any that is free.
    token : str, optional
        What every request must give, as a bearer token or as a password with any user name.
    origins : sequence of str
        As for `create_app`.
    authorize, storage_options
        As for `zarr_manifests.open`.
    started : callable, optional
        Called with the server's URL when it listens.

    Raises
    ------
    InvalidArgumentError
        If the host can be reached from elsewhere and there is no token, or the address cannot be
        listened on.
    NotARepositoryError
        If there is no repository.

    Examples
    --------
    Listen for a moment, and stop as Ctrl-C does:

    >>> import zarr_manifests as zm
    >>> from zarr_manifests.serving.server import serve
    >>> repo = zm.create("memory://serve-example")
    >>> def stop(url):
    ...     print(url[:17])
    ...     raise KeyboardInterrupt
    >>> serve(repo, port=0, started=stop)
    http://127.0.0.1:
    """
    repo = repository_of(location, storage_options, authorize=authorize)
    local = _is_loopback(host)
    if not local and token is None:
        raise InvalidArgumentError(
            f"host {plain_text(host)} can be reached from elsewhere: give a token, which readers "
            "must know; or serve on 127.0.0.1, behind a server that decides who may read"
        )
    app = create_app(repo, token=token, hosts=(*LOOPBACK, host) if local else None, origins=origins)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
    )
    with suppress(KeyboardInterrupt), _listening(host, port) as listener:
        if started is not None:
            name = f"[{host}]" if ":" in host else host
            started(f"http://{name}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise InvalidArgumentError(
            f"cannot listen on {plain_text(host)} port {port}: {error}"
        ) from error
    return listener
