"""An SQL92 expression, ready to be asked whether a message matches.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitlog.properties import decode_properties, get_property
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.java_values import ValueUnreadableError
from dledger.filters.sql_evaluation import Lookup, evaluation
from dledger.filters.sql_grammar import parse_sql
from dledger.filters.sql_tree import MAX_DEPTH, Node, Property, children

SEARCHED_NAMES: Final = 4
"""Up to this number of names it is cheaper to search the raw properties than to decode them all."""


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
