"""Templates of kerchunk references: text with expressions in double braces.

Anybody may have written a file of references, and a template language such as Jinja is a
programming language. Its sandbox keeps a template from forbidden objects, but not from working for
hours (`{{ 'a' * 10**10 }}`). So only what references are known to need is supported, and everything
else is an error: names, whole numbers, `+ - * // %`, parentheses, a number formatted by
`'%03d' % i`, and a template that is called with values (`{{ f(c='t2m') }}`).

Invariant: an expression has at most `_MOST_CHARS` characters, and numbers are below 2**63. A text
can still become long, since it may call another one many times.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from zarr_manifests.errors import InvalidArgumentError, UnsupportedFormatError

__all__ = ["Templates"]

type _Value = int | str

_EXPRESSION: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FORMAT: Final = re.compile(r"%0?[0-9]{0,2}d")
_MOST_CHARS: Final = 200
_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Templates:
    """Named texts that other texts may use.

    Parameters
    ----------
    texts : mapping of str to str
        Texts by name. A text with an expression is called; others are inserted unchanged.

    Raises
    ------
    InvalidArgumentError
        If names or texts are not strings.

    Examples
    --------
    >>> from zarr_manifests.virtual.templates import Templates
    >>> templates = Templates({"u": "s3://winds", "f": "{{c}}.nc"})
    >>> templates.render("{{u}}/{{ '%02d' % (i + 1) }}/{{ f(c='t') }}", {"i": 6})
    's3://winds/07/t.nc'
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        if not all(isinstance(text, str) for pair in texts.items() for text in pair):
            raise InvalidArgumentError("kerchunk templates are a map from names to texts")
        self._texts = dict(texts)
        self._plain: dict[str, _Value] = {k: v for k, v in texts.items() if "{{" not in v}

    def render(self, text: str, values: Mapping[str, _Value] | None = None) -> str:
        """Return the text with its expressions evaluated.

        Raises
        ------
        InvalidArgumentError
            If a name is unknown, or a number is divided by zero or beyond 2**63.
        UnsupportedFormatError
            If an expression is not supported.
        """
        if "{" not in text:
            return text
        names = ChainMap(dict(values or {}), self._plain)
        parts = _EXPRESSION.split(text)
        if any(sign in literal for literal in parts[::2] for sign in ("{{", "{%", "{#")):
            raise _not_understood(text)
        for place in range(1, len(parts), 2):
            try:
                tree = _parsed(parts[place])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise _not_understood(text) from error
            parts[place] = str(self._value(text, tree, names))
        return "".join(parts)

    def _value(self, text: str, node: ast.expr, names: Mapping[str, _Value]) -> _Value:
        match node:
            case ast.Constant(int() | str() as value) if type(value) is not bool:
                pass
            case ast.Name(name):
                if name not in names:
                    known = ", ".join(sorted(names)[:10]) or "none"
                    raise _wrong(text, f"needs {name!r}, which is not defined; known: {known}")
                value = names[name]
            case ast.UnaryOp(ast.USub(), operand):
                value = -self._number(text, operand, names)
            case ast.BinOp(ast.Constant(str(form)), ast.Mod(), right) if _FORMAT.fullmatch(form):
                value = form % self._number(text, right, names)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                numbers = [self._number(text, operand, names) for operand in (left, right)]
                try:
                    value = _OPERATORS[type(sign)](*numbers)
                except ZeroDivisionError as error:
                    raise _wrong(text, "divides by zero") from error
            case ast.Call(ast.Name(name), [], keywords) if name in self._texts and all(
                each.arg for each in keywords
            ):
                given = {str(each.arg): self._value(text, each.value, names) for each in keywords}
                # It sees only its arguments, so templates cannot call each other recursively.
                value = Templates({}).render(self._texts[name], given)
            case _:
                raise _not_understood(text)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise _wrong(text, "goes beyond 2**63")
        return value

    def _number(self, text: str, node: ast.expr, names: Mapping[str, _Value]) -> int:
        value = self._value(text, node, names)
        if type(value) is not int:
            raise _wrong(text, f"needs a number, not the text {str(value)[:80]!r}")
        return value


@lru_cache(maxsize=1000)
def _parsed(source: str) -> ast.expr:
    if len(source) > _MOST_CHARS:
        raise ValueError("too long")
    return ast.parse(source.strip(), mode="eval").body


def _wrong(text: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the kerchunk template {text[:80]!r} {why}")


def _not_understood(text: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the kerchunk template {text[:80]!r} is not supported: names, whole numbers, + - * // %, "
        "'%03d' % number and template(name=value) are. Write the references out, for instance "
        "by kerchunk itself"
    )
