"""Prometheus' text format, written."""

from __future__ import annotations

import math

import pytest

from remoting.metrics.text_format import (
    LINES_PER_PIECE,
    MAX_LABEL_CHARS,
    Family,
    escaped_label,
    family_text,
    number_text,
)

LAG = Family("lag_messages", "gauge", "Behind.")


def test_a_family_is_its_help_its_type_and_a_line_per_series() -> None:
    samples = [({"topic": "A"}, 3), ({"topic": "B"}, 0.5)]
    assert "".join(family_text(LAG, samples, {"cluster": "c"})) == (
        "# HELP lag_messages Behind.\n"
        "# TYPE lag_messages gauge\n"
        'lag_messages{cluster="c",topic="A"} 3\n'
        'lag_messages{cluster="c",topic="B"} 0.5\n'
    )


def test_a_series_without_labels_has_no_braces() -> None:
    assert "".join(family_text(LAG, [({}, 7)], {})).endswith("\nlag_messages 7\n")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain", "plain"),
        ('say "no"', r"say \"no\""),
        ("C:\\n", r"C:\\n"),
        ("two\nlines", r"two\nlines"),
        ('\\"\n', r"\\\"\n"),
        ("grün {}=,", "grün {}=,"),
    ],
)
def test_the_value_of_a_label_is_escaped(text: str, escaped: str) -> None:
    assert escaped_label(text) == escaped


def test_a_long_value_of_a_label_is_cut_before_it_is_escaped() -> None:
    assert escaped_label("\n" * 1000) == r"\n" * MAX_LABEL_CHARS


def test_help_is_escaped() -> None:
    family = Family("x", "counter", 'a\\b\n"c"')
    assert next(iter(family_text(family, [({}, 1)], {}))).startswith('# HELP x a\\\\b\\n"c"\n')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**63, "9223372036854775808"),
        (-1, "-1"),
        (0.25, "0.25"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_as_scrapers_read_them(value: float, text: str) -> None:
    assert number_text(value) == text


def test_a_family_without_series_is_not_there() -> None:
    assert "".join(family_text(LAG, [], {})) == ""
    assert "".join(family_text(LAG, [None, None], {})) == ""


def test_a_long_family_comes_in_pieces_and_says_its_name_once() -> None:
    samples = [({"n": str(number)}, number) for number in range(3 * LINES_PER_PIECE)]
    pieces = list(family_text(LAG, [None, *samples[:2], None, *samples[2:]], {}))
    assert [piece.count("\n") for piece in pieces] == [
        0,
        4,
        LINES_PER_PIECE,
        LINES_PER_PIECE,
        LINES_PER_PIECE - 2,
    ]
    assert "".join(pieces).count("# TYPE") == 1
