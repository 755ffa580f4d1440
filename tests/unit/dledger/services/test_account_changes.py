"""What an account is after a request, and what no member could read is refused."""

from typing import Any

import pytest
from msgspec.structs import replace

from dledger.remoting.access.accounts import Permission, group_right, topic_right
from dledger.remoting.protocol.access_bodies import (
    AccessConfigHeader,
    AclInfo,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
)
from dledger.services.account_changes import (
    ACCOUNT_BYTES_MAX,
    AccountExistsError,
    NoSuchAccountError,
    account_of,
    checked,
    checked_white_addresses,
    created,
    updated,
    with_access_config,
    with_policies,
    without_policies,
)
from dledger.state.accounts import AccountConfig, PolicyConfig

PUB, SUB = Permission.PUB, Permission.SUB
SECRET = "hunter2-hunter2"
NAME = "order-service"
PLAIN = AccountConfig(NAME, SECRET)


def config(**fields: Any) -> AccessConfigHeader:
    return AccessConfigHeader(NAME, **fields)


def acl(*entries: tuple[str, list[str], str], kind: str | None = None) -> AclInfo:
    infos = [PolicyEntryInfo(resource, actions, [], word) for resource, actions, word in entries]
    return AclInfo(policies=[PolicyInfo(kind, infos)])


def test_an_account_config_makes_and_changes() -> None:
    made = with_access_config(
        None,
        config(
            secret_key=SECRET,
            white_remote_address="10.0.0.*",
            default_topic_perm="SUB|PUB",
            topic_perms="a=b=PUB, orders=PUB|SUB,%RETRY%billing=SUB",
            group_perms="%RETRY%audit=DENY",
        ),
    )
    assert made == AccountConfig(
        NAME,
        SECRET,
        white_address="10.0.0.*",
        default_topic_perm="PUB|SUB",
        topics={"a=b": "PUB", "orders": "PUB|SUB"},
        groups={"billing": "SUB", "audit": "DENY"},
    )
    # What is absent stays, but the flag of administrators; an empty list is one.
    changed = with_access_config(made, config(admin=True, topic_perms=""))
    assert changed == replace(made, admin=True, topics={})
    assert with_access_config(changed, config()) == replace(changed, admin=False)
    other = with_access_config(made, config(secret_key="another-secret", white_remote_address=""))
    assert other == replace(made, secret_key="another-secret", white_address="")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "a new account needs a secretKey"),
        ({"secret_key": "short"}, "at least 7 characters"),
        ({"secret_key": SECRET, "topic_perms": "orders"}, "'orders' is not name=permission"),
        ({"secret_key": SECRET, "group_perms": "g=PUP"}, "'PUP' is not DENY"),
        ({"secret_key": SECRET, "default_topic_perm": "ALL"}, "'ALL' is not DENY"),
        ({"secret_key": SECRET, "white_remote_address": "1.2.3"}, "not an address"),
        ({"secret_key": "s" * ACCOUNT_BYTES_MAX}, "bytes, at most 16384"),
    ],
)
def test_an_account_config_that_cannot_be_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        with_access_config(None, config(**fields))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", " order-service", "order\nservice"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="access key"):
        created(None, name, UserInfo(password=SECRET))


def test_a_user_may_have_a_short_name() -> None:
    assert created(None, "al", UserInfo(password=SECRET)).access_key == "al"


def test_a_user_is_made_once() -> None:
    asked = UserInfo(password=SECRET, user_type="super", user_status="DISABLE")
    made = created(None, NAME, asked)
    assert made == AccountConfig(NAME, SECRET, admin=True, enabled=False)
    granted = replace(made, topics={"orders": "PUB"})
    assert created(granted, NAME, asked) is granted, "asked for again, it stays as it is"
    for other in (
        UserInfo(password="another-secret", user_type="Super", user_status="disable"),
        UserInfo(password=SECRET, user_status="disable"),
        UserInfo(password=SECRET, user_type="Super"),
    ):
        with pytest.raises(AccountExistsError, match="exists already") as caught:
            created(made, NAME, other)
        assert SECRET not in str(caught.value)


