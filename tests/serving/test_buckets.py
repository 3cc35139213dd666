"""`zarr-manifests serve` of a repository in a bucket. `make servers` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from served import get, serving_process
from servers import SERVERS, Server
from zarr_manifests.repository import resolved
from zarr_manifests.storage import from_url

pytestmark = pytest.mark.servers

WINDS = np.arange(120, dtype="f4").reshape(3, 4, 10)


def day(number: int) -> xr.Dataset:
    values = {"u": (("time", "lat", "lon"), WINDS[number : number + 1])}
    return xr.Dataset(values, {"time": [number], "lat": np.linspace(30, -30, 4)})


def options(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Options that lead to the server; the environment has its keys, and not where it is."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    endpoints = [name for name, value in server.environment.items() if value == server.endpoint]
    if server.url.startswith("s3:"):
        for name in (*endpoints, "AWS_ALLOW_HTTP"):
            monkeypatch.delenv(name)
        return {"endpoint": server.endpoint, "allow_http": True}
    return {"allow_http": True}


def as_words(how: Mapping[str, object]) -> list[str]:
    """The same options for the command line."""
    return [f"--option={name}={json.dumps(value).strip('"')}" for name, value in how.items()]


@pytest.mark.parametrize("name", SERVERS)
def test_a_repository_in_a_bucket_is_served(
    server_named: Callable[[str], Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_named(name)
    how = options(server, monkeypatch)
    place = f"{server.url}/served-{name}-{os.getpid()}"
    # The coordinate times lie inline, the others in packed objects.
    repo = zm.create(place, {"inline-chunk-bytes": 32}, storage_options=how)
    for number in (0, 1):
        append = {"append_dim": "time"} if number else {}
        zm.write(day(number), repo, message=f"day {number}", **append)
    first = resolved(repo, "main~1")
    with serving_process(place, *as_words(how)) as (url, _):
        with xr.open_zarr(f"{url}/zarr/main", chunks=None) as ds:
            np.testing.assert_array_equal(ds.u, WINDS[:2])
            assert ds.lat.values.tolist() == [30, 10, -10, -30]
        with xr.open_zarr(f"{url}/zarr/{first}", chunks=None) as ds:
            np.testing.assert_array_equal(ds.u, WINDS[:1])

        whole = get(url, f"/zarr/{first}/u/c/0/0/0")
        assert (whole.status, whole.headers["accept-ranges"]) == (200, "bytes")
        part = get(url, f"/zarr/{first}/u/c/0/0/0", Range="bytes=3-9")
        assert (part.status, part.body) == (206, whole.body[3:10])
        assert get(url, f"/zarr/{first}/u/c/7/0/0").status == 404

        slice_ = get(url, "/slice/main/u?index=1,:,2:5")
        length = int.from_bytes(slice_.body[:4], "little")
        header: dict[str, Any] = json.loads(slice_.body[4 : 4 + length])
        values = np.frombuffer(slice_.body[4 + length :], "<f4").reshape(header["shape"])
        np.testing.assert_array_equal(values, WINDS[1, :, 2:5])

        # What another process commits is there at once.
        zm.write(day(2), repo, message="day 2", append_dim="time")
        with xr.open_zarr(f"{url}/zarr/main", chunks=None) as ds:
            np.testing.assert_array_equal(ds.u, WINDS)
        second = resolved(repo, "main~1")
        for page in ("", f"tree/{second}", f"array/{second}/u", f"diff/{first}/{second}"):
            shown = get(url, f"/{page}")
            assert shown.status == 200, (page, shown.text)
        history = get(url, "/").text
        assert "day 2" in history
        assert place in history

        storage = from_url(place, **how)
        storage.delete_many([one.key for one in storage.list() if one.key.startswith("chunks/")])
        gone = get(url, f"/zarr/{second}/u/c/1/0/0")
        assert gone.status == 500, "a chunk that is gone is not one that was never written"


def test_a_bucket_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        with SERVERS["ministack"]() as server:
            how = options(server, monkeypatch) | {"retries": 0}
            place = f"{server.url}/served"
            repo = zm.create(place, {"inline-chunk-bytes": 0}, storage_options=how)
            zm.write(day(0), repo, message="day 0")
            url, _ = stack.enter_context(serving_process(place, *as_words(how)))
            assert get(url, "/zarr/main/zarr.json").status == 200
        for path in ("/", "/zarr/main/zarr.json", "/zarr/main/u/c/0/0/0", "/slice/main/u"):
            assert get(url, path).status == 503, path


def test_a_place_that_cannot_be_served_is_one_line(
    server_named: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_named("ministack")
    how = options(server, monkeypatch)
    command = [sys.executable, "-m", "zarr_manifests", "serve", f"{server.url}/nothing", "--port=0"]
    for more, code, said in (
        (as_words(how), 1, "no repository"),
        (as_words(how)[:1], 2, "allow_http"),
    ):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
