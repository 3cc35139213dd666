"""Azurite, Microsoft's own emulator of Azure Blob Storage, which runs on node."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import importlib.util
import shutil
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from servers.process import Server, ServerMissingError, free_port, running

# Every installation of Azurite has this account and this key; they are no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "tests"
_MAIN = (
    Path(__file__).parents[3] / ".servers" / "node_modules" / "azurite" / "dist/src/blob/main.js"
)


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    if importlib.util.find_spec("obstore") is None:
        raise ServerMissingError("the package obstore is not installed")
    node = shutil.which("node")
    if node is None or not _MAIN.exists():
        raise ServerMissingError("there is no Azurite: `make servers` installs it, if there is npm")
    port = free_port()
    flags = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    command = [node, str(_MAIN), "--blobPort", str(port), *flags]
    with running(command, port) as host:
        endpoint = f"{host}/{ACCOUNT}"
        _make_container(endpoint)
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "AZURE_STORAGE_CONNECTION_STRING": (
                f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
                f"BlobEndpoint={endpoint};"
            ),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        yield Server(f"az://{CONTAINER}", endpoint, environment, {"allow_http": True})


def _make_container(endpoint: str) -> None:
    """Make it by hand, since obstore makes none."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = f"PUT{'\n' * 12}x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{CONTAINER}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        pass
