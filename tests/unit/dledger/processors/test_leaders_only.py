"""What leaders alone do: a member that leads no more names the leader, and confirms nothing."""

from typing import Any

import pytest

from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import LockBatchRequestBody, MessageQueue
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import RecallHandle
from tests.harness.broker import Broker, topic_fields
from tests.harness.fake_group import BROKER
from tests.harness.pops import fields

CODE = RequestCode
TOPIC = topic_fields(4, topic="orders")
GROUP = b'{"groupName":"readers","consumeEnable":true,"retryQueueNums":2}'
CLONE = {"srcGroup": "absent", "destGroup": "readers", "topic": "orders", "offline": "false"}
QUEUES = LockBatchRequestBody("g", "a", mq_set=[MessageQueue("T", BROKER, 0)]).encode()
HALF = {
    "producerGroup": "p",
    "tranStateTableOffset": "0",
    "commitLogOffset": "0",
    "commitOrRollback": "8",
    "msgId": "K",
}


@pytest.mark.parametrize(
    ("code", "ext", "body"),
    [
        (CODE.UPDATE_AND_CREATE_TOPIC, TOPIC, b""),
        (CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T"}, b""),
        (CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, GROUP),
        (CODE.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}, b""),
        (CODE.CLONE_GROUP_OFFSET, CLONE, b""),
        (CODE.LOCK_BATCH_MQ, {}, QUEUES),
        (CODE.UNLOCK_BATCH_MQ, {}, QUEUES),
        (CODE.POP_MESSAGE, fields(), b""),
        (
            CODE.RECALL_MESSAGE,
            {"topic": "T", "recallHandle": RecallHandle("T", BROKER, 5, "K").encode()},
            b"",
        ),
        (CODE.END_TRANSACTION, HALF, b""),
        (CODE.CONSUMER_SEND_MSG_BACK, {"offset": "0", "group": "g", "delayLevel": "0"}, b""),
        (CODE.SEND_RECORDS, {"group": "p", "runs": [["T", 0, 1]]}, bytes(99)),
        (CODE.CONSUME_STEP, {"consumer_group": "g", "runs": [], "commits": [["T", 0, -1, 3]]}, b""),
        (CODE.OPEN_PRODUCER, {"producerId": "30" * 16}, b""),
    ],
)
def test_a_member_that_leads_no_more_names_the_leader(
    broker: Broker, code: int, ext: dict[str, Any], body: bytes
) -> None:
    broker.make_topic()
    broker.group.step_down("elsewhere:1")
    refused = broker.call(code, ext, body)
    assert (refused.code, refused.ext["leaderAddr"]) == (14, "elsewhere:1")
    assert refused.ext["outcome"] == "not_stored"
    assert broker.group.waiting == 0


@pytest.mark.parametrize(
    ("code", "ext", "body", "is_first_made"),
    [
        (CODE.UPDATE_AND_CREATE_TOPIC, TOPIC, b"", True),
        (CODE.DELETE_TOPIC_IN_BROKER, {"topic": "absent"}, b"", False),
        (CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, GROUP, True),
        (CODE.DELETE_SUBSCRIPTIONGROUP, {"groupName": "absent"}, b"", False),
        (CODE.CLONE_GROUP_OFFSET, CLONE, b"", False),
    ],
)
def test_change_that_is_there_is_confirmed_by_leaders_only(
    broker: Broker, code: int, ext: dict[str, str], body: bytes, is_first_made: bool
) -> None:
    if is_first_made:
        assert broker.call(code, ext, body).code == 0
    entries = broker.group.log.last_index
    broker.group.barriers_pass = False
    assert broker.handle(request(code, ext, body)) is DEFERRED
    broker.group.pass_barriers()
    assert broker.connection.replies.pop()[1].code == 0
    assert broker.group.log.last_index == entries
    assert broker.handle(request(code, ext, body)) is DEFERRED
    broker.group.step_down("elsewhere:1")
    refused = broker.connection.replies.pop()[1]
    assert (refused.code, refused.ext["leaderAddr"]) == (14, "elsewhere:1")
