"""Every verb of the command line, with arguments that nobody expects.

Verbs and parameters are found in the application. Each ends with 0, 1 or 2, shows nothing that a
terminal would obey, and leaves a sound repository.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli_verbs import VERBS
from zarr_manifests.cli import app
from zarr_manifests.serving import server
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import copy_of

HERE = Path(__file__).parent
RUNNER = CliRunner()
EXPIRING = {"clean", "recover", "config apply", "config set"}


def _load(name: str) -> Any:
    found = sys.modules.get(f"entrances_{name}")
    if found is None:
        spec = importlib.util.spec_from_file_location(f"entrances_{name}", HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


values, worlds = _load("values"), _load("world")


def in_argv(text: Any) -> bool:
    """Whether a shell could have given it."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


TEXTS = (*filter(in_argv, values.TEXT.extreme), "\udcff", "a\udc80b")
NUMBERS = (*map(str, values.INT.extreme), "nan", "inf", "1e9", "0x10", "", "x", "\u0663")
REFS = ("main", "dev", "v1", "HEAD-ID", "OLD-ID")
SPANS = ("0s", "30d", "1h", "9" * 400 + "d", "-1d", "1.5h", "d", "1 d", "\u0663d", "999999999999d")
FILES = {
    "good.yaml": b"max-delta-count: 7\n",
    "empty": b"",
    "bad.yaml": b"commits: [1, {",
    "binary": bytes(range(256)),
    "deep.yaml": b"[" * 5000,
    "large.yaml": b"#" * (2 << 20),
    "names.yaml": b'"\\e[31m": {"\\0": 1}\nunknown: "\\ud800"\n',
}
PLACES = (*FILES, "absent", ".", "/", "/dev/null", "", "\udcff", "x" * 300, "\x1b[31m")
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("branch", "tag", "start", "end", "version", "at", "name", "expected", "into", "since"),
        REFS,
    ),
    **dict.fromkeys(("keep", "limit", "to", "months"), ("1", "3", "50")),
    "files": ("absent", "good.yaml"),
    "group": ("/a", "/t"),
    "variable": ("a", "t"),
    "grace": SPANS[:3],
    **dict.fromkeys(("config", "file"), ("good.yaml",)),
    "plot": ("picture.svg",),
    "min_live": ("0.5", "1"),
    "mode": ("minor", "major", "full"),
    "array": ("/a", "/t"),
    "path": ("/a", "/t"),
    "options": ("max-delta-count=7", "commits.mode=rewrite"),
    "settings": ("max-delta-count=7", "commits.mode=rewrite"),
    "depth": ("1",),
    "entries": ("title=winds", "grid={lat: 0.25}"),
    "dest": ("memory://verbs-clone", "cloned"),
    "history": ("all", "head", "heads"),
    "references": ("absent", "good.yaml", "memory://nothing"),
    "source": (*REFS, "absent", "good.yaml", "memory://nothing"),
    "message": ("text",),
    "append_dim": ("time",),
    "container": ("a=b", "here=."),
    "from_option": ("force=true",),
    "remote_protocol": ("s3",),
    "kind": ("zarr", "zip", "kerchunk", "icechunk"),
    "policy": ("fail", "ours", "theirs"),
    "index": ("0", "...", ":1"),
    "old": ("/a", "/t"),
    "new": ("/b",),
    "max_bytes": ("1000",),
    "to_option": ("force=true",),
    "option": ("force=true",),
    "host": ("127.0.0.1", "localhost"),
    "port": ("0",),
    "token": ("secret",),
    "origin": ("https://viewer.example", "*"),
}
"""Usual words by parameter."""


def usual(parameter: Any) -> tuple[str, ...]:
    if parameter.name == "url":
        return ("URL",)
    if parameter.name == "directory":  # of the demo, which leaves what is there alone
        return ("taken",)
    assert parameter.name in WORDS, f"no words for {parameter.name}; say some in {HERE.name}/"
    return WORDS[parameter.name]


def unusual(parameter: Any) -> tuple[str, ...]:
    if parameter.name == "url":
        return (*filter(in_argv, values.PLACE.extreme), "\udcff")
    if parameter.name == "directory":
        return ()
    if parameter.type_descriptor.annotation in (int, float):
        return NUMBERS
    if parameter.type_descriptor.annotation is Path:
        return PLACES
    return (
        *TEXTS,
        *SPANS,
        *REFS,
        "a=b",
        "=",
        "a=",
        "commits.mode=[",
        "max-delta-count=-1",
        "force=x",
    )


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def words_of(parameter: Any, word: str) -> list[str]:
    if parameter.param_type_name == "argument":
        return [word]
    return [parameter.opts[0], word]


def calls(command: Any) -> Iterator[list[tuple[Any, str]]]:
    """One parameter at a time has an unusual word; the others that are needed have usual ones."""
    parameters = [p for p in command.params if p.name not in ("help", "version_")]
    for number, odd in enumerate(parameters):
        flags = [p for p in parameters if is_flag(p)]
        for at, word in enumerate(("",) if is_flag(odd) else unusual(odd)):
            chosen = []
            for parameter in parameters:
                if parameter is odd and not is_flag(odd):
                    chosen.append((parameter, word))
                elif is_flag(parameter):
                    if parameter is odd or (at + number) % 5 == flags.index(parameter):
                        chosen.append((parameter, ""))
                elif parameter.required or parameter.name == "directory" or (at + number) % 4 == 0:
                    known = usual(parameter)
                    chosen.append((parameter, known[at % len(known)]))
            yield chosen


def test_every_parameter_has_words() -> None:
    for verb, command in VERBS.items():
        for parameter in command.params:
            if parameter.name != "help" and not is_flag(parameter):
                assert usual(parameter), verb
    assert len(VERBS) > 20


@pytest.fixture(scope="module")
def template() -> Any:
    return worlds.Template()


@pytest.mark.hypothesis
@pytest.mark.parametrize("verb", VERBS)
def test_verb(
    verb: str,
    template: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    place = tmp_path / "a" / "b"
    (place / "taken").mkdir(parents=True)
    (place / "taken" / "file").write_bytes(b"somebody's")
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    monkeypatch.chdir(place)
    if verb == "serve":  # which would go on, or look for odd names of hosts
        monkeypatch.setattr(server, "_listening", lambda *_: socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    counter, command = itertools.count(), VERBS[verb]
    every = [*calls(command)]
    for chosen in every[:: max(1, 20 // request.config.getoption("--examples"))]:
        name = f"verbs-{tmp_path.name}-{next(counter)}"
        storage = MemoryStorage(name)
        for info in template.storage.list():
            storage.put(info.key, template.storage.get(info.key))
        world = worlds.World(template, tmp_path, counter, storage)
        known = {"URL": f"memory://{name}", "HEAD-ID": template.ids[0], "OLD-ID": template.ids[2]}
        words = verb.split()
        for parameter, word in chosen:
            found = known.get(word, word)
            words += [parameter.opts[0]] if is_flag(parameter) else words_of(parameter, found)
        result = RUNNER.invoke(app, words)
        shown = [word[:60] for word in words]
        assert result.exception is None or isinstance(result.exception, SystemExit), shown
        assert result.exit_code in (0, 1, 2), shown
        assert worlds.obeyed(result.output) == [], shown
        world.check([], may_expire=verb in EXPIRING)
    assert (place / "taken" / "file").read_bytes() == b"somebody's"
    assert copy_of(template.storage)
