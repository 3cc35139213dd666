"""A server of a sample, and Chromium to look at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from missing import missing
from sample_site import Sample, make_sample
from served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(str(tmp_path_factory.mktemp("site") / "<b>winds"))


@pytest.fixture(scope="session")
def site(sample: Sample) -> Iterator[str]:
    with serving(sample.repo) as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed; `make browser` installs it")
    path = shutil.which("chromium")
    if path is None:
        missing("there is no chromium; the package of that name has it")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser, site: str) -> Iterator[Callable[..., Page]]:
    """Opens a page of the site. None may complain in its console, or ask anything elsewhere."""
    troubles: list[str] = []
    contexts = []

    def opened(path: str = "/", **options: Any) -> Page:
        contexts.append(chromium.new_context(viewport={"width": 1200, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)  # the machine may be busy
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda asked: asked.url.startswith(f"{site}/") or troubles.append(asked.url),
        )
        page.goto(site + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []
