"""Fixtures: a group of one node without consensus, on a temporary folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup
from tests.harness.watched_broker import STATUS, Watched


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def group(tmp_path: Path, clock: ManualClock) -> Iterator[FakeGroup]:
    fake = FakeGroup(tmp_path, clock)
    yield fake
    fake.close()


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    return Broker(group)


@pytest.fixture
def watched(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(broker.group, "status", lambda: STATUS)
    return Watched(broker)
