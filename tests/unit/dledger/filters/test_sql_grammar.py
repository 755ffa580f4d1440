"""What is an expression, what is none, and why."""

import pytest

from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.sql_grammar import MAX_EXPRESSION_CHARS, MAX_WORDS, parse_sql
from dledger.filters.sql_tree import (
    All,
    AnyOf,
    Cast,
    Compare,
    Comparison,
    Constant,
    Find,
    In,
    IsNull,
    Negate,
    Node,
    Not,
    Property,
    Search,
)

A, B, FIVE = Property("a"), Property("b"), Constant(5)
EQUAL = Comparison.EQUAL


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a = 5", Compare(EQUAL, A, FIVE)),
        ("a <> 'x'", Compare(Comparison.NOT_EQUAL, A, Constant("x"))),
        ("a < 5", Compare(Comparison.LESS, A, FIVE)),
        ("a<=5", Compare(Comparison.LESS_OR_EQUAL, A, FIVE)),
        ("5 > a", Compare(Comparison.GREATER, FIVE, A)),
        ("a >= -5", Compare(Comparison.GREATER_OR_EQUAL, A, Negate(FIVE))),
        ("a = +5", Compare(EQUAL, A, FIVE)),
        ("a", Cast(A)),
        ("NOT a", Not(Cast(A))),
        ("TRUE", Constant(True)),
        ("null", Constant(None)),
        ("a IS NULL", IsNull(A)),
        ("a is not null", Not(IsNull(A))),
        ("a IN ('x', 'y', 'x')", In(A, frozenset({"x", "y"}), negated=False)),
        ("a NOT IN ('x')", In(A, frozenset({"x"}), negated=True)),
        ("a CONTAINS 'x'", Find(Search.CONTAINS, A, "x", negated=False)),
        ("a not startswith 'x'", Find(Search.STARTS_WITH, A, "x", negated=True)),
        ("a EndsWith ''", Find(Search.ENDS_WITH, A, "", negated=False)),
        ("a = TRUE", Compare(EQUAL, A, Constant(True))),
        ("a = 'it''s'", Compare(EQUAL, A, Constant("it's"))),
        ("a = 'ä\n'", Compare(EQUAL, A, Constant("ä\n"))),
        ("(((a))) = 5", Compare(EQUAL, A, FIVE)),
    ],
)
def test_one_operator(text: str, tree: Node) -> None:
    assert parse_sql(text) == tree


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a = 5 OR b = 5 AND a = 5", "a = 5 OR (b = 5 AND a = 5)"),
        ("NOT a AND b", "(NOT a) AND b"),
        ("a < 5 = TRUE", "(a < 5) = TRUE"),
        ("a = b = 5", "(a = b) = 5"),
        ("a BETWEEN 1 AND 5 AND b", "(a BETWEEN 1 AND 5) AND b"),
        ("a between 1 and b or b", "((a >= 1) AND (a <= b)) OR b"),
        ("a NOT BETWEEN 1 AND 5", "a < 1 OR a > 5"),
        ("a\t=\r\n5 -- the rest is silence", "a = 5"),
        ("a /* = 6 ** / */ = 5", "a = 5"),
        ("a = 5 --", "a = 5"),
    ],
)
def test_what_binds_tighter(text: str, same: str) -> None:
    assert parse_sql(text) == parse_sql(same)


def test_not_binds_tighter_than_a_comparison() -> None:
    assert parse_sql("NOT a = 5") == Compare(EQUAL, Not(Cast(A)), FIVE)
    assert parse_sql("NOT (a = 5)") == Not(Compare(EQUAL, A, FIVE))


def test_long_chains_are_flat() -> None:
    parts = (Cast(A), Cast(B), Cast(A))
    assert parse_sql("a OR b OR a") == AnyOf(parts)
    assert parse_sql("a AND b AND a") == All(parts)


