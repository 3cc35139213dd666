"""What the verbs share: the arguments and options they take, and what they print.

Results are printed as text or JSON, and errors as lines. The library's errors say what to do in
Python: `pass force=True`, `repo.ancestry() lists them`. On the command line the same is an option
or a verb.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, get_args, get_origin

import typer
from msgspec import Struct
from rich.text import Text

import zarr_manifests as zm
from zarr_manifests.errors import ConflictError, InvalidArgumentError, WhereError, plain_text
from zarr_manifests.progress import show_progress
from zarr_manifests.rendering import PlainConsole
from zarr_manifests.report import json_line

if TYPE_CHECKING:
    from zarr_manifests.repository import Repository

type Repo = Repository
"""The repository at the URL, opened."""
type TrustingRepo = Repository
"""The same; with `--authorize` it reads files at the places that are saved with it."""
Pairs = list[str] | None
"""What was given as `NAME=VALUE`, each name once."""

_SHARED: Final = """
url :
    The repository: a path, or a URL such as file:///data/winds.
version : VERSION
    A branch, tag, id or short id, main~3, main@{2026-11-01}.
at : -a VERSION
    Which version: a branch, tag, id or short id, main~3, main@{2026-11-01}.
branch : -b
    The branch to commit to.
message : -m
    The commit message.
dry_run :
    Change nothing, and say what would change.
json :
    Print JSON: one object on each line.
authorize :
    Read files at the places that are saved with it (`config show`).
max_bytes :
    Bytes of metadata, and of a chunk that is copied, that are accepted.
container : NAME=URL
    A place whose files may be looked at; may be given several times.
option : -o NAME=VALUE
    How to reach the storage, such as region=eu-west-1; may be given several times.
from_option : NAME=VALUE
    How to reach what is imported; may be given several times.
to_option : NAME=VALUE
    How to reach the other place; may be given several times.
"""
_TOLD: Final = re.compile(r"^(\w+) :(.*)\n((?:    .*\n?)+)", re.MULTILINE)


def verb(function: Callable[..., object]) -> Callable[..., None]:
    """Make a function a verb: positional parameters are arguments, keyword-only ones options.

    In the place of a `Repo` the command takes a URL, and `--option`. What the function returns is
    printed, and the command takes `--json`, unless the function says that it returns None.

    What the help says of a parameter stands in the section Parameters of the docstring, or above,
    if several verbs have it. In the place of a type stand a short name such as `-n`, and what the
    help calls the value, such as `WHEN`. Limits are an annotation, such as `{"min": 0}`.
    """
    said, _, parameters = inspect.cleandoc(function.__doc__ or "").partition("\n\nParameters\n")
    texts = {found[1]: found for found in _TOLD.finditer(f"{_SHARED}\n{parameters}")}
    signature = inspect.signature(function, eval_str=True)
    tells = signature.return_annotation is not None
    opened, due = "", []
    added: dict[str, Any] = {"json": bool} if tells else {}
    for one in signature.parameters.values():
        if one.annotation in (Repo, TrustingRepo):
            opened = one.name
            added |= {"authorize": bool} if one.annotation is TrustingRepo else {}
            added |= {"option": list[str] | None}
            due.append(one.replace(name="url", annotation=str))
        else:
            due.append(one)
    for name, kind in added.items():
        default = False if kind is bool else None
        due.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    made = [_described(one, texts) for one in due]

    def run(**given: Any) -> None:
        as_json = given.pop("json", False)
        with show_progress() if tells else nullcontext():
            if opened:
                url, option = given.pop("url"), given.pop("option")
                given[opened] = open_at(url, option, given.pop("authorize", False))
            result = function(**given)
        if tells:
            show(result, as_json)

    changed: Any = run
    changed.__name__, changed.__doc__ = function.__name__, said
    changed.__signature__ = inspect.Signature(made)
    changed.__annotations__ = {one.name: one.annotation for one in made}
    return run


def _described(one: Parameter, texts: dict[str, re.Match[str]]) -> Parameter:
    """The parameter with what Typer wants to know of it; what more it knows comes as a mapping."""
    annotated = get_origin(one.annotation) is Annotated
    kind, more = get_args(one.annotation) if annotated else (one.annotation, {})
    words = texts[one.name][2].split()
    told: Any = {
        "help": " ".join(texts[one.name][3].split()),
        "metavar": next((word for word in words if not word.startswith("-")), None),
        "show_default": one.default not in (None, False),
        **more,
    }
    if one.kind is not one.KEYWORD_ONLY:
        return one.replace(annotation=Annotated[kind, typer.Argument(**told)])
    names = [f"--{one.name.replace('_', '-')}", *(word for word in words if word[0] == "-")]
    return one.replace(annotation=Annotated[kind, typer.Option(*names, **told)])


# --- what was given --------------------------------------------------------------------------


def storage_options(url: str, given: Pairs, option: str = "--option") -> dict[str, object]:
    """The storage options that `--option name=value` gives; `option` is its name, for errors."""
    from zarr_manifests.storage.url import parse_options

    texts = pairs(given, option)
    # As in `python -m`: credentials may be a function in a file of the working directory.
    if "credentials" in texts and "" not in sys.path:
        sys.path.insert(0, "")
    return parse_options(url, texts)


def pairs(given: Pairs, option: str) -> dict[str, str]:
    """The values by name that `NAME=VALUE` gives several times; errors have no value."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name or name in found:
            raise InvalidArgumentError(f"{option} takes name=value, and each name once")
        found[name] = value
    return found


