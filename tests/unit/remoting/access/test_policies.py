"""Policies: the entry that fits best decides, as an oracle of RocketMQ's rules finds it."""

import ipaddress
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.remoting.access.accounts import Account, Permission, Right, group_right, topic_right
from dledger.remoting.access.policies import Policies, PolicyEntry, parse_entry, resource_text
from tests.harness.extent import examples

PUB, SUB = Permission.PUB, Permission.SUB


def entry(
    resource: str, actions: str = "All", decision: str = "Allow", *sources: str, kind: str = ""
) -> PolicyEntry:
    return parse_entry(kind, resource, actions.split(","), sources, decision)


def decided(right: Right, *entries: PolicyEntry, host: str = "10.0.0.1") -> bool | None:
    return Policies(entries).decide(right, host)


ORDERS = topic_right("orders", PUB)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), None),
        ((entry("Topic:orders", "Pub"),), True),
        ((entry("Topic:orders", "Sub"),), None),
        ((entry("Group:orders", "Pub"),), None),
        ((entry("*", "Pub", "Deny"),), False),
        # A whole name before a begin, a longer begin before a shorter one.
        ((entry("Topic:orders"), entry("Topic:ord*", "All", "Deny")), True),
        ((entry("Topic:ord*"), entry("Topic:o*", "All", "Deny")), True),
        ((entry("Topic:*", "All", "Deny"), entry("Topic:o*")), True),
        # About one kind before about everything.
        ((entry("*", "All", "Deny"), entry("Topic:*")), True),
        # Custom before default, whatever fits better.
        ((entry("Topic:orders", kind="Default"), entry("*", "All", "Deny")), False),
        ((entry("Topic:orders", kind="Default"),), True),
        # Deny before Allow where both fit as well.
        ((entry("Topic:orders", "Pub"), entry("Topic:orders", "All", "Deny")), False),
        # Addresses.
        ((entry("Topic:orders", "All", "Allow", "10.0.0.0/24"),), True),
        ((entry("Topic:orders", "All", "Allow", "10.0.1.0/24", "::1"),), None),
        ((entry("Topic:orders", "All", "Deny", "10.0.0.1"), entry("Topic:*")), False),
    ],
)
def test_the_entry_that_fits_best_decides(
    entries: tuple[PolicyEntry, ...], expected: bool | None
) -> None:
    assert decided(ORDERS, *entries) is expected
    assert decided(ORDERS, *reversed(entries)) is expected


def test_a_mapped_address_is_its_ipv4_address() -> None:
    only = entry("Topic:orders", "All", "Allow", "10.0.0.0/24")
    assert decided(ORDERS, only, host="::ffff:10.0.0.9") is True
    assert decided(ORDERS, only, host="unix") is None


def test_no_begin_grants_a_topic_of_the_broker() -> None:
    inner = topic_right("SCHEDULE_TOPIC_XXXX", SUB)
    assert decided(inner, entry("Topic:SCHEDULE*"), entry("*")) is None
    assert decided(inner, entry("Topic:SCHEDULE*", "All", "Deny")) is False
    assert decided(inner, entry("Topic:SCHEDULE_TOPIC_XXXX")) is True


def test_policies_come_before_lines_and_defaults() -> None:
    account = Account(
        "someone",
        "secret-",
        default_group=SUB,
        topics={"orders": PUB | SUB, "bills": SUB},
        policies=Policies([entry("Topic:orders", "Sub", "Deny"), entry("Group:a", "All", "Deny")]),
    )
    assert account.allows(topic_right("orders", PUB))
    assert not account.allows(topic_right("orders", SUB))
    assert account.allows(topic_right("bills", SUB))
    assert not account.allows(topic_right("bills", PUB))
    assert account.allows(group_right("b"))
    assert not account.allows(group_right("a"))


def test_a_super_user_may_do_what_policies_deny() -> None:
    """As in RocketMQ: policies of one are not looked at."""
    denied = Policies([entry("*", "All", "Deny")])
    assert Account("someone", "secret-", is_admin=True, policies=denied).allows(ORDERS)


