"""RocketMQ's C++ client, as its Python package carries it, against three real brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.local_cluster import local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import ForeignClient, foreign_client, needs_cpp_client
from tests.harness.leader_kill import RESUME_TIMEOUT_S, judge_a_kill, send_over_a_kill
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import (
    committed_behind,
    messages_at,
    place,
    stored_in,
    tag_and_keys,
)

pytestmark = [pytest.mark.slow, needs_cpp_client]

SEND_OK = 0


async def send(producer: ForeignClient, kind: str, **asked: Any) -> Any:
    return await producer.ask({"kind": kind, "topic": "sent", **asked})


async def test_every_kind_of_send_is_stored_as_it_was_meant(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, "sent", queues=4)
        async with foreign_client(
            tmp_path / "p", "cpp_producer.py", "senders", cluster.namesrv_address
        ) as producer:
            acknowledged = {
                body: await send(producer, "sync", body=body, tags="A", keys=f"k{number}")
                for number, body in enumerate(["one", "two", "größer " * 1000])
            }
            ordered = [
                await send(producer, "orderly", body=f"step {step}", tags="S", keys="s", shard=2)
                for step in range(10)
            ]
            assert await send(producer, "oneway", body="unheard", tags="O", keys="o") == {}
            items = [
                {"topic": "sent", "body": f"item {n}", "tags": f"T{n}", "keys": f"b{n}"}
                for n in range(3)
            ]
            batch = await send(producer, "batch", messages=items)
            delayed = await send(
                producer, "sync", body="later", tags="D", keys="d", delay_level=1,
                properties={"kind": "delayed"},
            )  # fmt: skip
            # One more answer behind the one-way message, over the same connection.
            assert "error" not in await send(producer, "sync", body="last")
        async with foreign_client(
            tmp_path / "c", "cpp_pull_consumer.py", "readers", cluster.namesrv_address, "sent", "*",
            wait_ready=False,
        ) as reader:  # fmt: skip
            await reader.until(lambda lines: {"end": True} in lines, 60)
        async with foreign_client(
            tmp_path / "c", "cpp_pull_consumer.py", "choosers", cluster.namesrv_address, "sent",
            "T1 || S", wait_ready=False,
        ) as chooser:  # fmt: skip
            await chooser.until(lambda lines: {"end": True} in lines, 60)
        async with connect(namesrvs) as client:
            stored = await stored_in(client, "sent")

    for number, (body, answer) in enumerate(acknowledged.items()):
        assert (answer["status"], answer["offset"]) == (SEND_OK, stored[body].queue_offset)
        assert tag_and_keys(stored[body]) == ("A", f"k{number}")
        assert answer["msg_id"] == stored[body].properties["UNIQ_KEY"]
    steps = [stored[f"step {step}"] for step in range(10)]
    assert {message.record.queue_id for message in steps} == {2}
    assert [message.queue_offset for message in steps] == [answer["offset"] for answer in ordered]
    assert [answer["offset"] for answer in ordered] == sorted(
        {answer["offset"] for answer in ordered}
    )
    assert tag_and_keys(stored["unheard"]) == ("O", "o")
    parts = [stored[f"item {n}"] for n in range(3)]
    first = parts[0]
    assert batch["status"] == SEND_OK
    assert [place(part) for part in parts] == [
        (first.record.queue_id, first.queue_offset + n) for n in range(3)
    ]
    assert [tag_and_keys(part) for part in parts] == [(f"T{n}", f"b{n}") for n in range(3)]
    assert len({part.properties["UNIQ_KEY"] for part in parts}) == 3
    assert delayed["status"] == SEND_OK
    later = stored.get("later")
    if later is not None:
        assert later.properties["kind"] == "delayed"
        assert later.record.store_timestamp_ms >= later.record.born_timestamp_ms + 1000
    read = {line["body"]: line for line in reader.messages}
    # The delayed one comes a second after it was sent, which may be behind either reader.
    assert read.keys() - {"later"} == stored.keys() - {"later"}
    for body, line in read.items():
        assert (line["topic"], line["queue_id"], line["queue_offset"]) == (
            "sent",
            *place(stored[body]),
        )
        assert (line["tags"] or None, line["keys"] or None) == tag_and_keys(stored[body])
    assert {line["body"] for line in chooser.messages} == {
        "item 1",
        *(f"step {step}" for step in range(10)),
    }


@pytest.mark.hunt
async def test_push_consumer_gets_refused_messages_again(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "sent", queues=4)
        async with (
            foreign_client(tmp_path / "p", "cpp_producer.py", "senders", namesrv) as producer,
            foreign_client(
                tmp_path / "c", "cpp_push_consumer.py", "workers", namesrv, "sent", "A || B", "any"
            ) as consumer,
        ):
            answers = {}
            for number in range(60):
                body, tag = f"m{number}", "ABC"[number % 3]
                answers[body] = await send(producer, "sync", body=body, tags=tag, keys=f"k{number}")
            await send(
                producer, "sync", body="no!", tags="B", keys="again", properties={"kind": "hard"}
            )
            await send(producer, "sync", body="later", tags="A", keys="d", delay_level=2)
            wanted = {f"m{number}" for number in range(60) if number % 3 < 2} | {"no!", "later"}
            # Ten seconds: the first retry waits that long.
            await consumer.until(
                lambda lines: (
                    wanted <= {line.get("body") for line in lines}
                    and any(line.get("reconsume_times") for line in lines)
                ),
                60,
            )
            # While it runs: it reports that every few seconds, and it may be stopped just before.
            async with connect([namesrv]) as client:
                stored = await stored_in(client, "sent")
                of_group = [stored[body] for body in wanted]
                await committed_behind(client, "workers", "sent", of_group)
        async with connect([namesrv]) as client:
            retried = await stored_in(client, "%RETRY%workers")
            async with PullConsumer(client, "workers") as group:
                queues = await group.fetch_message_queues("sent")
                committed = {
                    queue.queue_id: await group.committed_offset(queue) for queue in queues
                }

    first_time = [line for line in consumer.messages if not line["reconsume_times"]]
    again = [line for line in consumer.messages if line["reconsume_times"]]
    assert Counter(line["body"] for line in first_time) == Counter(wanted)
    for line in first_time:
        message = stored[line["body"]]
        assert (line["queue_id"], line["queue_offset"]) == place(message)
        assert (line["tags"], line["keys"]) == tag_and_keys(message)
        assert line["id"] == message.properties["UNIQ_KEY"]
        if line["body"] in answers:
            assert line["queue_offset"] == answers[line["body"]]["offset"]
    assert [
        (line["body"], line["topic"], line["tags"], line["keys"], line["reconsume_times"])
        for line in again
    ] == [("no!", "sent", "B", "again", 1)]
    assert again[0]["origin"] == "hard"
    assert list(retried) == ["no!"]
    assert retried["no!"].properties["RETRY_TOPIC"] == "sent"
    # The next consumer of the group begins behind all of it.
    for body in wanted:
        queue_id, offset = place(stored[body])
        assert (committed[queue_id] or 0) > offset


@pytest.mark.hunt
async def test_an_orderly_consumer_gets_each_queue_in_order(tmp_path: Path) -> None:
    """It locks its queues at the broker first, and pulls none that it has not locked."""
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "sent", queues=4)
        async with (
            foreign_client(tmp_path / "p", "cpp_producer.py", "senders", namesrv) as producer,
            foreign_client(
                tmp_path / "c", "cpp_push_consumer.py", "sorters", namesrv, "sent", "*", "orderly"
            ) as consumer,
        ):
            for number in range(80):
                answer = await send(
                    producer, "orderly", body=f"m{number}", tags="A", keys="k", shard=number % 4
                )
                assert answer["status"] == SEND_OK
            wanted = {f"m{number}" for number in range(80)}
            await consumer.until(lambda lines: wanted <= {line.get("body") for line in lines}, 60)
    for shard in range(4):
        mine = [line for line in consumer.messages if line["queue_id"] == shard]
        assert [line["body"] for line in mine] == [f"m{n}" for n in range(shard, 80, 4)]
        assert [line["queue_offset"] for line in mine] == list(range(20))


@pytest.mark.hunt
async def test_clients_survive_a_killed_leader(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "sent", queues=4)
        async with (
            foreign_client(
                tmp_path / "p", "cpp_producer.py", "senders", namesrv, "3000"
            ) as producer,
            foreign_client(
                tmp_path / "c", "cpp_push_consumer.py", "workers", namesrv, "sent", "*", "any"
            ) as consumer,
        ):
            reported = await send_over_a_kill(cluster, [producer], "sent")
            await consumer.until(
                lambda lines: reported.acknowledged.keys() <= {line.get("body") for line in lines},
                RESUME_TIMEOUT_S,
            )
        judge_a_kill(reported, await messages_at(namesrv, "sent"), consumer)
