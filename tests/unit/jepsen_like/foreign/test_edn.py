"""EDN: values and text, there and back; what is damaged is an error with its line."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.jepsen_like.foreign.edn import (
    DEPTH_MAX,
    EdnError,
    Keyword,
    Symbol,
    Tagged,
    text_of,
    values,
)
from tests.harness.extent import examples

NAMES = st.from_regex(r"[a-z][a-z0-9*!_?<>=/-]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("nil", "true", "false")
)
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | NAMES.map(Keyword)
    | NAMES.map(Symbol)
    | st.builds(Fraction, st.integers(-99, 99), st.integers(2, 99)).filter(
        lambda ratio: ratio.denominator > 1
    )
)
HASHABLE = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Tagged, NAMES, inner)
    ),
    max_leaves=8,
)
VALUES = HASHABLE | st.dictionaries(HASHABLE, HASHABLE, max_size=4)


@settings(max_examples=examples(100))
@given(st.lists(VALUES, max_size=4))
def test_values_come_back_from_their_text(several: list[object]) -> None:
    assert list(values("\n".join(map(text_of, several)))) == several


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1 -2 +3 4N 2.5 1e3 0.5M]", (1, -2, 3, 4, 2.5, 1000.0, 0.5)),
        ('"a\\n\\u00e9\\"" \\a', 'a\né"'),
        ("#_ [1 #_ 2] :kept", Keyword("kept")),
        ("#jepsen.history.Op{:a 1}", Tagged("jepsen.history.Op", {Keyword("a"): 1})),
        ("; a comment\n#{nil true}", frozenset({None, True})),
        ("(read [x 1/2])", (Symbol("read"), (Symbol("x"), Fraction(1, 2)))),
        ("{:a 1,:b\\newline}", {Keyword("a"): 1, Keyword("b"): "\n"}),
        ("##-Inf", -math.inf),
    ],
)
def test_notation_of_each_kind_is_read(text: str, value: object) -> None:
    assert next(values(text)) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1\n}", "line 2: '}' closes nothing"),
        ("{:a 1\n", "line 1: '{' has no end"),
        ("{:a}", "a key without a value"),
        ("{{} 1}", "a map is a key"),
        ("12abc", "is no number"),
        ("1/0", "is no number"),
        ("\n\x00", "line 2: '\\x00' begins no value"),
        (":", "a keyword has no name"),
        ('"\\q"', "unknown escape"),
        ("#_", "has no end"),
        ("[" * (DEPTH_MAX + 1), "nested more than"),
        ("9" * 5_000, "is no number"),
    ],
)
def test_damage_is_an_error_with_its_line(text: str, why: str) -> None:
    with pytest.raises(EdnError) as raised:
        list(values(text))
    assert why in str(raised.value)


@given(st.text(st.sampled_from('{}[]()#_":;\\ \n019.-+/Nabnil^@`,'), max_size=40))
def test_any_text_is_values_or_an_error(text: str) -> None:
    try:
        found = list(values(text))
    except EdnError:
        return
    assert len(found) <= len(text)
