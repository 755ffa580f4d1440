"""All processors of a broker over the fake group."""

from __future__ import annotations

import pytest

from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup


@pytest.fixture
def broker(group: FakeGroup, clock: ManualClock) -> Broker:
    return Broker(group, clock)


@pytest.fixture
def popping(broker: Broker) -> Broker:
    broker.make_topic("T", queues=2)
    broker.group.put("T", 0, b"a", b"b", b"c")
    return broker
