"""Pages without a browser: odd arrays, odd requests, and what they must never hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zarr

import zarr_manifests as zm
from sample_site import HOSTILE, HOSTILE_ARRAY, Sample, make_sample
from served import get, serving
from zarr_manifests.repository import resolved


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(str(tmp_path_factory.mktemp("pages") / "<b>winds"))


@pytest.fixture(scope="module")
def url(sample: Sample) -> Iterator[str]:
    with serving(sample.repo) as url:
        yield url


def test_no_page_has_a_script_or_style_of_its_own_or_an_address_elsewhere(
    sample: Sample, url: str
) -> None:
    odd = resolved(sample.repo, "odd")
    for path in (
        "/",
        f"/tree/{odd}",
        f"/tree/{odd}?group=air",
        f"/array/{odd}/{quote(HOSTILE_ARRAY)}",
        f"/array/{odd}/air/t",
        f"/diff/{sample.ids['three days']}/{odd}",
        f"/diff/{sample.ids['three days']}/{odd}/air/t",
        "/tree/%3Cscript%3E",
    ):
        answer = get(url, path)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        text = answer.text
        assert HOSTILE not in text
        assert "\u202e" not in text
        assert "<img" not in text
        assert re.findall(r"<script(?! src=\"/static/page\.js\" defer></script>)", text) == []
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=(?!alert)|javascript:", text)
        assert re.findall(r'(?:href|src|action)="(?![/#])[^"]*"', text) == []
    assert all("http" not in line for line in static_lines() if "www.w3.org" not in line)


def static_lines() -> list[str]:
    folder = Path(zm.__file__).parent / "serving" / "static"
    return [line for path in folder.iterdir() for line in path.read_text("utf-8").splitlines()]


def test_arrays_without_values_to_draw_have_a_page_too(url: str, sample: Sample) -> None:
    def write(group: zarr.Group) -> None:
        group.create_array("odd/empty", shape=(0, 3), chunks=(1, 1), dtype="f4")
        text: Any = group.create_array("odd/text", shape=(2,), chunks=(1,), dtype=str)
        text[:] = ["a", "b"]
        group.create_array("odd/long", shape=(2,) * 7, chunks=(1,) * 7, dtype="i1")

    sample.repo.create_branch("shapes")
    sample.commit("odd shapes", write, "shapes")
    at = sample.ids["odd shapes"]
    for name, words in (
        ("empty", "The array has no values"),
        ("text", "2 of 2 chunks"),
        ("long", "0 of 128 chunks"),
    ):
        answer = get(url, f"/array/{at}/odd/{name}")
        assert answer.status == 200, name
        assert words in answer.text, name


def test_a_commit_after_expired_ones_has_a_page(tmp_path: Path) -> None:
    sample = make_sample(str(tmp_path / "expired"))
    for name in ("odd", "fix/day-3"):
        sample.repo.delete_branch(name)
    sample.repo.delete_tag("v1")
    sample.repo.expire_snapshots(keep_last=1)
    sample.repo.garbage_collect(timedelta(0))
    with serving(zm.open(str(tmp_path / "expired"))) as url:
        answer = get(url, f"/array/{sample.ids['day 5']}/air/t")
        assert answer.status == 200
        assert "6 of 6 chunks" in answer.text
        assert get(url, "/").text.count('class="commit"') == 1
        assert get(url, f"/tree/{sample.ids['day 4']}").status == 410
        gone = get(url, f"/diff/{sample.ids['day 4']}/{sample.ids['day 5']}")
        assert (gone.status, "No longer here" in gone.text) == (410, True)


def test_versions_are_compared_in_both_directions(url: str, sample: Sample) -> None:
    old, new = sample.ids["three days"], sample.ids["day 5"]
    answer = get(url, f"/compare?old={new}&new=v1")
    assert (answer.status, answer.headers["location"]) == (303, f"/diff/{new}/{old}")
    assert "/air/t" in get(url, answer.headers["location"]).text
    back = get(url, f"/diff/{new}/{old}/air/t")
    assert back.status == 200
    assert "[6, 37, 72]" in back.text.replace("&#34;", '"')
    assert "Nothing: both versions" in get(url, f"/diff/{old}/{old}").text


def test_odd_requests_are_answered_with_what_is_there(url: str, sample: Sample) -> None:
    for query in ("rows=1", "rows=x", "rows=-5", "rows=99999999999999999999", "rows=%00"):
        assert get(url, f"/?{query}").status == 200
    chosen = dict(re.findall(r'name="(old|new)" value="([^"]+)" checked', get(url, "/").text))
    newest = [info.id for info in sample.repo.ancestry(chosen["new"], limit=2)]
    assert newest == [chosen["new"], chosen["old"]]
    whole, one = (get(url, f"/?rows={rows}").text.count('class="commit"') for rows in (60, 1))
    assert whole > one == 1
    assert "rows=4" in get(url, "/?rows=1").text
    for query in ("vertical=9", "horizontal=1&vertical=1", "at0=99", "at0=a"):
        assert get(url, f"/array/main/air/t?{query}").status == 200
