"""Many readers at once, slow ones among them: no error, and no growth of the server's memory."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from served import Answer, get, serving_process

READERS, ROUNDS, REQUESTS = 16, 4, 12
STALLED = 60
MIB = 1024**2
LARGE_BYTES = 12 * MIB
GROWTH_BYTES = 128 * MIB
ROOM_BYTES, PIECE_BYTES = 256 * MIB, 8 * MIB
PEAK_BYTES = 640 * MIB
"""More than the room for chunks and what a server has without readers."""


def memory(pid: int, name: str) -> int:
    """Bytes that a process has in memory: now (VmRSS), or at most so far (VmHWM)."""
    text = Path(f"/proc/{pid}/status").read_text()
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found) * 1024


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_many_readers_get_everything_and_the_server_does_not_grow(tmp_path: Path) -> None:
    place = tmp_path / "repository"
    repo = zm.create(place)
    data = np.random.default_rng(7).integers(0, 256, (64, 200_000), dtype="u1")
    large = np.random.default_rng(8).integers(0, 256, LARGE_BYTES, dtype="u1")
    with repo.transaction(message="chunks") as store:
        root = zarr.create_group(store)
        a = root.create_array(
            "a", shape=data.shape, chunks=(1, 200_000), dtype="u1", compressors=None
        )
        a[:60] = data[:60]
        root.create_array(
            "large", shape=large.shape, chunks=large.shape, dtype="u1", compressors=None
        )[:] = large
    wrong: list[tuple[str, int]] = []

    def check(path: str, answer: Answer, status: int, body: bytes | None = None) -> None:
        if answer.status != status or (body is not None and answer.body != body):
            wrong.append((path, answer.status))

    def read(url: str, who: int) -> None:
        for number in range(REQUESTS):
            row = (7 * who + number) % 64
            path, there = f"/zarr/main/a/c/{row}/0", row < 60
            whole = data[row].tobytes()
            check(path, get(url, path), 200 if there else 404, whole if there else None)
            if there:
                part = get(url, path, Range="bytes=1000-1999")
                check(path, part, 206, whole[1000:2000])
                known = {"If_None_Match": part.headers["etag"]}
                check(path, get(url, path, **known), 304, b"")
            for other in ("/zarr/main/zarr.json", "/zarr/main/a/c/", "/"):
                check(other, get(url, other), 200)
            check("slice", get(url, f"/slice/main/a?index={row},:"), 200)
        check("large", get(url, "/zarr/main/large/c/0"), 200, large.tobytes())

    with serving_process(str(place)) as (url, pid):
        sizes = []
        for _ in range(ROUNDS):
            threads = [threading.Thread(target=read, args=(url, n)) for n in range(READERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sizes.append(memory(pid, "VmRSS"))
        assert wrong == []
        assert sizes[-1] - sizes[1] < GROWTH_BYTES, sizes

        host, port = url.removeprefix("http://").split(":")
        asking = f"GET /zarr/main/large/c/0 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        with contextlib.ExitStack() as stalled:
            waiting = []
            for _ in range(STALLED):
                one = stalled.enter_context(socket.create_connection((host, int(port))))
                one.sendall(asking)
                waiting.append(one)
            answered = 0
            while begun := select.select(waiting, [], [], 2)[0]:
                answered += len(begun)
                waiting = [one for one in waiting if one not in begun]
            assert 0 < answered <= ROOM_BYTES // PIECE_BYTES, "the others wait for room"
            assert get(url, "/zarr/main/zarr.json").status == 200, "small answers do not wait"
            assert get(url, "/slice/main/a?index=0,:").status == 200
        assert get(url, "/zarr/main/large/c/0").body == large.tobytes(), "the room is free again"
        most = memory(pid, "VmHWM")
    assert most < PEAK_BYTES, (sizes, most)
