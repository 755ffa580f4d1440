"""An SQL92 evaluator of its own: recursive descent that evaluates while it reads, no tree.

It shares no line with the product. Values are tagged pairs, rules are written down one by one as
the page of protocol facts has them; nothing is decided before a message is there, except what is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n\f]+|--[^\r\n]*|/\*.*?\*/)
    |(?P<text>'(?:[^']|'')*')
    |(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<int>0|[1-9][0-9]*[lL]?) |(?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|<=|>=|[=<>(),+-])""",
    re.VERBOSE | re.DOTALL,
)
KEYWORDS = {
    "OR", "AND", "NOT", "IS", "NULL", "TRUE", "FALSE", "BETWEEN", "IN",
    "CONTAINS", "STARTSWITH", "ENDSWITH",
}  # fmt: skip


class RefusedError(Exception):
    """The text is no expression."""


class NoMatchError(Exception):
    """A value cannot be read as what it is compared with."""


# A value is (kind, value): kind is one of int, long, double, text, bool, null. A part is what a
# rule returns: a function from properties to a value, and what is known of it before.


class Part:
    def __init__(self, run: Any, form: str, constant: Any = None) -> None:
        self.run = run
        self.form = form  # constant, property, boolean, negated
        self.constant = constant


def judge(text: str, properties: Mapping[str, str]) -> bool:
    """Return whether the message matches; raises RefusedError when *text* is no expression."""
    part = Reader(text).whole()
    try:
        kind, value = part.run(properties)
    except NoMatchError:
        return False
    return kind == "bool" and value is True


class Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None:
                raise RefusedError(f"at {at}")
            at = found.end()
            kind = str(found.lastgroup)
            if kind == "skip":
                continue
            word = found.group()
            if kind == "word" and word.upper() in KEYWORDS:
                kind, word = "key", word.upper()
            self.tokens.append((kind, word))
        self.tokens.append(("end", ""))
        self.at = 0

    def sees(self, *words: str) -> bool:
        ahead = self.tokens[self.at : self.at + len(words)]
        return [w for k, w in ahead if k in ("key", "sign")] == list(words)

    def takes(self, *words: str) -> bool:
        if not self.sees(*words):
            return False
        self.at += len(words)
        return True

    def needs(self, word: str) -> None:
        if not self.takes(word):
            raise RefusedError(f"{word} wanted")

    def whole(self) -> Part:
        part = boolean(self.either())
        if self.tokens[self.at][0] != "end":
            raise RefusedError("more follows")
        return part

    def either(self) -> Part:
        part = self.both()
        while self.takes("OR"):
            part = logic(boolean(part), boolean(self.both()), decisive=True)
        return part

    def both(self) -> Part:
        part = self.same()
        while self.takes("AND"):
            part = logic(boolean(part), boolean(self.same()), decisive=False)
        return part

    def same(self) -> Part:
        part = self.compared()
        while True:
            if self.takes("="):
                part = equal(part, self.compared())
            elif self.takes("<>"):
                part = inverse(equal(part, self.compared()))
            elif self.takes("IS", "NULL"):
                part = is_null(part)
            elif self.takes("IS", "NOT", "NULL"):
                part = inverse(is_null(part))
            else:
                return part

    def compared(self) -> Part:
        part = self.signed()
        while True:
            for sign in ("<=", ">=", "<", ">"):
                if self.takes(sign):
                    part = ordered(sign, part, self.signed())
                    break
            else:
                negated = self.sees("NOT") and self.tokens[self.at + 1][1] in (
                    "BETWEEN", "IN", "CONTAINS", "STARTSWITH", "ENDSWITH",
                )  # fmt: skip
                if negated:
                    self.at += 1
                if self.takes("BETWEEN"):
                    low = self.signed()
                    self.needs("AND")
                    part = between(part, low, self.signed(), negated)
                elif self.takes("IN"):
                    self.needs("(")
                    texts = [self.text()]
                    while self.takes(","):
                        texts.append(self.text())
                    self.needs(")")
                    part = member(part, texts, negated)
                else:
                    for how in ("CONTAINS", "STARTSWITH", "ENDSWITH"):
                        if self.takes(how):
                            part = search(how, part, self.text(), negated)
                            break
                    else:
                        if negated:
                            raise RefusedError("NOT")
                        return part

    def text(self) -> str:
        kind, word = self.tokens[self.at]
        if kind != "text":
            raise RefusedError("a text is wanted")
        self.at += 1
        return word[1:-1].replace("''", "'")

    def signed(self) -> Part:
        if self.takes("+"):
            return self.signed()
        if self.takes("-"):
            return minus(self.signed())
        if self.takes("NOT"):
            return inverse(boolean(self.signed()))
        if self.takes("("):
            part = self.either()
            self.needs(")")
            return part
        kind, word = self.tokens[self.at]
        if kind == "text":
            return literal(("text", self.text()))
        self.at += 1
        if kind == "int":
            value = int(word.rstrip("lL"))
            if value >= 2**63:
                raise RefusedError("too large")
            return literal(("int" if value < 2**31 else "long", value))
        if kind == "float":
            number = float(word)
            if number == float("inf") or (number == 0 and any(c in "123456789" for c in word)):
                raise RefusedError("no double holds it")
            return literal(("double", number))
        if kind == "key" and word in ("TRUE", "FALSE", "NULL"):
            return literal(("null", None) if word == "NULL" else ("bool", word == "TRUE"))
        if kind == "word":

            def run(properties: Mapping[str, str]) -> Any:
                return ("text", properties[word]) if word in properties else ("null", None)

            return Part(run, "property", word)
        raise RefusedError(f"{word} cannot begin an operand")


