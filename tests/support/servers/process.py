"""Servers in processes of their own, on this machine only."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_START_S = 120
# Systems give higher ones to outgoing connections, also while a server is about to start.
_PORTS = range(12_000, 32_000)


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
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
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
        if process.poll() is not None:
            raise RuntimeError(f"the server on port {port} has ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        threading.Event().wait(0.05)
    raise RuntimeError(f"the server on port {port} did not start within {_START_S} s")
