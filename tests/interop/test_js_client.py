"""The JavaScript client `ali-ons` against three real brokers.

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
from tests.harness.foreign_client import ForeignClient, foreign_client, needs_js_client
from tests.harness.leader_kill import RESUME_TIMEOUT_S, judge_a_kill, send_over_a_kill
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import (
    committed_behind,
    messages_at,
    place,
    stored_in,
    tag_and_keys,
)

pytestmark = [pytest.mark.slow, needs_js_client]

SEND_OK = "SEND_OK"


async def send(producer: ForeignClient, body: str, **asked: Any) -> Any:
    answer = await producer.ask({"topic": "sent", "body": body, **asked})
    assert answer["status"] == SEND_OK, answer
    return answer


async def test_messages_arrive_as_sent_and_refused_ones_come_again(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        # Both before the consumer starts: it does not wait for topics that come later.
        await create_topic([namesrv], "sent", queues=4)
        async with (
            foreign_client(tmp_path, "js_producer.mjs", "senders", namesrv) as producer,
            foreign_client(
                tmp_path, "js_push_consumer.mjs", "workers", namesrv, "sent", "A || B"
            ) as consumer,
        ):
            answers = {}
            for number in range(60):
                body, tag = f"m{number}", "ABC"[number % 3]
                answers[body] = await send(producer, body, tags=tag, keys=f"k{number} n")
            # Long enough for the client to compress it.
            answers["größer " * 1000] = await send(producer, "größer " * 1000, tags="A", keys="k")
            answers["no!"] = await send(
                producer, "no!", tags="B", keys="again", properties={"kind": "hard"}
            )
            await send(producer, "later", tags="A", keys="d", delay_level=2)
            wanted = {body for body in answers if body[1:] not in map(str, range(2, 60, 3))}
            wanted.add("later")
            # Ten seconds: the first retry waits that long.
            await consumer.until(
                lambda lines: (
                    wanted <= {line.get("body") for line in lines}
                    and any(line.get("reconsume_times") for line in lines)
                ),
                90,
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

    for body, answer in answers.items():
        assert (int(answer["queue_id"]), answer["offset"]) == place(stored[body])
    assert stored["later"].record.store_timestamp_ms >= (
        stored["later"].record.born_timestamp_ms + 5000
    )
    first_time = [line for line in consumer.messages if not line["reconsume_times"]]
    again = [line for line in consumer.messages if line["reconsume_times"]]
    assert Counter(line["body"] for line in first_time) == Counter(wanted)
    for line in first_time:
        message = stored[line["body"]]
        assert (line["queue_id"], line["queue_offset"]) == place(message)
        assert (line["tags"], line["keys"]) == tag_and_keys(message)
    assert [
        (line["body"], line["tags"], line["keys"], line["reconsume_times"], line["origin"])
        for line in again
    ] == [("no!", "B", "again", 1, "hard")]
    assert list(retried) == ["no!"]
    assert retried["no!"].properties["RETRY_TOPIC"] == "sent"
    # The next consumer of the group begins behind all of it.
    for body in wanted:
        queue_id, offset = place(stored[body])
        assert (committed[queue_id] or 0) > offset


@pytest.mark.hunt
async def test_clients_survive_a_killed_leader(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "sent", queues=4)
        async with (
            foreign_client(tmp_path, "js_producer.mjs", "senders", namesrv, "3000") as producer,
            foreign_client(
                tmp_path, "js_push_consumer.mjs", "workers", namesrv, "sent", "*"
            ) as consumer,
        ):
            reported = await send_over_a_kill(cluster, [producer], "sent")
            await consumer.until(
                lambda lines: reported.acknowledged.keys() <= {line.get("body") for line in lines},
                RESUME_TIMEOUT_S,
            )
        judge_a_kill(reported, await messages_at(namesrv, "sent"), consumer)
