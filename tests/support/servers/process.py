"""Servers in processes of their own, on this machine only."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Server", "ServerMissingError", "free_port", "running"]

_START_S = 60


class ServerMissingError(Exception):
    """What runs the server is not installed."""


@dataclass(frozen=True)
class Server:
    """A server that runs, with an empty bucket.

    `environment` leads `from_url(url, **options)` to it, and no other server.
    """

    url: str
    endpoint: str
    environment: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run the server for the block; gives its address as soon as it listens."""
    process = subprocess.Popen(
        command,
        env=os.environ | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(_START_S * 20):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            break
        threading.Event().wait(0.05)
    raise RuntimeError("the server for the tests of object stores did not start")
