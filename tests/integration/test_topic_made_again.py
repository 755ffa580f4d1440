"""A topic is deleted, made again and sent to without a wait: what is acknowledged is there.

Requests are put together from the layout of RocketMQ's frames, on one connection to the leader of
three real brokers.
"""

import random

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.commitlog.record import decode_record
from tests.harness.raw_pull import Request, ask_together, pull_all

CREATE, DELETE, SEND = 17, 215, 10
SUCCESS, TOPIC_NOT_EXIST = 0, 17
ROUNDS = 40

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("three-brokers")]


def create(topic: str, queues: int) -> Request:
    count = str(queues)
    fields = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": count, "writeQueueNums": count,
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    return CREATE, fields, b""


def send(topic: str, body: bytes) -> Request:
    fields = {
        "producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "queueId": "0",
        "defaultTopicQueueNums": "4", "sysFlag": "0", "bornTimestamp": "1", "flag": "0",
        "properties": "", "reconsumeTimes": "0", "unitMode": "false", "batch": "false",
    }  # fmt: skip
    return SEND, fields, body


def drawn(rng: random.Random, topic: str) -> list[Request]:
    """Return requests of one round."""
    requests = [create(topic, 2)]
    for step in range(rng.randint(2, 6)):
        if rng.random() < 0.5:
            requests.append((DELETE, {"topic": topic}, b""))
        if rng.random() < 0.8:
            requests.append(create(topic, rng.choice([1, 2, 4])))
        requests += [send(topic, b"%d-%d" % (step, number)) for number in range(rng.randint(0, 3))]
    return requests


def test_topic_made_again_keeps_what_is_acknowledged(three_brokers: LocalCluster) -> None:
    rng = random.Random(7)
    cluster = three_brokers
    leader = cluster.brokers[trio.run(cluster.wait_leader)].address
    kept = 0
    for number in range(ROUNDS):
        topic = f"made-again-{number}"
        requests = drawn(rng, topic)
        acknowledged: list[bytes] = []
        answers = ask_together(leader, requests)
        for (code, _, body), (header, _) in zip(requests, answers, strict=True):
            if code == DELETE:
                acknowledged.clear()
            elif code == SEND and header["code"] == SUCCESS:
                acknowledged.append(body)
            assert header["code"] == SUCCESS or (code, header["code"]) == (
                SEND, TOPIC_NOT_EXIST,
            ), header  # fmt: skip
        records = pull_all(leader, topic, 0) if acknowledged else ()
        assert [bytes(decode_record(each).body) for each in records] == acknowledged
        kept += len(acknowledged)
    assert kept > 10
    assert all(node.running for node in cluster.nodes)
