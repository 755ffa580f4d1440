"""``dledger mirror``: copy a cluster into a second one with equal queue offsets; compare both."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.output import (
    CliError,
    ExitCode,
    Output,
    addresses,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.client.admin.copies import ClusterCopies
    from dledger.mirror.mirror import Mirror, Round
    from dledger.mirror.plan import Selection
    from dledger.mirror.verify import Comparison, QueueVerdict
    from dledger.remoting.log import LogForm

app = App(name="mirror", help="Copy a cluster into a second one, offset by offset.", backend="trio")

REPORT_S: Final = 10.0
"""Between two lines of the log about what is copied; nothing is logged when nothing was."""

WHY_MAX: Final = 20
"""Refusals of one round that are logged: a cluster that is away refuses each queue."""

QUEUE_COLUMNS = ("topic", "broker", "queue", "begin", "end", "copied", "lag", "stopped")
VERDICT_COLUMNS = (
    "topic",
    "broker",
    "queue",
    "source",
    "target",
    "compared",
    "digest",
    "verdict",
)

From = Annotated[
    str, Parameter(name="--from", help="NameServers of the source, host:port;host:port.")
]
To = Annotated[str, Parameter(name="--to", help="NameServers of the target, which is written to.")]
Topics = Annotated[str, Parameter(help="Topics to copy: shell patterns, several with commas.")]
Groups = Annotated[
    str,
    Parameter(help="Consumer groups to copy, with their offsets, retries and dead letters."),
]
Pairs = Annotated[
    list[str] | None,
    Parameter(
        name="--pair",
        help="SOURCE=TARGET: broker groups that correspond; without it those of one name do.",
    ),
]
FromCredentials = Annotated[
    Path | None, Parameter(help="Credentials for the source; else those of the environment.")
]
ToCredentials = Annotated[
    Path | None, Parameter(help="Credentials for the target; else those of the environment.")
]


@app.default
async def mirror(
    *,
    source: From,
    target: To,
    topics: Topics = "*",
    groups: Groups = "*",
    pairs: Pairs = None,
    once: Annotated[bool, Parameter(help="Copy what is there, print a table, and end.")] = False,
    metrics: Annotated[
        str, Parameter(help="host:port of the page for Prometheus; empty: none.")
    ] = "",
    from_credentials: FromCredentials = None,
    to_credentials: ToCredentials = None,
    output: Output = "table",
) -> int:
    """Copy topics, messages and consumer groups of one cluster into a second one, until Ctrl-C.

    Messages keep their queue, offset, properties, keys, tags, bodies, born time and host. Where
    the copy stands is where the target's queues end: end it at any time, start it anywhere again,
    run two of them. A queue that cannot be copied exactly is stopped, and the log names what to do.
    """
    import sys

    from dledger.mirror.mirror import Mirror
    from dledger.remoting.log import configure_logs
    from dledger.remoting.machine import TrioClock

    selection, given = _selection(topics, groups), pairs_of(pairs or ())
    form: LogForm = "text" if sys.stderr.isatty() or once else "json"
    configure_logs(form=form, level="warning" if once else "info")
    async with (
        _cluster(source, from_credentials) as here,
        _cluster(target, to_credentials) as there,
    ):
        one = Mirror(here, there, TrioClock(), selection, given)
        if once:
            return await _once(one, output)
        await _forever(one, metrics)
    return ExitCode.OK


@app.command
async def verify(
    *,
    source: From,
    target: To,
    topics: Topics = "*",
    groups: Groups = "*",
    pairs: Pairs = None,
    from_credentials: FromCredentials = None,
    to_credentials: ToCredentials = None,
    output: Output = "table",
) -> int:
    """Compare both clusters: tables, bounds, messages, committed offsets; exit 1 if they differ.

    Every message is read at both. Stop producers of the source first, or what is new there counts
    as behind.
    """
    from dledger.mirror.verify import compare

    selection, given = _selection(topics, groups), pairs_of(pairs or ())
    async with (
        _cluster(source, from_credentials) as here,
        _cluster(target, to_credentials) as there,
    ):
        found = await compare(here, there, selection, given)
    _show_comparison(found, output)
    return ExitCode.OK if found.is_same else ExitCode.FAILED


def _selection(topics: str, groups: str) -> Selection:
    from dledger.mirror.plan import Selection

    return Selection(topics, groups)


def pairs_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the pairs in ``SOURCE=TARGET`` texts.

    Raises:
        CliError: One is no pair; a usage error.
    """
    found: dict[str, str] = {}
    for text in texts:
        source, equals, target = text.partition("=")
        if not (source and equals and target) or source in found:
            raise CliError(
                f"--pair {text}: give SOURCE=TARGET, each source once", exit_code=ExitCode.USAGE
            )
        found[source] = target
    return found


