"""Text of anybody's that is shown: names, messages, URLs and metadata, harmless to a terminal.

Every text that the package makes of such values goes through `plain_text`: errors as they are
shown, `str` and `repr`, what the command line prints, and what a notebook shows. Values themselves
are never changed.
"""

from __future__ import annotations

import unicodedata

__all__ = ["plain_text"]


def plain_text(value: object, *, lines: bool = False) -> str:
    r"""As text that a terminal obeys in nothing: what it would obey is written out, as `\x1b`.

    These are control characters, those that turn the direction of text around, and those that
    nobody sees.

    Parameters
    ----------
    value : object
        What `str` makes a text of.
    lines : bool
        Keep the ends of lines: for what is made of several.

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
