"""Queries for Prometheus: those of a board, and the metrics that one names."""

from __future__ import annotations

import re
from typing import Any


def board_queries(board: dict[str, Any]) -> list[str]:
    """Return the query of every line and variable of a board."""
    variables = [variable["query"]["query"] for variable in board["templating"]["list"]]
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    return [*variables, *(target["expr"] for target in targets)]


def metrics_of(query: str) -> set[str]:
    """Return the families that a query names; of a histogram's series, the histogram."""
    # What stands in quotation marks or behind by (…) is a label.
    bare = re.sub(r'"[^"]*"', "", query)
    names = set(re.findall(r"\b((?:rocketmq|dledger)_[a-z_]+|up)\b", bare))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
