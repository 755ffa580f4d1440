"""What matches: the rules of the protocol facts, one by one."""

import pytest

from dledger.commitlog.properties import encode_properties
from dledger.filters.property_filter import Expression


def matches(text: str, **properties: str) -> bool:
    return Expression(text).matches(encode_properties(properties))


YES, NO = True, False


@pytest.mark.parametrize(
    ("text", "properties", "expected"),
    [
        # The right side decides what a property is read as.
        ("a = 5", {"a": "5"}, YES),
        ("a = 5", {"a": "05"}, YES),
        ("a = 5", {"a": "5.0"}, NO),
        ("a <> 5", {"a": "5.5"}, NO),
        ("a = 5.0", {"a": "5"}, YES),
        ("a = '5'", {"a": "5"}, YES),
        ("a = '5'", {"a": "05"}, NO),
        ("a = 'customer-003'", {"a": "customer-004"}, NO),
        ("a > 5", {"a": "10"}, YES),
        ("a > 5", {"a": "5"}, NO),
        ("a >= 5", {"a": "5"}, YES),
        ("a < 5", {"a": "-6"}, YES),
        ("a <= 5", {"a": "6"}, NO),
        ("a > -5", {"a": "-4"}, YES),
        ("a = -5", {"a": "-5"}, YES),
        ("a = +5", {"a": "5"}, YES),
        ("5 = a", {"a": "5"}, YES),
        ("5 < a", {"a": "6"}, YES),
        ("5.5 > a", {"a": "5"}, YES),
        ("a > 5", {"a": "3000000000"}, NO),  # no int
        ("a > 3000000000", {"a": "3000000001"}, YES),
        ("a > 5.0", {"a": "3000000000"}, YES),
        ("a = TRUE", {"a": "tRuE"}, YES),
        ("a = FALSE", {"a": "whatever"}, YES),
        ("a <> TRUE", {"a": "1"}, YES),
        ("a > b", {"a": "10", "b": "9"}, YES),  # two texts have an order as numbers only
        ("a = b", {"a": "10", "b": "10.0"}, NO),
        ("a < b", {"a": "x", "b": "9"}, NO),
        ("a >= b", {"a": "x", "b": "9"}, NO),
        ("a = b", {"a": "x", "b": "x"}, YES),
        ("a < 1.5", {"a": "NaN"}, NO),
        ("a > 1.5", {"a": "NaN"}, YES),
        # What cannot be read ends it all, wherever it stands.
        ("a > 5", {"a": "x"}, NO),
        ("NOT (a > 5)", {"a": "x"}, NO),
        ("a > 5 OR b = 'y'", {"a": "x", "b": "y"}, NO),
        ("b = 'y' OR a > 5", {"a": "x", "b": "y"}, YES),
        ("b = 'y' AND a > 5 OR TRUE", {"a": "x", "b": "z"}, YES),
        ("(a > 5) IS NULL", {"a": "x"}, NO),
        ("TRUE = a", {"a": "true"}, NO),
        ("NOT (TRUE = a)", {"a": "x"}, NO),
        # Unknown.
        ("a = 5", {}, NO),
        ("a <> 5", {}, NO),
        ("NOT (a = 5)", {}, NO),
        ("NOT (a > 5)", {}, NO),
        ("a > 5 OR TRUE", {}, YES),
        ("a > 5 AND FALSE", {}, NO),
        ("NOT (a > 5 AND FALSE)", {}, YES),
        ("NOT (a > 5 OR FALSE)", {}, NO),
        ("(a > 5) IS NULL", {}, YES),
        ("(a > 5 AND b > 5) IS NULL", {"b": "6"}, YES),
        ("(a > 5 AND b > 5) IS NULL", {"b": "4"}, NO),
        ("a IS NULL", {}, YES),
        ("a IS NULL", {"a": "x"}, NO),
        ("a IS NOT NULL", {"a": "x"}, YES),
        ("a IS NOT NULL", {}, NO),
        ("NULL", {}, NO),
        ("NOT NULL", {}, NO),
        ("NULL OR TRUE", {}, YES),
        ("a BETWEEN 1 AND 5", {}, NO),
        ("a NOT BETWEEN 1 AND 5", {}, NO),
        ("a BETWEEN 1 AND 5", {"a": "5"}, YES),
        ("a BETWEEN 1 AND 5", {"a": "6"}, NO),
        ("a NOT BETWEEN 1 AND 5", {"a": "6"}, YES),
        ("a NOT BETWEEN 1 AND 5", {"a": "1"}, NO),
        ("a BETWEEN b AND 5", {"a": "9"}, NO),
        ("a NOT BETWEEN b AND 5", {"a": "9"}, YES),
        ("a BETWEEN 1 AND 2.5", {"a": "2"}, YES),
        ("a IN ('x','y')", {"a": "y"}, YES),
        ("a IN ('x','y')", {"a": "z"}, NO),
        ("a IN ('x')", {}, NO),
        ("a NOT IN ('x')", {"a": "z"}, YES),
        ("a NOT IN ('x')", {"a": "x"}, NO),
        ("a NOT IN ('x')", {}, NO),
        ("'x' = a", {}, NO),
        ("'x' <> a", {}, YES),  # only a left one that is missing is unknown
        ("a <> 'x'", {}, NO),
        ("5 < a", {}, NO),
        ("a = b", {}, NO),
        ("a = b", {"a": "x"}, NO),
        ("a <> b", {"a": "x"}, YES),
        # A property alone is never true.
        ("a", {"a": "true"}, NO),
        ("NOT a", {"a": "true"}, YES),
        ("NOT a", {}, NO),
        ("NOT a = 5", {"a": "5"}, NO),
        ("(NOT a) = TRUE", {"a": "5"}, YES),
        # Texts inside texts: never unknown.
        ("a CONTAINS 'b'", {"a": "abc"}, YES),
        ("a CONTAINS 'x'", {"a": "abc"}, NO),
        ("a NOT CONTAINS 'x'", {"a": "abc"}, YES),
        ("a NOT CONTAINS 'b'", {"a": "abc"}, NO),
        ("a STARTSWITH 'ab'", {"a": "abc"}, YES),
        ("a STARTSWITH 'bc'", {"a": "abc"}, NO),
        ("a ENDSWITH 'bc'", {"a": "abc"}, YES),
        ("a NOT ENDSWITH 'ab'", {"a": "abc"}, YES),
        ("a CONTAINS 'x'", {}, NO),
        ("a NOT CONTAINS 'x'", {}, NO),
        ("NOT (a CONTAINS 'x')", {}, YES),
        ("a CONTAINS ''", {"a": "abc"}, NO),
        ("a NOT CONTAINS ''", {"a": "abc"}, NO),
        ("5 CONTAINS '5'", {}, NO),
        ("5 NOT CONTAINS '6'", {}, NO),
        # Kinds that have nothing in common compare as smaller.
        ("(a = 5) = 1", {"a": "5"}, NO),
        ("(a = 5) < 1", {"a": "5"}, YES),
        ("1 < (a = 5)", {"a": "5"}, YES),
        ("1 > (a = 5)", {"a": "5"}, NO),
        ("(a = 5) = TRUE", {"a": "5"}, YES),
        ("(a = 5) > (a = 6)", {"a": "5"}, YES),
        ("5 = 5.0", {}, YES),
        ("5 = 'x'", {}, NO),
        # Minus.
        ("-a = 5", {"a": "-5"}, NO),
        ("(-a) IS NULL", {"a": "5"}, YES),
        ("- - a IS NULL", {"a": "5"}, YES),
        ("-(5) < -4", {}, YES),
        # What a message carries besides.
        ("TAGS = 'A' AND KEYS IS NOT NULL", {"TAGS": "A", "KEYS": "k"}, YES),
        ("a = 'ä€'", {"a": "ä€"}, YES),
        ("A = 5", {"a": "5"}, NO),
    ],
)
def test_the_rules(text: str, properties: dict[str, str], expected: bool) -> None:
    assert matches(text, **properties) is expected


def test_many_names_are_looked_up_the_same_way() -> None:
    text = " OR ".join(f"p{i} = {i}" for i in range(1, 9))
    assert matches(text, p8="8")
    assert not matches(text, p8="9")
    assert not matches(text, p7="x", p8="8")
