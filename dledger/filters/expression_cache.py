"""Compiled expressions, kept while they are in use."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.expression import Expression
from dledger.filters.sql_grammar import MAX_EXPRESSION_CHARS

MAX_CACHED_CHARS: Final = 512 * 1024
"""Text of all expressions kept; what is compiled of it takes some fifty times as much memory."""


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
