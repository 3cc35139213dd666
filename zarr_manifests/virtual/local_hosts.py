"""Hosts of this machine and of its link, whose services often trust whoever reaches them.

The addresses of a name are asked for once; a name whose addresses change later is not noticed.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

__all__ = ["is_local_host", "leads_to_local"]

_MACHINE_SERVICES: Final = ipaddress.ip_network("fd00:ec2::/32")


def is_local_host(host: str) -> bool:
    """Whether a host, with or without its port, says by itself that it is local."""
    name = _name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_local(ipaddress.ip_address(name))
    except ValueError:
        return False


def leads_to_local(host: str) -> bool:
    """Whether an address of a host is local; False if it has none that is known here."""
    try:
        found = socket.getaddrinfo(_name(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the request fails as well, or a proxy knows the name
        return False
    return any(_is_local(ipaddress.ip_address(str(at[4][0]).partition("%")[0])) for at in found)


def _name(host: str) -> str:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".")  # of a name that is complete


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inner = getattr(address, "ipv4_mapped", None) or address
    local = inner.is_loopback or inner.is_link_local or inner.is_unspecified
    return local or (inner.version == 6 and inner in _MACHINE_SERVICES)
