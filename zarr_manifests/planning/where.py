"""A *where*: comparisons of columns with literals, all of which must hold.

`parse_where` reads text, or Python values, which can also say `within`: closed ranges of labels.
`Where.sql` is the canonical text, in the SQL of Spark. Numbers in it are decimals where Spark would
otherwise round them on the way to a comparison, so that Spark compares exactly, as
`planning.skipping` does.

Invariant: without `within`, the canonical text of a `Where` parses to an equal one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from numbers import Integral, Real
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from zarr_manifests.errors import InvalidArgumentError, WhereError

_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d\d?)(?::?(\d\d))?", re.ASCII)


def zone_of(name: str) -> tzinfo:
    """The time zone of that name, such as `Europe/Berlin`, `UTC` or `+08:00`.

    Raises
    ------
    InvalidArgumentError
        If there is no such zone.

    Examples
    --------
    >>> from zarr_manifests.planning.where import zone_of
    >>> zone_of("GMT+8")
    datetime.timezone(datetime.timedelta(seconds=28800))
    """
    if name in ("UTC", "Z", "Etc/UTC"):
        return UTC
    offset = _OFFSET.fullmatch(str(name))
    if offset is not None:
        sign, hours, minutes = offset.groups()
        length = timedelta(hours=int(hours), minutes=int(minutes or 0))
        if length < timedelta(hours=24):
            return timezone(length if sign == "+" else -length)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        raise InvalidArgumentError(f"{name!r} is no time zone, such as 'Europe/Berlin'") from error


GRAMMAR: Final = """\
a where is comparisons, joined by AND:
  column = literal         (and != < <= > >=)
  column IN (literal, ...)
  column BETWEEN literal AND literal
  column IS NULL           column IS NOT NULL
