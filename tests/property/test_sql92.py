"""SQL92 expressions against an evaluator of the tests' own, and against everything hostile."""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.properties import encode_properties
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.property_filter import Expression
from tests.harness import sql_oracle
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
sentences = st.lists(words, max_size=12).map(" ".join)
messages = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES))


def agree(text: str, properties: dict[str, str]) -> None:
    try:
        expected = sql_oracle.judge(text, properties)
    except sql_oracle.RefusedError:
        try:
            Expression(text)
        except ExpressionIllegalError:
            return
        raise AssertionError(f"{text!r} is no expression") from None
    assert Expression(text).matches(encode_properties(properties)) is expected, (text, properties)


@settings(max_examples=examples(400))
@given(expressions, messages)
def test_expressions_agree_with_the_oracle(text: str, properties: dict[str, str]) -> None:
    agree(text, properties)


@settings(max_examples=examples(200))
@given(sentences, messages)
def test_sentences_of_any_words_are_refused_or_judged_alike(
    text: str, properties: dict[str, str]
) -> None:
    agree(text, properties)


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
