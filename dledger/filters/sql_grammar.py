"""The grammar of SQL92 expressions, and the way from text to tree.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken, VisitError

from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.sql_tree import (
    MAX_INT,
    MAX_LONG,
    SHOWN_CHARS,
    All,
    AnyOf,
    Comparison,
    Constant,
    Find,
    IsNull,
    Negate,
    Node,
    Not,
    Property,
    Search,
    between,
    equality,
    membership,
    order,
    truth,
)

MAX_EXPRESSION_CHARS: Final = 8192
"""Longest expression: as much as is read before the words are counted."""

MAX_WORDS: Final = 1024
"""Names, literals, operators and signs in an expression: parsing and evaluating it costs as
much."""

MAX_LONG_DIGITS: Final = 19

GRAMMAR: Final = r"""
start: either

?either: both
    | both (_OR both)+ -> any_of
?both: same
    | same (_AND same)+ -> all_of
?same: compared
    | same EQUALITY compared -> equals
    | same _IS _NULL -> is_null
    | same _IS _NOT _NULL -> is_not_null
?compared: signed
    | compared ORDER signed -> ordered
    | compared _BETWEEN signed _AND signed -> between
    | compared _NOT _BETWEEN signed _AND signed -> not_between
    | compared _IN "(" TEXT ("," TEXT)* ")" -> in_texts
    | compared _NOT _IN "(" TEXT ("," TEXT)* ")" -> not_in_texts
    | compared SEARCH TEXT -> found
    | compared _NOT SEARCH TEXT -> not_found
?signed: "+" signed
    | "-" signed -> negate
    | _NOT signed -> not_
    | "(" either ")"
    | TEXT -> text
    | INTEGER -> integer
    | FLOAT -> float_
    | _TRUE -> true
    | _FALSE -> false
    | _NULL -> null
    | NAME -> name

_OR.2: /OR(?![A-Z0-9_$])/i
_AND.2: /AND(?![A-Z0-9_$])/i
_NOT.2: /NOT(?![A-Z0-9_$])/i
_IS.2: /IS(?![A-Z0-9_$])/i
_IN.2: /IN(?![A-Z0-9_$])/i
_BETWEEN.2: /BETWEEN(?![A-Z0-9_$])/i
SEARCH.2: /(CONTAINS|STARTSWITH|ENDSWITH)(?![A-Z0-9_$])/i
_TRUE.2: /TRUE(?![A-Z0-9_$])/i
_FALSE.2: /FALSE(?![A-Z0-9_$])/i
_NULL.2: /NULL(?![A-Z0-9_$])/i
EQUALITY.2: "=" | "<>"
ORDER: "<=" | ">=" | "<" | ">"
NAME: /[A-Z_$][A-Z0-9_$]*/i
FLOAT.2: /[0-9]+\.[0-9]*(E[+-]?[0-9]+)?|\.[0-9]+(E[+-]?[0-9]+)?|[0-9]+E[+-]?[0-9]+/i
INTEGER.1: /0|[1-9][0-9]*L?/i
TEXT: /'(?:[^']|'')*'/
BLANK: /[ \t\r\n\f]+/
LINE_COMMENT.3: /--[^\r\n]*/
COMMENT.3: /\/\*(?:[^*]|\*(?!\/))*\*\//
%ignore BLANK
%ignore LINE_COMMENT
%ignore COMMENT
"""

_WORD: Final = re.compile(r"'[^']*'|[\w$.]+|[^\s]")


def parse_sql(text: str) -> Node:
    """Return the tree of an expression; it is true, false or unknown.

    Raises ExpressionIllegalError: it is none, or too long. Depth is not looked at.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionIllegalError(
            f"the expression has {len(text)} characters, at most {MAX_EXPRESSION_CHARS}"
        )
    words = sum(1 for _ in _WORD.finditer(text))
    if words > MAX_WORDS:
        raise ExpressionIllegalError(f"the expression has {words} words, at most {MAX_WORDS}")
    try:
        return truth(_parser().parse(text))
    except UnexpectedInput as error:
        raise ExpressionIllegalError(_where(error)) from None
    except VisitError as error:
        if isinstance(error.orig_exc, ExpressionIllegalError):
            raise error.orig_exc from None
        raise


@cache
def _parser() -> Any:
    return Lark(
        GRAMMAR, parser="lalr", lexer="basic", transformer=_ToTree(), maybe_placeholders=False
    )


def _where(error: UnexpectedInput) -> str:
    if isinstance(error, UnexpectedCharacters):
        return f"line {error.line}, column {error.column}: {error.char!r} cannot stand here"
    if isinstance(error, UnexpectedToken):
        if error.token.type == "$END":
            return "the expression ends too early"
        word = str(error.token)[:SHOWN_CHARS]
        return f"line {error.line}, column {error.column}: {word!r} cannot stand here"
    return "the expression ends too early"


def _integer(text: str) -> Constant:
    digits = text.rstrip("lL")
    if len(digits) > MAX_LONG_DIGITS or (value := int(digits)) > MAX_LONG:
        raise ExpressionIllegalError(f"{digits[:SHOWN_CHARS]} is larger than {MAX_LONG}")
    return Constant(value, is_wide=value > MAX_INT)


def _float(text: str) -> Constant:
    value = float(text)
    is_zero = not set(text.lower().partition("e")[0]) & set("123456789")
    if value == float("inf") or (value == 0.0 and not is_zero):
        raise ExpressionIllegalError(f"{text[:SHOWN_CHARS]} is outside of what a double holds")
    return Constant(value)


def _text(token: str) -> str:
    return token[1:-1].replace("''", "'")


@v_args(inline=True)
class _ToTree(Transformer[Token, Node]):
    """Makes nodes as the parser reduces; nothing is walked afterwards."""

    is_null = IsNull
    negate = Negate

    def start(self, node: Node) -> Node:
        return node

    def any_of(self, *parts: Node) -> Node:
        return AnyOf(tuple(map(truth, parts)))

    def all_of(self, *parts: Node) -> Node:
        return All(tuple(map(truth, parts)))

    def equals(self, left: Node, how: str, right: Node) -> Node:
        return equality(Comparison(how), left, right)

    def ordered(self, left: Node, how: str, right: Node) -> Node:
        return order(Comparison(how), left, right)

    def is_not_null(self, operand: Node) -> Node:
        return Not(IsNull(operand))

    def between(self, operand: Node, low: Node, high: Node) -> Node:
        return between(operand, low, high, negated=False)

    def not_between(self, operand: Node, low: Node, high: Node) -> Node:
        return between(operand, low, high, negated=True)

    def in_texts(self, operand: Node, *texts: str) -> Node:
        return membership(operand, frozenset(map(_text, texts)), negated=False)

    def not_in_texts(self, operand: Node, *texts: str) -> Node:
        return membership(operand, frozenset(map(_text, texts)), negated=True)

    def found(self, operand: Node, how: str, text: str) -> Node:
        return Find(Search(how.upper()), operand, _text(text), negated=False)

    def not_found(self, operand: Node, how: str, text: str) -> Node:
        return Find(Search(how.upper()), operand, _text(text), negated=True)

    def not_(self, operand: Node) -> Node:
        return Not(truth(operand))

    def text(self, token: str) -> Node:
        return Constant(_text(token))

    def integer(self, token: str) -> Node:
        return _integer(token)

    def float_(self, token: str) -> Node:
        return _float(token)

    def true(self) -> Node:
        return Constant(True)

    def false(self) -> Node:
        return Constant(False)

    def null(self) -> Node:
        return Constant(None)

    def name(self, token: str) -> Node:
        return Property(str(token))