@pytest.mark.parametrize("name", ["inn", "nota", "ORDER", "_x", "$y", "is_null", "TRUE1", "e5"])
def test_names_may_begin_like_keywords(name: str) -> None:
    assert parse_sql(f"{name} = 5") == Compare(EQUAL, Property(name), FIVE)


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("0", Constant(0)),
        ("2147483647", Constant(2147483647)),
        ("2147483648", Constant(2147483648, is_wide=True)),
        ("5L", FIVE),
        ("5l", FIVE),
        ("9223372036854775807L", Constant(9223372036854775807, is_wide=True)),
        ("5.", Constant(5.0)),
        (".5", Constant(0.5)),
        ("0.0", Constant(0.0)),
        ("5.25e-2", Constant(0.0525)),
        ("1E3", Constant(1000.0)),
        ("4.9e-324", Constant(4.9e-324)),
    ],
)
def test_numbers(text: str, constant: Constant) -> None:
    tree = parse_sql(f"a = {text}")
    assert tree == Compare(EQUAL, A, constant)
    assert isinstance(tree, Compare)
    assert isinstance(tree.right, Constant)
    assert type(tree.right.value) is type(constant.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        (" -- a", "ends too early"),
        ("a >", "ends too early"),
        ("(a", "ends too early"),
        ("a IN ('x'", "ends too early"),
        ("a)", "line 1, column 2: '\\)'"),
        ("a =\n= 5", "line 2, column 1: '='"),
        ("a = 'x", 'column 5: "\'"'),
        ("a = 'x''", "column 8"),
        ("/* a = 5", "column 1: '/'"),
        ("a != 5", "'!'"),
        ("a LIKE 'x'", "'LIKE'"),
        ("a + 5 = 6", "'\\+'"),
        ("a = 007", "'0'"),
        ("a = 0L", "'L'"),
        ("a = 5x", "'x'"),
        ("ä = 5", "'ä'"),
        ("a.b = 5", "'.'"),
        ("a-b = 5", "'-'"),
        ("a = \x00", "x00"),
        ("a IN (5)", "'5'"),
        ("a IN ()", "'\\)'"),
        ("a IN 'x'", "'x'"),
        ("'x' IN ('x')", "only a property"),
        ("a = 5 IN ('x')", "'5'|only a property"),
        ("(a = 5) IN ('x')", "only a property"),
        ("a CONTAINS b", "'b'"),
        ("NOT CONTAINS 'x'", "'CONTAINS'"),
        ("'x'", "true or false is wanted"),
        ("5", "true or false is wanted"),
        ("-a", "true or false is wanted"),
        ("NOT 5", "true or false is wanted"),
        ("a AND 'x'", "true or false is wanted"),
        ("a > 'x'", "compares numbers, not 'x'"),
        ("TRUE < a", "compares numbers, not TRUE"),
        ("a >= NULL", "compares numbers, not NULL"),
        ("a BETWEEN 'a' AND 'b'", "compares numbers"),
        ("a BETWEEN NULL AND 5", "compares numbers"),
        ("a = NULL", "IS NULL"),
        ("NULL <> a", "IS NULL"),
        ("TRUE = 5", "cannot be compared"),
        ("a BETWEEN 5 AND 3", "the smaller one comes first"),
        ("a NOT BETWEEN 2.5 AND 2", "the smaller one comes first"),
        ("a = 9223372036854775808", "larger than"),
        ("a = 99999999999999999999999", "larger than"),
        ("a = 1e-999", "outside of what a double holds"),
        ("a = 1e999", "outside of what a double holds"),
    ],
)
def test_what_is_no_expression(text: str, why: str) -> None:
    with pytest.raises(ExpressionIllegalError, match=why):
        parse_sql(text)


def test_what_is_wrong_is_shown_in_part() -> None:
    with pytest.raises(ExpressionIllegalError) as raised:
        parse_sql("a = 5 " + "x" * 8000)
    assert len(str(raised.value)) < 100


def test_the_length_is_limited() -> None:
    blank = " " * (MAX_EXPRESSION_CHARS - 5)
    assert parse_sql(f"a = 5{blank}") == Compare(EQUAL, A, FIVE)
    with pytest.raises(ExpressionIllegalError, match="8193 characters, at most 8192"):
        parse_sql(f"a = 5{blank} ")


def test_the_number_of_words_is_limited() -> None:
    listed = ",".join(f"'{i}'" for i in range(MAX_WORDS // 2 - 2))
    tree = parse_sql(f"a IN ({listed})")
    assert isinstance(tree, In)
    assert len(tree.texts) == MAX_WORDS // 2 - 2
    with pytest.raises(ExpressionIllegalError, match="words, at most 1024"):
        parse_sql(f"a IN ({listed},'x','y')")
