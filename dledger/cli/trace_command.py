"""``dledger msg trace``: the path of a message, as its clients reported it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dledger.cli.commands import with_admin
from dledger.output import CliError, ExitCode, RowsOutput, show, utc

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.client.trace import TraceBean, TraceContext

COLUMNS = ("time", "step", "group", "topic", "where", "took_ms", "try", "result")


@with_admin
async def trace(
    admin: Admin,
    message_id: Annotated[str, Parameter(help="A message's id, or one of its keys.")],
    /,
    *,
    topic: Annotated[
        str, Parameter(name=["--trace-topic"], help="Where clients send their traces.")
    ] = "RMQ_SYS_TRACE_TOPIC",
    output: RowsOutput = "table",
) -> int:
    """Show the clients that sent and consumed a message, when, how long it took and the result.

    Shows what clients with message trace reported: each broker's newest 64 trace messages.
    """
    from dledger.client.core.errors import NoRouteError

    try:
        steps = await admin.message_trace(message_id, trace_topic=topic)
    except NoRouteError:
        raise CliError(
            f"topic {topic} does not exist",
            next_step="start brokers with traceTopicEnable=true, clients with enable_msg_trace",
        ) from None
    rows = path_rows(steps, message_id)
    if not rows and output == "table":
        raise CliError(
            f"{topic} has no message with id {message_id}",
            next_step="only clients with enable_msg_trace report; give the id or a key",
        )
    show(output, "", rows, COLUMNS)
    return ExitCode.OK if rows else ExitCode.FAILED


def path_rows(steps: Iterable[TraceContext], wanted: str) -> list[dict[str, Any]]:
    """Return a row for each step of the messages with id or key *wanted*, in order of time."""
    from dledger.client.core.hooks import ConsumeReturnType
    from dledger.client.trace import TraceType

    rows: list[dict[str, Any]] = []
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    ended: dict[tuple[str, str], TraceContext] = {}
    topics: dict[str, str] = {}
    for step in steps:
        for bean in step.beans:
            if wanted != bean.msg_id and wanted not in bean.keys.split(" "):
                continue
            call = (step.request_id, bean.msg_id)
            match step.trace_type:
                case TraceType.PUB:
                    topics[bean.msg_id] = bean.topic
                    result = "stored" if step.is_success else "stored, not as safe as asked for"
                    rows.append(_row(step, bean, "send", result, step.cost_time_ms))
                case TraceType.END_TRANSACTION:
                    result = bean.transaction_state + (
                        ", asked by the broker" if bean.from_transaction_check else ""
                    )
                    rows.append(_row(step, bean, "end of transaction", result))
                case TraceType.SUB_BEFORE:
                    if call not in begun:
                        begun[call] = _row(step, bean, "consume", "no end is known")
                        rows.append(begun[call])
                case TraceType.SUB_AFTER:
                    ended[call] = step
    for call, step in ended.items():
        row = begun.get(call)
        if row is None:
            bean = next(bean for bean in step.beans if bean.msg_id == call[1])
            row = _row(step, bean, "consume", "")
            rows.append(row)
        row["took_ms"] = step.cost_time_ms
        row["result"] = _result(ConsumeReturnType, step)
    for row in rows:
        row["topic"] = row["topic"] or topics.get(row["message_id"], "")
    return sorted(rows, key=lambda row: row["time"])


def _result(codes: Any, step: TraceContext) -> str:
    if step.is_success:
        return "success"
    names = {code.value: code.name.lower() for code in codes}
    # 0 is also what clients write that know no codes.
    return names.get(step.context_code, "failed") if step.context_code else "failed"


def _row(
    step: TraceContext, bean: TraceBean, name: str, result: str, took_ms: int | None = None
) -> dict[str, Any]:
    return {
        "time": utc(step.time_stamp_ms),
        "step": name,
        "group": step.group_name,
        "topic": bean.topic,
        "where": bean.store_host,
        "took_ms": took_ms,
        "try": bean.retry_times + 1 if name == "consume" else None,
        "result": result,
        "message_id": bean.msg_id,
        "offset_message_id": bean.offset_msg_id,
        "tags": bean.tags,
        "keys": bean.keys,
        "region": step.region_id,
    }
