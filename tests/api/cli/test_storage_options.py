"""`--option` on every verb that takes a URL."""

from __future__ import annotations

import pytest

from cli_calls import call


@pytest.mark.parametrize("verb", ["log", "config set", "clone", "cat", "import zarr", "merge"])
def test_options_reach_the_storage(verb: str) -> None:
    more = {"log": (), "config set": ("a=1",)}.get(verb, ("elsewhere",))
    found = call(*verb.split(), "s3://bucket/winds", *more, "--option", "regoin=eu-west-1")
    assert "regoin: unknown storage option" in found.stderr
    assert found.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["region"], "takes name=value"),
        (["region=geheim", "region=geheim"], "each name once"),
        (["allow_http=maybe"], "allow_http: must be true or false"),
        (["secret_access_key=geheim"], "secret_access_key: a secret cannot be a storage option"),
        (["credentials=accounts:nobody"], "cannot be imported in this process"),
        (["credentials=accounts:no_mapping", "retries=0"], "did not return a mapping"),
    ],
)
def test_faults_are_told_without_the_values(given: list[str], says: str) -> None:
    arguments = [part for one in given for part in ("--option", one)]
    found = call("log", "s3://bucket/winds", *arguments)
    assert found.exit_code in (1, 2)
    assert says in found.stderr
    assert "geheim" not in found.output
    assert "Traceback" not in found.output
