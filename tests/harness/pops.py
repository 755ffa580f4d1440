"""Requests of POP consumers to a broker over the fake group, and what they are answered."""

from typing import Any

import pytest

from dledger.commitlog.record import iter_records
from dledger.filters.errors import DamagedMessageError
from dledger.processors.pop_messages import PopMessages
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.pop_requests import (
    PopMessageResponseHeader,
    ReceiptHandle,
    decode_start_offsets,
)
from dledger.services.pop_decision import Found, Receive
from dledger.state.state_record import SubscriptionGroupsChange
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeGroup
from tests.harness.present import present

INVISIBLE_MS = 30_000


def fields(**changes: Any) -> dict[str, str]:
    values = {
        "consumerGroup": "g", "topic": "T", "queueId": -1, "maxMsgNums": 32,
        "invisibleTime": INVISIBLE_MS, "pollTime": 0, "bornTime": 0, "initMode": 0, **changes,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value is not None}


def pop(broker: Broker, **changes: Any) -> RemotingCommand:
    command = request(RequestCode.POP_MESSAGE, fields(**changes))
    handled = broker.handle(command)
    while handled is DEFERRED:
        broker.group.settle()
        answers = [answer for asked, answer in broker.connection.replies if asked is command]
        if answers:
            return answers[0]
        assert broker.group.waiting, "not answered"
    assert isinstance(handled, RemotingCommand), handled
    return handled


def hold(broker: Broker, code: int = RequestCode.POP_MESSAGE, **changes: Any) -> RemotingCommand:
    """Send a request that finds nothing and waits."""
    command = request(code, fields(pollTime=15_000, **changes))
    assert broker.handle(command) is DEFERRED
    broker.group.settle()
    assert answer_of(broker, command) is None
    return command


def answer_of(broker: Broker, command: RemotingCommand) -> RemotingCommand | None:
    found = [answer for asked, answer in broker.connection.replies if asked is command]
    return found[0] if found else None


def answered(broker: Broker, command: RemotingCommand) -> RemotingCommand:
    return present(answer_of(broker, command))


def bodies(response: RemotingCommand) -> list[tuple[bytes, int]]:
    """Return the body of each message, and how often it was handed out before."""
    assert response.code == 0, response
    return [
        (bytes(record.body), record.reconsume_times)
        for record in iter_records(bytes(response.body))
    ]


def handles(response: RemotingCommand) -> list[ReceiptHandle]:
    """Put the handles together as a client does."""
    header = PopMessageResponseHeader.decode(response.ext)
    starts = decode_start_offsets(header.start_offset_info or "")
    return [
        ReceiptHandle(
            starts["0", record.queue_id],
            header.pop_time, header.invisible_time, header.revive_qid, BROKER, record.queue_id,
            record.queue_offset,
        )
        for record in iter_records(bytes(response.body))
    ]  # fmt: skip


def receipt(handle: ReceiptHandle, **changes: Any) -> dict[str, str]:
    values = {
        "consumerGroup": "g", "topic": "T", "queueId": handle.queue_id, "offset": handle.offset,
        "extraInfo": handle.encode(),
        **changes,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def ack(broker: Broker, handle: ReceiptHandle, **changes: Any) -> RemotingCommand:
    return broker.call(RequestCode.ACK_MESSAGE, receipt(handle, **changes))


def change(
    broker: Broker, handle: ReceiptHandle, invisible_ms: int, **more: str
) -> RemotingCommand:
    ext = receipt(handle, invisibleTime=invisible_ms, **more)
    return broker.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)


def changed(handle: ReceiptHandle, response: RemotingCommand) -> ReceiptHandle:
    assert response.code == 0, response
    return ReceiptHandle(
        handle.offset,
        int(response.ext["popTime"]),
        int(response.ext["invisibleTime"]),
        int(response.ext["reviveQid"]),
        BROKER,
        handle.queue_id,
        handle.offset,
    )


def damage(patch: pytest.MonkeyPatch, *queues: tuple[str, int]) -> None:
    """Let messages of some queues be unreadable where they are looked for."""
    find = PopMessages.find

    def found(self: PopMessages, receive: Receive, queue_id: int, *rest: int) -> Found:
        if (receive.topic, queue_id) in queues:
            raise DamagedMessageError("unreadable", 0, 1)
        return find(self, receive, queue_id, *rest)

    patch.setattr(PopMessages, "find", found)


def pass_ms(broker: Broker, ms: int) -> None:
    assert isinstance(broker.clock, ManualClock)
    broker.clock.now_s += ms / 1000


def retries(group: FakeGroup, times: int) -> None:
    config = SubscriptionGroupConfig("g", retry_max_times=times)
    group.store(SubscriptionGroupsChange((config,)))


def place_of(units: Any) -> tuple[int, int]:
    return int(units["phy_offset"][0]), int(units["size"][0])
