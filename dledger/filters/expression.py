"""An SQL92 expression, ready to be asked whether a message matches.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from commitlog.properties import decode_properties, get_property
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.java_values import ValueUnreadableError
from dledger.filters.sql_evaluation import Lookup, evaluation
from dledger.filters.sql_grammar import MAX_EXPRESSION_CHARS, parse_sql
from dledger.filters.sql_tree import MAX_DEPTH, Node, Property, children

SEARCHED_NAMES: Final = 4
"""Up to this number of names it is cheaper to search the raw properties than to decode them all."""

MAX_CACHED_CHARS: Final = 512 * 1024
"""Text of all expressions kept; what is compiled of it takes some fifty times as much memory."""


class Expression:
    """A compiled expression. Immutable; equal texts give expressions that say the same.

    Attributes:
        text: What it was made from.
        names: The properties it reads.
        cost: How many operands and operators it has: what looking at one message costs.
    """

    __slots__ = ("_evaluate", "_searches", "cost", "names", "text")

    def __init__(self, text: str) -> None:
        """Compile *text*.

        Raises:
            ExpressionIllegalError: It is no expression, or too large or deep.
        """
        tree = parse_sql(text)
        names, self.cost = _measured(tree)
        self.text = text
        self.names = frozenset(names)
        self._evaluate = evaluation(tree)
        self._searches = (
            {name: name.encode() for name in names} if len(names) <= SEARCHED_NAMES else None
        )

    def matches(self, properties: bytes) -> bool:
        """Tell whether a message with these encoded properties matches: only true is a match."""
        searches = self._searches
        if searches is None:
            lookup: Lookup = decode_properties(properties).get
        else:
            lookup = _searching(properties, searches)
        try:
            return self._evaluate(lookup) is True
        except ValueUnreadableError:
            return False


def _searching(properties: bytes, names: Mapping[str, bytes]) -> Lookup:
    def lookup(name: str) -> str | None:
        value = get_property(properties, names[name])
        return None if value is None else value.decode("utf-8", "replace")

    return lookup


def _measured(tree: Node) -> tuple[set[str], int]:
    """Return the names in a tree and the number of its nodes; no calls as deep as it is.

    Raises:
        ExpressionIllegalError: It is too deep.
    """
    names: set[str] = set()
    count = 0
    level = [tree]
    for _ in range(MAX_DEPTH):
        count += len(level)
        names.update(node.name for node in level if isinstance(node, Property))
        level = [child for node in level for child in children(node)]
        if not level:
            return names, count
    raise ExpressionIllegalError(f"more than {MAX_DEPTH} operators stand inside each other")


class ExpressionCache:
    """Expressions by their text, and why a text is none. The least recently used leave first.

    Groups and topics that use the same text share what it was compiled to.
    """

    def __init__(self, max_chars: int = MAX_CACHED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._compiled: OrderedDict[str, Expression | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, text: str) -> Expression:
        """Return the expression.

        Raises:
            ExpressionIllegalError: *text* is none.
        """
        found = self._compiled.get(text)
        if found is None:
            found = self._compile(text)
        else:
            self._compiled.move_to_end(text)
        if isinstance(found, str):
            raise ExpressionIllegalError(found)
        return found

    def _compile(self, text: str) -> Expression | str:
        made: Expression | str
        try:
            made = Expression(text)
        except ExpressionIllegalError as error:
            made = str(error)
        if len(text) <= MAX_EXPRESSION_CHARS:
            self._compiled[text] = made
            self._chars += len(text)
            while self._chars > self._max_chars:
                self._chars -= len(self._compiled.popitem(last=False)[0])
        return made
