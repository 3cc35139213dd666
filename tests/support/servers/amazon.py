"""Servers that speak as Amazon S3 does: ministack, moto, and one that ignores a condition."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import urllib.request
from collections.abc import Iterator

from servers.process import Server, ServerMissingError, free_port, running

BUCKET = "tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_ALLOW_HTTP": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}

_MOTO = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

# moto checks a condition and then writes, in threads without a lock.
one, app = threading.Lock(), DomainDispatcherApplication(create_backend_app)

def one_at_a_time(environ, start_response):
    with one:
        return app(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True)
"""


def _needs(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ServerMissingError(f"the package {name} is not installed")


def _with_bucket(endpoint: str) -> Server:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    with urllib.request.urlopen(request):
        pass
    return Server(f"s3://{BUCKET}", endpoint, ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint})


@contextlib.contextmanager
def ministack() -> Iterator[Server]:
    _needs("obstore", "ministack")
    port = free_port()
    settings = {
        "SERVICES": "s3",
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
    }
    script = "from ministack.app import main; main()"
    with running([sys.executable, "-W", "ignore", "-c", script], port, settings) as endpoint:
        yield _with_bucket(endpoint)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    _needs("obstore", "moto", "flask", "flask_cors")
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-c", _MOTO, str(port)]
    with running(command, port) as endpoint:
        yield _with_bucket(endpoint)


@contextlib.contextmanager
def localbucket() -> Iterator[Server]:
    """Heeds `If-None-Match`, ignores `If-Match`, and knows no deletion of several objects."""
    _needs("obstore", "localbucket")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "localbucket", "--port", str(port), folder]
        with running(command, port) as endpoint:
            yield _with_bucket(endpoint)
