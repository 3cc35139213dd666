"""Datasets, arrays and trees written into open sessions and forks: several writes, one commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from looking import opened
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
)
from zarr_manifests.storage.memory import MemoryStorage


def days(start: int, stop: int, factor: float = 1.0) -> xr.Dataset:
    time = np.arange(start, stop)
    values = time[:, None] * factor * 10.0 + np.arange(3)
    return xr.Dataset({"t": (("time", "x"), values)}, {"time": time, "x": [0, 1, 2]})


def now(session: zm.Session, group: str | None = None) -> xr.Dataset:
    return xr.open_zarr(session.store, group=group, consolidated=False).load()


@pytest.fixture
def repo() -> zm.Repository:
    return zm.create(MemoryStorage())


# --- sessions --------------------------------------------------------------------------------


OPERATION = st.one_of(
    st.tuples(
        st.sampled_from(["error", "error", "skip", "replace"]),
        st.integers(0, 12),
        st.integers(1, 4),
    ),
    st.tuples(st.just("region"), st.integers(0, 8), st.integers(1, 4)),
    st.sampled_from([("create", 0, 4), ("replace all", 2, 3)]),
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(OPERATION, st.sampled_from(["", "g"]), st.sampled_from([1.0, 2.0])),
        min_size=1,
        max_size=6,
    )
)
def test_one_commit_has_what_as_many_commits_have(
    operations: list[tuple[tuple[str, int, int], str, float]],
) -> None:
    """The same calls of `write` and of `to_session` do the same, and refuse the same."""
    many, one = (zm.create(MemoryStorage()) for _ in range(2))
    session = one.writable_session()
    for (what, start, count), group, factor in operations:
        ds, how = days(start, start + count, factor), dict[str, Any](group=group)
        match what:
            case "error" | "skip" | "replace":
                how |= {"append_dim": "time", "on_existing": what}
            case "region":
                ds = ds.drop_vars(["time", "x"])
                how |= {"region": {"time": slice(start, start + count)}}
            case "replace all":
                how |= {"mode": "w"}
        outcomes = [
            outcome(partial(zm.write, ds, many, message=what, **how)),
            outcome(partial(zm.to_session, ds, session, **how)),
        ]
        assert outcomes[0] == outcomes[1]
        if outcomes[0] == "done":
            xr.testing.assert_identical(now(session, group), opened(many, group=group))
    if session.status():
        session.commit("all of it")


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (ManifestsError, ValueError) as error:
        return type(error).__name__
    return "done"


# --- others that come first ------------------------------------------------------------------


@pytest.mark.parametrize("rebased", [False, True])
def test_appends_land_behind_those_of_others(repo: zm.Repository, rebased: bool) -> None:
    zm.write(days(0, 2), repo, message="create", encoding={"t": {"chunks": (1, 3)}})
    session = repo.writable_session(append_dim="time")
    zm.to_session(days(4, 6), session, append_dim="time")
    zm.write(days(2, 4), repo, message="of others", append_dim="time")
    if rebased:
        session.rebase()
    session.commit("behind")
    xr.testing.assert_identical(opened(repo), days(0, 6))


@pytest.mark.parametrize(("twice", "rebased"), [(False, False), (False, True), (True, False)])
def test_labels_that_others_have_written_are_not_written_again(
    repo: zm.Repository, twice: bool, rebased: bool
) -> None:
    """Though the append itself could be put behind theirs.

    A second append of a session was planned with labels that the tip does not have; so it refuses
    whatever others have appended.
    """
    own, others = ((5, 6), (2, 3)) if twice else ((3, 5), (4, 6))
    zm.write(days(0, 2), repo, message="create", encoding={"t": {"chunks": (1, 3)}})
    session = repo.writable_session(append_dim="time")
    zm.to_session(days(*own), session, append_dim="time", on_existing="skip")
    if twice:
        zm.to_session(days(6, 8), session, append_dim="time", on_existing="skip")
    zm.write(days(*others), repo, message="of others", append_dim="time")
    with pytest.raises(ConflictError, match=r"/time: read: .*labels"):
        session.rebase() if rebased else session.commit("late")
    session.discard_changes()
    session.rebase()
    zarr.create_group(session.store, path="air")
    session.commit("something else")
    assert opened(repo).time.values.tolist() == [0, 1, *range(*others)]


# --- forks, and what is refused --------------------------------------------------------------


def test_what_is_no_open_session_is_refused(repo: zm.Repository) -> None:
    ds, session = days(0, 1), repo.writable_session()
    for wrong in (session.store, repo, "path"):
        with pytest.raises(InvalidArgumentError, match=type(wrong).__name__):
            zm.to_session(ds, wrong)
    with pytest.raises(ReadOnlyError):
        zm.to_session(ds, repo.readonly_session())
    with pytest.raises(InvalidArgumentError, match="check"):
        zm.to_session(ds, session, check="all")
    session.close()
    with pytest.raises(SessionClosedError):
        zm.to_session(ds, session)


# --- arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t", None, "x"])
def test_an_array_is_read_back_as_it_was(repo: zm.Repository, name: str | None) -> None:
    array = days(0, 4).t.rename(name)
    zm.write(array.isel(time=slice(0, 2)), repo, message="create")
    zm.write(array.isel(time=slice(2, 4)), repo, message="append", append_dim="time")
    found = xr.open_dataarray(repo, engine="zarr_manifests")
    xr.testing.assert_identical(found.load(), array)
    plain = zarr.storage.MemoryStore()
    array.to_zarr(plain, consolidated=False)
    assert {*opened(repo).variables} == {*xr.open_zarr(plain, consolidated=False).variables}


# --- trees -----------------------------------------------------------------------------------


def tree(start: int, stop: int) -> xr.DataTree:
    """Labels in the root that a node inherits, labels of its own, and a node without time."""
    root = days(start, stop)[["time"]].assign_attrs(title="models")
    return xr.DataTree.from_dict(
        {
            "/": root,
            "/era5": days(start, stop)[["t"]].drop_vars("time"),
            "/gfs/daily": days(start, stop, 2).assign_attrs(run="00"),
            "/land": xr.Dataset({"mask": ("y", [True, False])}),
            "/empty": xr.Dataset(),
        }
    )


def tree_of(repo: zm.Repository) -> xr.DataTree:
    return xr.open_datatree(repo, engine="zarr_manifests").load()


def test_a_tree_is_read_back_as_it_was(repo: zm.Repository) -> None:
    given = tree(0, 4)
    given["gfs/daily/t"].encoding = {"chunks": (1, 3)}
    given["era5/t"].encoding = {"dtype": "f4"}
    zm.write(given, repo, message="create")
    found = tree_of(repo)
    expected = tree(0, 4)
    expected["era5/t"] = expected["era5/t"].astype("f4")
    xr.testing.assert_identical(found, expected)
    assert found["gfs/daily/t"].encoding["chunks"] == (1, 3)
    assert [info.message for info in repo.ancestry()] == ["create", "create repository"]
    with pytest.raises(AlreadyExistsError, match=r"group '/' of .* has data already"):
        zm.write(tree(0, 4), repo, message="again")
    with pytest.raises(InvalidArgumentError, match="encoding are of one group"):
        zm.write(tree(0, 4), repo, mode="w", encoding={"era5": {}})


def test_a_tree_is_appended_to(repo: zm.Repository) -> None:
    how: dict[str, Any] = {"message": "append", "append_dim": "time"}
    zm.write(tree(0, 2), repo, **how)
    before = zm.write(tree(2, 4), repo, **how)
    xr.testing.assert_identical(tree_of(repo), tree(0, 4))
    with pytest.raises(AlreadyExistsError, match="are there already"):
        zm.write(tree(2, 4), repo, **how)
    with pytest.raises(InvalidArgumentError, match="group '/era5' has no coordinate"):
        zm.write(tree(2, 4), repo, **how, on_existing="skip")
    own = tree(2, 6).drop_nodes("era5")
    with pytest.raises(InvalidArgumentError, match="append_dim 'lat' is not a dimension"):
        zm.write(own, repo, message="append", append_dim="lat")
    assert repo.list_branches()["main"] == before


def test_a_region_is_a_part_of_one_group(repo: zm.Repository) -> None:
    tree = xr.DataTree.from_dict({"/a": days(0, 4)})
    zm.write(tree, repo)
    for region in ("auto", {"time": slice(1, 3)}):
        with pytest.raises(InvalidArgumentError, match="write the tree's nodes one by one"):
            zm.write(tree, repo, region=region)


def test_what_is_no_data_of_xarray_is_refused(repo: zm.Repository) -> None:
    for wrong in (None, [1], np.arange(3)):
        with pytest.raises(InvalidArgumentError, match="Dataset, a DataArray or a DataTree"):
            zm.write(wrong, repo, message="wrong")


@pytest.mark.parametrize("name", ["a/b", "zarr.json", "..", "", "a\\b", 1])
def test_names_that_nobody_would_find_are_refused(repo: zm.Repository, name: Any) -> None:
    ds = xr.Dataset({name: ("x", [1.0]), "b": ("x", [2.0])})
    with pytest.raises(InvalidArgumentError, match="cannot be the name of an array"):
        zm.write(ds, repo, message="write")
    assert len(list(repo.ancestry())) == 1
    with pytest.raises(InvalidArgumentError, match="a group cannot have the path"):
        zm.write(xr.DataTree(children={"..": xr.DataTree(days(0, 1))}), repo)
