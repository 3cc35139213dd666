"""Datasets, arrays and trees written into open sessions and forks: several writes, one commit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from zarr_manifests.error_cases import UnmergedForksError
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    ReadOnlyError,
    SessionClosedError,
)
from zarr_manifests.storage.memory import MemoryStorage


def days(start: int, stop: int, factor: float = 1.0) -> xr.Dataset:
    time = np.arange(start, stop)
    values = time[:, None] * factor * 10.0 + np.arange(3)
    return xr.Dataset({"t": (("time", "x"), values)}, {"time": time, "x": [0, 1, 2]})


def head(repo: Any, group: str | None = None) -> xr.Dataset:
    return xr.open_dataset(repo, engine="zarr_manifests", group=group).load()


def now(session: zm.Session, group: str | None = None) -> xr.Dataset:
    return xr.open_zarr(session.store, group=group, consolidated=False).load()


@pytest.fixture
def repo() -> zm.Repository:
    return zm.create(MemoryStorage())


# --- sessions --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["synchronous", "threads", "processes"])
def test_several_datasets_are_one_commit(tmp_path: Any, scheduler: str) -> None:
    repo = zm.create(tmp_path)
    with repo.writable_session() as session:
        for number, group in enumerate(("a", "b")):
            ds = days(0, 4, number + 1).chunk(time=2)
            zm.to_session(ds, session, group=group, scheduler=scheduler)
        zm.to_session(
            days(4, 6).chunk(time=2), session, group="a", append_dim="time", scheduler=scheduler
        )
        part = days(0, 2, -1).drop_vars("x").chunk(time=2)
        zm.to_session(part, session, group="b", region="auto", scheduler=scheduler)
        assert len([*repo.ancestry()]) == 1
        session.commit("two groups")
    assert [info.message for info in repo.ancestry()] == ["two groups", "create repository"]
    xr.testing.assert_identical(head(repo, "a"), days(0, 6))
    expected = days(0, 4, 2)
    expected["t"][:2] = days(0, 2, -1).t
    xr.testing.assert_identical(head(repo, "b"), expected)
    assert len(repo.readonly_session().chunk_refs("a/t", statistics=True)) == 3


OPERATION = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 12), st.integers(1, 4)),
    st.tuples(st.just("append"), st.integers(0, 12), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(0, 12), st.integers(1, 4)),
    st.tuples(st.just("replace"), st.integers(0, 12), st.integers(1, 4)),
    st.tuples(st.just("region"), st.integers(0, 8), st.integers(1, 4)),
    st.tuples(st.just("units"), st.integers(0, 12), st.integers(1, 3)),
    st.sampled_from([("create", 0, 4), ("replace all", 2, 3), ("more", 0, 1)]),
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
        ds, how = days(start, start + count, factor), {"group": group}
        match what:
            case "append":
                how |= {"append_dim": "time"}
            case "skip" | "replace":
                how |= {"append_dim": "time", "on_existing": what}
            case "region":
                ds, how = (
                    ds.drop_vars(["time", "x"]),
                    how | {"region": {"time": slice(start, start + count)}},
                )
            case "units":
                ds.t.attrs["units"] = "K"
                how |= {"append_dim": "time"}
            case "replace all":
                how |= {"mode": "w"}
            case "more":
                ds, how = ds[["t"]].rename(t="u").isel(time=0, drop=True), how | {"mode": "a"}
        outcomes = [
            outcome(partial(zm.write, ds, many, message=what, **how)),
            outcome(partial(zm.to_session, ds, session, **how)),
        ]
        event(f"{what}: {outcomes[0]}")
        assert outcomes[0] == outcomes[1]
        if outcomes[0] == "done":
            xr.testing.assert_identical(now(session, group), head(many, group))
    if session.status():
        session.commit("all of it")


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (ManifestsError, ValueError) as error:
        return type(error).__name__
    return "done"


def test_what_is_not_committed_counts(repo: zm.Repository) -> None:
    session = repo.writable_session()
    zm.to_session(days(0, 2), session)
    with pytest.raises(AlreadyExistsError, match="has data already"):
        zm.to_session(days(0, 2), session)
    with pytest.raises(AlreadyExistsError, match="1 of 'time' is there already"):
        zm.to_session(days(1, 3), session, append_dim="time")
    zm.to_session(days(1, 3), session, append_dim="time", on_existing="skip")
    kelvins = days(3, 4)
    session.store.delete_sync("nothing")
    zarr.open_array(session.store, path="t").attrs["units"] = "K"
    kelvins.t.attrs["units"] = "degC"
    with pytest.raises(InvalidArgumentError, match="keeps its units 'K'"):
        zm.to_session(kelvins, session, append_dim="time")
    with pytest.raises(NotFoundError, match="no arrays that a region could be part of"):
        zm.to_session(days(0, 1), session, group="other", region="auto")
    session.commit("three days")
    assert head(repo).time.values.tolist() == [0, 1, 2]


def test_looking_at_labels_is_no_read_that_a_commit_depends_on(repo: zm.Repository) -> None:
    zm.write(days(0, 2), repo, message="create")
    session = repo.writable_session(isolation="serializable")
    zm.to_session(days(0, 2), session, append_dim="time", on_existing="skip")
    zm.write(days(2, 3), repo, message="of others", append_dim="time")
    zarr.create_group(session.store, path="air")
    session.commit("beside it")
    assert head(repo).sizes["time"] == 3


# --- others that come first ------------------------------------------------------------------


def test_an_append_after_others_is_a_conflict(repo: zm.Repository) -> None:
    zm.write(days(0, 2), repo, message="create")
    session = repo.writable_session()
    zm.to_session(days(2, 4), session, append_dim="time")
    zm.write(days(4, 5), repo, message="of others", append_dim="time")
    for call in (lambda: session.commit("late"), session.rebase):
        with pytest.raises(ConflictError, match="came first and changed arrays along 'time'"):
            call()
    assert session.status()


@pytest.mark.parametrize("rebased", [False, True])
def test_appends_land_behind_those_of_others(repo: zm.Repository, rebased: bool) -> None:
    zm.write(days(0, 2), repo, message="create", encoding={"t": {"chunks": (1, 3)}})
    session = repo.writable_session(append_dim="time")
    zm.to_session(days(4, 6), session, append_dim="time")
    zm.write(days(2, 4), repo, message="of others", append_dim="time")
    if rebased:
        session.rebase()
    session.commit("behind")
    xr.testing.assert_identical(head(repo), days(0, 6))


@pytest.mark.parametrize("rebased", [False, True])
@pytest.mark.parametrize("twice", [False, True])
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
    assert head(repo).time.values.tolist() == [0, 1, *range(*others)]


# --- forks, and what is refused --------------------------------------------------------------


@pytest.mark.slow
def test_forks_write_regions(tmp_path: Any) -> None:
    repo = zm.create(tmp_path)
    session = repo.writable_session()
    zm.to_session(days(0, 8), session, encoding={"t": {"chunks": (2, 3)}})
    with dask.config.set(scheduler="processes"):  # a fork gives each block to a fork of its own
        forks = []
        for start in (0, 4):
            fork = pickle.loads(pickle.dumps(session.fork()))
            part = days(start, start + 4, -1).drop_vars("x").chunk(time=2)
            zm.to_session(part, fork, region="auto")
            forks.append(fork)
    session.merge(*forks)
    session.commit("by two workers")
    xr.testing.assert_identical(head(repo), days(0, 8, -1))
    with pytest.raises(InvalidArgumentError, match="a fork cannot append"):
        zm.to_session(days(8, 9), session.fork(), append_dim="time")


def test_what_is_no_open_session_is_refused(repo: zm.Repository) -> None:
    ds, session = days(0, 1), repo.writable_session()
    for wrong, name in ((session.store, "ManifestStore"), (repo, "Repository"), ("path", "str")):
        with pytest.raises(InvalidArgumentError, match=f"not to a {name}"):
            zm.to_session(ds, wrong)
    with pytest.raises(ReadOnlyError):
        zm.to_session(ds, repo.readonly_session())
    session.close()
    with pytest.raises(SessionClosedError):
        zm.to_session(ds, session)
    with pytest.raises(InvalidArgumentError, match="check must be"):
        zm.to_session(ds, repo.writable_session(), check="all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_copies_that_others_made_are_not_left_out(tmp_path: Any) -> None:
    """What `to_session` itself merges does not hide that other copies were not merged."""
    session = zm.create(tmp_path).writable_session()
    zarr.create_array(session.store, name="a", shape=(2,), chunks=(1,), dtype="u1")
    copy = pickle.loads(pickle.dumps(session.store))
    zarr.open_array(copy, path="a")[:] = 7
    zm.to_session(days(0, 2).chunk(time=1), session, group="g", scheduler="processes")
    with pytest.raises(UnmergedForksError):
        session.commit("without the copy")


# --- arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t", None, "time", "x"])
def test_an_array_is_read_back_as_it_was(repo: zm.Repository, name: str | None) -> None:
    array = days(0, 4).t.rename(name)
    zm.write(array.isel(time=slice(0, 2)), repo, message="create")
    zm.write(array.isel(time=slice(2, 4)), repo, message="append", append_dim="time")
    found = xr.open_dataarray(repo, engine="zarr_manifests")
    xr.testing.assert_identical(found.load(), array)
    plain = zarr.storage.MemoryStore()
    array.to_zarr(plain, consolidated=False)
    assert {*head(repo).variables} == {*xr.open_zarr(plain, consolidated=False).variables}


def test_an_array_takes_an_encoding_and_a_region(repo: zm.Repository) -> None:
    array = days(0, 4).t
    zm.write(array, repo, message="create", encoding={"t": {"chunks": (1, 3)}})
    zm.write(array[2:4].drop_vars("x") * -1, repo, message="turn", region="auto")
    assert head(repo).t[:, 1].values.tolist() == [1, 11, -21, -31]
    assert head(repo).t.encoding["chunks"] == (1, 3)
    with pytest.raises(InvalidArgumentError, match="encoding names 'u'"):
        zm.write(array, repo, message="refused", mode="a", encoding={"u": {}})


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


def opened(repo: zm.Repository) -> xr.DataTree:
    return xr.open_datatree(repo, engine="zarr_manifests").load()


def test_a_tree_is_read_back_as_it_was(repo: zm.Repository) -> None:
    encoding = {"/gfs/daily": {"t": {"chunks": (1, 3)}}, "era5": {"t": {"dtype": "f4"}}}
    zm.write(tree(0, 4), repo, message="create", encoding=encoding)
    found = opened(repo)
    expected = tree(0, 4)
    expected["era5/t"] = expected["era5/t"].astype("f4")
    xr.testing.assert_identical(found, expected)
    assert found["gfs/daily/t"].encoding["chunks"] == (1, 3)
    assert [info.message for info in repo.ancestry()] == ["create", "create repository"]
    with pytest.raises(AlreadyExistsError, match=r"group '/' of .* has data already"):
        zm.write(tree(0, 4), repo, message="again")
    with pytest.raises(InvalidArgumentError, match=r"encoding names '/other', .* not a node"):
        zm.write(tree(0, 4), repo, message="other", mode="w", encoding={"other": {}})
    with pytest.raises(InvalidArgumentError, match="encoding names 'u'"):
        zm.write(tree(0, 4), repo, message="other", mode="w", encoding={"/era5": {"u": {}}})


def test_a_tree_is_appended_to(repo: zm.Repository) -> None:
    how: dict[str, Any] = {"message": "append", "append_dim": "time"}
    zm.write(tree(0, 2), repo, **how)
    before = zm.write(tree(2, 4), repo, **how)
    xr.testing.assert_identical(opened(repo), tree(0, 4))
    with pytest.raises(AlreadyExistsError, match="are there already"):
        zm.write(tree(2, 4), repo, **how)
    with pytest.raises(InvalidArgumentError, match="group '/era5' has no coordinate"):
        zm.write(tree(2, 4), repo, **how, on_existing="skip")
    own = tree(2, 6).drop_nodes("era5")
    with pytest.raises(InvalidArgumentError, match="'/land' has no dimension 'time'"):
        zm.write(own, repo, **how, mode="a-")
    with pytest.raises(InvalidArgumentError, match="append_dim 'lat' is not a dimension"):
        zm.write(own, repo, message="append", append_dim="lat")
    assert repo.list_branches()["main"] == before


def test_skipping_what_a_tree_has_makes_no_commit(repo: zm.Repository) -> None:
    def models(start: int, stop: int) -> xr.DataTree:
        return xr.DataTree.from_dict({"/a": days(start, stop), "/b": days(start, stop, 2)})

    how: dict[str, Any] = {"message": "job", "append_dim": "time", "on_existing": "skip"}
    zm.write(models(0, 2), repo, **how)
    first = zm.write(models(1, 4), repo, **how)
    assert zm.write(models(0, 3), repo, **how) == first
    xr.testing.assert_identical(opened(repo), models(0, 4))
    session = repo.writable_session()
    zm.to_session(models(4, 6), session, append_dim="time")
    zm.write(days(4, 5), repo, message="of others", group="b", append_dim="time")
    with pytest.raises(ConflictError, match="/b/time"):
        session.commit("late")


def test_regions_of_a_tree(repo: zm.Repository) -> None:
    both = xr.DataTree.from_dict({"/a": days(0, 4), "/b": days(0, 4, 2)})
    zm.write(both, repo, message="create")
    part = xr.DataTree.from_dict(
        {f"/{name}": days(1, 3, -1).drop_vars(["x", "time"]) for name in "ab"}
    )
    zm.write(part, repo, message="turn", region={"time": slice(1, 3)})
    for name in "ab":
        assert opened(repo)[name].t[1:3, 0].values.tolist() == [-10, -20]
    by_label = xr.DataTree.from_dict({"/b": days(0, 1, 7).drop_vars("x")})
    zm.write(by_label, repo, message="by label", region="auto")
    part["land"] = xr.Dataset({"mask": ("y", [True])})
    with pytest.raises(InvalidArgumentError, match="not a dimension of the tree's node '/land'"):
        zm.write(part, repo, message="refused", region={"time": slice(1, 3)})
    with pytest.raises(InvalidArgumentError, match="no variables to write to a region"):
        zm.write(xr.DataTree(), repo, message="nothing", region="auto")


@pytest.mark.parametrize("group", [None, "models"])
def test_trees_replace_and_join_what_is_there(repo: zm.Repository, group: str | None) -> None:
    where = {} if group is None else {"group": group}
    zm.write(days(0, 2), repo, message="root")
    zm.write(days(0, 2), repo, message="in the way", group="models/old")
    new = xr.DataTree.from_dict({"/new": days(0, 2, 3), "/deep/er": days(0, 2, 4)})
    zm.write(new, repo, message="beside", **where)  # the tree's root has nothing to write
    found = opened(repo)[group or "/"]
    assert ("t" in found) == (group is None)
    xr.testing.assert_identical(found["deep/er"].to_dataset(), days(0, 2, 4))
    zm.write(new, repo, message="replace", mode="w", **where)
    xr.testing.assert_identical(xr.open_datatree(repo, engine="zarr_manifests", **where), new)
    assert ("t" in opened(repo)) == (group is not None)


def test_a_tree_replaces_one_of_the_older_format(repo: zm.Repository) -> None:
    with repo.transaction(message="of Zarr 2") as store:
        days(0, 2).to_zarr(store, group="g/a", zarr_format=2, consolidated=False)
    models = xr.DataTree.from_dict({"/a": days(0, 2), "/b": days(0, 2)})
    zm.write(models, repo, message="beside", group="g", mode="a")
    found = zarr.open_group(repo.readonly_session().store, path="g/b", mode="r")
    assert found.metadata.zarr_format == 2
    zm.write(models, repo, message="anew", mode="w")
    for path in ("", "a", "b"):
        found = zarr.open_group(repo.readonly_session().store, path=path, mode="r")
        assert found.metadata.zarr_format == 3


def test_part_of_a_tree_has_what_it_inherits(repo: zm.Repository) -> None:
    zm.write(tree(0, 4)["era5"], repo, message="a node", group="here")
    assert head(repo, "here").time.values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_nodes_that_no_group_can_be_are_refused(repo: zm.Repository, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a group cannot have the path"):
        zm.write(xr.DataTree(children={name: xr.DataTree(days(0, 1))}), repo, message="refused")


@pytest.mark.slow
def test_lazy_trees_are_computed(tmp_path: Any) -> None:
    lazy = xr.DataTree.from_dict({"/a": days(0, 4), "/b": days(0, 4, 2)}).chunk(time=2)
    repo = zm.create(tmp_path)
    zm.write(lazy, repo, message="create", scheduler="processes")
    xr.testing.assert_identical(opened(repo), lazy.compute())


def test_what_is_no_data_of_xarray_is_refused(repo: zm.Repository) -> None:
    for wrong in (None, 5, {"t": [1]}, np.arange(3)):
        with pytest.raises(InvalidArgumentError, match="Dataset, a DataArray or a DataTree"):
            zm.write(wrong, repo, message="wrong")


@pytest.mark.parametrize("name", ["a/b", "zarr.json", ".zarray", "..", ""])
def test_names_that_nobody_would_find_are_refused(name: str) -> None:
    repo = zm.create(MemoryStorage())
    ds = xr.Dataset({name: ("x", [1.0]), "b": ("x", [2.0])})
    with pytest.raises(InvalidArgumentError, match="cannot be the name of an array"):
        zm.write(ds, repo, message="write")
    assert len(list(repo.ancestry())) == 1


def test_attributes_of_another_type_are_written() -> None:
    storage = MemoryStorage("attributes-of-another-type")
    ds = xr.Dataset({"t": ("x", [1.0])}, attrs={"version": 1, "final": True})
    zm.write(ds, storage, message="write")
    zm.write(ds.assign_attrs(version=1.0, final=1), storage, message="again", mode="a")
    found = xr.open_dataset(storage, engine="zarr_manifests").attrs
    assert [*map(repr, found.values())] == ["1.0", "1"]
