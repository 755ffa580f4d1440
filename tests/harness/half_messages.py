"""Half messages and their ends, as a client's requests."""

from typing import Any, NamedTuple

from dledger.commitlog.message_id import decode_offset_message_id
from dledger.commitlog.record import Record, decode_record
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup

UNDECIDED, COMMIT, ROLLBACK = 0, 8, 12
PROPERTIES = "TRAN_MSG\x01true\x02PGROUP\x01pg\x02TAGS\x01TagA\x02UNIQ_KEY\x01ABC\x02"


class Half(NamedTuple):
    """A half message as its producer knows it."""

    offset: int
    position: int


def send_half(
    broker: Broker, body: bytes = b"body", properties: str = PROPERTIES, **changes: Any
) -> RemotingCommand:
    """Send a half message for queue 2 of topic ``T``."""
    ext = {
        "producerGroup": "pg", "topic": "T", "defaultTopic": "TBW102", "queueId": "2",
        "defaultTopicQueueNums": "4", "sysFlag": "5", "bornTimestamp": "1699999999000",
        "flag": "77", "properties": properties, **changes,
    }  # fmt: skip
    return broker.call(RequestCode.SEND_MESSAGE, ext, body)


def begin(broker: Broker, body: bytes = b"body", properties: str = PROPERTIES) -> Half:
    """Store a half message."""
    response = send_half(broker, body, properties)
    assert response.code == 0, response.remark
    position = decode_offset_message_id(response.ext["msgId"])[-1]
    return Half(int(response.ext["queueOffset"]), position)


def end_ext(half: Half, decision: int, **changes: Any) -> dict[str, str]:
    """Return the header of the end of a transaction."""
    return {
        "producerGroup": "pg", "tranStateTableOffset": str(half.offset),
        "commitLogOffset": str(half.position), "commitOrRollback": str(decision), "msgId": "ABC",
        "fromTransactionCheck": "false", **changes,
    }  # fmt: skip


def end(
    broker: Broker,
    half: Half,
    decision: int,
    *,
    connection: FakeConnection | None = None,
    **changes: Any,
) -> RemotingCommand:
    """End a transaction and return the answer."""
    return broker.call(
        RequestCode.END_TRANSACTION, end_ext(half, decision, **changes), connection=connection
    )


def records(group: FakeGroup, topic: str, queue_id: int) -> list[Record]:
    """Return what stands in a queue."""
    count = group.state.max_offset(topic, queue_id)
    units = group.queues.queue(topic, queue_id).read(0, count)
    return [
        decode_record(bytes(group.log.record_at(position)))
        for position in units["phy_offset"].tolist()
    ]
