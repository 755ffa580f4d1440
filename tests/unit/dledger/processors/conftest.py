"""All processors of a broker over the fake group."""

from __future__ import annotations

import pytest

from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup


@pytest.fixture
def broker(group: FakeGroup, clock: ManualClock) -> Broker:
    return Broker(group, clock)
