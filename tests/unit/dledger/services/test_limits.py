"""A full disk: sends are refused with a clear code, and taken again when there is space."""

import pytest
import structlog.testing
import trio

from dledger.commitlog.errors import DiskFullError
from dledger.remoting.protocol.codes import RequestCode
from dledger.services.limits import DiskSpace
from dledger.settings.tables import StoreTable
from dledger.testing.doubles import VirtualClock
from dledger.waiting import PERIOD_S, every_second
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup

SEND = {
    "a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
    "i": "UNIQ_KEY\x01K\x02",
}  # fmt: skip


async def test_disk_is_full_from_the_warning_level_on() -> None:
    used = 0.5
    space = DiskSpace(lambda: used, StoreTable())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(every_second, VirtualClock(), space.measure)
        await trio.sleep(0)
        assert not space.is_full
        used = 0.9
        await trio.sleep(1.5 * PERIOD_S)
        assert space.is_full
        used = 0.89
        await trio.sleep(1.5 * PERIOD_S)
        assert not space.is_full
        nursery.cancel_scope.cancel()


def test_error_names_not_stored() -> None:
    space = DiskSpace(lambda: 1.0, StoreTable())
    space.measure()
    error = space.full_error()
    assert isinstance(error, DiskFullError)
    assert (error.outcome, error.retriable) == ("not_stored", True)
    assert "diskSpaceWarningLevelRatio" in str(error)


def test_less_than_a_segment_left_is_one_state_with_one_reason() -> None:
    lacks = True
    space = DiskSpace(lambda: 0.5, StoreTable(), lambda: lacks)
    with structlog.testing.capture_logs() as lines:
        for lacks in (True, True, False, False):
            space.measure()
            assert space.is_full is lacks
            assert ("less space is left on the disk than a segment" in space.reason) is lacks
            assert space.status() == {"disk_full": space.reason}
    assert [line["event"] for line in lines] == ["disk_full", "disk_has_space"]


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE_V2, RequestCode.CONSUMER_SEND_MSG_BACK])
def test_sends_are_refused_with_code_14_while_it_is_full(
    group: FakeGroup, code: RequestCode
) -> None:
    broker = Broker(group)
    broker.make_topic()
    group.put("T", 0, b"x")
    unit = group.queues.queue("T", 0).read(0, 1)[0]
    fields = (
        SEND
        if code == RequestCode.SEND_MESSAGE_V2
        else {"offset": str(int(unit["phy_offset"])), "group": "g", "delayLevel": "0"}
    )
    broker.processors.space.reason = "the disk is full"
    end = group.log.end_position
    refused = broker.call(code, dict(fields), b"hello")
    assert (refused.code, refused.ext["outcome"], refused.ext["retriable"]) == (
        14, "not_stored", "true",
    )  # fmt: skip
    assert group.log.end_position == end
    broker.processors.space.reason = ""
    assert broker.call(code, dict(fields), b"hello").code == 0
