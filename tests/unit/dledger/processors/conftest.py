"""All processors of a broker over the fake group."""

import pytest

from dledger.testing.doubles import VirtualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup


@pytest.fixture
async def virtual(group: FakeGroup) -> Broker:
    """A broker on the virtual time of its test."""
    group.clock = VirtualClock()
    return Broker(group)


@pytest.fixture
def popping(broker: Broker) -> Broker:
    broker.make_topic("T", queues=2)
    broker.group.put("T", 0, b"a", b"b", b"c")
    return broker


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    broker.group.put("T", 0, *(b"m%d" % i for i in range(10)))
    return broker
