"""Metrics as a scraper reads them."""

from __future__ import annotations

import math

import pytest

from remoting.metrics.families import MAX_LABEL_CHARS, SERIES_PER_PIECE, Family, family_text

LAG = Family("lag_messages", "gauge", "Behind.")


def line_of(value: float = 1, **labels: str) -> str:
    """Return the line of a single series, without its name."""
    (text,) = family_text(LAG, [(labels, value)], {})
    return text.splitlines()[2].removeprefix("lag_messages")


def test_family_text_has_help_type_and_a_line_per_series() -> None:
    samples = [({"topic": "A"}, 3), ({"topic": "B"}, 0.5)]
    assert "".join(family_text(LAG, samples, {"cluster": "c"})) == (
        "# HELP lag_messages Behind.\n"
        "# TYPE lag_messages gauge\n"
        'lag_messages{cluster="c",topic="A"} 3.0\n'
        'lag_messages{cluster="c",topic="B"} 0.5\n'
    )


def test_family_text_keeps_the_name_of_a_counter() -> None:
    sent = Family("sent_total", "counter", "Sent.")
    assert "".join(family_text(sent, [({}, 1)], {})) == (
        "# HELP sent_total Sent.\n# TYPE sent_total counter\nsent_total 1.0\n"
    )


def test_a_series_without_labels_has_no_braces() -> None:
    assert line_of(7) == " 7.0"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain", "plain"),
        ('say "no"', r"say \"no\""),
        ("C:\\n", r"C:\\n"),
        ("two\nlines", r"two\nlines"),
        ('\\"\n', r"\\\"\n"),
        ("grün {}=,", "grün {}=,"),
        ("a \ud800", "a ?"),
    ],
)
def test_the_value_of_a_label_is_escaped(text: str, escaped: str) -> None:
    assert line_of(x=text) == f'{{x="{escaped}"}} 1.0'


def test_a_long_value_of_a_label_is_cut_before_it_is_escaped() -> None:
    assert line_of(x="\n" * 1000) == '{x="' + r"\n" * MAX_LABEL_CHARS + '"} 1.0'


def test_help_is_escaped() -> None:
    family = Family("x_total", "counter", 'a\\b\n"c"')
    assert next(iter(family_text(family, [({}, 1)], {}))).startswith(
        '# HELP x_total a\\\\b\\n"c"\n'
    )


@pytest.mark.parametrize("value", [2**63, -1, 0.25, 1e-9, math.inf, -math.inf])
def test_numbers_are_read_back_as_they_were(value: float) -> None:
    assert float(line_of(value)) == value


def test_what_is_no_number_is_read_back_as_such() -> None:
    assert math.isnan(float(line_of(math.nan)))


def test_a_family_without_series_is_not_there() -> None:
    assert "".join(family_text(LAG, [], {})) == ""
    assert "".join(family_text(LAG, [None, None], {})) == ""


def test_a_long_family_comes_in_pieces_and_has_its_name_once() -> None:
    samples = [({"n": str(number)}, number) for number in range(3 * SERIES_PER_PIECE)]
    pieces = list(family_text(LAG, [None, *samples[:2], None, *samples[2:]], {}))
    assert [piece.count("\n") for piece in pieces] == [
        0,
        4,
        SERIES_PER_PIECE,
        SERIES_PER_PIECE,
        SERIES_PER_PIECE - 2,
    ]
    assert "".join(pieces).count("# TYPE") == 1
