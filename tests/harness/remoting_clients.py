"""RocketMQ's clients of the remoting protocol: what they send, and what must come of it.

Such a client is a producer, or several consumers in one process, each in a group of its own.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from dledger.client.connect import connect
from dledger.client.core.errors import NoRouteError
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.record import SYS_FLAG_COMPRESSED
from tests.harness.eventually import eventually
from tests.harness.foreign_client import ForeignClient, Line
from tests.harness.grpc_clients import Started
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import (
    committed_behind,
    messages_of,
    place,
    stored_in,
    tag_and_keys,
)

TOPIC = "Orders"
CONSUME_S = 100.0
DECISIONS = ("commit", "rollback", "leave")
SHARDS = ("s1", "s2", "s3")
STEPS = 6
LONG = "größer " * 1000
AGAIN, NEVER = "again", "never"
REFUSED = {AGAIN: 2, NEVER: 3}
"""How often a consumer is given a message that it refuses: once, or always with two retries."""

QUICK_CHECKS: Mapping[str, object] = {
    **SMALL_FILES,
    "broker.transaction_timeout_ms": 2_000,
    "broker.transaction_check_interval_ms": 2_000,
}
"""A half message without a decision is asked about soon."""

Parts = Callable[..., AbstractAsyncContextManager[ForeignClient]]
"""Starts a client: its folder, ``produce`` or ``consume``, the NameServer, and a specification of
each consumer."""


def consumer(kind: str, group: str, **selects: str) -> str:
    """Return the specification of a consumer.

    Args:
        kind: ``push``, ``orderly`` or ``lite``.
        selects: ``tags`` or ``sql``.
    """
    return json.dumps({"kind": kind, "group": group, "topic": TOPIC, **selects})


CONSUMERS = (
    consumer("push", "all", tags="*"),
    consumer("push", "chosen", tags="A || B"),
    consumer("push", "counted", sql="number BETWEEN 5 AND 12"),
    consumer("orderly", "lined", tags="*"),
    consumer("lite", "lite", tags="*"),
)


def one_at_a_time(client: Parts) -> Started:
    """Return how `lose_nothing` starts the producer and consumers of a client."""

    def started(folder: Path, part: str, namesrv: str, *rest: str) -> Any:
        if part == "produce":
            return client(folder, part, namesrv)
        group, _, tags = rest
        return client(folder, "consume", namesrv, consumer(part, group, tags=tags))

    return started


async def send_every_kind(producer: ForeignClient, decisions: Sequence[str]) -> dict[str, Line]:
    """Send messages of each kind, and return their answers by body."""
    sent: dict[str, Line] = {}

    async def send(body: str, **asked: Any) -> None:
        sent[body] = await producer.ask({"topic": TOPIC, "body": body, **asked})
        assert "error" not in sent[body], sent[body]

    for number in range(30):
        kind = "async" if number % 2 else "sync"
        properties = {"origin": f"row {number}", "number": str(number)}
        tags, keys = "ABC"[number % 3], f"k{number}"
        await send(f"m{number}", kind=kind, tags=tags, keys=keys, properties=properties)
    await send(LONG, tags="A", keys="k")
    await send("unheard", kind="oneway", tags="A", keys="o")
    for step in range(STEPS):
        for shard in SHARDS:
            await send(f"{shard} step {step}", kind="orderly", shard=shard, tags="A", keys=shard)
    batch = [{"body": f"item {number}", "tags": "A", "keys": f"b{number}"} for number in range(3)]
    answer = await producer.ask({"topic": TOPIC, "kind": "batch", "messages": batch})
    sent.update({f"item {number}": {"batch": answer} for number in range(3)})
    await send("later", tags="A", keys="d", delay_level=1)
    await send(AGAIN, tags="A", keys="k")
    await send(NEVER, tags="A", keys="k")
    # The last of them: the question about it is a line of the producer, as an answer is.
    for decision in decisions:
        await send(decision, kind="transaction", decision=decision, tags="A", keys="t")
    return sent


def wanted(sent: Mapping[str, Line]) -> dict[str, set[str]]:
    """Return the bodies that each consumer group must be given."""
    everything = set(sent) - {"rollback"}
    return {
        "all": everything,
        "chosen": everything - {f"m{number}" for number in range(2, 30, 3)},
        "counted": {f"m{number}" for number in range(5, 13)},
        "lined": everything,
        "lite": everything,
    }


def due(sent: Mapping[str, Line], never_in_order: int) -> Counter[tuple[str, str]]:
    """Return how often each group must be given each body."""
    times = Counter(
        {
            (group, body): 1 if group == "lite" else REFUSED.get(body, 1)
            for group, bodies in wanted(sent).items()
            for body in bodies
        }
    )
    times["lined", NEVER] = never_in_order
    return times


def given(lines: Sequence[Line]) -> Counter[tuple[str, str]]:
    """Return how often each group was given each body."""
    return Counter((line["consumer"], line["body"]) for line in lines if "body" in line)


async def exchange_every_kind(
    folder: Path,
    client: Parts,
    namesrv: str,
    address: str,
    *,
    never_in_order: int = REFUSED[NEVER],
    decisions: Sequence[str] = DECISIONS,
) -> None:
    """Send each kind of message, and assert what is stored and what consumers get.

    Args:
        namesrv: The cluster's, to judge by.
        address: What the clients are given as that of a NameServer.
        never_in_order: How often an orderly consumer is given what it always refuses.
        decisions: About transactions.
    """
    async with (
        client(folder / "consumers", "consume", address, *CONSUMERS) as consumers,
        client(folder / "producer", "produce", address) as producer,
        connect([namesrv]) as sdk,
    ):
        sent = await send_every_kind(producer, decisions)
        due_now = due(sent, never_in_order)
        try:
            await consumers.until(lambda lines: due_now <= given(lines), CONSUME_S)
        except AssertionError as error:
            error.add_note(f"missing: {due_now - given(consumers.lines)}")
            raise
        stored = await stored_in(sdk, TOPIC)
        dead: dict[str, list[MessageExt]] = {}

        async def has_dead_letters() -> bool:
            try:
                for group in ("all", "chosen", "lined"):
                    dead[group] = await messages_of(sdk, f"%DLQ%{group}")
            except NoRouteError:
                return False
            return all(dead.values())

        await eventually("each group has a dead letter", has_dead_letters)
        for group in ("all", "lined", "lite"):
            await committed_behind(sdk, group, TOPIC, stored.values())
    assert given(consumers.lines) - due_now == Counter(), (
        f"too often: {given(consumers.lines) - due_now}"
    )
    assert stored.keys() == wanted(sent)["all"]
    for letters in dead.values():
        assert [(bytes(letter.body).decode(), tag_and_keys(letter)) for letter in letters] == [
            (NEVER, ("A", "k"))
        ]
    judge_stored(sent, stored)
    judge_given(consumers.messages, stored, due_now)
    checked = {"checked": "leave", "message_id": sent["leave"]["message_id"]}
    assert checked in producer.lines


def judge_stored(sent: Mapping[str, Line], stored: Mapping[str, MessageExt]) -> None:
    """Assert that messages are where their producer was answered, as they were sent."""
    for body, answer in sent.items():
        if body in ("rollback", "unheard", "later", "commit", "leave") or "batch" in answer:
            continue  # what is stored later, or what has no place of its own in the answer
        assert answer["status"] == "SEND_OK"
        assert (answer["queue_id"], answer["offset"]) == place(stored[body])
        assert answer["message_id"] == stored[body].message_id
    for number in range(30):
        message = stored[f"m{number}"]
        assert tag_and_keys(message) == ("ABC"[number % 3], f"k{number}")
        assert message.properties["origin"] == f"row {number}"
    assert stored[LONG].record.sys_flag & SYS_FLAG_COMPRESSED
    assert len(stored[LONG].record.body) < len(LONG) // 2
    for shard in SHARDS:
        steps = [place(stored[f"{shard} step {step}"]) for step in range(STEPS)]
        assert len({queue_id for queue_id, _ in steps}) == 1
        assert steps == sorted(steps)
    first, *rest = [stored[f"item {number}"] for number in range(3)]
    assert [place(item) for item in rest] == [
        (first.record.queue_id, first.queue_offset + number) for number in (1, 2)
    ]
    later = stored["later"].record
    assert later.store_timestamp_ms >= later.born_timestamp_ms + 1000


def judge_given(
    messages: Sequence[Line],
    stored: Mapping[str, MessageExt],
    due_now: Mapping[tuple[str, str], int],
) -> None:
    """Assert that consumers were given what is stored, and the orderly one in order."""
    for line in messages:
        message = stored[line["body"]]
        assert line["topic"] == TOPIC
        assert (line["tags"], line["keys"]) == tag_and_keys(message)
        assert (line.get("origin") or None) == message.properties.get("origin")
        assert line["message_id"] == message.message_id
        if not line["reconsume_times"]:
            assert (line["queue_id"], line["queue_offset"]) == place(message)
    for group in ("all", "lined"):
        for body in REFUSED:
            attempts = [
                line["reconsume_times"]
                for line in messages
                if (line["consumer"], line["body"]) == (group, body)
            ]
            assert attempts == list(range(due_now[group, body]))
    places: dict[int, list[int]] = {}
    for line in messages:
        if line["consumer"] == "lined":
            places.setdefault(line["queue_id"], []).append(line["queue_offset"])
    for offsets in places.values():
        assert offsets == sorted(offsets)
