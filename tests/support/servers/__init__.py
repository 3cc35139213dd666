"""Servers of object stores on this machine, for tests."""

from servers.amazon import ENVIRONMENT, localbucket, ministack, moto
from servers.google import google
from servers.microsoft import azurite
from servers.process import Server, ServerMissingError

__all__ = [
    "ENVIRONMENT",
    "SERVERS",
    "Server",
    "ServerMissingError",
    "localbucket",
]

SERVERS = {"ministack": ministack, "moto": moto, "azurite": azurite, "google": google}
"""All that heed conditions, by name; each is a context manager that runs a server."""
