"""A *where*: comparisons of columns with literals, all of which must hold.

`parse_where` reads text, or the same in Python values. `Where.sql` is the canonical text, in the
SQL of Spark. Numbers in it are decimals where Spark would otherwise round them on the way to a
comparison, so that Spark compares exactly, as `planning.zones.skipping` does.

Invariant: a `Where` always has canonical text, which parses to an equal one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import MAXYEAR, MINYEAR, UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Final

import numpy as np

from zarr_manifests.error_cases import WhereError
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["GRAMMAR", "Comparison", "Literal", "Moment", "Where", "parse_where"]

GRAMMAR: Final = """\
a where is comparisons, joined by AND:
  column = literal         (and != < <= > >=)
  column IN (literal, ...)
  column BETWEEN literal AND literal
  column IS NULL           column IS NOT NULL
Literals: 4000, -1.5e3, 'text', TRUE, FALSE, DATE '2000-01-31', TIMESTAMP '2000-01-31 12:00:00'.
Names of columns that are not plain words stand in backticks."""

_SYMBOLS: Final = {"=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">"}
_SYMBOLS[">="] = ">="
_TURNED: Final = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OPS: Final = (*_TURNED, "in", "between", "is_null", "is_not_null")
_WORDS: Final = frozenset(
    [
        *("AND", "OR", "NOT", "IN", "IS", "NULL", "BETWEEN", "LIKE", "TRUE", "FALSE"),
        *("DATE", "TIMESTAMP", "INTERVAL", "CASE", "EXISTS"),
    ]
)
_ALLOWED: Final = frozenset({"DATE", "TIMESTAMP"})
"""Names of columns, unless text follows."""
_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<word>[^\W\d]\w*)
    | (?P<quoted>`(?:[^`]|``)+`|"(?:[^"]|"")+")
    | (?P<text>'(?:[^'\\]|''|\\['"\\nrt])*')
    | (?P<symbol><=>|==|!=|<>|<=|>=|[=<>(),+-])
    )""",
    re.VERBOSE,
)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
_MOMENT: Final = re.compile(
    r"([+-]?\d{4,6})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?)?"
    r"\s?(Z|[+-]\d\d:\d\d)?)?)?)?",
    re.ASCII,
)
_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS: Final = 38
"""Most digits of a decimal in Spark."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A date or a point in time, as ISO 8601 text.

    Parameters
    ----------
    text : str
        Such as `2000-01-31 12:00:00.5Z`. It may end after any field and stands for the first
        instant of the period that it names.

    Raises
    ------
    InvalidArgumentError
        If it is not a date or time of the proleptic Gregorian calendar.

    Examples
    --------
    >>> from zarr_manifests.planning.zones.where import Moment
    >>> Moment("1970-01-02").nanoseconds()
    86400000000000
    """

    text: str

    def __post_init__(self) -> None:
        self._fields()

    @property
    def is_date(self) -> bool:
        """Whether it has no time of day."""
        return ":" not in self.text and not re.search(r"[T ]", self.text)

    def _fields(self) -> tuple[list[int], str | None]:
        """Year to second and nanoseconds; and the time zone."""
        found = _MOMENT.fullmatch(self.text)
        if found is None:
            raise InvalidArgumentError(f"{self.text!r} is not a date or time in ISO 8601")
        *parts, fraction, zone = found.groups()
        year, month, day, hour, minute, second = (
            int(part) if part else least
            for part, least in zip(parts, (0, 1, 1, 0, 0, 0), strict=True)
        )
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        sound = 1 <= month <= 12 and 1 <= day <= _DAYS[month - 1] and max(minute, second) < 60
        if not sound or hour > 23 or ((month, day) == (2, 29) and not leap):
            raise InvalidArgumentError(f"{self.text!r} is not a date or time of the calendar")
        return [year, month, day, hour, minute, second, int((fraction or "").ljust(9, "0"))], zone

    def nanoseconds(self, zone: tzinfo = UTC) -> int:
        """Nanoseconds from 1970 in UTC; `zone` is where a moment without a time zone is."""
        (year, month, day, hour, minute, second, nanos), named = self._fields()
        cycles = 0
        if not MINYEAR <= year <= MAXYEAR:  # the calendar repeats itself after 400 years
            cycles, year = divmod(year - 2000, 400)
            year += 2000
        local = datetime(
            year, month, day, hour, minute, second, tzinfo=zone if named is None else UTC
        )
        seconds = (local - _EPOCH) // timedelta(seconds=1) + cycles * 146_097 * 86_400
        if named not in (None, "Z"):
            offset = int(named[1:3]) * 3600 + int(named[4:6]) * 60
            seconds -= offset if named[0] == "+" else -offset
        return seconds * 10**9 + nanos


