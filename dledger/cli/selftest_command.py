"""``dledger selftest``: send to every broker group, read it back, and state a verdict."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from dledger.cli.commands import open_client
from dledger.cli.topic_command import groups_of
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    addresses,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.client.core.client_instance import ClientInstance
    from dledger.client.core.route import MessageQueue

TOPIC: Final = "dledger_selftest"
"""It stays: deleting a topic is for administrators."""

FOUND_WITHIN_S: Final = 10.0
"""An index follows the log within milliseconds; this is for a cluster under load."""


async def selftest(
    *,
    messages: Annotated[int, Parameter(help="Messages to each broker group.")] = 10,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Send messages to every broker group, read them back and find one by key; exit 1 if not.

    Uses the topic dledger_selftest, which it creates and leaves. Nothing else is changed.
    """
    if messages < 1:
        raise CliError("--messages: at least 1", exit_code=ExitCode.USAGE)
    rows = await run_steps(addresses(namesrv), messages)
    good = all(row["result"] == "good" for row in rows)
    if output == "json":
        print_json({"good": good, "steps": rows})
    else:
        show(output, "", rows, ("group", "step", "result", "ms"))
        note("good: every message came back as it was sent" if good else "BAD: see the table")
    return ExitCode.OK if good else ExitCode.FAILED


async def run_steps(namesrvs: list[str], messages: int) -> list[dict[str, Any]]:
    """Return one row for each step in each broker group; a step that fails ends its group's."""
    from dledger.client.admin.admin import Admin

    rows: list[dict[str, Any]] = []
    run = secrets.token_hex(4)
    async with open_client(namesrvs) as client:
        admin = Admin(client)
        names = await groups_of(admin, None)

        async def create() -> None:
            await admin.create_topic(TOPIC, queue_nums=1, broker_names=names)

        if await _step(rows, "all", "topic", create):
            for name in names:
                await _group_steps(client, name, run, messages, rows)
    return rows


async def _group_steps(
    client: ClientInstance, name: str, run: str, messages: int, rows: list[dict[str, Any]]
) -> None:
    from dledger.client.consumer.pull_consumer import PullConsumer
    from dledger.client.core.message import Message
    from dledger.client.producer.producer import Producer

    async with (
        Producer(client, "dledger-cli") as producer,
        PullConsumer(client, "dledger-cli") as reader,
    ):
        (queue,) = [q for q in await producer.publish_queues(TOPIC) if q.broker_name == name]
        bodies = [f"{run} {name} {number}".encode() for number in range(messages)]
        places: list[int] = []

        async def send() -> None:
            for body in bodies:
                message = Message(TOPIC, body, keys=f"{run}-{name}")
                future = await producer.send_async(message, queue=queue)
                places.append((await future.result()).queue_offset)

        async def read() -> None:
            found = await _read(reader, queue, places)
            if found != bodies:
                raise CliError(f"{len(found)} of {messages} came back, or others")

        async def find() -> None:
            await _find(client, f"{run}-{name}", messages)

        for step, do in (("send", send), ("read", read), ("find by key", find)):
            if not await _step(rows, name, step, do):
                return


async def _step(
    rows: list[dict[str, Any]], group: str, step: str, do: Callable[[], Awaitable[object]]
) -> bool:
    from dledger.commitlog.errors import MQError

    began = time.monotonic()
    result = "good"
    try:
        await do()
    except MQError as error:
        result = str(error)
    ms = round((time.monotonic() - began) * 1000, 1)
    rows.append({"group": group, "step": step, "result": result, "ms": ms})
    return result == "good"


async def _read(reader: Any, queue: MessageQueue, places: list[int]) -> list[bytes]:
    """Return the bodies at *places*, which rise."""
    wanted, bodies = set(places), []
    async for message in reader.iter_messages(queue, places[0], until=places[-1] + 1):
        if message.queue_offset in wanted:
            bodies.append(message.body_bytes)
    return bodies


async def _find(client: ClientInstance, key: str, messages: int) -> None:
    import trio

    from dledger.client.admin.admin import Admin

    found = 0
    with trio.move_on_after(FOUND_WITHIN_S):
        while found < messages:
            found = len(await Admin(client).query_messages(TOPIC, key, max_messages=messages))
            await trio.sleep(0.05)
    if found < messages:
        raise CliError(f"{found} of {messages} are found by their key")