Literals: 4000, -1.5e3, 'text', TRUE, FALSE, DATE '2000-01-31', TIMESTAMP '2000-01-31 12:00:00'.
Names of columns that are not plain words stand in backticks."""

_SYMBOLS: Final = {
    **{op: op for op in ("=", "!=", "<", "<=", ">", ">=")},
    "==": "=",
    "<>": "!=",
}
_OPS: Final = (*_SYMBOLS.values(), "in", "between", "within", "is_null", "is_not_null")
_WORDS: Final = frozenset(
    [
        *("AND", "OR", "NOT", "IN", "IS", "NULL", "BETWEEN", "LIKE", "TRUE", "FALSE"),
        *("INTERVAL", "CASE", "EXISTS"),
    ]
)
_TEXT: Final = r"""'(?:[^'\\]|''|\\['"\\nrt])*+'"""
_LITERAL: Final = re.compile(
    rf"(?:DATE|TIMESTAMP)\s*{_TEXT}|(?:TRUE|FALSE)\b|{_TEXT}"
    r"|[+-]?\s*(?:\d+(?:\.\d*)?|\.\d+)(?:E[+-]?\d+)?(?![\w.])",
    re.IGNORECASE,
)
_COMPARISON: Final = re.compile(
    rf"""
    (?P<name> [^\W\d]\w*+ | `(?:[^`]|``)++` | "(?:[^"]|"")++" ) \s*
    (?: IS\s+(?P<null>(?:NOT\s+)?NULL)\b
    | BETWEEN\b\s*(?P<low>{_LITERAL.pattern})\s*AND\b\s*(?P<high>{_LITERAL.pattern})
    | IN\s*\(\s*(?P<list>(?:{_LITERAL.pattern})(?:\s*,\s*(?:{_LITERAL.pattern}))*)\s*\)
    | (?P<op>==|!=|<>|<=|>=|[=<>])\s*(?P<value>{_LITERAL.pattern})
    ) \s*
    """,
    re.VERBOSE | re.IGNORECASE,
)
_JOINT: Final = re.compile(r"AND\b\s*", re.IGNORECASE)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
MOMENT: Final = re.compile(
    r"([+-]?\d{4,6})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?)?"
    r"\s?(Z|[+-]\d\d:\d\d)?)?)?)?",
    re.ASCII,
)
"""Year to second, the fraction of it, and the time zone; of any calendar."""
_YEARS: Final = (np.datetime64("0002-01-01", "s"), np.datetime64("9999-01-01", "s"))
_DIGITS: Final = 38
"""Most digits of a decimal in Spark."""


class Moment(Struct, frozen=True):
    """A date or a point in time, as ISO 8601 text.

    Parameters
    ----------
    text : str
        Such as `2000-01-31 12:00:00.5Z`. It may end after any field and names a whole period, of
        which the first instant counts in comparisons.

    Raises
    ------
    InvalidArgumentError
        If it is not a date or time of the proleptic Gregorian calendar.

    Examples
    --------
    >>> from zarr_manifests.planning.where import Moment
    >>> Moment("1970-01-02").nanoseconds()
    86400000000000
    """

    text: str

    def __post_init__(self) -> None:
        self.nanoseconds()

    def nanoseconds(self, zone: tzinfo = UTC, *, last: bool = False) -> int:
        """Nanoseconds from 1970 in UTC to the first instant of its period, or to the last.

        `zone` is where a moment without a time zone is.
        """
        found = MOMENT.fullmatch(self.text)
        if found is None:
            raise InvalidArgumentError(f"{self.text!r} is not a date or time in ISO 8601")
        *parts, fraction, named = found.groups()
        named_parts = zip(("", "-", "-", "T", ":", ":"), parts, strict=True)
        try:
            local = np.datetime64(
                "".join(mark + part.strip("+") for mark, part in named_parts if part)
            )
        except ValueError as error:
            raise InvalidArgumentError(
                f"{self.text!r} is not a date or time of the calendar"
            ) from error
        nanos = int((fraction or "").ljust(9, "0")) - last
        if last and fraction:
            nanos += 10 ** (9 - len(fraction))
        elif last:
            unit: Any = np.datetime_data(local.dtype)[0]
            local += np.timedelta64(1, unit)
        at = local.astype("M8[s]")
        # Python has no offsets for other years.
        offset = zone.utcoffset(min(max(at, _YEARS[0]), _YEARS[1]).item()) or timedelta()
        if named is not None:
            offset = timedelta()
        if named not in (None, "Z"):
            offset = timedelta(hours=int(named[:3]), minutes=int(named[0] + named[4:6]))
        seconds = int(at.astype(np.int64)) - offset // timedelta(seconds=1)
        return seconds * 10**9 + nanos


type Literal = bool | int | float | str | Moment
type End = Literal | bytes | timedelta | np.timedelta64 | None
"""An end of a range of labels; None for an open one."""


def _canonical(value: Any) -> Literal:
    """The literal that stands for a value from Python."""
    match value:
        case bool() | np.bool_():
            return bool(value)
        case Moment():
            return value
        case str():
            return str(value)
        case np.datetime64() if not np.isnat(value):  # in UTC, as NumPy has it
            nanos = np.datetime_data(value.dtype)[0] == "ns"
            return Moment(f"{value}Z" if nanos else f"{value.astype('M8[us]')}000Z")
        case datetime() if value == value:  # pandas' NaT is none
            return _moment(value)
        case date() if value == value:
            return Moment(value.isoformat())
        case Integral() | Real() | Decimal() if not isinstance(value, np.timedelta64):
            return _canonical_number(value)
    raise InvalidArgumentError(
        f"{value!r} cannot be compared with a column: give a number, text, bool or time"
    )


def _range(column: str, given: Any) -> tuple[End, End]:
    """The ends of a range, or of a single value."""
    match given:
        case slice(start=low, stop=high, step=None):
            pass
        case (low, high):
            pass
        case slice() | tuple() | list():
            raise InvalidArgumentError(
                f"a range of {column!r} must be a pair (lo, hi) or a slice, with None for an open "
                f"end; got {given!r}"
            )
        case _:
            low = high = given
    ends = _end(low), _end(high)
    kinds = {_kind(end) for end in ends if end is not None}
    if len(kinds) > 1 and not kinds <= {"text", "time", "duration"}:
        raise InvalidArgumentError(
            f"the range {given!r} of {column!r} mixes {' and '.join(sorted(kinds))}"
        )
    return ends


def _end(value: Any) -> End:
    """The end of a range that stands for a value from Python."""
    match value:
        case None | bytes() | timedelta():
            return value
        case np.timedelta64() if not np.isnat(value):
            return value
        case datetime() if value == value:
            # With all digits it is a point in time, and not the second that it begins.
            text, zone = _moment(value).text.removesuffix("Z"), "Z" if value.tzinfo else ""
            return Moment(f"{text[:19]}{text[19:] or '.':0<10}{zone}")
        case float() | np.floating() if math.isinf(value):
            return float(value)
    if hasattr(value, "calendar"):  # a date of cftime
        return str(value.isoformat(timespec="microseconds"))
    return _canonical(value)


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


def _literal_sql(value: End) -> str:
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
        case None | bytes() | timedelta() | np.timedelta64():
            return str(value)
    is_date = ":" not in value.text and not re.search(r"[T ]", value.text)
    return f"{'DATE' if is_date else 'TIMESTAMP'} '{value.text}'"


def _name_sql(name: str) -> str:
    plain = re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII) and name.upper() not in _WORDS
    return name if plain else f"`{name.replace('`', '``')}`"


class Comparison(Struct, frozen=True):
    """A comparison of a column with literals.

    Parameters
    ----------
    column : str
        Name of the column.
    op : str
        `=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `between`, `within`, `is_null` or `is_not_null`.
    values : tuple
        One literal; two for `between`; any number for `in`; none for `is_null` and `is_not_null`.
        Numbers, text, bools and times of Python and NumPy become literals. For `within`, closed
        ranges of which one must hold: pairs or slices, with None for an open end, or single values.
        Text and dates in them name whole periods.

    Raises
    ------
    InvalidArgumentError
        If the operator is unknown, or the values do not fit it.

    Examples
    --------
    >>> from zarr_manifests.planning.where import Comparison
    >>> Comparison("depth", "between", (-10, 2.5)).sql
    'depth BETWEEN -10 AND 2.5'
    """

    column: str
    op: str
    values: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not self.column:
            raise InvalidArgumentError(f"{self.column!r} is not the name of a column")
        op = _operator(self.op)
        if op is None:
            raise InvalidArgumentError(f"{self.op!r} is not an operator; known: {', '.join(_OPS)}")
        ranges = op == "within"
        make: Callable[[Any], Any] = partial(_range, self.column) if ranges else _canonical
        values = tuple(map(make, self.values))
        count = {"between": 2, "is_null": 0, "is_not_null": 0}.get(op, 1)
        if len(values) != count and not (op in ("in", "within") and values):
            raise InvalidArgumentError(
                f"{op} of {self.column!r} does not take {len(values)} values"
            )
        kinds = set() if ranges else {_kind(value) for value in values}
        if len(kinds) > 1 and kinds != {"text", "time"}:
            raise InvalidArgumentError(
                f"{op} of {self.column!r} mixes {' and '.join(sorted(kinds))}"
            )
        force_setattr(self, "op", op)
        force_setattr(self, "values", values)

    @property
    def sql(self) -> str:
        """Its canonical text in Spark's SQL, which has no `within`."""
        name = _name_sql(self.column)
        if self.op == "within":
            ranges = [f"({_literal_sql(low)}, {_literal_sql(high)})" for low, high in self.values]
            return f"{name} WITHIN {', '.join(ranges)}"
        values = [_literal_sql(value) for value in self.values]
        match self.op:
            case "in":
                return f"{name} IN ({', '.join(values)})"
            case "between":
                return f"{name} BETWEEN {values[0]} AND {values[1]}"
            case "is_null" | "is_not_null":
                return f"{name} {self.op.replace('_', ' ').upper()}"
        return f"{name} {self.op} {values[0]}"


