"""Servers of object stores as fixtures, each started when a test asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from missing import missing
from servers import ENVIRONMENT as ENVIRONMENT
from servers import SERVERS, Server, ServerMissingError, localbucket


@dataclass(frozen=True)
class ObjectServer:
    """Where the server is, and the bucket that is there."""

    endpoint: str
    bucket: str = "tests"


def start(name: str, stack: contextlib.ExitStack) -> Server:
    """The server of that name, which runs until the stack is closed."""
    serve = localbucket if name == "localbucket" else SERVERS[name]
    try:
        return stack.enter_context(serve())
    except ServerMissingError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def server_named() -> Iterator[Callable[[str], Server]]:
    """Gives the server of that name, which runs to the end of the tests.

    Without what runs it, the tests that need it are skipped; in CI they fail.
    """
    with contextlib.ExitStack() as stack:
        running: dict[str, Server] = {}

        def named(name: str) -> Server:
            if name not in running:
                running[name] = start(name, stack)
            return running[name]

        yield named


@pytest.fixture(scope="session")
def object_server(server_named: Callable[[str], Server]) -> Iterator[ObjectServer]:
    """A server that speaks as Amazon S3 does, which the environment points to from now on."""
    server = server_named("ministack")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield ObjectServer(server.endpoint)