@asynccontextmanager
async def _cluster(namesrv: str, credentials: Path | None) -> AsyncIterator[ClusterCopies]:
    import structlog

    from dledger.client.admin.copies import ClusterCopies
    from dledger.client.connect import CREDENTIALS_FILE, connect
    from dledger.remoting.log import configure_logs

    if not structlog.is_configured():
        configure_logs(form="text", level="warning")
    environment = dict(os.environ)
    if credentials is not None:
        environment[CREDENTIALS_FILE] = str(credentials)
    async with connect(addresses(namesrv), environment=environment) as instance:
        yield ClusterCopies(instance)


async def _once(one: Mirror, output: Output) -> int:
    done = await one.run_once()
    rows = queue_rows(one)
    show(output, "", rows, QUEUE_COLUMNS)
    copied = sum(row["copied"] for row in rows)
    note(f"{copied} messages copied, {one.lag} behind, {len(one.stopped)} queues stopped")
    for what, why in sorted(done.errors.items())[:WHY_MAX]:
        note(f"{what}: {why}")
    return ExitCode.FAILED if done.errors or one.stopped or one.lag else ExitCode.OK


def queue_rows(one: Mirror) -> list[dict[str, Any]]:
    """Return a row for each queue of a mirror, as it stands."""
    ordered = sorted(
        one.queues.items(), key=lambda item: (item[0].topic, item[0].broker_name, item[0].queue_id)
    )
    return [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "begin": copy.bounds.begin,
            "end": copy.end,
            "copied": copy.copied_messages,
            "lag": copy.lag,
            "stopped": copy.stopped,
        }
        for queue, copy in ordered
    ]


async def _forever(one: Mirror, metrics: str) -> None:
    """Copy until cancelled, and serve the page if one is wanted.

    Raises:
        CliError: The page's address cannot be bound.
    """
    import trio

    from dledger.mirror.metrics import MirrorMetrics
    from dledger.remoting.metrics import MetricsServer, load_library
    from dledger.remoting.tcp import TcpNetwork

    page, reports = MirrorMetrics(one), Reports(one, trio.current_time)

    def note_round(done: Round) -> None:
        page.note(done)
        reports.note(done)

    async with trio.open_nursery() as nursery:
        if metrics:
            host, _, port = metrics.rpartition(":")
            if not port.isdecimal():
                raise CliError(f"--metrics {metrics}: give host:port", exit_code=ExitCode.USAGE)
            load_library()
            server = MetricsServer(TcpNetwork(), page.pieces)
            await nursery.start(server.serve, host.strip("[]") or "127.0.0.1", int(port))
        await one.run(note_round)


class Reports:
    """Logs what a mirror does: a line each `REPORT_S`, and what is refused."""

    def __init__(self, one: Mirror, now_s: Any) -> None:
        import structlog

        self._log = structlog.get_logger("dledger.mirror")
        self._mirror = one
        self._now_s = now_s
        self._next_s = 0.0
        self._copied = self._commits = 0
        self._refused: dict[str, str] = {}

    def note(self, done: Round) -> None:
        """Take in a round."""
        self._copied += done.copied_messages
        self._commits += done.commits
        if done.put_topics or done.put_groups:
            self._log.info("mirror_tables", topics=done.put_topics, groups=done.put_groups)
        for what, why in sorted(done.errors.items())[:WHY_MAX]:
            if self._refused.get(what) != why:
                self._log.warning("mirror_refused", what=what, why=why)
        self._refused = done.errors
        if self._now_s() < self._next_s or not (self._copied or self._commits):
            return
        self._next_s = self._now_s() + REPORT_S
        self._log.info(
            "mirror_copies",
            copied_messages=self._copied,
            commits=self._commits,
            lag_messages=self._mirror.lag,
            queues_stopped=len(self._mirror.stopped),
        )
        self._copied = self._commits = 0


def _show_comparison(found: Comparison, output: Output) -> None:
    rows = [verdict_row(one) for one in found.queues]
    offsets = [one._asdict() for one in found.offsets]
    if output == "json":
        print_json(
            {"same": found.is_same, "queues": rows, "tables": found.tables, "offsets": offsets}
        )
        return
    show(output, "", rows, VERDICT_COLUMNS)
    for text in found.tables:
        note(f"{text}: not at the target as it is at the source")
    for one in found.offsets:
        note(f"{one.group} in queue {one.queue_id} of {one.topic}: {one.offset} is not committed")
    note("both clusters are the same" if found.is_same else "the clusters differ")


def verdict_row(one: QueueVerdict) -> dict[str, Any]:
    """Return what is shown of one queue."""
    return {
        "topic": one.queue.topic,
        "broker": one.queue.broker_name,
        "queue": one.queue.queue_id,
        "source": f"{one.source.begin}-{one.source.end}",
        "target": f"{one.target.begin}-{one.target.end}",
        "compared": one.compared,
        "digest": one.digest,
        "verdict": one.verdict
        if one.differs_at is None
        else f"{one.verdict} at offset {one.differs_at}",
    }
