"""Accounts in the tables: put and deleted as a whole, carried by snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import CorruptStoreError, InvariantBroken
from dledger.jepsen_like.simulation.reference_replica import digests_by_field
from dledger.state.accounts import AccessChange, AccountConfig, PolicyConfig
from dledger.state.image import Image, cut_everything, snapshot, take_cut
from dledger.state.snapshot import load
from dledger.state.state_record import TopicsChange, decode_change, encode_change, state_batch
from dledger.state.tables import StateTables
from dledger.state.topics import ACCESS_QUEUE, builtin_groups, builtin_topics
from tests.harness.fake_group import BROKER, CLUSTER, FakeGroup

SECRET = "hunter2-hunter2"
POLICY = PolicyConfig("Custom", "Topic:orders", ("Pub", "Sub"), ("10.0.0.0/8",), "Allow")
ACCOUNT = AccountConfig(
    "order-service",
    SECRET,
    white_address="10.0.0.*",
    topics={"orders": "PUB|SUB"},
    groups={"billing": "SUB"},
    policies=(POLICY,),
)

BUILTIN: dict[str, Any] = {
    "builtin_topics": builtin_topics(CLUSTER, BROKER),
    "builtin_groups": builtin_groups(),
}


def change(group: FakeGroup, *changes: AccessChange | TopicsChange) -> None:
    group.propose(state_batch(*changes), lambda _: None)
    group.settle()


def test_an_access_record_is_read_as_it_was_written() -> None:
    asked = AccessChange((ACCOUNT,), ("gone-account",), "10.9.9.9", "operator at 10.0.0.1")
    queue_id, body = encode_change(asked)
    assert (queue_id, decode_change(queue_id, body)) == (ACCESS_QUEUE, asked)
    assert cbor2.loads(body) == {
        "v": 1,
        "put": [
            {
                "access_key": "order-service",
                "secret_key": SECRET,
                "admin": False,
                "enabled": True,
                "white_address": "10.0.0.*",
                "default_topic_perm": "DENY",
                "default_group_perm": "DENY",
                "topics": {"orders": "PUB|SUB"},
                "groups": {"billing": "SUB"},
                "policies": [["Custom", "Topic:orders", ["Pub", "Sub"], ["10.0.0.0/8"], "Allow"]],
            }
        ],
        "delete": ["gone-account"],
        "white_addresses": "10.9.9.9",
        "asked_by": "operator at 10.0.0.1",
    }


def test_an_access_record_with_a_new_field_stops_the_node() -> None:
    """Without it this member would grant what another refuses."""
    body = cbor2.loads(encode_change(AccessChange((ACCOUNT,)))[1])
    body["put"][0]["language"] = 5
    with pytest.raises(InvariantBroken, match="unreadable state record on queue 14"):
        decode_change(ACCESS_QUEUE, cbor2.dumps(body))


def test_no_repr_shows_a_secret() -> None:
    assert SECRET not in repr(AccessChange((ACCOUNT,)))
    tables = StateTables(accounts={"order-service": ACCOUNT})
    assert SECRET not in repr(tables)


def test_accounts_are_put_and_deleted_as_a_whole(group: FakeGroup) -> None:
    other = replace(ACCOUNT, access_key="other-service")
    change(group, AccessChange((ACCOUNT, other), white_addresses="10.9.9.9"))
    change(group, AccessChange((replace(ACCOUNT, topics={}),), ("other-service", "never-there")))
    state = group.state
    assert state.accounts == {"order-service": replace(ACCOUNT, topics={})}
    assert (state.white_addresses, state.access_counter) == ("10.9.9.9", 2)
    assert state.access_changed_ms == state.last_store_time_ms > 0
    change(group, AccessChange(white_addresses=""))
    assert (state.white_addresses, len(state.accounts)) == ("", 1)


def test_the_digest_sees_a_changed_secret(group: FakeGroup) -> None:
    change(group, AccessChange((ACCOUNT,)))
    before = digests_by_field(group.state)
    group.state.accounts["order-service"] = replace(ACCOUNT, secret_key="other-secret")
    after = digests_by_field(group.state)
    assert {name for name in before if before[name] != after[name]} == {"accounts"}


def test_a_snapshot_carries_accounts(group: FakeGroup) -> None:
    change(group, AccessChange((ACCOUNT,), white_addresses="10.9.9.9"))
    data = snapshot(group.state)
    loaded = load(data, **BUILTIN)
    assert loaded == group.state
    assert (loaded.accounts, loaded.white_addresses) == ({"order-service": ACCOUNT}, "10.9.9.9")
    assert (loaded.access_counter, snapshot(loaded)) == (1, data)


def test_accounts_follow_by_cuts(group: FakeGroup) -> None:
    image = Image()
    image.take(cut_everything(group.state))
    assert image.snapshot(hints=False) == snapshot(group.state)
    change(group, AccessChange((ACCOUNT, replace(ACCOUNT, access_key="other-service"))))
    image.take(take_cut(group.state))
    assert image.snapshot(hints=False) == snapshot(group.state)
    change(group, AccessChange((replace(ACCOUNT, enabled=False),), ("other-service",), "10.*.*.*"))
    image.take(take_cut(group.state))
    assert image.snapshot(hints=False) == snapshot(group.state)
    whole = Image()
    whole.take(cut_everything(group.state))
    assert whole.snapshot() == image.snapshot()


def test_a_damaged_snapshot_with_accounts_is_noticed(group: FakeGroup) -> None:
    change(group, AccessChange((ACCOUNT,)))
    data = bytearray(snapshot(group.state))
    data[data.index(SECRET.encode())] ^= 1
    with pytest.raises(CorruptStoreError, match="checksum"):
        load(data, **BUILTIN)
