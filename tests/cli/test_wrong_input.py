"""Wrong input at every verb: one line that says what to do, exit code 1 or 2, and no change."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from cli_verbs import VERBS, WITH_URL
from zarr_manifests.cli import app

AFTER: dict[str, tuple[str, ...]] = {
    "diff": ("main", "main"),
    "cat": ("t",),
    "mv": ("t", "u"),
    "revert": ("main",),
    "cherry-pick": ("main",),
    "merge": ("main",),
    "clone": ("$new",),
    "export": ("$new",),
    "config set": ("pack-bytes=7",),
    "config apply": ("$config",),
}
"""What these verbs need beside a URL."""
ELSEWHERE = {
    "import netcdf",
    "import zarr",
    "import kerchunk",
    "import icechunk",
    "recover",
    "check",
    "demo",
}
"""Verbs for which a folder without a repository is no error, or another one."""
WRONG: dict[str, list[tuple[str, str]]] = {
    "log": [
        ("--at nope", "there is no branch 'nope'"),
        ("--at main~99", "only 1 snapshot before it"),
        ("--at main@{soon}", "ISO 8601"),
        ("--at main@{1999-01-01}", "no snapshot from 1999"),
        ("--since nope", "there is no branch 'nope'"),
        ("-n -1", "greater than or equal to"),
        ("-n many", "valid integer"),
        ("nope", "there is no array '/nope'"),
        ("--brnch x", "No such option"),
        ("--ops t", "of all branches and tags"),
        ("--ops --at v1", "of all branches and tags"),
        ("--ops --since v1", "of all branches and tags"),
        ("--ops --oneline", "of all branches and tags"),
    ],
    "show": [("nope", "there is no branch 'nope'"), ("{", "names no version")],
    "diff": [
        ("nope", "there is no branch 'nope'"),
        ("main main~1", "give the older snapshot first, or --direct"),
        ("main main --log --values", "give one of"),
        ("main~1 --values --array nope", "there is no array /nope"),
    ],
    "tree": [("nope", "there is no branch"), ("--chunks --stats", "not both")],
    "cat": [
        ("", "Missing argument 'array'"),
        ("nope", "there are: /t"),
        ("t 9", "out of range on axis 0, which has length 4"),
        ("t a", "is not an index; write"),
        ("t --limit 0", "greater than or equal to"),
        ("t : --limit 1", "narrow the one or raise the other"),
    ],
    "info": [("more", "unexpected extra argument")],
    "du": [
        ("nope", "there is no branch"),
        ("--array nope", "there are: /t"),
    ],
    "explain": [
        ("nope", "there is no array '/nope'"),
        ("--at nope", "there is no branch"),
        ("-c $new", "cannot be read"),
        ("t -c $config", "not both"),
    ],
    "branch": [
        ("trial nope", "there is no branch 'nope'"),
        ("main", "branch 'main' exists; `branch --move` moves it"),
        ("main -d", "`branch --move` moves it"),
        ("-d", "--delete takes a NAME"),
        ("HEAD", "stands for"),
        ("main --move", "--move takes a NAME and a VERSION"),
        ("main main -d --move", "--move takes a NAME and a VERSION"),
        ("trial main --force", "go with --move"),
        ("trial main --expected v1", "go with --move"),
        ("main nope --move", "there is no branch 'nope'"),
        ("nope main --move", "there is no branch 'nope'"),
        ("main main~1 --move", "or --force"),
        ("main main~1 --move --expected v1", "is not a snapshot id"),
    ],
    "tag": [
        ("v1", "tag 'v1' exists"),
        ("x -d", "there is no tag 'x'"),
        ("-d", "--delete takes a NAME"),
    ],
    "merge": [
        ("nope", "there is no branch 'nope'"),
        ("main --into nope", "there is no branch 'nope'"),
        ("main --policy mine", "'mine' is not one of"),
    ],
    "revert": [("main~1", "is the first"), ("nope", "there is no branch 'nope'")],
    "cherry-pick": [("main~1", "the first"), ("main", "has the state after commit")],
    "mv": [
        ("nope x", "nope"),
        ("t /", "the root"),
        ("t x/y", "x"),
        ("t", "Missing argument 'new'"),
        ("t u -b nope", "there is no branch 'nope'"),
    ],
    "config metadata": [
        ("title", "expected NAME=VALUE"),
        ("=x", "expected NAME=VALUE"),
        ("a=1 a=2", "each name once"),
        (f"a={'x' * 20_000}", "and 16,384 are allowed"),
    ],
    "clone": [
        ("$new --history some", "'all'"),
        ("$new -b nope", "'main' has to be among them"),
        ("$new --to-option x", "--to-option takes name=value"),
        ("$url/inner", "overlap"),
    ],
    "export": [
        ("$new nope", "there is no branch 'nope'"),
        ("$new -f zrr", "--format zrr is unknown"),
        ("$new --no-copy", "--format kerchunk and --format icechunk can refer"),
        ("$new --tag x", "--tag goes with --no-copy"),
        ("$new -f kerchunk", "pass --no-copy"),
        ("$new --path nope", "there is no group or array '/nope'"),
        ("$taken", "holds"),
        ("$new --to-option x", "--to-option takes name=value"),
    ],
    "compact": [
        ("-b nope", "there is no branch 'nope'"),
        ("--mode more", "is not one of"),
        ("--packs -b nope", "there is no branch 'nope'"),
        ("--packs --min-live 2", "at most 1"),
        ("--min-live 1", "goes with --packs"),
        ("--statistics --array nope", "there is no array"),
        ("--statistics -b nope", "there is no branch"),
        ("--statistics --dry-run", "takes no --dry-run"),
        ("--array t", "--array with --statistics"),
        ("--packs --statistics", "give one of"),
        ("--packs --mode full", "give one of"),
    ],
    "import netcdf": [
        ("", "Missing argument"),
        ("$new --open x", "open must be"),
    ],
    "clean": [
        ("--keep config", "give --keep a number or an age, or save `snapshots`"),
        ("--keep config --no-collect", "give --keep a number or an age, or save `snapshots`"),
        ("--keep soon", "write it as 30d"),
        (f"--keep {'9' * 5000}", "write it as 30d"),
        ("--keep 0", "--keep must be a whole number of at least 1"),
        ("--keep 0 --no-collect", "--keep must be a whole number of at least 1"),
        ("--grace soon", "write it as 30d"),
        ("--no-collect", "goes with --keep"),
    ],
    "recover": [
        ("", "`zarr-manifests recover --to NUMBER` goes back to older refs"),
        ("--to 99", "version 99 is not older"),
        ("--to x", "valid integer"),
        ("--to 1 --collections-ended", "not both"),
    ],
    "check": [("--option x", "--option takes name=value")],
    "config set": [("a", "expected option=value"), ("nope=1", "nope"), ("", "Missing argument")],
    "config apply": [("$new", "cannot be read")],
    "import zarr": [
        ("$new", "there is no folder"),
        ("$plain --from-option x", "--from-option"),
    ],
    "import kerchunk": [("$new", "$new"), ("$config --container x", "--container takes NAME=URL")],
    "import icechunk": [
        ("$new", "there is no icechunk repository"),
        ("$new --history some", "--history some"),
    ],
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    repo = zm.create(tmp_path / "url")
    with repo.transaction(message="make t") as store:
        zarr.create_array(store, name="t", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    repo.create_tag("v1")
    (tmp_path / "config").write_text("pack-bytes: 7\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    zarr.create_array(tmp_path / "plain", shape=(1,), dtype="i4")
    (tmp_path / "empty").mkdir()
    names = ("url", "config", "taken", "plain", "empty", "new")
    return {name: str(tmp_path / name) for name in names}


def filled(text: str, places: dict[str, str]) -> str:
    return Template(text).substitute(places)


def said(verb: str, *words: str) -> str:
    """The one line on standard error with which it ends."""
    done = CliRunner().invoke(app, [*verb.split(), *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2), (verb, words, done.output)
    assert done.stdout == "", (verb, words)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert not re.search(r"repo\.|Repository\.|\w=(True|False)\b", line), line
    return line


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_word_too_few_or_an_unknown_option(verb: str) -> None:
    assert "No such option" in said(verb, "--frobnicate")
    if any(parameter.required for parameter in VERBS[verb].params):
        line = said(verb)
        assert "Missing argument" in line
        assert f"; see `zarr-manifests {verb} --help`" in line


def test_a_verb_that_is_near_is_asked_for() -> None:
    line = said("lgo")
    assert line.endswith("'lgo'. Did you mean 'log'? See `zarr-manifests --help`")


@pytest.mark.parametrize("verb", sorted(WITH_URL))
def test_a_bad_url_or_no_repository(verb: str, places: dict[str, str]) -> None:
    after = [filled(word, places) for word in AFTER.get(verb, ())]
    after += [places["plain"]] if verb.startswith("import") else []
    assert "nonsense" in said(verb, "nonsense://x", *after)
    if verb not in ELSEWHERE:
        for place in ("empty", "new", "taken"):
            assert "no repository" in said(verb, places[place], *after)
    for place in ("empty", "new"):
        path = Path(places[place])
        assert not path.exists() or not [*path.iterdir()]


@pytest.mark.parametrize("verb", sorted(WRONG))
def test_wrong_words(verb: str, places: dict[str, str]) -> None:
    before = {path: path.read_bytes() for path in Path(places["url"]).rglob("*") if path.is_file()}
    for words, due in WRONG[verb]:
        line = said(verb, places["url"], *filled(words, places).split())
        assert filled(due, places) in line, (words, line)
    after = {path: path.read_bytes() for path in Path(places["url"]).rglob("*") if path.is_file()}
    assert after == before
    assert not Path(places["new"]).exists()


def test_every_verb_has_wrong_words() -> None:
    assert WITH_URL - WRONG.keys() <= {"verify", "config show", "serve"}


@pytest.mark.parametrize("kind", ["zarr", "kerchunk", "icechunk"])
def test_an_import_that_fails_makes_no_repository(kind: str, places: dict[str, str]) -> None:
    made = places["new"]
    said(f"import {kind}", made, places["empty"])
    assert not zm.exists(made)