def _operator(op: Any) -> str | None:
    """The operator that is meant; None if it is none."""
    name = str(op).strip().lower().replace(" ", "_")
    name = _SYMBOLS.get(name, name)
    return name if name in _OPS else None


def _kind(value: End) -> str:
    match value:
        case bool():
            return "bool"
        case bytes():
            return "bytes"
        case timedelta() | np.timedelta64():
            return "duration"
        case str():
            return "text"
        case Moment():
            return "time"
    return "number"


class Where(Struct, frozen=True):
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


def parse_where(where: Any) -> Where:
    """The comparisons that text or Python values say.

    Parameters
    ----------
    where : str, Where, Comparison, mapping or iterable
        Text such as `"depth > 4000 AND lat BETWEEN -30 AND 30"`; a mapping from column to value; or
        a list of these and of comparisons, each a `Comparison` or a tuple (column, operator,
        value). In a mapping, a list means `IN`, None means `IS NULL`, a tuple that begins with an
        operator is (operator, value), and any other pair or slice a closed range of labels. A list
        of ranges and values means any of them. Of these, text and dates name whole periods; in text
        of a where and after operators, they are instants.

    Returns
    -------
    Where
        Equal for the same comparisons, however they were given; labels of mappings are ranges.

    Raises
    ------
    WhereError
        If text is anything else; the error shows the place and the grammar.
    InvalidArgumentError
        If Python values are anything else.

    Examples
    --------
    >>> from zarr_manifests.planning.where import parse_where
    >>> parse_where("depth > 4000 and flag in (1, 2)").sql
    'depth > 4000 AND flag IN (1, 2)'
    >>> parse_where([("time", ">=", "2000-01"), ("t", "is not null")]).sql
    "time >= '2000-01' AND t IS NOT NULL"
    >>> parse_where({"flag": [1, 2], "depth": (">", 4000)}).sql
    'flag IN (1, 2) AND depth > 4000'
    >>> parse_where({"lat": (-30, 30), "time": slice("2000-02", None)}).sql
    "lat WITHIN (-30, 30) AND time WITHIN ('2000-02', None)"
    """
    match where:
        case Where():
            return where
        case Comparison():
            return Where((where,))
        case str():
            return _parsed(where)
        case Mapping():
            return Where(tuple(_of_item(name, value) for name, value in where.items()))
        case Iterable():
            return Where(tuple(one for each in where for one in _of_each(each)))
    raise InvalidArgumentError(f"{where!r} is not a where; {GRAMMAR}")