def test_a_user_is_updated_by_what_is_there() -> None:
    before = replace(PLAIN, topics={"orders": "PUB"})
    assert updated(before, NAME, UserInfo()) == before
    assert updated(before, NAME, UserInfo(password="another-secret", user_type="Super")) == replace(
        before, secret_key="another-secret", admin=True
    )
    assert updated(before, NAME, UserInfo(user_status="disable")) == replace(before, enabled=False)
    for wrong in (UserInfo(user_type="Root"), UserInfo(user_status="off"), UserInfo(password="x")):
        with pytest.raises(ValueError, match=r"is not|at least 7"):
            updated(before, NAME, wrong)


def test_what_is_not_there_is_not_changed() -> None:
    with pytest.raises(NoSuchAccountError, match="does not exist"):
        updated(None, NAME, UserInfo(password=SECRET))
    with pytest.raises(NoSuchAccountError, match="does not exist"):
        with_policies(None, NAME, acl(("Topic:a", ["Pub"], "Allow")))
    with pytest.raises(NoSuchAccountError, match="does not exist"):
        without_policies(None, NAME, "", "")


def test_an_entry_replaces_one_about_the_same_resource() -> None:
    first = with_policies(
        PLAIN, NAME, acl(("topic:orders", ["pub"], "allow"), ("Group:*", ["All"], "Deny"))
    )
    assert first.policies == (
        PolicyConfig("Custom", "Topic:orders", ("Pub",), (), "Allow"),
        PolicyConfig("Custom", "Group:*", ("All",), (), "Deny"),
    )
    second = with_policies(first, NAME, acl(("Topic:orders", ["Sub", "Pub"], "Deny")))
    assert second.policies[0] == PolicyConfig("Custom", "Topic:orders", ("Sub", "Pub"), (), "Deny")
    beside = with_policies(second, NAME, acl(("Topic:orders", ["Pub"], "Allow"), kind="Default"))
    assert len(beside.policies) == 3
    assert without_policies(beside, NAME, "", "Topic:orders").policies == beside.policies[1:]
    assert without_policies(beside, NAME, "Default", "Topic:orders") == second
    assert without_policies(beside, NAME, "", "Topic:other") == beside
    assert without_policies(beside, NAME, "", "").policies == ()


def test_policies_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="policies are empty"):
        with_policies(PLAIN, NAME, AclInfo())
    with pytest.raises(ValueError, match="for administrators alone"):
        with_policies(PLAIN, NAME, acl(("Cluster:*", ["Pub"], "Allow")))
    with pytest.raises(ValueError, match="actions are empty"):
        with_policies(PLAIN, NAME, acl(("Topic:a", [], "Allow")))
    many = acl(*[(f"Topic:topic-{number}", ["Pub"], "Allow") for number in range(600)])
    with pytest.raises(ValueError, match="bytes, at most 16384"):
        with_policies(PLAIN, NAME, many)


def test_the_account_that_decides_has_all_of_it() -> None:
    row = replace(
        with_policies(PLAIN, NAME, acl(("Topic:pay*", ["All"], "Allow"))),
        white_address="10.0.0.*",
        topics={"orders": "PUB"},
        default_group_perm="SUB",
        enabled=False,
    )
    account = account_of(row)
    assert (account.secret_key, account.is_admin, account.is_enabled) == (SECRET, False, False)
    assert account.white.fits("10.0.0.9")
    assert account.allows(topic_right("payments", SUB))
    assert account.allows(topic_right("orders", PUB))
    assert not account.allows(topic_right("orders", SUB))
    assert account.allows(group_right("any"))
    assert account_of(PLAIN).policies is None


def test_white_addresses_are_checked() -> None:
    assert checked_white_addresses("10.0.0.*,10.1.1.1") == "10.0.0.*,10.1.1.1"
    assert checked_white_addresses("") == ""
    with pytest.raises(ValueError, match="not an address"):
        checked_white_addresses("10.0.0.*,everyone")
    with pytest.raises(ValueError, match="bytes, at most 65536"):
        checked_white_addresses("10.0.0.1" + " " * 70_000)
    with pytest.raises(ValueError, match="bytes, at most 16384"):
        checked(replace(PLAIN, white_address="10.0.0.1" + " " * 17_000))
