"""The page on places and credentials: what it does in a bucket is done beside a test server."""

from __future__ import annotations

import http.server
import os
import re
import ssl
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import zarr_manifests as zm
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import from_url
from zarr_manifests.storage.url import _OPTIONS

PAGE = Path(__file__).parents[2] / "docs/guide/places.md"
_BLOCK = re.compile(
    r"^(?:<!-- skip: (?P<why>[^\n]*) -->\n+)?```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def test_the_code_of_the_page_runs_in_a_bucket(
    server_named: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_named("ministack")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = list(_BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    here = "the tests of storages run it beside a server"
    assert [block["why"] for block in found].count(here) == 2
    code = "\n".join(block["code"] for block in found if block["why"] in (None, here))
    code = code.replace("s3://winds/", f"s3://{server.url.split('/')[2]}/page/")
    code = code.replace("eu-central-1", "us-east-1")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page", "ENDPOINT": server.endpoint})  # noqa: S102
    place = f"s3://{server.url.split('/')[2]}/page/ours"
    here = {"endpoint": server.endpoint, "allow_http": True}
    repo = zm.open(place, storage_options=here)
    assert [info.message for info in repo.ancestry()] == ["copied", "create repository"]
    sys.modules.pop("winds_accounts")


def _signed(name: str, signer: Any = None) -> tuple[x509.Certificate, Any]:
    """A certificate by an authority, or that of an authority; and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    unsigned = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer[0].subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    return unsigned.sign(signer[1] if signer else key, hashes.SHA256()), key


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_private_authority_is_trusted_if_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = _signed("authority.test")
    certificate, key = _signed("localhost", authority)
    pem = serialization.Encoding.PEM
    (tmp_path / "authority.pem").write_bytes(authority[0].public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "server.pem").write_bytes(
        certificate.public_bytes(pem) + key.private_bytes(pem, *plain)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    monkeypatch.setenv("NO_PROXY", "localhost")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hello) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = {"endpoint": f"https://localhost:{server.server_port}", "anonymous": True}
        with pytest.raises(StorageError, match="cannot be reached"):
            from_url("s3://bucket/winds", retries=0, **place).get("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        assert from_url("s3://bucket/winds", retries=0, **place).get("a") == b"hello"
        server.shutdown()


def test_the_page_lists_every_option() -> None:
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    listed: dict[str, set[str]] = {}
    for names, kinds in rows:
        for name in re.findall(r"`(\w+)`", names):
            listed.setdefault(name, set()).update(re.findall(r"`(\w+)`", kinds) or {"file"})
    real: dict[str, set[str]] = {}
    for kind, options in _OPTIONS.items():
        for name in options:
            real.setdefault(name, set()).add("https" if kind == "http" else kind)
    assert {name: listed.get(name) for name in real} == real


def test_the_examples_of_the_page_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## One example for each store")[2]
    code = _BLOCK.search(text)
    assert code is not None
    lines = [line.partition("  #")[0] for line in code["code"].splitlines()]
    assert len(lines) > 5
    for line in lines:
        place = eval(line, {"from_url": from_url})  # noqa: S307
        assert "ObjectStorage" in repr(place)
    assert os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") is None
