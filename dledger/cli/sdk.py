"""The SDK opened on the real world, for commands."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from client.connect import connect
from client.core.client_instance import ClientInstance
from remoting.log import configure_logs


def open_client(namesrvs: Sequence[str]) -> ClientInstance:
    """Return a client instance of this process; enter it with ``async with``.

    Standard output is the command's: what the SDK logs goes to standard error, from warnings on.
    """
    if not structlog.is_configured():
        configure_logs(form="text", level="warning")
    return connect(namesrvs)