type Literal = bool | int | float | str | Moment


def _canonical(value: Any) -> Literal:
    """The literal that stands for a value from Python."""
    match value:
        case bool() | np.bool_():
            return bool(value)
        case Moment():
            return value
        case str():
            return str(value)
        case np.datetime64() if not np.isnat(value):
            days = np.datetime_data(value.dtype)[0] in "YMWD"
            return Moment(str(value.astype("M8[D]") if days else value))
        case datetime() if value == value:  # pandas' NaT is none
            return _moment(value)
        case date() if value == value:
            return Moment(value.isoformat())
        case Integral() | Real() | Decimal() if not isinstance(value, np.timedelta64):
            return _canonical_number(value)
    raise InvalidArgumentError(
        f"{value!r} cannot be compared with a column: give a number, text, bool or time"
    )


def _moment(value: datetime) -> Moment:
    naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    nanos = getattr(value, "nanosecond", 0)  # pandas has these
    text = datetime.isoformat(naive.replace(microsecond=0), " ")[:19]
    text += f".{naive.microsecond:06}{nanos:03}" if naive.microsecond or nanos else ""
    return Moment(text + ("" if value.tzinfo is None else "Z"))


def _canonical_number(value: Any) -> int | float:
    """An int for a number without a fraction, as long as a decimal of Spark holds it."""
    exact = isinstance(value, Integral | Decimal)
    number = (int if isinstance(value, Integral) else Decimal if exact else float)(value)
    if not math.isfinite(number):
        raise InvalidArgumentError(
            f"{value!r} cannot be a literal: find infinity by `> 1.7976931348623157e308`, and "
            "missing values by IS NULL"
        )
    whole = int(number)
    if number == whole and len(str(abs(whole))) < _DIGITS:
        return whole
    if number == whole and exact:
        raise InvalidArgumentError(
            f"{value!r} has too many digits; fewer than {_DIGITS} are allowed"
        )
    return float(number)


def _literal_sql(value: Literal) -> str:
    match value:
        case bool():
            return str(value).upper()
        case int():
            # Spark would compare a larger integer with a float column as floats of 32 bits.
            return str(value) if abs(value) <= 2**24 else f"{value}.0"
        case float():
            return repr(value)
        case str():
            escaped = value.replace("\\", "\\\\").replace("'", "\\'")
            return f"'{escaped}'"
    return f"{'DATE' if value.is_date else 'TIMESTAMP'} '{value.text}'"


