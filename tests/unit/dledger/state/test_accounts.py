"""Accounts in the tables: put and deleted as a whole, carried by snapshots."""

from msgspec.structs import replace

from dledger.state.accounts import AccessChange, AccountConfig, PolicyConfig
from dledger.state.tables import StateTables
from tests.harness.fake_group import FakeGroup

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


def test_no_repr_shows_a_secret() -> None:
    assert SECRET not in repr(AccessChange((ACCOUNT,)))
    tables = StateTables()
    tables.accounts["order-service"] = ACCOUNT
    assert SECRET not in repr(tables)


def test_accounts_are_put_and_deleted_as_a_whole(group: FakeGroup) -> None:
    other = replace(ACCOUNT, access_key="other-service")
    group.store(AccessChange((ACCOUNT, other), white_addresses="10.9.9.9"))
    group.store(AccessChange((replace(ACCOUNT, topics={}),), ("other-service", "never-there")))
    state = group.state
    assert state.accounts == {"order-service": replace(ACCOUNT, topics={})}
    assert (state.white_addresses, state.access_counter) == ("10.9.9.9", 2)
    assert state.access_changed_ms == state.last_store_time_ms > 0
    group.store(AccessChange(white_addresses=""))
    assert (state.white_addresses, len(state.accounts)) == ("", 1)
