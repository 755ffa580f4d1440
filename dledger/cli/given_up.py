"""What a change would give up, shown before it is confirmed with --yes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from dledger.output import Output, note, print_json, show
from remoting.protocol.command import RemotingCommand
from remoting.protocol.confirmation import (
    CONFIRMED_FIELD,
    GIVES_UP_FIELD,
    GivenUp,
    decode_given_up,
)

Yes = Annotated[bool, Parameter(name="--yes", negative="", help="Do it; otherwise only show it.")]


def confirmed() -> dict[str, str]:
    """Return the field of a request that confirms what it gives up."""
    return {CONFIRMED_FIELD: "true"}


def given_up_in(answer: RemotingCommand) -> GivenUp | None:
    """Return what a broker wants confirmed; None: it refuses for another reason."""
    text = answer.ext.get(GIVES_UP_FIELD)
    if text is None:
        return None
    try:
        return decode_given_up(text)
    except msgspec.MsgspecError:
        return None


def rows_of(found: Mapping[str, GivenUp]) -> list[dict[str, Any]]:
    """Return broker, topic and messages that would go, one row for each topic. Pure."""
    rows: list[dict[str, Any]] = []
    for broker, lost in found.items():
        rows += [
            {"broker": broker, "topic": topic, "messages": count}
            for topic, count in lost.messages.items()
        ]
        if lost.other_topics:
            others = f"({lost.other_topics} more)"
            rows.append({"broker": broker, "topic": others, "messages": lost.other_messages})
    return rows


def show_given_up(found: Mapping[str, GivenUp], output: Output) -> None:
    """Print what would go, by broker."""
    if not found:
        return
    if output == "json":
        print_json({broker: msgspec.to_builtins(lost) for broker, lost in found.items()})
        return
    show(output, "Would be given up", rows_of(found), ("broker", "topic", "messages"))
    for broker, lost in found.items():
        newest = ""
        if lost.newest_ms:
            moment = datetime.fromtimestamp(lost.newest_ms / 1000, UTC)
            newest = f"; stored up to {moment.isoformat(timespec='seconds')}"
        uncounted = ""
        if lost.uncounted_queues:
            uncounted = f"; {lost.uncounted_queues} queues are not counted"
        note(f"{broker}: {lost}{newest}{uncounted}")
