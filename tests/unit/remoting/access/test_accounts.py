"""What an account may do, line by line and by default."""

from __future__ import annotations

import pytest

from remoting.access.accounts import (
    Account,
    Permission,
    Right,
    group_right,
    parse_permission,
    topic_right,
)

PUB, SUB, DENY = Permission.PUB, Permission.SUB, Permission.DENY


def account(**fields: object) -> Account:
    return Account("access", "secret-key", **fields)  # type: ignore[arg-type]  # names and values of the test's own


@pytest.mark.parametrize(
    ("text", "permission"),
    [("PUB", PUB), ("SUB", SUB), ("PUB|SUB", PUB | SUB), ("SUB|PUB", PUB | SUB), ("DENY", DENY)],
)
def test_permissions_are_spelled_as_in_rocketmq(text: str, permission: Permission) -> None:
    assert parse_permission(text) == permission
    assert parse_permission(str(permission)) == permission


@pytest.mark.parametrize("text", ["", "pub", "PUB,SUB", "ANY", "PUB|"])
def test_anything_else_is_an_error_and_not_a_silent_deny(text: str) -> None:
    with pytest.raises(ValueError, match="is not DENY, PUB, SUB or PUB"):
        parse_permission(text)


def test_account_without_a_line_or_default_may_nothing() -> None:
    for permission in (PUB, SUB, PUB | SUB):
        assert not account().allows(Right("T", permission))
        assert not account().allows(Right("g", permission, is_group=True))


def test_a_line_counts_before_the_default() -> None:
    it = account(default_topic=PUB | SUB, topics={"T": PUB, "U": DENY})
    assert it.allows(Right("T", PUB))
    assert not it.allows(Right("T", SUB))
    assert not it.allows(Right("U", PUB))
    assert it.allows(Right("V", SUB))


def test_topics_and_groups_of_one_name_are_two_things() -> None:
    it = account(topics={"x": SUB}, default_group=DENY)
    assert it.allows(Right("x", SUB))
    assert not it.allows(Right("x", SUB, is_group=True))


def test_accounts_allow_with_either_of_two_permissions() -> None:
    assert account(topics={"T": SUB}).allows(Right("T", PUB | SUB))
    assert account(topics={"T": PUB}).allows(Right("T", PUB | SUB))
    assert not account(topics={"T": DENY | PUB}).allows(Right("T", PUB | SUB))


def test_administrator_without_lines_may_everything() -> None:
    right = Right("T", PUB)
    assert account(is_admin=True).allows(right)
    assert not account(is_admin=True, topics={"U": PUB}).allows(right)
    assert account(is_admin=True, topics={"U": PUB}, default_topic=PUB).allows(right)


def test_no_default_grants_what_needs_a_line() -> None:
    right = topic_right("SCHEDULE_TOPIC_XXXX", SUB, by_line=True)
    assert not account(default_topic=PUB | SUB).allows(right)
    assert account(topics={"SCHEDULE_TOPIC_XXXX": SUB}).allows(right)
    assert account(is_admin=True, topics={"T": PUB}).allows(right)


def test_a_retry_topic_is_its_group() -> None:
    assert topic_right("%RETRY%g", PUB) == Right("g", SUB, is_group=True)
    assert group_right("%RETRY%g") == group_right("g") == Right("g", SUB, is_group=True)
    assert topic_right("T", PUB) == Right("T", PUB)


def test_the_secret_is_not_shown() -> None:
    assert "secret-key" not in repr(account())
