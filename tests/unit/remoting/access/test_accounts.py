"""What an account may do, line by line and by default.

Which addresses a pattern is about.
"""

import pytest

from dledger.remoting.access.accounts import (
    Account,
    Permission,
    Right,
    WhiteAddresses,
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
    right = topic_right("SCHEDULE_TOPIC_XXXX", SUB)
    assert not account(default_topic=PUB | SUB).allows(right)
    assert account(topics={"SCHEDULE_TOPIC_XXXX": SUB}).allows(right)
    assert account(is_admin=True, topics={"T": PUB}).allows(right)


def test_a_retry_topic_is_its_group() -> None:
    assert topic_right("%RETRY%g", PUB) == Right("g", SUB, is_group=True)
    assert group_right("%RETRY%g") == group_right("g") == Right("g", SUB, is_group=True)
    assert topic_right("T", PUB) == Right("T", PUB)


def test_the_secret_is_not_shown() -> None:
    assert "secret-key" not in repr(account())


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1"], ["10.0.0.2", "110.0.0.1", "::1"]),
        ("10.0.0.*", ["10.0.0.0", "10.0.0.255"], ["10.0.1.0"]),
        ("10.0.*.*", ["10.0.7.9"], ["10.1.0.0"]),
        ("10.0.0.10-20", ["10.0.0.10", "10.0.0.20"], ["10.0.0.9", "10.0.0.21"]),
        ("10.0.3-4.*", ["10.0.3.0", "10.0.4.255"], ["10.0.2.255", "10.0.5.0"]),
        ("10.0.0.{1,7}", ["10.0.0.1", "10.0.0.7"], ["10.0.0.2", "10.0.0.17"]),
        ("10.0.0.1,10.0.0.3;10.1.0.*", ["10.0.0.3", "10.1.0.9"], ["10.0.0.2"]),
        ("2001:db8::1", ["2001:db8:0::1"], ["2001:db8::2", "10.0.0.1"]),
        ("*", ["10.0.0.1", "2001:db8::1"], []),
        ("", [], ["10.0.0.1", "127.0.0.1", "0.0.0.0"]),
    ],
)
def test_a_pattern_is_about_these_and_no_others(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    white = WhiteAddresses(pattern)
    assert [host for host in inside if not white.fits(host)] == []
    assert [host for host in outside if white.fits(host)] == []


def test_a_host_that_is_no_address_fits_only_everybody() -> None:
    assert not WhiteAddresses("10.0.0.*").fits("broker.example")
    assert not WhiteAddresses("10.0.0.*").fits("")


@pytest.mark.parametrize(
    "pattern",
    [
        "10.0.0",
        "10.0.0.256",
        "10.0.0.-1",
        "10.0.0.5-3",
        "a.b.c.d",
        "10.0.0.{1,x}",
        "::g",
        "1e1.0.0.1",
    ],
)
def test_addresses_report_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"address|backwards"):
        WhiteAddresses(pattern)


def test_a_list_has_a_limit() -> None:
    with pytest.raises(ValueError, match="1001 address patterns, at most 1000"):
        WhiteAddresses(",".join(["10.0.0.1"] * 1001))


def test_a_choice_of_octets_counts_as_many_patterns() -> None:
    """Each is looked at for every request: one choice must not get round the limit."""
    octets = ",".join(["1"] * 600)
    assert WhiteAddresses(f"10.0.0.{{{octets}}}").fits("10.0.0.1")
    with pytest.raises(ValueError, match="more than 1000 address patterns"):
        WhiteAddresses(f"10.0.0.{{{octets}}},10.0.1.{{{octets}}}")
    with pytest.raises(ValueError, match="1001 address patterns, at most 1000"):
        WhiteAddresses(f"10.0.0.{{{','.join(['1'] * 1001)}}}")


def test_a_long_list_is_cut_in_one_pass() -> None:
    """A request carries it: at a cost of its square a broker would stand still for minutes."""
    assert not WhiteAddresses("," * 4_000_000)
    with pytest.raises(ValueError, match="not an address"):
        WhiteAddresses("{" * 400_000)
