"""Write the tables of ``docs/reference/errors.md``: ``python -m tests.harness.errors_page``."""

import sys
from collections.abc import Iterator
from typing import Final

import dledger.broker_errors
import dledger.client.core.errors
import dledger.filters.errors
import dledger.namesrv.errors
import dledger.remoting.errors
from dledger.client.core.errors import ClientError
from dledger.commitlog.errors import MQError
from dledger.remoting.errors import ConnectionLostError
from dledger.remoting.protocol.outcome import ANSWERS, Condition, condition_of
from tests.harness.shipped_files import ROOT

PAGE: Final = ROOT / "docs" / "reference" / "errors.md"
MODULES: Final = (
    dledger.client.core.errors,
    dledger.broker_errors,
    dledger.filters.errors,
    dledger.namesrv.errors,
    dledger.remoting.errors,
)

WHEN: Final = {
    Condition.STORED: "done; for a send: in the log, on a majority",
    Condition.FLUSH_DISK_TIMEOUT: "from RocketMQ's brokers only",
    Condition.SLAVE_NOT_AVAILABLE: "from RocketMQ's brokers only",
    Condition.FLUSH_SLAVE_TIMEOUT: "from RocketMQ's brokers only",
    Condition.QUORUM_TIMEOUT: "no majority within `propose_timeout_ms`",
    Condition.LEADERSHIP_LOST: "leadership or patience ended before a majority had it",
    Condition.INTERNAL_ERROR: "an error outside this table; see the broker's log",
    Condition.PRODUCER_UNKNOWN: "an idempotent producer's session is over, or was never opened",
    Condition.SEQUENCE_TOO_OLD: "an idempotent send is older than what is remembered",
    Condition.SEQUENCE_UNDECIDED: "an earlier attempt of an idempotent send is still on its way",
    Condition.REPLY_UNCONFIRMED: "the requester did not confirm the reply",
    Condition.NOT_LEADER: "another broker leads; `leaderAddr` and `term` name it",
    Condition.SHUTTING_DOWN: "the broker is stopping",
    Condition.NOT_READY: "the server has just started, or waits for something",
    Condition.DISK_FULL: "no space for the bytes",
    Condition.PENDING_FULL: (
        "`max_pending_bytes` wait for a majority, or something has waited for it too long"
    ),
    Condition.BUSY: "too many requests of this kind are open",
    Condition.SEQUENCE_GAP: "an idempotent send came before one that it follows",
    Condition.TIMER_FLOW_CONTROL: "too many messages wait for their time",
    Condition.REQUESTER_AWAY: "the requester of a reply is not connected here, or refused it",
    Condition.TIMER_NOT_ENABLED: "a message with a time of its own, and `timerWheelEnable=false`",
    Condition.ALREADY_DELIVERED: "a message is to be recalled and was delivered",
    Condition.MESSAGE_ILLEGAL: "topic, size, properties or batch break a rule",
    Condition.BAD_REQUEST: "a field or the body does not fit the request's code",
    Condition.NOT_SUPPORTED: "no handler for this request code",
    Condition.TABLE_FULL: "a limit of topics, groups, offsets or clients is met; the remark names"
    " the setting",
    Condition.NO_PERMISSION: "the topic, the broker or a setting forbids it",
    Condition.ACCESS_REFUSED: "access control: the requester is not proved, or has no right",
    Condition.TOPIC_NOT_EXIST: "no such topic, and it may not be created",
    Condition.GROUP_NOT_EXIST: "no such consumer group, and it may not be created",
    Condition.INVALID_QUEUE: "the topic has no such queue",
    Condition.SUBSCRIPTION_ILLEGAL: "the filter expression cannot be read",
    Condition.SUBSCRIPTION_NOT_EXIST: "the group's heartbeat has not come yet",
    Condition.SUBSCRIPTION_NOT_LATEST: "the group's heartbeat is older than the request",
    Condition.NOT_FOUND: "no message, offset or entry there",
    Condition.OFFSET_MOVED: "the offset is outside the queue; the answer names where to go on",
    Condition.SEQUENCE_REUSED: "an idempotent send repeats a sequence with another message",
    Condition.ILLEGAL_OPERATION: "the answer to a transaction check comes before its time",
    Condition.STALE_RECEIPT: "the receipt handle names no message that is out: acknowledged, "
    "handed out again, or its time was changed",
    Condition.POP_AT_WORK: "messages of the queue are out for the group by POP: it pulls and "
    "commits when they are acknowledged or given up",
    Condition.CONSUMER_NOT_ONLINE: "no consumer of the group is connected here",
    Condition.CLIENT_SILENT: "a client that was asked through the broker gave no answer in time",
    Condition.STALE_LOCK_TOKEN: "the lock token shown is not that of the grant that stands",
    Condition.COMMIT_NOT_EXPECTED: "the consumer group's offset is not where the step begins",
}


def conditions() -> str:
    """Return the table condition → code → outcome."""
    rows = ["| condition | code | outcome | retriable | when |", "|---|---|---|---|---|"]
    for condition, (code, outcome, retriable) in ANSWERS.items():
        rows.append(
            f"| `{condition}` | {int(code)} {code.name} | {outcome} | {_yes(retriable)} "
            f"| {WHEN[condition]} |"
        )
    return "\n".join(rows) + "\n"


def client_errors() -> str:
    """Return the table of what the SDK raises."""
    rows = ["| error | outcome | retriable | means |", "|---|---|---|---|"]
    for kind in _below(ClientError):
        rows.append(
            f"| `{kind.__name__}` | {kind.outcome} | {_yes(kind.retriable)} | {_about(kind)} |"
        )
    return "\n".join(rows) + "\n"


def daemon_errors() -> str:
    """Return the table of what is raised inside daemons, and how a client is answered."""
    rows = ["| error | answered as | outcome | means |", "|---|---|---|---|"]
    for kind in _below(MQError):
        if issubclass(kind, ClientError):
            continue
        outcome = (
            "unknown once sent, else not_stored" if kind is ConnectionLostError else kind.outcome
        )
        rows.append(
            f"| `{kind.__module__}.{kind.__name__}` | `{condition_of(kind.__new__(kind))}` "
            f"| {outcome} | {_about(kind)} |"
        )
    return "\n".join(rows) + "\n"


TABLES: Final = {
    "conditions": conditions,
    "client errors": client_errors,
    "daemon errors": daemon_errors,
}


def with_tables(page: str) -> str:
    """Return *page* with the present tables between its marks."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table()}\n{end}{after}"
    return page


def _below(root: type[MQError]) -> Iterator[type[MQError]]:
    seen: dict[type[MQError], None] = {}
    # By name: the order in which modules were loaded is that of the tests before.
    for kind in sorted(root.__subclasses__(), key=lambda kind: (kind.__module__, kind.__name__)):
        seen.update(dict.fromkeys([kind, *_below(kind)]))
    packages = ("client", "dledger", "namesrv", "remoting", "commitlog")
    for kind in seen:
        if kind.__module__.endswith("errors") and kind.__module__.split(".")[0] in packages:
            yield kind


def _about(kind: type[MQError]) -> str:
    lines = (kind.__doc__ or "").strip().splitlines()
    return lines[0].replace("|", "\\|")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


if __name__ == "__main__":
    sys.stdout.write(f"writing {PAGE}\n")
    PAGE.write_text(with_tables(PAGE.read_text()))
