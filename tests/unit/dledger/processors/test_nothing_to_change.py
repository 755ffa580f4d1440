"""Changes that are there already: a deposed leader does not confirm them."""

from __future__ import annotations

import pytest

from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from tests.harness.broker import Broker, topic_fields

CODE = RequestCode
TOPIC = topic_fields(4, topic="orders")
GROUP = b'{"groupName":"readers","consumeEnable":true,"retryQueueNums":2}'


@pytest.mark.parametrize(
    ("code", "ext", "body", "is_first_made"),
    [
        (CODE.UPDATE_AND_CREATE_TOPIC, TOPIC, b"", True),
        (CODE.DELETE_TOPIC_IN_BROKER, {"topic": "absent"}, b"", False),
        (CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, GROUP, True),
        (CODE.DELETE_SUBSCRIPTIONGROUP, {"groupName": "absent"}, b"", False),
        (
            CODE.CLONE_GROUP_OFFSET,
            {"srcGroup": "absent", "destGroup": "readers", "topic": "orders", "offline": "false"},
            b"",
            False,
        ),
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
