"""``dledger producer``: producers that are connected."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from dledger.cli.group_command import time_text
from dledger.cli.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    RowsOutput,
    addresses,
    show,
)

app = App(name="producer", help="Producers that are connected.", backend="trio")


@app.command
async def ls(
    group: Annotated[
        str | None, Parameter(help="Of this producer group; of all otherwise.")
    ] = None,
    /,
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: RowsOutput = "table",
) -> int:
    """List connected producers."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        found = await Admin(client).producers()
    if group is not None and group not in found:
        raise CliError(f"no producer of {group} is connected", next_step="see dledger producer ls")
    rows = [
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
    columns = ("group", "client_id", "address", "language", "version", "last_heard")
    show(output, "", rows, columns)
    return ExitCode.OK
