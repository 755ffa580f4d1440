"""Pulls as a client asks them, and what is found in their answers."""

from typing import Any

from dledger.commitlog.record import iter_records
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection

SUBSCRIPTION, SUSPEND, COMMIT = 4, 2, 1


def ext(**changes: Any) -> dict[str, str]:
    values = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": "0",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": str(SUBSCRIPTION),
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": "*",
        "subVersion": "0",
        **changes,
    }
    return {key: str(value) for key, value in values.items() if value is not None}


def pull(broker: Broker, code: int = RequestCode.PULL_MESSAGE, **changes: Any) -> RemotingCommand:
    return broker.call(code, ext(**changes))


def command(**changes: Any) -> RemotingCommand:
    return request(RequestCode.PULL_MESSAGE, ext(**changes))


def hold(broker: Broker, connection: FakeConnection | None = None, **changes: Any) -> None:
    command = request(RequestCode.PULL_MESSAGE, ext(sysFlag=SUBSCRIPTION | SUSPEND, **changes))
    assert broker.handle(command, connection) is DEFERRED


def found(response: RemotingCommand) -> list[bytes]:
    return [bytes(record.body) for record in iter_records(bytes(response.body))]


def heartbeat(broker: Broker, *subscriptions: SubscriptionData, **changes: Any) -> None:
    body = HeartbeatData(
        client_id="c1",
        consumer_data_set=[ConsumerData("g", subscription_data_set=list(subscriptions), **changes)],
    )
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode()).code == 0
    broker.group.settle()
