"""Escape untrusted text for terminals.

Names, messages, URLs and metadata may hold control characters. The package escapes them with
`plain_text` wherever it shows them: in errors, `str` and `repr`, on the command line and in
notebooks. The values themselves are never changed.
"""

from __future__ import annotations

import unicodedata

__all__ = ["plain_text"]


def plain_text(value: object, *, lines: bool = False) -> str:
    r"""The value as text with control characters escaped, such as `\x1b`.

    Characters that change the direction of text and invisible characters are escaped, too.

    Parameters
    ----------
    value : object
        Converted with `str`.
    lines : bool
        Keep newlines.

    Examples
    --------
    >>> from zarr_manifests.plain import plain_text
    >>> print(plain_text("air\x1b[2J\nerror: none"))
    air\x1b[2J\nerror: none
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if _harmless(c) or (lines and c == "\n") else _written_out(c) for c in text)


def _harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # any kind of space


def _written_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