def literal(value: tuple[str, Any]) -> Part:
    return Part(lambda _: value, "constant", value)


def boolean(part: Part) -> Part:
    if part.form == "boolean":
        return part
    if part.form == "property":

        def run(properties: Mapping[str, str]) -> Any:
            kind, _ = part.run(properties)
            return ("null", None) if kind == "null" else ("bool", False)

        return Part(run, "boolean")
    if part.form == "constant" and part.constant[0] in ("bool", "null"):
        return part
    raise RefusedError("not true or false")


def logic(left: Part, right: Part, *, decisive: bool) -> Part:
    def run(properties: Mapping[str, str]) -> Any:
        first = left.run(properties)
        if first == ("bool", decisive):
            return first
        second = right.run(properties)
        if second == ("bool", decisive):
            return second
        if "null" in (first[0], second[0]):
            return ("null", None)
        return ("bool", not decisive)

    return Part(run, "boolean")


def inverse(part: Part) -> Part:
    def run(properties: Mapping[str, str]) -> Any:
        kind, value = part.run(properties)
        return ("null", None) if kind == "null" else ("bool", not value)

    return Part(run, "boolean")


def is_null(part: Part) -> Part:
    return Part(lambda properties: ("bool", part.run(properties)[0] == "null"), "boolean")


def minus(part: Part) -> Part:
    def run(properties: Mapping[str, str]) -> Any:
        kind, value = part.run(properties)
        return (kind, -value) if kind in ("int", "long", "double") else ("null", None)

    return Part(run, "negated")


def equal(left: Part, right: Part) -> Part:
    for part in (left, right):
        if part.form == "constant" and part.constant[0] == "null":
            raise RefusedError("NULL")
    constants = left.form == right.form == "constant"
    if constants and left.constant[0] == "bool" and right.constant[0] != "bool":
        raise RefusedError("TRUE = 5")

    def run(properties: Mapping[str, str]) -> Any:
        first, second = left.run(properties), right.run(properties)
        if first[0] == "null":
            return ("null", None)
        if second[0] == "null":
            return ("bool", False)
        if first[0] == second[0] == "text":
            return ("bool", first[1] == second[1])
        return ("bool", align(first, second) == 0)

    return Part(run, "boolean")


