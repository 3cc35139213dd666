"""Speaks the XML interface of Google Cloud Storage, as far as obstore uses it; run as a script."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PAGE = 100
_TIME = "Wed, 21 Oct 2015 07:28:00 GMT"
_OBJECTS: dict[str, tuple[int, bytes]] = {}
_LOCK = threading.Lock()
_LAST = [10**15]  # generations are large numbers


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        _, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        with _LOCK:
            if not key:
                self._list(query)
            elif self.command == "PUT":
                self._put(key, body)
            elif self.command == "DELETE":
                self._say(204 if _OBJECTS.pop(key, None) else 404)
            else:
                self._get(key)

    do_GET = do_HEAD = do_PUT = do_DELETE = _answer  # noqa: N815

    def _put(self, key: str, body: bytes) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        there, _ = _OBJECTS.get(key, (0, b""))
        if wanted is not None and int(wanted) != there:
            return self._say(412)
        _LAST[0] += 1
        _OBJECTS[key] = _LAST[0], body
        return self._say(200, ETag=_etag(body), x_goog_generation=_LAST[0])

    def _get(self, key: str) -> None:
        generation, data = _OBJECTS.get(key, (0, b""))
        if not generation:
            return self._say(404)
        if self.headers.get("If-Match") not in (None, _etag(data)):
            return self._say(412)
        said = {"ETag": _etag(data), "x_goog_generation": generation, "Last_Modified": _TIME}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self._say(200, data, **said)
        start, end = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return self._say(416)
        said["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
        return self._say(206, data[start : end + 1], **said)

    def _list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        prefix = query.get("prefix", "")
        keys = sorted(key for key in _OBJECTS if key.startswith(prefix) and key > after)
        size = min(_PAGE, int(query.get("max-keys", _PAGE)))
        found = "".join(
            f"<Contents><Key>{key}</Key><Generation>{_OBJECTS[key][0]}</Generation>"
            f"<LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            f"<ETag>{_etag(_OBJECTS[key][1])}</ETag><Size>{len(_OBJECTS[key][1])}</Size></Contents>"
            for key in keys[:size]
        )
        if len(keys) > size:
            found += f"<NextContinuationToken>{keys[size - 1]}</NextContinuationToken>"
        self._say(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    _Server(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
