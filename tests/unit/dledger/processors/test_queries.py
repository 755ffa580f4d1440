"""The small ones: view by offset, capabilities, raft status, runtime info, code table."""

from __future__ import annotations

import json

import pytest

from commitlog.entry import ENTRY_HEADER_BYTES, Run
from commitlog.record import decode_record, encode_record
from dledger.testing.clocks import EPOCH_MS
from remoting.processor import ProcessorTable
from remoting.protocol.bodies import KVTable
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker
from tests.harness.fake_group import batch_of


def test_a_message_is_seen_by_its_position(broker: Broker) -> None:
    broker.group.put("T", 0, b"a", b"b")
    position = int(broker.group.queues.queue("T", 0).read(1, 1)["phy_offset"][0])
    response = broker.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(position)})
    assert response.code == 0
    assert bytes(decode_record(response.body).body) == b"b"


@pytest.mark.parametrize("offset", [-1, 0, 5, 10**9])
def test_a_position_without_a_record_is_told(broker: Broker, offset: int) -> None:
    broker.group.put("T", 0, b"a")
    response = broker.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
    assert response.code == 1
    assert response.remark == f"can not find message by the offset, {offset}"


def test_a_message_that_is_not_applied_is_not_seen(broker: Broker) -> None:
    record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"")
    broker.group.propose(batch_of([record], Run("T", 0, 1)), lambda _: None)
    broker.group.append()
    position = ENTRY_HEADER_BYTES + 4
    view = {"offset": str(position)}
    assert bytes(broker.group.log.record_at(position)), "it is in the log"
    assert broker.call(RequestCode.VIEW_MESSAGE_BY_ID, view).code == 1
    broker.group.apply()
    assert broker.call(RequestCode.VIEW_MESSAGE_BY_ID, view).code == 0


def test_our_sdk_learns_what_this_broker_can(broker: Broker) -> None:
    response = broker.call(RequestCode.CAPABILITIES)
    assert response.code == 0
    assert response.ext["cbor"] == "true"
    assert response.ext["records"] == "true"
    assert response.ext["version"]


def test_raft_status_is_json(broker: Broker) -> None:
    response = broker.call(RequestCode.RAFT_STATUS)
    status = json.loads(bytes(response.body))
    assert status["brokerName"] == "broker-a"
    assert status["role"] == "leader"
    assert status["term"] == 1


def test_runtime_info_has_what_mqadmin_reads(broker: Broker) -> None:
    broker.group.put("T", 0, b"a")
    broker.clock.now_s = 10.0  # type: ignore[union-attr]  # it is the manual clock
    response = broker.call(RequestCode.GET_BROKER_RUNTIME_INFO)
    table = KVTable.decode(response.body).table
    for key in ("putTps", "getTransferedTps", "getTransferredTps", "getTotalTps"):
        assert len([float(number) for number in table[key].split()]) == 3
    assert float(table["putTps"].split()[0]) == pytest.approx(0.1)
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
    assert int(table["earliestMessageTimeStamp"]) == EPOCH_MS
    assert int(table["commitLogMaxOffset"]) == broker.group.state.applied_end_position
    assert table["scheduleMessageOffset_3"] == "0,0"
    assert table["brokerVersionDesc"] == "V4_9_7"


def test_an_empty_broker_has_no_earliest_message(broker: Broker) -> None:
    response = broker.call(RequestCode.GET_BROKER_RUNTIME_INFO)
    assert KVTable.decode(response.body).table["earliestMessageTimeStamp"] == "-1"


def test_every_code_has_one_handler(broker: Broker) -> None:
    table = ProcessorTable()
    broker.processors.register(table)
    needed = {10, 310, 320, 51101, 11, 361, 51103, 14, 15, 29, 30, 31, 32, 33, 34, 35, 36, 38, 46}
    needed |= {17, 37, 215, 21, 351, 202, 28, 51100, 51102, 51110}
    needed |= {41, 42, 200, 201, 207, 225, 352, 203, 204, 300, 343, 345, 307, 309, 223}
    assert needed <= table.codes()
