"""Blocking redirects of an object store to other hosts.

The client follows redirects by itself, sends the session token of the credentials along, and has no
option against it. But it has options for a proxy, and for hosts to contact without one. So its
proxy is a listener in this process, which refuses everything and notes the requested host. Requests
to the store's own host bypass the proxy, and redirects to other hosts end there.

If the environment sets a proxy, requests have to use it, and redirects are not blocked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Final

from zarr_manifests.runtime import SYSTEM, ForkSafeLock

__all__ = ["confined", "refused_host"]

_ANSWER: Final = b"HTTP/1.1 421 Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_HEAD_BYTES: Final = 64 * 1024
_READ_S: Final = 2.0
_DRAINS: Final = 100
_HOST: Final = re.compile(r"[a-z0-9._:\[\]-]{1,255}")
_OWN: Final = {"s3": "amazonaws.com", "gs": "googleapis.com", "az": "blob.core.windows.net"}
# Sources of credentials: services of the machine, the providers' own, and these variables' hosts.
_SOURCES: Final = {
    "s3": ("169.254.0.0/16", "fd00:ec2::/32", "amazonaws.com"),
    "gs": ("169.254.0.0/16", "metadata.google.internal", "googleapis.com", "accounts.google.com"),
    "az": ("169.254.0.0/16", "login.microsoftonline.com", "fabric.microsoft.com"),
}
_VARIABLES: Final = ("AWS_", "GOOGLE_", "AZURE_", "AZURITE_", "IDENTITY_", "MSI_")


def confined(kind: str, url: str | None, *, credentials: bool) -> dict[str, str]:
    """Return client options with which it contacts no other host than the store's.

    Parameters
    ----------
    kind : str
        `"s3"`, `"gs"`, `"az"` or `"http"`.
    url : str, optional
        The store's URL; None for the provider's own.
    credentials : bool
        Whether it requests credentials, which come from other hosts.
    """
    if any(name in ("http", "https", "all") for name in urllib.request.getproxies()):
        return {}
    hosts = {_host_of(url) if url else _OWN[kind]}
    if credentials:
        hosts.update(_SOURCES[kind], _hosts_of_environment())
    return {
        "proxy_url": f"http://127.0.0.1:{_listener().port}",
        "proxy_excludes": ",".join(sorted(hosts - {""})),
    }


def refused_host() -> str:
    """The last host that was refused, if known."""
    return _listener().refused


def _host_of(url: str) -> str:
    host = (urllib.parse.urlsplit(url).hostname or "").lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _hosts_of_environment() -> Iterable[str]:
    for name, value in os.environ.items():
        if name.upper().startswith(_VARIABLES) and re.match(r"https?://", value):
            yield _host_of(value)
    if "AZURE_STORAGE_USE_EMULATOR" in os.environ:
        yield "127.0.0.1"


class _Listener:
    """A proxy that refuses every request.

    Attributes
    ----------
    port : int
        The port it listens on, on this machine only; 0, which is unreachable, if it does not.
    refused : str
        The last host that was requested.
    """

    def __init__(self) -> None:
        self.refused = "unnamed"
        self.port = 0
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor, or no thread
            self._socket = socket.create_server(("127.0.0.1", 0))
            SYSTEM.later(0.0, self._serve)
            self.port = self._socket.getsockname()[1]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _serve(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError), self._socket:
            while True:
                connection, _ = self._socket.accept()
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(_READ_S)
                    self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            more = connection.recv(_HEAD_BYTES)
            if not more:
                return
            head += more
        self.refused = _asked(head.split(b"\r\n", 1)[0].decode(errors="replace"))
        connection.sendall(_ANSWER)
        connection.shutdown(socket.SHUT_WR)
        for _ in range(_DRAINS):  # unread bytes would reset the connection before the answer
            if not connection.recv(_HEAD_BYTES):
                return


def _asked(line: str) -> str:
    """The host in a request to a proxy."""
    method, _, rest = line.partition(" ")
    target = rest.partition(" ")[0]
    host = target if method == "CONNECT" else urllib.parse.urlsplit(target).netloc
    host = host.rpartition("@")[2].lower()
    return host if _HOST.fullmatch(host) else "unnamed"


class _Listening:
    """The listener of this process."""

    listener: _Listener | None = None


_LOCK: Final = ForkSafeLock()


def _listener() -> _Listener:
    with _LOCK:
        if _Listening.listener is None:
            _Listening.listener = _Listener()
        return _Listening.listener


def _forget() -> None:
    if _Listening.listener is not None:  # its thread belongs to the parent
        _Listening.listener.close()
        _Listening.listener = None


os.register_at_fork(after_in_child=_forget)
