"""A server for the tests of object stores, started when the first of them needs it."""

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
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"}


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
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.endpoint}/{server.bucket}", method="PUT")
        ):
            pass
        with pytest.MonkeyPatch.context() as patch:
            here = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true"}
            for name, value in (_CREDENTIALS | here).items():
                patch.setenv(name, value)
            yield server
    finally:
        process.terminate()
        process.wait()
