"""Which receipts are renewed, when, and for how long."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from dledger.client.core.route import MessageQueue
from dledger.proxy import renewals as module
from dledger.proxy.renewals import INVISIBLE_S, RENEW_AFTER_S, RENEWED_S_MAX, Renewals, RenewalTable
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader
from dledger.remoting.protocol.receipt_handle import ReceiptHandle
from tests.unit.client.fake_cluster import open_world

QUEUE = MessageQueue("Orders", "broker-a", 2)


def receipt(offset: int) -> ReceiptHandle:
    return ReceiptHandle(0, 1, 60_000, 1_005, "broker-a", 2, offset)


def add(table: RenewalTable, offset: int, client_id: str = "c", now_s: float = 0) -> bool:
    return table.add(client_id, "workers", QUEUE, receipt(offset), now_s)


def due(table: RenewalTable, now_s: float, *ended: str) -> list[int]:
    found = table.due(now_s, lambda client_id: client_id not in ended)
    return [renewal.receipt.offset for _, renewal in found]


def test_receipt_is_due_after_half_of_its_time() -> None:
    table = RenewalTable()
    add(table, 1)
    add(table, 2, now_s=10)
    assert due(table, RENEW_AFTER_S - 1) == []
    assert due(table, RENEW_AFTER_S) == [1]
    assert due(table, RENEW_AFTER_S + 10) == [1, 2]


def test_client_shows_the_receipt_it_got_first() -> None:
    table = RenewalTable()
    add(table, 1)
    shown = receipt(1).encode()
    renewal = table.get("workers", shown)
    assert renewal is not None
    renewal.receipt = ReceiptHandle(1, 9, 60_000, 1_009, "broker-a", 2, 1)
    assert table.get("workers", shown) is renewal
    assert table.get("others", shown) is None
    table.remove("workers", shown)
    table.remove("workers", shown)
    assert table.get("workers", shown) is None


def test_message_of_an_ended_client_is_forgotten() -> None:
    table = RenewalTable()
    add(table, 1, "a")
    add(table, 2, "b")
    assert due(table, RENEW_AFTER_S, "a") == [2]
    assert len(table) == 2, "its newest receipt counts still"
    assert due(table, INVISIBLE_S - 1, "a") == [2]
    assert len(table) == 2
    assert due(table, INVISIBLE_S, "a") == [2]
    assert len(table) == 1


def test_client_that_was_away_goes_on() -> None:
    table = RenewalTable()
    add(table, 1)
    assert due(table, RENEW_AFTER_S, "c") == []
    assert due(table, INVISIBLE_S - 5) == [1]


def test_renewals_of_a_message_have_an_end() -> None:
    table = RenewalTable()
    add(table, 1)
    assert due(table, RENEWED_S_MAX - 1) == [1]
    assert due(table, RENEWED_S_MAX) == []
    assert len(table) == 0


def test_number_of_renewals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWALS_MAX", 2)
    table = RenewalTable()
    assert [add(table, offset) for offset in range(3)] == [True, True, False]


async def test_silent_broker_holds_up_no_renewal_of_another(autojump_clock: MockClock) -> None:
    renewed_s: list[float] = []

    def renew(asked: RemotingCommand) -> RemotingCommand:
        renewed_s.append(trio.current_time())
        fields = ChangeInvisibleTimeResponseHeader(2_000, 60_000, 1_007)
        return response_to(asked, 0, None, dict(fields.encode()))

    def keep_silent(asked: RemotingCommand) -> Handled:
        return DEFERRED

    async with open_world() as world, world.client() as client, trio.open_nursery() as nursery:
        silent = await world.add_group("h", 1, 11_000)
        silent.brokers[0].on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, keep_silent)
        world.groups["g"].brokers[0].on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, renew)
        await client.route("T")
        renewals, began_s = Renewals(client, lambda _: True), trio.current_time()
        for number in range(1_000):
            old = ReceiptHandle(0, 1, 60_000, 1_005, "h", 0, number)
            renewals.table.add("c", "workers", MessageQueue("T", "h", 0), old, began_s)
        old = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0)
        renewals.table.add("c", "workers", MessageQueue("T", "g", 0), old, began_s)
        nursery.start_soon(renewals.run)
        await trio.sleep(3 * INVISIBLE_S)
        nursery.cancel_scope.cancel()
    gaps_s = [
        after - before for before, after in zip([began_s, *renewed_s], renewed_s, strict=False)
    ]
    assert len(gaps_s) >= 5
    assert max(gaps_s) < INVISIBLE_S - 10