def ordered(sign: str, left: Part, right: Part) -> Part:
    for part in (left, right):
        if part.form == "constant" and part.constant[0] in ("bool", "null", "text"):
            raise RefusedError("only numbers have an order")

    def run(properties: Mapping[str, str]) -> Any:
        first, second = left.run(properties), right.run(properties)
        if "null" in (first[0], second[0]):
            return ("null", None)
        if first[0] == second[0] == "text":
            first, second = ("double", read_double(first[1])), ("double", read_double(second[1]))
        found = align(first, second)
        holds = {"<": found < 0, "<=": found <= 0, ">": found > 0, ">=": found >= 0}
        return ("bool", holds[sign])

    return Part(run, "boolean")


def between(part: Part, low: Part, high: Part, negated: bool) -> Part:
    if negated:
        made = logic(ordered("<", part, low), ordered(">", part, high), decisive=True)
    else:
        made = logic(ordered(">=", part, low), ordered("<=", part, high), decisive=False)
    if low.form == high.form == "constant" and low.constant[1] > high.constant[1]:
        raise RefusedError("the wrong way round")
    return made


def member(part: Part, texts: list[str], negated: bool) -> Part:
    if part.form != "property":
        raise RefusedError("IN wants a property")

    def run(properties: Mapping[str, str]) -> Any:
        kind, value = part.run(properties)
        return ("null", None) if kind == "null" else ("bool", (value in texts) != negated)

    return Part(run, "boolean")


def search(how: str, part: Part, text: str, negated: bool) -> Part:
    def run(properties: Mapping[str, str]) -> Any:
        kind, value = part.run(properties)
        if kind != "text" or text == "":
            return ("bool", False)
        if how == "CONTAINS":
            found = value.find(text) >= 0
        elif how == "STARTSWITH":
            found = value[: len(text)] == text
        else:
            found = value[len(value) - len(text) :] == text if len(text) <= len(value) else False
        return ("bool", found != negated)

    return Part(run, "boolean")


def align(first: tuple[str, Any], second: tuple[str, Any]) -> int:
    if first[0] == "text":
        first = (second[0], read_as(second[0], first[1]))
    elif second[0] == "text":
        if first[0] == "bool":
            raise NoMatchError
        second = (first[0], read_as(first[0], second[1]))
    if (first[0] == "bool") != (second[0] == "bool"):
        return -1
    return (
        spot(first[1]) - spot(second[1])
        if first[0] != "double" != second[0]
        else (double_order(float(first[1]), float(second[1])))
    )


def spot(value: Any) -> int:
    return int(value)


def double_order(first: float, second: float) -> int:
    def key(value: float) -> tuple[Any, ...]:
        if value != value:
            return (2, 0, 0)
        if value in (float("inf"), float("-inf")):
            return (1 if value > 0 else -1, 0, 0)
        return (0, Fraction(value), 0 if str(value).startswith("-") else 1)

    return (key(first) > key(second)) - (key(first) < key(second))


def read_as(kind: str, text: str) -> Any:
    if kind == "bool":
        return text.upper() == "TRUE"
    if kind == "double":
        return read_double(text)
    if not re.fullmatch("[-+]?[0-9]+", text):
        raise NoMatchError
    value = int(text)
    bits = 31 if kind == "int" else 63
    if not -(2**bits) <= value < 2**bits:
        raise NoMatchError
    return value


def read_double(text: str) -> float:
    text = text.strip("".join(chr(i) for i in range(33)))
    if text.lstrip("+-") in ("NaN", "Infinity") and len(text) - len(text.lstrip("+-")) < 2:
        return float(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[fFdD]?", text):
        return float(text.rstrip("fFdD"))
    raise NoMatchError
