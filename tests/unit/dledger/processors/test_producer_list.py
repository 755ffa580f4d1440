"""Every producer that is connected."""

from __future__ import annotations

import json

from dledger.testing.clocks import ManualClock
from remoting.protocol.bodies import HeartbeatData, ProducerData
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection


def test_producers_are_listed_by_group_with_their_last_sign_of_life(
    broker: Broker, clock: ManualClock
) -> None:
    for number, group in enumerate(("p", "q")):
        data = HeartbeatData(
            client_id=f"c{number}", producer_data_set=[ProducerData(group_name=group)]
        )
        connection = FakeConnection(peer_address=("10.0.0.7", 4000 + number))
        broker.call(RequestCode.HEART_BEAT, {}, data.encode(), connection=connection)
    at_ms = clock.wall_ms()
    clock.now_s += 5
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_PRODUCER_INFO).body))
    assert body == {
        "data": {
            group: [
                {
                    "clientId": f"c{number}",
                    "remoteIP": f"10.0.0.7:{4000 + number}",
                    "language": "PYTHON",
                    "version": 407,
                    "lastUpdateTimestamp": at_ms,
                }
            ]
            for number, group in enumerate(("p", "q"))
        }
    }
