"""``dledger producer``: connected producers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from dledger.cli.commands import Rows, listing
from dledger.cli.group_command import time_text
from dledger.output import CliError

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin

app = App(name="producer", help="Show connected producers.", backend="trio")

COLUMNS = ("group", "client_id", "address", "language")


@app.command(name="ls")
@listing(COLUMNS, (*COLUMNS, "version", "last_heard"))
async def list_producers(
    admin: Admin,
    group: Annotated[str | None, Parameter(help="Producer group; all otherwise.")] = None,
    /,
) -> Rows:
    """List connected producers."""
    found = await admin.producers()
    if group is not None and group not in found:
        raise CliError(f"no producer of {group} is connected", next_step="see dledger producer ls")
    return [
        {
            "group": name,
            "client_id": producer.client_id,
            "address": producer.remote_ip,
            "language": producer.language,
            "version": producer.version,
            "last_heard": time_text(producer.last_update_timestamp),
        }
        for name, producers in found.items()
        for producer in producers
        if group in (None, name)
    ]
