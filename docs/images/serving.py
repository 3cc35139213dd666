"""Draws `serving.png`: a page of `zarr-manifests serve`, as Chromium shows it.

Run it with `python docs/images/serving.py`, where Playwright and Chromium are installed.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from io import BytesIO
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

import zarr_manifests as zm
from zarr_manifests.demo import open_winds
from zarr_manifests.serving import create_app

_SIZE = {"width": 1000, "height": 1190}


def repository() -> zm.Repository:
    """The demo's winds: six years, then month after month, and a correction on a branch."""
    repo = zm.create("memory://winds")
    winds = open_winds()
    zm.write(
        winds.isel(time=slice(0, 72)),
        repo,
        message="Wind of 1982 to 1987",
        encoding={name: {"chunks": (1, 37, 72)} for name in winds.data_vars},
    )
    repo.create_tag("first-years")
    for at in range(72, 84):
        month = winds.isel(time=slice(at, at + 1))
        text = month.time.dt.strftime("%B %Y").item()
        zm.write(month, repo, message=f"Wind of {text}", append_dim="time")
        if at == 78:
            repo.create_branch("fix/july")
    with repo.transaction("fix/july", message="Correct the north of July 1988") as store:
        import zarr

        array = zarr.open_array(store, path="u")
        array[78, 26:] = array[78, 26:] * 1.1
    return repo


def shoot(to: Path, scheme: str = "light") -> None:
    """Save a picture of the page of an array."""
    repo = repository()
    config = uvicorn.Config(create_app(repo), port=0, log_level="warning", lifespan="off")
    server, listener = uvicorn.Server(config), config.bind_socket()
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        page = browser.new_page(viewport=_SIZE, color_scheme=scheme)
        page.goto(f"{url}/array/{repo.list_branches()['main']}/u")
        page.locator(".axis-x span").first.wait_for()
        picture = Image.open(BytesIO(page.screenshot()))
        browser.close()
    server.should_exit = True
    picture.convert("RGB").quantize(200).save(to, optimize=True)


if __name__ == "__main__":
    shoot(Path(__file__).with_name("serving.png"), *sys.argv[1:])