def open_at(url: str, option: Pairs, authorize: bool = False) -> Repository:
    """Open the repository at that URL."""
    return zm.open(url, authorize=authorize, storage_options=storage_options(url, option))


# --- what is printed ----------------------------------------------------------------------------

_PIPED_WIDTH: Final = 200
_WORDS: Final = {
    r"\breset_branch\b": "`branch --move`",
    r"\bgarbage_collect\(\)": "`clean`",
    r"\bgive keep \([^)]*\)": "give --keep a number or an age",
    r"\btimedelta\(days=30\)": "30d",
    r"\bon_error='report'": "--skip",
    r"\bon_changed='replace'": "--replace",
    r"\bsymmetric=False\b": "--direct",
    r"\bauthorize=\[[^\]]*\]": "--authorize",
    r"\bvirtual_containers=\{[^}]*\}": "--authorize, after `config set` of virtual-containers,",
    r"\bcall zm\.create\b": "make one by `import`",
    r"`zm\.recover\(repo, version\)`": "`recover --to`",
    r"\bzm\.recover\b(?!`)": "`recover`",
    r"\bmax_bytes=": "--max-bytes",
    r"\b(force|copy)=True\b": r"--\1",
    r"\b(format|expected)='([\w-]*)'": r"--\1 \2",
    r"\b(tag|path)=(?=[\s,.;]|$)": r"--\1",
    r"`repo\.(ancestry\(\)|txn_versions\(branch\))`(?! and)": "`zarr-manifests log`",
    r"`repo\.list_(branch|tag)e?s\(\)`": r"`zarr-manifests \1`",
    r"`repo\.ops_log\(\)`": "`zarr-manifests log --ops`",
}
"""What is said of Python, as regular expressions, and what of the command line instead."""


class _Console(PlainConsole):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # the application ends, and well


class Told(Struct, frozen=True):
    """A result that is not the same for programs as for people.

    Parameters
    ----------
    found : object
        What `--json` prints; None if that is no other than the text.
    text : iterable, optional
        What people see, part by part, a text as one line; `found` itself by default.
    wrong : bool
        Whether the exit code says that something is wrong.
    """

    found: object
    text: Iterable[object] | None = None
    wrong: bool = False


def console() -> PlainConsole:
    """Standard output; in a pipe, long lines are not wrapped."""
    out = _Console()
    if not out.is_terminal:
        out.width = max(out.width, _PIPED_WIDTH)
    return out


def show(result: object, as_json: bool) -> None:
    """Print a result as text, or as JSON: a listing is an object on each line.

    Text alone is the id of a snapshot.
    """
    told = result if isinstance(result, Told) else Told(result)
    if as_json and told.found is not None:
        found = {"snapshot_id": told.found} if isinstance(told.found, str) else told.found
        for one in found if isinstance(found, list) else [found]:
            typer.echo(json_line(one))
    else:
        out = console()
        for part in [told.found] if told.text is None else told.text:
            out.print(plain_text(part) if isinstance(part, str) else part, soft_wrap=True)
    if told.wrong:
        raise typer.Exit(1)


def styled(text: str, style: str) -> Text:
    """Anybody's text in a style."""
    return Text(plain_text(text), style)


def write_error(error: BaseException | str) -> None:
    """Print the error as one line on standard error, and each conflict as another."""
    conflicts = error.conflicts if isinstance(error, ConflictError) else ()
    text = error.message if isinstance(error, ConflictError) else str(error)
    mark = typer.style("error:", fg=typer.colors.RED, bold=True)
    color = None if sys.stderr.isatty() else False
    is_plain = isinstance(error, WhereError)  # which shows a place by lines of its own
    shown = plain_text(on_command_line(text), lines=is_plain)
    typer.echo(f"{mark} {shown}", err=True, color=color)
    for conflict in conflicts:
        typer.echo(f"  {conflict}", err=True)


def on_command_line(text: str) -> str:
    """The message with options and verbs of the command line.

    Examples
    --------
    >>> from zarr_manifests.cli.verbs import on_command_line
    >>> on_command_line("export with format='zarr', or pass force=True")
    'export with --format zarr, or pass --force'
    >>> on_command_line("branch 'v1' exists; reset_branch moves it")
    "branch 'v1' exists; `branch --move` moves it"
    >>> on_command_line("`repo.ops_log()` lists the versions")
    '`zarr-manifests log --ops` lists the versions'
    """
    for pattern, given in _WORDS.items():
        text = re.sub(pattern, given, text)
    return text
