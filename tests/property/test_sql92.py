"""SQL92 expressions: parts are joined by the laws of three values; and everything hostile.

What single comparisons are is a table: tests/unit/dledger/filters/test_sql_evaluation.py.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dledger.commitlog.properties import encode_properties
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.property_filter import Expression
from tests.harness.extent import examples

NAMES: Final = ("a", "b", "c")
TEXTS: Final = ("'x'", "'5'", "''", "'true'", "'5.0'", "'it''s'")
NUMBERS: Final = (
    "0", "3", "5", "7", "5L", "2147483647", "2147483648", "9223372036854775807", "1.5", "5.0",
    "1e3", ".5", "0.0",
)  # fmt: skip
COMPARISONS: Final = ("=", "<>", "<", "<=", ">", ">=")
VALUES: Final = (
    "x", "5", "3", "7", "-7", "05", "+5", " 5", "5.0", "1e3", "true", "FALSE", "NaN", "-Infinity",
    "-0.0", "0.0", "2147483647", "2147483648", "-2147483648", "9223372036854775807",
    "9223372036854775808", "5L", "it's", "xyz5",
)  # fmt: skip


def operands(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    atoms = st.one_of(
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
        st.sampled_from(NUMBERS),
        st.sampled_from(TEXTS),
        st.sampled_from(("TRUE", "FALSE", "NULL")),
    )
    return st.one_of(
        atoms,
        atoms,
        st.tuples(st.sampled_from("+-"), atoms).map("".join),
        inner.map(lambda text: f"({text})"),
    )


def extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operand = operands(inner)
    negation = st.sampled_from((" ", " NOT "))
    listed = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map(", ".join)
    searches = st.sampled_from(("CONTAINS", "STARTSWITH", "EndsWith"))
    return st.one_of(
        st.tuples(operand, st.sampled_from(COMPARISONS), operand).map(" ".join),
        st.builds("{}{}BETWEEN {} AND {}".format, operand, negation, operand, operand),
        st.builds("{}{}IN ({})".format, operand, negation, listed),
        st.builds("{}{}{} {}".format, operand, negation, searches, st.sampled_from(TEXTS)),
        st.builds("{} IS {}NULL".format, operand, st.sampled_from(("", "NOT "))),
        st.builds("NOT {}".format, operand),
        st.builds("{} {} {}".format, inner, st.sampled_from(("AND", "OR", "or")), inner),
    )


expressions = st.recursive(operands(st.sampled_from(NAMES)), extended, max_leaves=8)
words = st.sampled_from(
    (*NAMES, *TEXTS, *NUMBERS, *COMPARISONS, "AND", "OR", "NOT", "IS", "NULL", "TRUE", "BETWEEN",
     "IN", "CONTAINS", "(", ")", ",", "+", "-", "--", "/*", "*/", "'", "!", "ä", "\0", "\n"),
)  # fmt: skip
messages = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES))


class Value(Enum):
    """What an expression is for a message; BROKEN: a value cannot be read as it must be."""

    TRUE = 1
    FALSE = 2
    UNKNOWN = 3
    BROKEN = 4


T, F, U, BROKEN = Value
OPPOSITE: Final = {T: F, F: T, U: U, BROKEN: BROKEN}


def value(text: str, properties: Mapping[str, str]) -> Value:
    """Return what *text* is, by the three questions that can be asked about it."""
    message = encode_properties(dict(properties))
    asked = {T: text, F: f"NOT ({text})", U: f"({text}) IS NULL"}
    met = [kind for kind, question in asked.items() if Expression(question).matches(message)]
    assert len(met) < 2, (text, properties, met)
    return met[0] if met else BROKEN


def joined(left: Value, right: Value, decisive: Value) -> Value:
    """Return what two parts are together: the left one is read first, and may decide alone."""
    for side in (left, right):
        if side in (decisive, BROKEN):
            return side
    return U if U in (left, right) else OPPOSITE[decisive]


def value_of_good(text: str, properties: Mapping[str, str]) -> Value:
    """Return what *text* is; an example with text that is no expression is left out."""
    try:
        return value(text, properties)
    except ExpressionIllegalError:
        reject()


@settings(max_examples=examples(300))
@given(expressions, expressions, messages)
def test_parts_are_joined_by_the_tables_of_three_values(
    left: str, right: str, properties: dict[str, str]
) -> None:
    one, other = value_of_good(left, properties), value_of_good(right, properties)
    assert value(f"({left}) AND ({right})", properties) is joined(one, other, F)
    assert value(f"({left}) OR ({right})", properties) is joined(one, other, T)
    assert value(f"NOT ({left})", properties) is OPPOSITE[one]
    assert value(f"({left}) IS NULL", properties) is {U: T, BROKEN: BROKEN}.get(one, F)
    assert value(f"({left}) IS NOT NULL", properties) is {U: F, BROKEN: BROKEN}.get(one, T)


bounds = operands(st.sampled_from(NAMES))


@settings(max_examples=examples(200))
@given(bounds, bounds, bounds, messages)
def test_between_is_two_comparisons(
    part: str, low: str, high: str, properties: dict[str, str]
) -> None:
    within = value_of_good(f"{part} BETWEEN {low} AND {high}", properties)
    outside = value_of_good(f"{part} NOT BETWEEN {low} AND {high}", properties)
    found = {
        sign: value(f"{part} {sign} {bound}", properties)
        for sign, bound in ((">=", low), ("<=", high), ("<", low), (">", high))
    }
    assert within is joined(found[">="], found["<="], F)
    assert outside is joined(found["<"], found[">"], T)


@given(st.sampled_from(NAMES), st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), messages)
def test_in_is_one_comparison_with_each(
    name: str, texts: list[str], properties: dict[str, str]
) -> None:
    found = F
    for text in texts:
        found = joined(found, value(f"{name} = {text}", properties), T)
    listed = ", ".join(texts)
    assert value(f"{name} IN ({listed})", properties) is found
    assert value(f"{name} NOT IN ({listed})", properties) is OPPOSITE[found]


@settings(max_examples=examples(150))
@given(
    st.one_of(
        st.text(max_size=200),
        st.builds(lambda part, times: part * times, words, st.integers(0, 3000)),
        st.builds(
            lambda text, at, part: text[:at] + part + text[at:],
            expressions,
            st.integers(0, 30),
            st.text(max_size=3),
        ),
    ),
    st.binary(max_size=80),
)
def test_whatever_comes_is_an_answer(text: str, properties: bytes) -> None:
    why = ""
    try:
        made = Expression(text)
    except ExpressionIllegalError as error:
        why = str(error)
    else:
        assert made.matches(properties) in (True, False)
    assert len(why) < 200
