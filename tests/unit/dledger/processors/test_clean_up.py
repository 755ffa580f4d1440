"""Clean-ups that tools ask for."""

from __future__ import annotations

import pytest

from dledger.processors.admin import CleanUpProcessor
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
    ],
)
def test_every_member_answers_with_success(broker: Broker, code: RequestCode) -> None:
    assert broker.call(code).code == 0
    broker.group.step_down("elsewhere:1")
    assert broker.call(code).code == 0


def test_the_leader_alone_lets_segments_expire(group: FakeGroup) -> None:
    asked: list[str] = []
    processor = CleanUpProcessor(group, asked.append)
    command = request(RequestCode.DELETE_EXPIRED_COMMITLOG, {"AccessKey": "root"})
    for _ in range(2):
        processor.delete_expired(FakeConnection(), command)  # type: ignore[arg-type]  # a fake with what it uses
        group.step_down("elsewhere:1")
    # No access control: the name in the request proves nothing, so only the host is noted.
    assert asked == [FakeConnection().peer_address[0]]
