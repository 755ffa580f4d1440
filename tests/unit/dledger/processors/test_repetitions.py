"""A request whose answer was lost comes again; ``docs/reference/repeated-requests.md``."""

import json
import re
from pathlib import Path
from typing import Any

from dledger.processors.access import AccessProcessor
from dledger.processors.handles import Limit, codes_of, handlers_of
from dledger.processors.wiring import PROCESSORS
from dledger.remoting.handling import Limiter
from dledger.remoting.protocol.codes import RequestCode as Code
from tests.harness.broker import Broker

PAGE = Path(__file__).parents[4] / "docs/reference/repeated-requests.md"

TOPIC: dict[str, Any] = {
    "topic": "T", "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4",
    "perm": "4", "topicFilterType": "SINGLE_TAG", "order": "false",
}  # fmt: skip
LOCK = {
    "consumerGroup": "g",
    "clientId": "c",
    "mqSet": [{"topic": "T", "brokerName": "b0", "queueId": 0}],
}
MODE = {"topic": "T", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 2}
USER = {"username": "u", "password": "secret-of-u"}
ACL = {
    "policies": [{"entries": [{"resource": "Topic:T", "actions": ["Pub"], "decision": "Allow"}]}]
}
SUBJECT = {"subject": "User:u"}

REPEATED: tuple[tuple[Code, dict[str, Any], Any], ...] = (
    (Code.UPDATE_AND_CREATE_TOPIC, TOPIC, None),
    (Code.UPDATE_AND_CREATE_TOPIC_LIST, {}, {"topicConfigList": [{"topicName": "L"}]}),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, {"groupName": "g", "retryMaxTimes": 3}),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, {}, {"groupConfigList": [{"groupName": "h"}]}),
    (Code.SET_MESSAGE_REQUEST_MODE, {}, MODE),
    (
        Code.UPDATE_CONSUMER_OFFSET,
        {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "3"},
        None,
    ),
    (Code.LOCK_BATCH_MQ, {}, LOCK),
    (Code.UNLOCK_BATCH_MQ, {}, LOCK),
    (Code.AUTH_CREATE_USER, {"username": "u"}, USER),
    (Code.AUTH_UPDATE_USER, {"username": "u"}, {"userType": "Super"}),
    (Code.AUTH_CREATE_ACL, SUBJECT, ACL),
    (Code.AUTH_DELETE_ACL, {**SUBJECT, "resource": "Topic:T"}, None),
    (Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "10.1.1.1"}, None),
    (Code.AUTH_DELETE_USER, {"username": "u"}, None),
    (Code.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": "old", "secretKey": "of-old-u"}, None),
    (Code.DELETE_ACL_CONFIG, {"accessKey": "old"}, None),
    (Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "cleanOffset": "true"}, None),
    (Code.DELETE_TOPIC_IN_BROKER, {"topic": "T"}, None),
)  # fmt: skip
"""In an order in which each finds what it changes."""


def tables(broker: Broker) -> list[dict[Any, Any]]:
    state = broker.group.state
    rows = [dict(table) for table in state.tables if table.form.name != "queues"]
    return [*rows, {"white": state.white_addresses}]


def test_repeated_changes_succeed_and_change_nothing(broker: Broker) -> None:
    limiters = {limit: Limiter(limit.value, 100) for limit in Limit}
    invoke: Any = None  # this member leads, and passes nothing on
    access = AccessProcessor(broker.group, broker.settings, lambda _: False, invoke)
    broker.processors.handlers |= handlers_of([access], limiters, broker.group)
    for code, ext, asked in REPEATED:
        body = b"" if asked is None else json.dumps(asked).encode()
        before = tables(broker)
        answer = broker.call(code, ext, body)
        assert answer.code == 0, (code, answer.remark)
        after = tables(broker)
        assert after != before, code
        again = broker.call(code, ext, body)
        assert (again.code, again.body) == (0, answer.body), (code, again.remark)
        assert tables(broker) == after, code


def test_page_has_each_request_once() -> None:
    codes = [int(code) for code in codes_of(PROCESSORS)]
    text = PAGE.read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if re.match(r"\| \d", line)]
    numbers = re.findall(r"\d+", " ".join([*rows, text.splitlines()[-1]]))
    assert sorted(map(int, numbers)) == sorted(codes)
