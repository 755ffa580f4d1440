"""``dledger top``: members, topics and groups of a cluster on one screen, again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from dledger.cli.commands import with_admin
from dledger.commitlog.errors import MQError
from dledger.output import CliError, ExitCode, cell_text, make_console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dledger.client.admin.admin import Admin

Sort = Literal["in", "out", "lag"]

MEMBER_COLUMNS: Final = ("group", "member", "address", "role", "term", "commit", "lag")
TOPIC_COLUMNS: Final = ("topic", "group", "in_per_s", "out_per_s", "lag")
_SORT_COLUMNS: Final = {"in": "in_per_s", "out": "out_per_s", "lag": "lag"}

TOPICS_ASKED_MAX: Final = 100
"""Topics whose rates one look asks for: each is a request to every broker. The others are counted;
those with the most waiting messages come first."""

MEMBERS_SHARE: Final = 2
"""Members take at most half of the screen; topics take the rest."""

_FIXED_LINES: Final = 5
"""Heads of two tables with their rules, and the empty line between the tables."""


@dataclass(frozen=True, slots=True)
class TopLook:
    """What one look at a cluster gave.

    Args:
        members: Rows with `MEMBER_COLUMNS`, one for each member of each broker group.
        topics: Rows with `TOPIC_COLUMNS`, one for each topic and consumer group.
        error: Why the newest look failed; then the rows are those of the one before.
    """

    at: str
    members: Sequence[Mapping[str, Any]] = field(default_factory=list)
    topics: Sequence[Mapping[str, Any]] = field(default_factory=list)
    topics_left_out: int = 0
    error: str = ""


@with_admin
async def top(
    admin: Admin,
    *,
    sort: Annotated[Sort, Parameter(help="What the first topics have most of.")] = "in",
    every_s: Annotated[float, Parameter(help="Seconds between two updates.")] = 2.0,
    count: Annotated[int | None, Parameter(help="Stop after this many updates.")] = None,
) -> None:
    """Show members, topics and groups of a cluster on one screen until Ctrl-C.

    Without a terminal it prints one look. Rates are those of the last minute.
    """
    import trio
    from rich.live import Live

    from dledger.cli.commands import known_error

    if not every_s > 0:
        raise CliError("--every-s: above 0", exit_code=ExitCode.USAGE)
    console = make_console()
    is_screen = console.is_terminal
    most = count if count is not None else (None if is_screen else 1)
    look, done = await look_at(admin), 1
    screen = Live(console=console, screen=True, auto_refresh=False) if is_screen else None
    with screen or nullcontext():
        while True:
            if screen is not None:
                screen.update(page(look, sort=sort, height=console.height), refresh=True)
            else:
                console.print(page(look, sort=sort))
            if most is not None and done >= most:
                return
            await trio.sleep(every_s)
            try:
                look = await look_at(admin)
            except (MQError, ExceptionGroup) as error:
                look = replace(look, error=str(known_error(error)))
            done += 1


async def look_at(admin: Admin) -> TopLook:
    """Ask every member for its state, and the brokers for rates and lag.

    Raises NoNameServerError: none answers.
    """
    from datetime import datetime

    from dledger.cli.cluster_command import brokers_of, with_absent
    from dledger.cli.raft_command import narrow_row, raft_rows
    from dledger.cli.stats_command import stats_of, topics_by_lag

    rows = with_absent(await brokers_of(admin, await admin.cluster_info()))
    members = [
        narrow_row(row)
        for broker in dict.fromkeys(row["broker"] for row in rows)
        for row in raft_rows([row for row in rows if row["broker"] == broker])
    ]
    names = await topics_by_lag(admin)
    return TopLook(
        at=datetime.now().astimezone().strftime("%H:%M:%S"),
        members=members,
        topics=await stats_of(admin, names[:TOPICS_ASKED_MAX]),
        topics_left_out=max(0, len(names) - TOPICS_ASKED_MAX),
    )


def page(look: TopLook, *, sort: Sort = "in", height: int = 0) -> RenderableType:
    """Return what stands on the screen. Pure."""
    from rich.console import Group
    from rich.text import Text

    ordered = sorted(look.topics, key=lambda row: row[_SORT_COLUMNS[sort]] or 0, reverse=True)
    serving = sum(1 for row in look.members if row["role"] in ("leader", "follower"))
    head = f"{serving} of {len(look.members)} members serve, {look.at}"
    lines = [Text(head, style="bold", no_wrap=True, overflow="ellipsis")]
    if look.topics_left_out:
        lines.append(Text(f"{look.topics_left_out} topics with less lag are not asked for"))
    if look.error:
        why = f"the last look failed: {cell_text(look.error)}"
        lines.append(Text(why, style="red", no_wrap=True, overflow="ellipsis"))
    members: Sequence[Mapping[str, Any]] = look.members
    if height:
        left = height - len(lines) - _FIXED_LINES
        members = members[: max(1, left // MEMBERS_SHARE)]
        ordered = ordered[: max(0, left - len(members))]
    tables = _table(MEMBER_COLUMNS, members), _table(TOPIC_COLUMNS, ordered)
    return Group(*lines, tables[0], Text(), tables[1])


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        numeric = any(isinstance(row[name], (int, float)) for row in rows)
        # Names give way where the terminal is narrow, numbers do not.
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    for row in rows:
        style = "red" if row.get("role") in ("absent", "unreachable") else ""
        cells = (cell_text(row[name]) for name in columns)
        table.add_row(*(Text(c, no_wrap=True, overflow="ellipsis") for c in cells), style=style)
    return table
