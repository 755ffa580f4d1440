"""A Helm chart: NameServers and one broker group with stable addresses, proxies, a console."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

_FILES: Final = (
    "Chart.yaml",
    "values.yaml",
    "templates/_helpers.tpl",
    "templates/broker.yaml",
    "templates/namesrv.yaml",
    "templates/secret.yaml",
    "templates/proxy.yaml",
    "templates/console.yaml",
    "templates/NOTES.txt",
)


def helm_files() -> dict[str, str]:
    """Return the chart's files by their paths in it."""
    chart = files("dledger.generate") / "chart"
    return {f"dledger/{name}": (chart / name).read_text(encoding="utf-8") for name in _FILES}
