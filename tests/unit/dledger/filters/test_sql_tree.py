"""Texts as Java reads them."""

import math

import pytest

from dledger.filters.sql_tree import ValueUnreadableError, boolean, compare_doubles, double, integer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-0", 0), ("+5", 5), ("-5", -5), ("0005", 5), ("0" * 5000 + "7", 7),
        ("2147483647", 2147483647), ("-2147483648", -2147483648),
        ("\u0665", 5), ("\uff11\uff12", 12),
    ],
)  # fmt: skip
def test_integers(text: str, value: int) -> None:
    assert integer(text, is_wide=False) == value


@pytest.mark.parametrize(
    "text",
    ["", "-", "+", "5.5", "5.0", " 5", "5 ", "5L", "0x5", "1_000", "--5", "five", "5\n",
     "\U0001d7d3",     "2147483648", "-2147483649", "9" * 40],
)  # fmt: skip
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueUnreadableError):
        integer(text, is_wide=False)


def test_a_wide_integer_has_64_bits() -> None:
    assert integer("2147483648", is_wide=True) == 1 << 31
    assert integer("-9223372036854775808", is_wide=True) == -(1 << 63)
    for text in ("9223372036854775808", "-9223372036854775809", "9" * 20):
        with pytest.raises(ValueUnreadableError):
            integer(text, is_wide=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), ("-5.25", -5.25), (".5", 0.5), ("5.", 5.0), ("1e3", 1000.0), ("1E-3", 0.001),
        ("5f", 5.0), ("5.5D", 5.5), (" \t5\n", 5.0), ("1e999", math.inf), ("-1e999", -math.inf),
        ("1e-999", 0.0), ("Infinity", math.inf), ("-Infinity", -math.inf), ("0x1.8p1", 3.0),
        ("-0X.8P2f", -2.0), ("0x1p9999", math.inf), ("-0x1p9999", -math.inf),
    ],
)  # fmt: skip
def test_doubles(text: str, value: float) -> None:
    assert double(text) == value


def test_nan_is_a_double() -> None:
    assert math.isnan(double("NaN"))
    assert math.isnan(double("-NaN"))


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "e5", "5e", "nan", "inf", "infinity", "1_0", "0x10", "0x1.8", "5 5", "5ff",
     "+-5", "\u0665", "1,5", "x"],
)  # fmt: skip
def test_what_is_no_double(text: str) -> None:
    with pytest.raises(ValueUnreadableError):
        double(text)


def test_long_texts_are_read_or_refused_at_once() -> None:
    long = "1" * 32_000
    unreadable = (long + "x", "0" * 32_000 + "x", "0x" + long + "x", "." * 32_000)
    for text in unreadable:
        with pytest.raises(ValueUnreadableError) as raised:
            double(text)
        assert len(str(raised.value)) < 100
        with pytest.raises(ValueUnreadableError):
            integer(text, is_wide=True)
    assert double(f"0.{long}") == pytest.approx(1 / 9)
    assert double(long) == math.inf


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("TrUe", True), ("false", False), ("1", False), ("", False)]
)
def test_booleans(text: str, value: bool) -> None:
    assert boolean(text) is value


def test_doubles_have_a_total_order() -> None:
    rising = [-math.inf, -5.0, -0.0, 0.0, 4.9e-324, 5.0, math.inf, math.nan]
    for i, left in enumerate(rising):
        for j, right in enumerate(rising):
            found = compare_doubles(left, right)
            assert (found > 0) - (found < 0) == (i > j) - (i < j), (left, right)
