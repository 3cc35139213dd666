"""A server that speaks as Amazon S3 does, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_START_S = 60
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_ALLOW_HTTP": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


@dataclass(frozen=True)
class ObjectServer:
    """Where the server is, and the bucket that is there."""

    endpoint: str
    bucket: str = "tests"


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(_START_S * 20):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            break
        threading.Event().wait(0.05)
    raise RuntimeError("the server for the tests of object stores did not start")


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """A server that speaks as Amazon S3 does, which the environment points to from now on."""
    for name in ("obstore", "ministack"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "SERVICES": "s3",
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "from ministack.app import main; main()"],
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        server = ObjectServer(f"http://127.0.0.1:{port}")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.endpoint}).items():
                patch.setenv(name, value)
            bucket = f"{server.endpoint}/{server.bucket}"
            with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT")):
                pass
            yield server
    finally:
        process.terminate()
        process.wait()
