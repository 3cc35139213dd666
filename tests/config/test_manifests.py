"""Sets, rules, splits and what is preloaded: valid or not there at all; what matches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.config import (
    ChunkManifests,
    Interval,
    ManifestSet,
    Preload,
    Rule,
    Split,
)
from zarr_manifests.config.path_regex import PathSet
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError

LAST = ManifestSet("default", 1_000_000, None, None, None)


def faults(build: Callable[[], Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value.problems


# --- intervals and rules --------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_intervals_are_closed(low: int, high: int, number: int) -> None:
    if low <= high:
        assert (number in Interval(low, high)) == (low <= number <= high)
    else:
        assert faults(lambda: Interval(low, high)) == (
            f"[{low}, {high}] is empty; give the smaller number first",
        )
    assert (number in Interval(low)) == (low <= number)
    assert (number in Interval(None, high)) == (number <= high)
    assert number in Interval()


@pytest.mark.parametrize("end", [-1, 10**12 + 1, True, 1.0, "1"])
def test_ends_are_numbers(end: Any) -> None:
    assert len(faults(lambda: Interval(end, end))) == 2


@pytest.mark.parametrize(
    ("regex", "path", "matches"),
    [
        (".*/(latitude|longitude|time)", "/air/time", True),
        (".*/(latitude|longitude|time)", "/time", True),
        (".*/(latitude|longitude|time)", "/air/time/bounds", False),
        (".*/(latitude|longitude|time)", "/air/daytime", False),
        ("/air", "/air/t", False),
        ("air/t", "/air/t", False),
        ("/(air|air/t)", "/air/t", True),
        (".*", "/", True),
        (".*", "/new\nline", True),
        (r"/\d{4}/t", "/1999/t", True),
        ("/été", "/été", True),
        (r"/\pL+", "/été", True),
        ("(?i)/AIR", "/air", True),
        ("(a+)+$", "a" * 5_000 + "!", False),
        ("(.*)*(.*)*(.*)*x", "/" * 5_000, False),
        ("(/|//|///)*", "/" * 5_000 + "-", False),
    ],
)
def test_a_path_is_matched_as_a_whole_in_linear_time(regex: str, path: str, matches: bool) -> None:
    assert Rule("default", regex).matches(path, 0, 0) is matches
    assert Split(regex, ((0, 1),)).matches(path) is matches
    assert Preload(arrays=("/never", regex)).matches(path) is matches


def test_conditions_of_a_rule_are_anded() -> None:
    rule = Rule("default", "/a", Interval(5, 9), Interval(0, 3))
    assert rule.matches("/a", 5, 3)
    assert not rule.matches("/b", 5, 3)
    assert not rule.matches("/a", 4, 3)
    assert not rule.matches("/a", 5, 4)
    assert Rule("default").matches("/anything", 10**9, 0)


def test_rules_that_are_too_many_for_one_automaton_are_tried_one_by_one() -> None:
    """Each is within its bounds, all together are not: they match what they match alone."""
    paths = [f"/{i % 50}/(?:[a-z]{{1,30}}[0-9]{{1,30}}){{{2 + i // 50},16}}" for i in range(150)]
    together = re2.Set.FullMatchSet()
    for path in paths:
        together.Add(path)
    with pytest.raises(re2.error):
        together.Compile()
    sets = tuple(ManifestSet(f"s{i}") for i in range(50))
    rules = tuple(Rule(f"s{i % 50}", path) for i, path in enumerate(paths))
    splits = tuple(Split(path, ((0, i + 1),)) for i, path in enumerate(paths))
    planned = ChunkManifests((*sets, LAST), rules, splits)
    found = []
    for path in ("/7/a1b2", "/7/a1b2c3", "/49/ab12cd34ef56", "/49/a1", "/50/a1b2"):
        one, rule = planned.set_for(path, 1, 1)
        split = planned.split_for(path)
        found.append((one.name, rule, split))
        first = next((r for r in rules if r.matches(path, 1, 1)), None)
        assert (rule, split) == (first, next((s for s in splits if s.matches(path)), None))
    assert [name for name, _, _ in found] == ["s7", "s7", "s49", "default", "default"]
    few = PathSet(paths[:3] + paths[50:53], memory_bytes=1)
    assert [few.matching(path) for path in ("/1/a1b2", "/1/a1b2c3", "/9/a1b2")] == [[1], [1, 4], []]


@pytest.mark.parametrize(
    ("regex", "fault"),
    [
        ("(", "missing \\)"),
        ("(?=x)", "without lookaround and backreferences"),
        (r"(a)\1", "without lookaround and backreferences"),
        ("(((a{30}){30}){30}){30}", "bad repetition|invalid repetition"),
        (r"\pL{100}", "too large"),
        ("a" * 1_001, "has 1001 characters, 1000 are allowed"),
        ("\ud800", "not Unicode"),
        (5, "expected a regular expression, got 5; quote it"),
    ],
)
def test_what_no_automaton_can_match_or_is_too_large_is_refused(regex: Any, fault: str) -> None:
    builds = (
        lambda: Rule("default", regex),
        lambda: Split(regex, ((0, 1),)),
        lambda: Preload(arrays=(regex,)),
    )
    for build, place in zip(builds, ("path", "path", "arrays[0].path"), strict=True):
        (problem,) = faults(build)
        assert problem.startswith(f"{place}: ")
        with pytest.raises(ConfigError, match=fault):
            build()


def test_a_compiled_regex_is_no_part_of_a_value() -> None:
    used, fresh = Rule("default", "/a"), Rule("default", "/a")
    assert used.matches("/a", 1, 1)
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert pickle.dumps(used) == pickle.dumps(fresh)
    assert pickle.loads(pickle.dumps(used)) == fresh


# --- sets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "places"),
    [
        (lambda: ManifestSet("a", 1, 1), ["arrays-per-manifest"]),
        (lambda: ManifestSet("a", 0, None, "", 0), ["max-manifest-size", "overflow-to", "cardi"]),
        (lambda: ManifestSet("a", overflow_to=None), ["overflow-to"]),
        (lambda: ManifestSet("default"), ["overflow-to", "cardinality"]),
        (lambda: ManifestSet("default", overflow_to=None), ["cardinality"]),
        (lambda: ManifestSet("-a"), ["name"]),
        (lambda: ManifestSet("a" * 65), ["name"]),
        (lambda: ManifestSet(None), ["name"]),
        (lambda: ManifestSet("a", True), ["max-manifest-size"]),
        (lambda: Split("/a", ()), ["along"]),
        (lambda: Split("/a", (("t", 0), (-1, 5), ("", 5), (True, 1))), ["along.t"] + ["along"] * 3),
        (lambda: Split("/a", (("t", 1), ("t", 2))), ["along"]),
        (lambda: Split("/a", {"t": 1}), ["along"]),
        (lambda: Split("/a", (("\ud800", 1),)), ["along"]),
        (lambda: Preload(-1, -1, "a", "b", ("/",)), ["max-", "max-", "arr", "bran", "tags[0]"]),
        (lambda: ChunkManifests(5, 5, 5, 5), ["sets", "rules", "splitting", "preload"]),
        (lambda: ChunkManifests(("a",), (5,)), ["sets[0]", "rules[0]"]),
        (lambda: ChunkManifests((LAST,) * 65), ["sets"]),
        (lambda: ChunkManifests(rules=(Rule("default"),) * 257), ["rules"]),
    ],
)
def test_they_cannot_be_built_invalid(build: Callable[[], Any], places: list[str]) -> None:
    found = faults(build)
    assert [p.startswith(place) for p, place in zip(found, places, strict=True)] == [True] * len(
        places
    ), found


def test_default_is_added_where_it_is_missing() -> None:
    assert ChunkManifests((ManifestSet("a"),)).sets == (ManifestSet("a"), LAST)
    assert ChunkManifests(()).sets == (LAST,)
    own = ManifestSet("default", None, 3, None, None)
    assert ChunkManifests((own, ManifestSet("a"))).sets == (own, ManifestSet("a"))
    assert ChunkManifests((own,)).default_set == own


def test_the_default_rule_needs_its_set() -> None:
    assert ChunkManifests((ManifestSet("a"),)).rules == ()
    assert ChunkManifests((ManifestSet("coordinates", 3),)).rules == ChunkManifests().rules
    same = Rule("coordinates", ".*", Interval(0, 5_000))
    assert faults(lambda: ChunkManifests((ManifestSet("a"),), (same,))) == (
        "rules[0].target: there is no set 'coordinates'; known are a, default",
    )


def test_names_lead_somewhere_and_not_in_a_circle() -> None:
    sets = (
        ManifestSet("one", overflow_to="two"),
        ManifestSet("in", overflow_to="one"),
        ManifestSet("two", overflow_to="three"),
        ManifestSet("three", overflow_to="one"),
        ManifestSet("self", overflow_to="self"),
        ManifestSet("lost", overflow_to="tow"),
        ManifestSet("one"),
    )
    circle, mend = "the sets overflow in a circle", "let one overflow to default"
    assert faults(lambda: ChunkManifests(sets, (Rule("default"), Rule("selfs")))) == (
        "sets[6].one: another set has this name; choose a new one",
        f"sets[0].one.overflow-to: {circle} (one -> two -> three -> one); {mend}",
        f"sets[4].self.overflow-to: {circle} (self -> self); {mend}",
        "sets[5].lost.overflow-to: there is no set 'tow'; did you mean two?",
        "rules[1].target: there is no set 'selfs'; did you mean self?",
    )


@given(st.data())
def test_the_order_of_sets(data: st.DataObject) -> None:
    """Each after those that overflow to it, and as far as that allows in the order they have."""
    count = data.draw(st.integers(0, 6))
    hidden = [f"s{i}" for i in range(count)]
    sets = [
        ManifestSet(name, overflow_to=data.draw(st.sampled_from([*hidden[i + 1 :], "default"])))
        for i, name in enumerate(hidden)
    ]
    planned = ChunkManifests(tuple(data.draw(st.permutations([*sets, LAST]))))
    ordered = planned.ordered_sets()
    place = {one.name: i for i, one in enumerate(ordered)}
    assert sorted(place) == sorted(one.name for one in planned.sets)
    assert all(place[one.name] < place[one.overflow_to] for one in ordered if one.overflow_to)
    assert ordered[-1] == LAST
    for i, one in enumerate(ordered):  # of those that may come next, the first in the list does
        rest = ordered[i:]
        free = [s for s in rest if s.name not in {other.overflow_to for other in rest}]
        assert one == min(free, key=planned.sets.index)


def test_the_first_rule_that_matches_wins() -> None:
    rules = (
        Rule("a", "/x/.*"),
        Rule("b", None, Interval(0, 9)),
        Rule("a", None, None, Interval(0)),
    )
    planned = ChunkManifests((ManifestSet("b"), ManifestSet("a")), rules[:2])
    assert planned.set_for("/x/y", 5, 5) == (ManifestSet("a"), rules[0])
    assert planned.set_for("/y", 5, 5) == (ManifestSet("b"), rules[1])
    assert planned.set_for("/y", 10, 5) == (LAST, None)
    every = ChunkManifests((ManifestSet("b"), ManifestSet("a")), rules)
    assert every.set_for("/y", 10, 5) == (ManifestSet("a"), rules[2])


def test_what_is_no_text_is_no_path() -> None:
    with pytest.raises(InvalidArgumentError, match="not valid Unicode text"):
        Rule("default", "/a.*").matches("\ud800", 1, 1)
    with pytest.raises(InvalidArgumentError, match="not valid Unicode text"):
        Split("/a", (("x", 1),)).matches("\ud800")


def test_the_first_split_that_matches_wins() -> None:
    splits = (Split("/a/.*", (("time", 5),)), Split(".*", ((0, 3), ("x", 4))))
    planned = ChunkManifests(splitting=splits)
    assert planned.split_for("/a/b") == splits[0]
    assert planned.split_for("/b") == splits[1]
    assert ChunkManifests(splitting=splits[:1]).split_for("/b") is None
    assert ChunkManifests(splitting=None).split_for("/b") is None


def test_many_arrays_are_sorted_by_few_compilations() -> None:
    """A planner asks for each of very many arrays; a regex is compiled once."""
    from zarr_manifests.config import path_regex

    planned = ChunkManifests(
        (ManifestSet("a"),), tuple(Rule("a", f"/only-here-{i}/.*") for i in range(20))
    )
    before = path_regex._compiled.cache_info().misses
    for i in range(1_000):
        planned.set_for(f"/g/{i}", 1, 1)
    assert path_regex._compiled.cache_info().misses == before