def _name_sql(name: str) -> str:
    plain = re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII) and name.upper() not in _WORDS
    return name if plain else f"`{name.replace('`', '``')}`"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a column with literals.

    Parameters
    ----------
    column : str
        Name of the column.
    op : str
        `=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `between`, `is_null` or `is_not_null`.
    values : tuple
        One literal; two for `between`; any number for `in`; none for `is_null` and `is_not_null`.
        Numbers, text, bools and times of Python and NumPy become literals.

    Raises
    ------
    InvalidArgumentError
        If the operator is unknown, or the values do not fit it.

    Examples
    --------
    >>> from zarr_manifests.planning.zones.where import Comparison
    >>> Comparison("depth", "between", (-10, 2.5)).sql
    'depth BETWEEN -10 AND 2.5'
    """

    column: str
    op: str
    values: tuple[Literal, ...] = ()

    def __post_init__(self) -> None:
        if not self.column:
            raise InvalidArgumentError(f"{self.column!r} is not the name of a column")
        op = str(self.op).strip().lower().replace(" ", "_")
        op = _SYMBOLS.get(op, op)
        if op not in _OPS:
            raise InvalidArgumentError(f"{self.op!r} is not an operator; known: {', '.join(_OPS)}")
        values = tuple(map(_canonical, self.values))
        count = {"between": 2, "is_null": 0, "is_not_null": 0}.get(op, 1)
        if len(values) != count and not (op == "in" and values):
            raise InvalidArgumentError(
                f"{op} of {self.column!r} does not take {len(values)} values"
            )
        kinds = {_kind(value) for value in values}
        if len(kinds) > 1 and kinds != {"text", "time"}:
            raise InvalidArgumentError(
                f"{op} of {self.column!r} mixes {' and '.join(sorted(kinds))}"
            )
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "values", values)

    @property
    def sql(self) -> str:
        """Its canonical text in Spark's SQL."""
        name, values = _name_sql(self.column), [_literal_sql(value) for value in self.values]
        match self.op:
            case "in":
                return f"{name} IN ({', '.join(values)})"
            case "between":
                return f"{name} BETWEEN {values[0]} AND {values[1]}"
            case "is_null" | "is_not_null":
                return f"{name} {self.op.replace('_', ' ').upper()}"
        return f"{name} {self.op} {values[0]}"

    def __str__(self) -> str:
        return self.sql


def _kind(value: Literal) -> str:
    match value:
        case bool():
            return "bool"
        case str():
            return "text"
        case Moment():
            return "time"
    return "number"


@dataclass(frozen=True, slots=True)
class Where:
    """Comparisons that must all hold.

    Parameters
    ----------
    comparisons : tuple of Comparison
        At least one.

    Raises
    ------
    InvalidArgumentError
        If there is none.
    """

    comparisons: tuple[Comparison, ...]

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise InvalidArgumentError("a where needs at least one comparison")

    @property
    def sql(self) -> str:
        """Its canonical text in Spark's SQL."""
        return " AND ".join(each.sql for each in self.comparisons)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns, each once."""
        return tuple(dict.fromkeys(each.column for each in self.comparisons))

    def named(self, names: Mapping[str, str]) -> Where:
        """The same comparisons, of columns by other names where these are known."""
        each = self.comparisons
        return Where(tuple(replace(one, column=names.get(one.column, one.column)) for one in each))

    def __str__(self) -> str:
        return self.sql


def parse_where(where: Any) -> Where:
    """The comparisons that text or Python values say.

    Parameters
    ----------
    where : str, Where, Comparison, mapping or iterable
        Text such as `"depth > 4000 AND lat BETWEEN -30 AND 30"`; a list of comparisons, each a
        `Comparison` or a tuple (column, operator, value); or a mapping from column to value, where
        a list means `IN`, None means `IS NULL`, and a tuple is (operator, value).

    Returns
    -------
    Where
        Equal for the same comparisons, however they were given.

    Raises
    ------
    WhereError
        If text is anything else; the error shows the place and the grammar.
    InvalidArgumentError
        If Python values are anything else.

    Examples
    --------
    >>> from zarr_manifests.planning.zones.where import parse_where
    >>> parse_where("4000 < depth and flag in (1, 2)").sql
    'depth > 4000 AND flag IN (1, 2)'
    >>> parse_where([("time", ">=", "2000-01"), ("t", "is not null")]).sql
    "time >= '2000-01' AND t IS NOT NULL"
    >>> parse_where({"flag": [1, 2], "depth": (">", 4000)}).sql
    'flag IN (1, 2) AND depth > 4000'
    """
    match where:
        case Where():
            return where
        case Comparison():
            return Where((where,))
        case str():
            return _Parser(where).where()
        case Mapping():
            return Where(tuple(_of_item(name, value) for name, value in where.items()))
        case Iterable():
            return Where(tuple(_of_tuple(each) for each in where))
    raise InvalidArgumentError(f"{where!r} is not a where; {GRAMMAR}")


def _of_item(name: str, value: Any) -> Comparison:
    match value:
        case None:
            return Comparison(name, "is_null")
        case tuple():
            return _of_tuple((name, *value))
        case list() | set() | frozenset() | range() | np.ndarray():
            return Comparison(name, "in", tuple(value))
    return Comparison(name, "=", (value,))


def _of_tuple(given: Any) -> Comparison:
    match given:
        case Comparison():
            return given
        case (name, op, *rest) if len(rest) < 2:
            several = str(op).lower() in ("in", "between") and rest
            return Comparison(name, op, tuple(rest[0]) if several else tuple(rest))
    raise InvalidArgumentError(f"{given!r} is not a comparison: give (column, operator, value)")


class _Parser:
    """Reads the text of a where from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                start = at + len(text[at:]) - len(text[at:].lstrip())
                what = "this text has no end" if text[start] == "'" else "this cannot be read"
                raise WhereError(what, text, start, GRAMMAR)
            kind = str(found.lastgroup)
            self._tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self._tokens.append(("end", "", len(text)))
        self._next = 0

    def where(self) -> Where:
        found = [self._comparison()]
        while self._word("AND"):
            found.append(self._comparison())
        kind, token, _ = self._tokens[self._next]
        if kind != "end":
            alone = token.upper() == "OR"
            raise self._error("comparisons can only be joined by AND" if alone else "expected AND")
        return Where(tuple(found))

    def _error(self, what: str, at: int | None = None) -> WhereError:
        place = self._tokens[self._next][2] if at is None else at
        return WhereError(what, self._text, place, GRAMMAR)

    def _word(self, word: str) -> bool:
        """Whether the next token is this word, which is then read."""
        kind, token, _ = self._tokens[self._next]
        found = kind == "word" and token.upper() == word
        self._next += found
        return found

    def _symbol(self, *symbols: str) -> str | None:
        kind, token, _ = self._tokens[self._next]
        if kind != "symbol" or token not in symbols:
            return None
        self._next += 1
        return token

    def _comparison(self) -> Comparison:
        start = self._tokens[self._next][2]
        if self._is_literal():
            value = self._literal()
            op = self._symbol(*_SYMBOLS)
            if op is None:
                raise self._error("expected a comparison of this literal with a column")
            return self._made(start, self._column, _TURNED[_SYMBOLS[op]], value)
        name = self._column()
        if self._word("IS"):
            op = "is_not_null" if self._word("NOT") else "is_null"
            if not self._word("NULL"):
                raise self._error("expected NULL")
            return Comparison(name, op)
        if self._word("BETWEEN"):
            low = self._literal()
            if not self._word("AND"):
                raise self._error("expected AND, between the bounds of BETWEEN")
            return self._made(start, lambda: name, "between", low, self._literal())
        if self._word("IN"):
            return self._made(start, lambda: name, "in", *self._list())
        if self._word("NOT"):
            raise self._error("NOT is not supported; use != or IS NOT NULL")
        op = self._symbol(*_SYMBOLS)
        if op is None:
            raise self._error("expected an operator: = != < <= > >= IN BETWEEN IS")
        return self._made(start, lambda: name, _SYMBOLS[op], self._literal())

    def _made(self, start: int, column: Callable[[], str], op: str, *values: Literal) -> Comparison:
        name = column()
        if self._tokens[self._next][1] in ("+", "-", "("):
            raise self._error("a where cannot have arithmetic or functions")
        try:
            return Comparison(name, op, values)
        except InvalidArgumentError as error:
            raise self._error(str(error), start) from None

    def _list(self) -> list[Literal]:
        if not self._symbol("("):
            raise self._error("expected a list of literals in parentheses")
        values = [self._literal()]
        while self._symbol(","):
            values.append(self._literal())
        if not self._symbol(")"):
            raise self._error("expected , or )")
        return values

    def _column(self) -> str:
        kind, token, _ = self._tokens[self._next]
        if kind == "quoted":
            self._next += 1
            return token[1:-1].replace(token[0] * 2, token[0])
        if kind != "word" or token.upper() in _WORDS - _ALLOWED:
            what = "NOT is not supported; use !=" if token.upper() == "NOT" else None
            raise self._error(what or "expected the name of a column")
        self._next += 1
        if self._tokens[self._next][1] == "(":
            raise self._error("a where cannot have functions", self._tokens[self._next - 1][2])
        return token

    def _is_literal(self) -> bool:
        kind, token, _ = self._tokens[self._next]
        followed = self._tokens[min(self._next + 1, len(self._tokens) - 1)][0]
        typed = token.upper() in ("DATE", "TIMESTAMP") and followed == "text"
        return (
            kind in ("number", "text")
            or token in ("+", "-")
            or (kind == "word" and (token.upper() in ("TRUE", "FALSE") or typed))
        )

    def _literal(self) -> Literal:
        if not self._is_literal():
            kind = self._tokens[self._next][0]
            names = kind in ("word", "quoted") and self._tokens[self._next][1].upper() != "NULL"
            what = "; text stands in single quotes" if names else "; use IS NULL" * (kind == "word")
            raise self._error(f"expected a literal{what}")
        kind, token, start = self._tokens[self._next]
        self._next += 1
        try:
            if kind == "text":
                return _unquoted(token)
            if token.upper() in ("TRUE", "FALSE"):
                return token.upper() == "TRUE"
            if kind == "word":
                text = self._tokens[self._next][1]
                self._next += 1
                return Moment(_unquoted(text))
            if kind == "symbol":
                kind, number, _ = self._tokens[self._next]
                if kind != "number":
                    raise self._error("expected a number")
                self._next += 1
                return _number(token + number)
            return _number(token)
        except InvalidArgumentError as error:
            raise (
                error if isinstance(error, WhereError) else self._error(str(error), start)
            ) from None


def _number(text: str) -> Literal:
    """An exact decimal; with an exponent, a number of 64 bits, as in Spark."""
    return _canonical(float(text) if "e" in text.lower() else Decimal(text))


def _unquoted(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        last = found[0][1]
        return _ESCAPES.get(last, last)

    return re.sub(r"\\.|''", plain, text[1:-1], flags=re.DOTALL)
