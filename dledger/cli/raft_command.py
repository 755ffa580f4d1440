"""``dledger raft``: terms, indexes and lag."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from dledger.cli.cluster_command import brokers_of
from dledger.cli.output import DEFAULT_NAMESRV, CliError, ExitCode, Namesrv, Output, addresses, show
from dledger.cli.probe import any_cluster_info

app = App(name="raft", help="Terms, indexes and lag of a group.", backend="trio")

COLUMNS = (
    "group",
    "member",
    "address",
    "role",
    "term",
    "last_index",
    "durable_index",
    "commit_index",
    "applied_index",
    "chain",
    "lag_entries",
    "elections",
    "truncations",
)


@app.command
async def status(
    group: str | None = None, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Show each member of a group, or of all: role, term, last, committed and applied index."""
    source, info = await any_cluster_info(addresses(namesrv))
    rows = [row for row in await brokers_of(info) if group in (None, row["broker"])]
    if not rows:
        raise CliError(
            f"no broker group {group or ''} is registered at {source}".replace("  ", " "),
            next_step="see dledger cluster ls",
        )
    members = raft_rows(rows)
    show(output, "", members, COLUMNS)
    return ExitCode.OK if any(row.get("serving") for row in rows) else ExitCode.FAILED


def raft_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is shown of each member, from what it says of itself. Pure."""
    last = max((int(row.get("last_index", 0)) for row in rows), default=0)
    return [
        {
            "group": row.get("group", row["broker"]),
            "member": row.get("self"),
            "address": row["address"],
            "role": row.get("role"),
            "leader": row.get("leader"),
            "serving": row.get("serving"),
            "term": row.get("term"),
            "last_index": row.get("last_index"),
            "durable_index": row.get("stable_index"),
            "commit_index": row.get("commit_index"),
            "applied_index": row.get("applied_index"),
            "chain": row.get("applied_chain"),
            "lag_entries": last - int(row["last_index"]) if "last_index" in row else None,
            "elections": row.get("elections"),
            "truncations": row.get("truncations"),
            "peers": row.get("peers"),
        }
        for row in rows
    ]
