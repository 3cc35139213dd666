"""Servers of object stores on this machine, for tests."""

from servers.amazon import ENVIRONMENT as ENVIRONMENT
from servers.amazon import localbucket as localbucket
from servers.amazon import ministack, moto
from servers.google import google
from servers.microsoft import azurite
from servers.process import Server as Server
from servers.process import ServerMissingError as ServerMissingError

SERVERS = {"ministack": ministack, "moto": moto, "azurite": azurite, "google": google}
"""All that heed conditions, by name; each is a context manager that runs a server."""
