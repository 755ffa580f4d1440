"""Quotas in the tables: put and deleted as a whole, in snapshots that older versions refuse."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import ForeignStoreError, InvariantBroken
from dledger.jepsen_like.simulation.reference_replica import digests_by_field
from dledger.state import snapshot as snapshots
from dledger.state.accounts import AccessChange, AccountConfig
from dledger.state.image import Image, cut_everything, take_cut
from dledger.state.quotas import QuotaConfig, QuotasChange
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import decode_change, encode_change, state_batch
from dledger.state.topics import QUOTAS_QUEUE, builtin_groups, builtin_topics
from tests.harness.fake_group import BROKER, CLUSTER, FakeGroup

ORDERS = QuotaConfig("account", "orders", sent_messages_per_s=100, connections=5)
DEFAULT = QuotaConfig("client", "", received_bytes_per_s=1 << 20)

BUILTIN: dict[str, Any] = {
    "builtin_topics": builtin_topics(CLUSTER, BROKER),
    "builtin_groups": builtin_groups(),
}


def change(group: FakeGroup, *changes: QuotasChange | AccessChange) -> None:
    group.propose(state_batch(*changes), lambda _: None)
    group.settle()


def test_a_quota_record_is_read_as_it_was_written() -> None:
    asked = QuotasChange((ORDERS, DEFAULT), ("client:10.0.0.1",), "operator at 10.0.0.1")
    queue_id, body = encode_change(asked)
    assert (queue_id, decode_change(queue_id, body)) == (QUOTAS_QUEUE, asked)
    assert cbor2.loads(body) == {
        "v": 1,
        "put": [
            {"kind": "account", "name": "orders", "sent_messages_per_s": 100, "connections": 5},
            {"kind": "client", "name": "", "received_bytes_per_s": 1 << 20},
        ],
        "delete": ["client:10.0.0.1"],
        "asked_by": "operator at 10.0.0.1",
    }


def test_a_quota_record_with_a_new_field_stops_the_node() -> None:
    """Without it this member would let pass what another refuses."""
    body = cbor2.loads(encode_change(QuotasChange((ORDERS,)))[1])
    body["put"][0]["requests_per_s"] = 5
    with pytest.raises(InvariantBroken, match="unreadable state record on queue 15"):
        decode_change(QUOTAS_QUEUE, cbor2.dumps(body))


def test_quotas_are_put_and_deleted_as_a_whole(group: FakeGroup) -> None:
    change(group, QuotasChange((ORDERS, DEFAULT)))
    less = QuotaConfig("account", "orders", connections=3)
    change(group, QuotasChange((less,), ("client:", "client:never-there")))
    assert group.state.quotas == {"account:orders": less}


def test_the_digest_sees_a_changed_quota(group: FakeGroup) -> None:
    change(group, QuotasChange((ORDERS,)))
    before = digests_by_field(group.state)
    group.state.quotas["account:orders"] = QuotaConfig("account", "orders")
    after = digests_by_field(group.state)
    assert {name for name in before if before[name] != after[name]} == {"quotas"}


def test_a_snapshot_carries_quotas(group: FakeGroup) -> None:
    change(
        group, QuotasChange((ORDERS, DEFAULT)), AccessChange((AccountConfig("orders", "s" * 8),))
    )
    data = snapshot(group.state)
    loaded = load(data, **BUILTIN)
    assert loaded == group.state
    assert loaded.quotas == {"account:orders": ORDERS, "client:": DEFAULT}
    assert snapshot(loaded) == data


@pytest.mark.parametrize(("has_accounts", "without"), [(False, 1), (True, 2)])
def test_only_a_snapshot_with_quotas_has_the_third_format(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, has_accounts: bool, without: int
) -> None:
    if has_accounts:
        change(group, AccessChange((AccountConfig("orders", "s" * 8),)))
    assert int.from_bytes(snapshot(group.state)[8:12], "big") == without
    change(group, QuotasChange((ORDERS,)))
    data = snapshot(group.state)
    assert int.from_bytes(data[8:12], "big") == 3
    monkeypatch.setattr(snapshots, "SNAPSHOT_FORMAT", 2)
    with pytest.raises(ForeignStoreError, match="format 3; this version knows up to 2"):
        load(data, **BUILTIN)
    monkeypatch.undo()
    change(group, QuotasChange(delete=("account:orders",)))
    assert int.from_bytes(snapshot(group.state)[8:12], "big") == without


def test_quotas_follow_by_cuts(group: FakeGroup) -> None:
    image = Image()
    image.take(cut_everything(group.state))
    for one in (
        QuotasChange((ORDERS, DEFAULT)),
        QuotasChange((QuotaConfig("account", "orders"),), ("client:",)),
        QuotasChange(delete=("account:orders",)),
    ):
        change(group, one)
        image.take(take_cut(group.state))
        assert image.snapshot() == snapshot(group.state, hints=True)
        whole = Image()
        whole.take(cut_everything(group.state))
        assert whole.snapshot() == image.snapshot()
