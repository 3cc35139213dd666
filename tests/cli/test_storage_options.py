"""`--option` on every verb that takes a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import zarr_manifests as zm
from cli_verbs import WITH_URL
from zarr_manifests.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# What these verbs cannot do without.
MORE = {
    "diff": ("main", "main"),
    "cat": ("air",),
    "mv": ("air", "sky"),
    **dict.fromkeys(("revert", "cherry-pick", "merge"), ("main",)),
    "config set": ("a=1",),
    "clone": ("elsewhere",),
    "export": ("elsewhere",),
    "import netcdf": ("elsewhere.nc",),
    **dict.fromkeys(("import zarr", "import kerchunk", "import icechunk"), ("elsewhere",)),
}


@pytest.mark.parametrize("verb", WITH_URL)
def test_options_reach_the_storage(verb: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("pack-bytes: 7\n")
    more = (config,) if verb == "config apply" else MORE.get(verb, ())
    found = call(*verb.split(), "s3://bucket/winds", *more, "--option", "regoin=eu-west-1")
    assert "regoin: unknown storage option; s3:// takes region" in found.stderr
    assert found.exit_code in (1, 2)


def test_options_are_used(tmp_path: Path) -> None:
    at = tmp_path / "winds"
    zm.create(at)
    (at / "current").rename(tmp_path / "current")
    (at / "current").symlink_to(tmp_path / "current")
    assert call("log", at).exit_code == 1
    found = call("log", at, "-o", "follow_links=true", "-o", "force=false")
    assert found.exit_code == 0, found.stderr
    assert "create repository" in found.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["region"], "takes name=value"),
        (["=eu"], "takes name=value"),
        (["region=a", "region=b"], "each name once"),
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
