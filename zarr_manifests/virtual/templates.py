"""Templates of kerchunk references: text with expressions in double braces.

Anybody may have written a file of references, and a template language such as Jinja is a
programming language. Its sandbox keeps a template from forbidden objects, but not from working for
hours or filling the memory (`{{ 'a' * 10**10 }}`). So only what references are known to need is
supported, and everything else is an error: names, whole numbers, `+ - * // %`, parentheses, a
number formatted by `'%03d' % i`, and a template that is called with values (`{{ f(c='t2m') }}`).

Invariant: rendering takes little time and memory. An expression has at most `_MOST_CHARS`
characters, numbers are below 2**63, and all texts, before and after rendering, count against a
budget.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Final

from zarr_manifests.errors import InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.virtual.budget import Budget

__all__ = ["Templates"]

type _Value = int | str
type _Rule = Callable[[Mapping[str, _Value]], _Value]

_EXPRESSION: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FORMAT: Final = re.compile(r"%0?[0-9]{0,2}d")
_MOST_CHARS: Final = 200
_KEPT: Final = 1000
"""Number of compiled expressions to keep."""
_COMPILED_BYTES: Final = 256
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
    budget : Budget, optional
        The bytes that rendering may make.

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

    def __init__(self, texts: Mapping[str, str], budget: Budget | None = None) -> None:
        if not all(isinstance(text, str) for pair in texts.items() for text in pair):
            raise InvalidArgumentError("kerchunk templates are a map from names to texts")
        self._texts = dict(texts)
        self._budget = budget or Budget()
        self._plain: dict[str, _Value] = {k: v for k, v in texts.items() if "{{" not in v}
        self._rules: dict[str, _Rule] = {}

    def render(self, text: str, values: Mapping[str, _Value] | None = None) -> str:
        """Return the text with its expressions evaluated.

        Raises
        ------
        InvalidArgumentError
            If a name is unknown, a number is divided by zero or beyond 2**63, or all texts
            together are too long.
        UnsupportedFormatError
            If an expression is not supported.
        """
        if "{" not in text:
            return text
        return self._rendered(text, ChainMap(dict(values or {}), self._plain))

    def _rendered(self, text: str, names: Mapping[str, _Value]) -> str:
        where = f"the kerchunk template {text[:80]!r}"
        self._budget.take(len(text), where)
        parts = _EXPRESSION.split(text)
        for literal in parts[::2]:
            if "{{" in literal or "{%" in literal or "{#" in literal:
                raise _not_understood(text)
        for place in range(1, len(parts), 2):
            rule = self._rules.get(parts[place])
            if rule is None:
                if len(self._rules) >= _KEPT:
                    self._rules.clear()
                self._budget.take(_COMPILED_BYTES, where)
                rule = self._rules[parts[place]] = self._rule(text, parts[place])
            parts[place] = str(rule(names))
            self._budget.take(len(parts[place]), where)
        return "".join(parts)

    def _rule(self, text: str, source: str) -> _Rule:
        try:
            if len(source) > _MOST_CHARS:
                raise _not_understood(text)
            return self._of(text, ast.parse(source.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, UnsupportedFormatError):
                raise
            raise _not_understood(text) from error

    def _of(self, text: str, node: ast.expr) -> _Rule:
        match node:
            case ast.Constant(int(value)) if type(value) is int:
                number = _bounded(text, value)
                return lambda _: number
            case ast.Constant(str(value)):
                return lambda _: value
            case ast.Name(name):
                return lambda names: _known(text, names, name)
            case ast.UnaryOp(ast.USub(), operand):
                inner = self._of(text, operand)
                return lambda names: -_number(text, inner(names))
            case ast.BinOp(ast.Constant(str(form)), ast.Mod(), right) if _FORMAT.fullmatch(form):
                inner = self._of(text, right)
                return lambda names: form % _number(text, inner(names))
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                return _computed(
                    text, _OPERATORS[type(sign)], self._of(text, left), self._of(text, right)
                )
            case ast.Call(ast.Name(name), [], keywords) if name in self._texts:
                return self._call(text, name, keywords)
        raise _not_understood(text)

    def _call(self, text: str, name: str, keywords: list[ast.keyword]) -> _Rule:
        if not all(keyword.arg for keyword in keywords):
            raise _not_understood(text)
        given = {str(keyword.arg): self._of(text, keyword.value) for keyword in keywords}
        # It sees only its arguments, so templates cannot call each other recursively.
        body, called = self._texts[name], Templates({}, self._budget)
        return lambda names: called.render(body, {k: rule(names) for k, rule in given.items()})


def _computed(text: str, compute: Callable[[int, int], int], left: _Rule, right: _Rule) -> _Rule:
    def rule(names: Mapping[str, Any]) -> int:
        try:
            value = compute(_number(text, left(names)), _number(text, right(names)))
        except ZeroDivisionError as error:
            raise InvalidArgumentError(
                f"the kerchunk template {text[:80]!r} divides by zero"
            ) from error
        return _bounded(text, value)

    return rule


def _known(text: str, names: Mapping[str, _Value], name: str) -> _Value:
    if name not in names:
        known = ", ".join(sorted(names)[:10]) or "none"
        raise InvalidArgumentError(
            f"the kerchunk template {text[:80]!r} needs {name!r}, which is not defined; known: "
            f"{known}"
        )
    return names[name]


def _number(text: str, value: _Value) -> int:
    if type(value) is not int:
        raise InvalidArgumentError(
            f"the kerchunk template {text[:80]!r} needs a number, not the text {str(value)[:80]!r}"
        )
    return value


def _bounded(text: str, value: int) -> int:
    if abs(value) >= 2**63:
        raise InvalidArgumentError(f"the kerchunk template {text[:80]!r} goes beyond 2**63")
    return value


def _not_understood(text: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the kerchunk template {text[:80]!r} is not supported: names, whole numbers, + - * // %, "
        "'%03d' % number and template(name=value) are. Write the references out, for instance "
        "by kerchunk itself"
    )
