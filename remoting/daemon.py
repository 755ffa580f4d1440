"""What the commands of all daemons share: options, and the first lines of the log."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import structlog
from cyclopts import Parameter

from dledger.remoting.log import LogForm, configure_logs
from dledger.remoting.settings import Config

PrintSettings = Annotated[
    bool,
    Parameter(
        name=["--print-settings", "-p"],
        negative="",
        help="Print every setting with its source and exit.",
    ),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], Parameter(help="Least level that is logged.")
]
LogFormOption = Annotated[
    LogForm | None, Parameter(help="json, or text for people; text on a terminal.")
]


def begin_log(config: Config, level: str, form: LogForm | None, **facts: object) -> None:
    """Send logs to standard error, the warnings of *config* first; *facts*: of every line."""
    form = form or ("text" if sys.stderr.isatty() else "json")
    configure_logs(form=form, level=level, **facts)
    log = structlog.get_logger()
    for warning in config.warnings:
        log.warning("config_warning", text=warning)


def log_settings(config: Config) -> None:
    """Log what is not a default."""
    structlog.get_logger().info(
        "settings",
        **{path: f"{value} ({source})" for path, value, source in config.changed_settings()},
    )