@pytest.mark.parametrize(
    ("policy_type", "resource", "action", "source", "decision", "why"),
    [
        ("Mine", "Topic:a", "Pub", "", "Allow", "policy type 'Mine'"),
        ("", "Topic", "Pub", "", "Allow", "resource 'Topic' is not"),
        ("", "Topic:", "Pub", "", "Allow", "resource 'Topic:' is not"),
        ("", "Topic:a*b", "Pub", "", "Allow", "resource 'Topic:a.b' is not"),
        ("", "Cluster:*", "Pub", "", "Allow", "for administrators alone"),
        ("", "Topic:a", "Create", "", "Allow", "for administrators alone"),
        ("", "Topic:a", "Write", "", "Allow", "action 'Write' is not"),
        ("", "Topic:a", "Pub", "10.0.0.*", "Allow", "source '10.0.0..' is no address"),
        ("", "Topic:a", "Pub", "", "Maybe", "decision 'Maybe'"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(
    policy_type: str, resource: str, action: str, source: str, decision: str, why: str
) -> None:
    sources = [source] if source else []
    with pytest.raises(ValueError, match=why):
        parse_entry(policy_type, resource, [action], sources, decision)


def test_an_entry_without_actions_is_refused() -> None:
    with pytest.raises(ValueError, match="actions are empty"):
        parse_entry("", "Topic:a", [], [], "Allow")


def test_resources_are_written_as_rocketmq_does() -> None:
    assert [resource_text(text) for text in ("topic:a", "GROUP:b*", "Topic:*", "*")] == [
        *("Topic:a", "Group:b*", "Topic:*", "*")
    ]


# -------------------------------------------------- against RocketMQ's rules, by their text


Raw = tuple[str, str, tuple[str, ...], tuple[str, ...], str]

names = st.sampled_from(["a", "ab", "abc", "b"])
raw_entries = st.tuples(
    st.sampled_from(["Custom", "Default"]),
    st.one_of(
        st.just("*"),
        st.builds(
            "{}:{}{}".format, st.sampled_from(["Topic", "Group"]), names, st.sampled_from(["", "*"])
        ),
        st.sampled_from(["Topic:*", "Group:*"]),
    ),
    st.sampled_from([("Pub",), ("Sub",), ("All",), ("Pub", "Sub")]),
    st.sampled_from([(), ("10.0.0.1",), ("10.0.0.0/30",), ("192.168.0.0/16", "10.0.0.2")]),
    st.sampled_from(["Allow", "Deny"]),
)


def oracle(entries: list[Raw], kind: str, name: str, action: str, host: str) -> bool | None:
    """Filter, then sort by what RocketMQ's page on ACL 2.0 states of priorities."""

    def about(resource: str) -> tuple[int, int, int] | None:
        if resource == "*":
            return (1, 2, 0)
        its_kind, _, its_name = resource.partition(":")
        if its_kind != kind:
            return None
        if not its_name.endswith("*"):
            return (0, 0, 0) if its_name == name else None
        begin = its_name[:-1]
        if not name.startswith(begin):
            return None
        return (0, 1 if begin else 2, -len(begin))

    for policy_type in ("Custom", "Default"):
        fitting = []
        for its_type, resource, actions, sources, decision in entries:
            place = about(resource)
            if its_type != policy_type or place is None:
                continue
            if action not in actions and "All" not in actions:
                continue
            inside = [
                ipaddress.ip_address(host) in ipaddress.ip_network(source) for source in sources
            ]
            if sources and not any(inside):
                continue
            fitting.append((*place, 0 if decision == "Deny" else 1))
        if fitting:
            return min(fitting)[-1] == 1
    return None


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(raw_entries, max_size=8),
    st.sampled_from(["Topic", "Group"]),
    names,
    st.sampled_from(["Pub", "Sub"]),
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.9"]),
)
def test_policies_decide_as_the_oracle_does(
    entries: list[Raw], kind: str, name: str, action: str, host: str
) -> None:
    right = Right(name, PUB if action == "Pub" else SUB, is_group=kind == "Group")
    parsed = [parse_entry(*one) for one in entries]
    random.Random(1).shuffle(parsed)
    assert Policies(parsed).decide(right, host) is oracle(entries, kind, name, action, host)
