"""``dledger producer``: connected producers."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from dledger.cli.group_command import time_text
from dledger.cli.watch import Watch, repeated
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    RowsOutput,
    Wide,
    addresses,
    show,
)

app = App(name="producer", help="Show connected producers.", backend="trio")

COLUMNS = ("group", "client_id", "address", "language")
WIDE_COLUMNS = (*COLUMNS, "version", "last_heard")


@app.command(name="ls")
async def list_producers(
    group: Annotated[str | None, Parameter(help="Producer group; all otherwise.")] = None,
    /,
    *,
    wide: Wide = False,
    watch: Watch = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: RowsOutput = "table",
) -> int:
    """List connected producers."""

    async def look() -> int:
        from dledger.cli.ask_cluster import open_client
        from dledger.client.admin.admin import Admin

        async with open_client(addresses(namesrv)) as client:
            found = await Admin(client).producers()
        if group is not None and group not in found:
            raise CliError(
                f"no producer of {group} is connected", next_step="see dledger producer ls"
            )
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
        show(output, "", rows, WIDE_COLUMNS if wide else COLUMNS)
        return ExitCode.OK

    return await repeated(look, watch)