def _of_item(name: str, value: Any) -> Comparison:
    match value:
        case None:
            return Comparison(name, "is_null")
        # Symbols that are no operator are not taken for a label.
        case (str(first), *_) if isinstance(value, tuple) and (
            _operator(first) or not re.search(r"\w", first)
        ):
            return _of_tuple((name, *value))
        case list() | set() | frozenset() | range() | np.ndarray():
            if any(each is None for each in value):
                raise InvalidArgumentError(
                    f"a list for {name!r} has None, which stands for no end and for what is "
                    "missing: give the range with its open end, or ask for IS NULL by itself"
                )
            return Comparison(name, "within" if any(map(_is_label, value)) else "in", (*value,))
    return Comparison(name, "within" if _is_label(value) else "=", (value,))


def _is_label(value: Any) -> bool:
    """Whether a value is a range of labels, or may stand for one, as text does for its period."""
    if hasattr(value, "calendar"):  # a date of cftime
        return True
    return isinstance(value, tuple | list | slice | str | date | Moment | np.datetime64)


def _of_each(given: Any) -> tuple[Comparison, ...]:
    if isinstance(given, str | Mapping | Where | Comparison):
        return parse_where(given).comparisons
    return (_of_tuple(given),)


def _of_tuple(given: Any) -> Comparison:
    match given:
        case (name, op, *rest) if len(rest) < 2:
            known = _operator(op)
            several = rest and (
                known in ("in", "between") or (known == "within" and isinstance(rest[0], list))
            )
            return Comparison(name, op, tuple(rest[0]) if several else tuple(rest))
    raise InvalidArgumentError(f"{given!r} is not a comparison: give (column, operator, value)")


def _parsed(text: str) -> Where:
    """The comparisons in the text of a where."""
    found, at = list[Comparison](), len(text) - len(text.lstrip())
    while True:
        match = _COMPARISON.match(text, at)
        if match is None or match["name"].upper() in _WORDS:
            what = "this is no comparison of a column with a literal"
            raise WhereError(what, text, at, GRAMMAR)
        try:
            found.append(_comparison(match))
        except InvalidArgumentError as error:
            raise WhereError(str(error), text, at, GRAMMAR) from None
        if match.end() == len(text):
            return Where(tuple(found))
        joint = _JOINT.match(text, match.end())
        if joint is None:
            what = "comparisons can only be joined by AND, without functions or arithmetic"
            raise WhereError(what, text, match.end(), GRAMMAR)
        at = joint.end()


def _comparison(found: re.Match[str]) -> Comparison:
    name, null = found["name"], found["null"]
    if name[0] in ("`", '"'):
        name = name[1:-1].replace(name[0] * 2, name[0])
    if null is not None:
        return Comparison(name, "is_not_null" if null.upper().startswith("NOT") else "is_null")
    if found["low"] is not None:
        return Comparison(name, "between", (_literal(found["low"]), _literal(found["high"])))
    if found["list"] is not None:
        return Comparison(name, "in", tuple(map(_literal, _LITERAL.findall(found["list"]))))
    return Comparison(name, found["op"], (_literal(found["value"]),))


def _literal(text: str) -> Literal:
    if text.upper() in ("TRUE", "FALSE"):
        return text.upper() == "TRUE"
    if text.endswith("'"):
        named, _, quoted = text[:-1].partition("'")
        plain = re.sub(r"\\.|''", _unescaped, quoted, flags=re.DOTALL)
        return Moment(plain) if named else plain
    number = "".join(text.split())
    # An exact decimal; with an exponent, a number of 64 bits, as in Spark.
    return _canonical(float(number) if "e" in number.lower() else Decimal(number))


def _unescaped(found: re.Match[str]) -> str:
    last = found[0][1]
    return _ESCAPES.get(last, last)
