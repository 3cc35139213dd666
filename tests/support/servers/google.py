"""A fake of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from servers.process import Server, ServerMissingError, free_port, running


@contextlib.contextmanager
def google() -> Iterator[Server]:
    if importlib.util.find_spec("obstore") is None:
        raise ServerMissingError("the package obstore is not installed")
    port = free_port()
    script = str(Path(__file__).with_name("google_fake.py"))
    with (
        running([sys.executable, script, str(port)], port) as endpoint,
        tempfile.TemporaryDirectory() as folder,
    ):
        # obstore asks for a token even where no signature is wanted, but not with this account.
        account = Path(folder) / "account.json"
        said = {"gcs_base_url": endpoint, "disable_oauth": True}
        said |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account.write_text(json.dumps(said))
        environment = {
            "GOOGLE_SERVICE_ACCOUNT": str(account),
            "GOOGLE_BASE_URL": endpoint,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        yield Server("gs://tests", endpoint, environment, {"allow_http": True})
