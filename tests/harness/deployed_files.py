"""The files in `deploy/`, as the tools that they are for read them, and queries in these."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from tests.harness.shipped_files import ROOT

DEPLOY: Final = ROOT / "deploy"
_VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")


def compose_services(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the services of the compose file, its variables replaced."""
    given = environment or {}
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    replaced = _VARIABLE.sub(lambda found: given.get(found[1], found[2]), text)
    services: dict[str, Any] = yaml.safe_load(replaced)["services"]
    return services


def board() -> dict[str, Any]:
    """Return the board of Grafana."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "board.json").read_text())
    return found


def alerts() -> list[dict[str, Any]]:
    """Return the rules of the alerts."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = groups[0]["rules"]
    return rules


def watched_queries() -> list[str]:
    """Return every query of board and alerts."""
    return [*board_queries(board()), *(rule["expr"] for rule in alerts())]


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
