"""Messages of the library in the words of the command line.

The library's errors say what to do in Python: `pass copy=False`, `repo.ancestry() lists them`. On
the command line the same is an option or a verb.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["on_command_line"]

_VERBS: Final = {
    "repo.list_branches()": "branch",
    "repo.list_tags()": "tag",
    "repo.ancestry()": "log",
    "repo.ops_log()": "log --ops",
    "zm.recover(repo, version)": "recover --to NUMBER",
    "repo.txn_versions(branch)": "log",
    "zm.recover": "recover",
}
_WORDS: Final = tuple(
    (re.compile(pattern), given)
    for pattern, given in (
        (r"`zm\.recover` and (?=`zarr-manifests recover` make)", ""),
        (r"(?<=`zarr-manifests recover` )make\b", "makes"),
        (r"`repo\.ancestry\(\)` and (`zarr-manifests log`) list\b", r"\1 lists"),
        (
            r"\bmake one with zm\.create, or check the path",
            "check the path; `zarr-manifests import` makes one of other data",
        ),
        (r"\breset_branch\('([^']*)', \.\.\.\)", r"`branch \1 VERSION --move`"),
        (
            r"\breset_branch\('([^']*)', '([^']*)', expected='([^']*)'\)",
            r"`branch \1 \2 --move --expected \3`",
        ),
        (r"\breset_branch\b", "`branch --move`"),
        (r"\bcherry_pick\b", "`cherry-pick`"),
        (r"\bgarbage_collect\(\)", "`clean`"),
        (
            r"\bpass keep_last, max_age or older_than \(`clean`: keep\)",
            "give --keep a number or an age",
        ),
        (r"\bkeep_last\b", "--keep"),
        (r"\bon_error='report'", "--skip"),
        (r"\bon_changed='replace'", "--replace"),
        (r"\bcopy=False\b", "--no-copy"),
        (r"\bwith copy=True\b", "without --no-copy"),
        (r"\bsymmetric=False\b", "--direct"),
        (r"\b(overwrite|force)=True\b", r"--\1"),
        (r"\b(format|expected|history)='([\w-]*)'", r"--\1 \2"),
        (r"\bauthorize=\[[^\]]*\]", "--authorize"),
        (r"\bmax_bytes=", "--max-bytes"),
        (r"\b(tag|path)=(?=[\s,.;]|$)", r"--\1"),
    )
)


def on_command_line(text: str) -> str:
    """The message with options and verbs of the command line.

    Examples
    --------
    >>> from zarr_manifests.cli.words import on_command_line
    >>> on_command_line("format='kerchunk' holds references: pass copy=False")
    '--format kerchunk holds references: pass --no-copy'
    >>> on_command_line("branch 'v1' exists; reset_branch moves it")
    "branch 'v1' exists; `branch --move` moves it"
    >>> on_command_line("`repo.ancestry()` and `zarr-manifests log` list the snapshots")
    '`zarr-manifests log` lists the snapshots'
    """
    for pattern, given in _WORDS:
        text = pattern.sub(given, text)
    for call, verb in _VERBS.items():
        text = text.replace(f"`{call}`", f"`zarr-manifests {verb}`")
    return text
