"""Messages that mean harm, written byte by byte, on three brokers: none ends, all are delivered."""

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.commitlog.properties import MAX_CLIENT_PROPERTIES_BYTES
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from tests.harness.cluster_questions import create_topic

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("three-brokers")]

HUNG_S = 120.0
"""It takes a few seconds; after this something waits without end."""

WAYS = ("", "DELAY\x011\x02", "TIMER_DELAY_SEC\x011\x02", "TIMER_DELAY_MS\x01900\x02")
HOSTILE = (
    "TIMER_ROLL_TIMES\x01abc\x02TIMER_OUT_MS\x01never\x02",
    "REAL_TOPIC\x01RMQ_SYS_DLEDGER_STATE\x02REAL_QID\x01-1\x02",
    "REAL_TOPIC\x01../../x\x02REAL_QID\x01x\x02",
    "A\x01b\x01c\x02",
    "no pairs\x02\x02\x01\x02",
    "RETRY_TOPIC\x01" + "x" * 20_000 + "\x02",
    "TRANSACTION_CHECK_TIMES\x01" + "9" * 5_000 + "\x02SET_ASIDE_BY\x01me\x02",
    "F\x01" + "x" * (MAX_CLIENT_PROPERTIES_BYTES - 100) + "\x02",
)
TOO_LONG = "F\x01" + "x" * (MAX_CLIENT_PROPERTIES_BYTES + 1) + "\x02"


async def ask(address: str, *commands: RemotingCommand) -> list[RemotingCommand]:
    """Send *commands* over one connection, as they are; return the answers in their order."""
    host, port = address.rsplit(":", 1)
    decoder, answers = FrameDecoder(), list[RemotingCommand]()
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        for number, command in enumerate(commands):
            command.opaque = number
            await stream.send_all(encode_command(command))
        while len(answers) < len(commands):
            data = await stream.receive_some(1 << 16)
            assert data, "the broker closed the connection"
            answers += decoder.feed(data)
    return sorted(answers, key=lambda answer: answer.opaque)


def message(body: bytes, properties: str, times: int = 0) -> RemotingCommand:
    ext = {
        "producerGroup": "p", "topic": "hostile", "defaultTopic": "TBW102", "queueId": "0",
        "defaultTopicQueueNums": "4", "sysFlag": "252", "bornTimestamp": "-1", "flag": "-1",
        "properties": properties, "reconsumeTimes": str(times),
    }  # fmt: skip
    return request(RequestCode.SEND_MESSAGE, ext, body)


async def test_messages_that_mean_harm_end_nothing_and_are_delivered(
    three_brokers: LocalCluster,
) -> None:
    cluster = three_brokers
    leader = cluster.brokers[await cluster.wait_leader()]
    pids = {node.name: node.pid for node in cluster.nodes}
    await create_topic([cluster.namesrv_address], "hostile", queues=1)
    sent: list[bytes] = []
    commands: list[RemotingCommand] = []
    for way in WAYS:
        for hostile in HOSTILE:
            for properties in (hostile + way, way + hostile):
                sent.append(b"%d" % len(sent))
                commands.append(message(sent[-1], properties, times=-len(sent)))
    with trio.fail_after(HUNG_S):
        answers = await ask(leader.address, *commands)
        assert {answer.code for answer in answers} == {0}
        (refused,) = await ask(leader.address, message(b"too long", TOO_LONG))
        assert (refused.code, refused.ext["outcome"]) == (13, "not_stored")
        found: list[bytes] = []
        async with (
            connect([cluster.namesrv_address]) as client,
            PullConsumer(client, "c") as consumer,
        ):
            (queue,) = await consumer.fetch_message_queues("hostile")
            offset = positions = 0
            while len(found) < len(sent):
                result = await consumer.pull(queue, offset, timeout_s=1)
                offset = result.next_begin_offset
                for each in result.messages:
                    found.append(bytes(each.body))
                    back = {
                        "offset": str(each.phy_offset), "group": "g",
                        "delayLevel": str(1 if positions % 2 else -1),
                    }  # fmt: skip
                    positions += 1
                    (answer,) = await ask(
                        leader.address, request(RequestCode.CONSUMER_SEND_MSG_BACK, back)
                    )
                    assert answer.code == 0, answer.remark
            retried = [
                bytes(each.body)
                async for _, result in consumer.drain(await consumer.fetch_message_queues("%DLQ%g"))
                for each in result.messages
            ]
    assert sorted(found, key=int) == sent
    assert len(retried) == len(sent) // 2
    assert {node.name: node.pid for node in cluster.nodes if node.running} == pids
