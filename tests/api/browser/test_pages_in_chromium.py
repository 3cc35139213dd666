"""The pages in a real browser: it draws what is stored, and fetches nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import pytest

from sample_site import HOSTILE, HOSTILE_ARRAY, Sample, Values, temperature

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    type Opening = Callable[..., Page]

pytestmark = pytest.mark.browser

SEQUENTIAL = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
DIVERGING = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
ONE_ONLY = (176, 110, 192, 255)


def colours(values: Values, low: float, high: float, stops: str) -> Values:
    """RGBA of each value; missing ones are transparent."""
    rgb = np.array([[*bytes.fromhex(stop)] for stop in stops.split()])
    places = np.linspace(0, len(rgb) - 1, 256)
    table = np.stack([np.interp(places, np.arange(len(rgb)), c) for c in rgb.T], axis=1)
    lost = np.isnan(values)
    part = np.where(lost, 0, (values - low) / (high - low))
    found = np.round(table[np.round(255 * part).astype(int)])
    found[lost] = 0
    return np.concatenate([found, np.where(lost, 0, 255)[..., None]], axis=-1)


def around_zero(values: Values) -> Values:
    most = np.nanmax(np.abs(values))
    return colours(values, -most, most, DIVERGING)


def pixels(canvas: Locator) -> Values:
    width, height, data = canvas.evaluate(
        """canvas => {
            const { width, height } = canvas;
            const copy = new OffscreenCanvas(width, height).getContext("2d");
            copy.drawImage(canvas, 0, 0);
            return [width, height, Array.from(copy.getImageData(0, 0, width, height).data)];
        }"""
    )
    return np.array(data).reshape(height, width, 4)


def drawn(page: Page, number: int = 0) -> Locator:
    """The canvas of a picture, when it is drawn."""
    page.locator("figure.plot").nth(number).locator(".axis-x span").first.wait_for()
    return page.locator("figure.plot .frame canvas").nth(number)


def is_drawn_as(canvas: Locator, wanted: Values) -> None:
    """A colour may be the next one of the table: the browser has the values as float32."""
    found = pixels(canvas)
    assert found.shape == wanted.shape
    assert (found[..., 3] == wanted[..., 3]).all()
    assert np.abs(found - wanted).max() <= 6
    assert (found == wanted).all(axis=-1).mean() > 0.97


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def test_clicks_lead_through_history_to_a_map_whose_pixels_are_the_values(
    open_page: Opening, sample: Sample
) -> None:
    page = open_page()
    assert page.locator(".commit").count() == len(sample.ids) + 1
    page.get_by_role("link", name="day 5", exact=True).click()
    assert sample.ids["day 5"] in page.url
    page.get_by_role("link", name="t", exact=True).click()
    canvas = drawn(page)
    is_drawn_as(canvas, around_zero(temperature(5)))  # stored from north to south
    assert texts(page, "figcaption") == ["Air temperature, time 2026-11-06"]
    assert texts(page, ".axis-y span:not(.sizer)")[:3] == ["90°S", "60°S", "30°S"]
    assert "120°W" in texts(page, ".axis-x span")
    assert texts(page, ".axis-name") == ["lon"]
    box = canvas.bounding_box()
    assert box is not None
    assert box["width"] / box["height"] == pytest.approx(360 / 185, rel=0.02)

    page.get_by_label("Position along time").fill("2")
    page.get_by_text("Air temperature, time 2026-11-03").wait_for()
    is_drawn_as(canvas, around_zero(temperature(2)))
    again = open_page(page.url[page.url.index("/array") :])  # the address says what is shown
    is_drawn_as(drawn(again), around_zero(temperature(2)))
    again.get_by_label("Down").select_option("time")
    again.get_by_text("Air temperature, lat 90°N").wait_for()
    one = np.stack([temperature(day)[0] for day in range(6)])
    is_drawn_as(drawn(again), colours(one, one.min(), one.max(), SEQUENTIAL))


def test_the_grid_says_which_chunks_there_are_and_which_the_commit_changed(
    open_page: Opening, sample: Sample
) -> None:
    page = open_page(f"/array/{sample.ids['correct day 3']}/air/t")
    drawn(page)
    cells = page.locator("table.chunks td")
    assert cells.evaluate_all("all => all.map(one => one.className)") == [
        *["stored-4"] * 3, "changed", "stored-4",
    ]  # fmt: skip
    assert texts(page, "figcaption") == ["Air temperature, time 2026-11-04"]  # what was changed
    cells.nth(3).hover()
    assert "chunk time 3: there" in texts(page, ".told")[0]
    assert "changed" in texts(page, ".told")[0]
    cells.nth(3).click()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "chunk time 1: there" in texts(page, ".told")[0]
    page.keyboard.press("Enter")
    page.get_by_text("Air temperature, time 2026-11-02").wait_for()
    page.keyboard.press("End")
    assert "chunk time 4" in texts(page, ".told")[0]
    assert page.locator("table.chunks td[tabindex='0']").count() == 1


def test_two_versions_are_compared_as_pictures(open_page: Opening, sample: Sample) -> None:
    page = open_page()
    page.get_by_label("Compare from: day 4").check()
    page.get_by_label("Compare to: correct day 3").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("link", name="/air/t", exact=True).click()
    assert page.url.endswith(f"/{sample.ids['day 4']}/{sample.ids['correct day 3']}/air/t")
    old, new = temperature(3), temperature(3)
    new[:10, :20] += 2
    new[10, 20] = 1
    most = np.nanmax(np.abs([old, new]))
    for number, values in enumerate((old, new)):
        is_drawn_as(drawn(page, number), colours(values, -most, most, DIVERGING))
    wanted = around_zero(new - old)
    wanted[10, 20] = ONE_ONLY
    is_drawn_as(drawn(page, 2), wanted)
    summary = texts(page, "figure.plot .readout")[2]
    assert summary.startswith("200 of 2,664 values shown differ, by 2 to 2")
    assert summary.endswith("; 1 are there in one version only.")
    classes = page.locator("table.chunks td").evaluate_all("all => all.map(one => one.className)")
    assert classes[3] == "changed"


def test_names_that_want_to_be_html_are_text(open_page: Opening, sample: Sample) -> None:
    page = open_page()
    assert "<b>winds" in page.locator("h1").inner_text()
    page.get_by_role("link", name=HOSTILE, exact=True).click()
    assert HOSTILE in page.locator("h1").inner_text()
    assert "\\x1b" in page.locator("main").inner_text()
    page.get_by_role("link", name=HOSTILE_ARRAY, exact=True).click()
    assert page.url.endswith(quote(HOSTILE_ARRAY))
    is_drawn_as(drawn(page), colours(np.eye(4), 0, 1, SEQUENTIAL))
    assert page.locator("h1").inner_text() == f"/{HOSTILE_ARRAY}"
    assert "\\u202e" in page.locator("main").inner_text()
    page.get_by_role("link", name="Compare with the version before").click()
    drawn(page)
    assert texts(page, ".bar-name") == ["<i>"]
    assert page.locator("main i, main b, main img").count() == 0
    assert page.locator("script:not([src])").count() == 0
    for version in ("odd", "fix:day-3", "v1", "main~1"):
        assert page.request.get(f"{page.url.split('/diff')[0]}/tree/{quote(version)}").status == 200
