"""What pages show, from what brokers answered: pure functions."""

from typing import Any

import pytest

from dledger.client.admin.admin import Admin, TopicConfig
from dledger.client.admin.groups import FIRST_MS, LAST_MS
from dledger.client.core.errors import RequestFailedError
from dledger.console import texts
from dledger.console.console import RefusedError
from dledger.console.groups_page import group_row, reset_time
from dledger.console.known import is_access_refusal
from dledger.console.look import ClusterLook, Status, group_views, known_members, look_at
from dledger.console.texts import PAGE_ROWS, paged
from dledger.console.topics_page import topic_row
from dledger.remoting.protocol.bodies import (
    ClientConnection,
    ConsumerConnection,
    MessageModel,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.topic_names import is_system
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world

MEMBERS = [
    {"name": f"n{number}", "client_address": f"127.0.0.1:{number}", "standing": "voter"}
    for number in range(3)
]


def status(number: int, leader: int, term: int = 3, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        "self": f"n{number}",
        "role": "leader" if number == leader else "follower",
        "serving": number == leader,
        "voter": True,
        "term": term,
        "last_index": 100,
        "commit_index": 100,
        "applied_index": 100,
        "members": MEMBERS,
    }
    if number == leader:
        said["peers"] = {
            f"n{other}": {"match_index": 90 + other, "acked_ms_ago": 5}
            for other in range(3)
            if other != number
        }
    return said | more


def look(at_ms: int, leader: int | None, *silent: int, term: int = 3) -> ClusterLook:
    number = -1 if leader is None else leader
    members: dict[str, Status | None] = {
        f"127.0.0.1:{each}": None if each in silent else status(each, number, term)
        for each in range(3)
    }
    return ClusterLook(at_ms, {"ns:1": 1}, {"g": members})


# --------------------------------------------------------------------------------- cluster


def test_lag_is_what_is_committed_and_not_applied() -> None:
    seen = look(1, 0, 2)
    seen.groups["g"]["127.0.0.1:1"] = status(1, 0, applied_index=70)
    (group,) = group_views(seen)
    assert [(row.name, row.role, row.lag) for row in group.members] == [
        ("n0", "leader", 0),
        ("n1", "follower", 30),
        ("n2", "no answer", 8),
    ]
    assert group.reasons == ("127.0.0.1:2 does not answer",)


def test_without_a_leader_no_lag_is_known() -> None:
    (group,) = group_views(look(1, None))
    assert group.leader is None
    assert [row.lag for row in group.members] == [None, None, None]


def test_members_that_are_removed_are_shown_no_longer() -> None:
    found = known_members({"old:1": None, **look(1, 0).groups["g"]})
    assert list(found) == ["127.0.0.1:0", "127.0.0.1:1", "127.0.0.1:2"]
    without_leader = known_members({"old:1": None, **look(1, None).groups["g"]})
    assert "old:1" in without_leader


def test_members_that_no_name_server_knows_are_found() -> None:
    leader = {"127.0.0.1:0": status(0, 0)}
    assert list(known_members(leader)) == ["127.0.0.1:0", "127.0.0.1:1", "127.0.0.1:2"]


def test_what_ails_a_member_is_named() -> None:
    seen = look(1, 0)
    seen.registered = {"127.0.0.1:0", "127.0.0.1:1"}
    seen.groups["g"]["127.0.0.1:1"] = status(1, 0, doubtful=True, scrub={"damaged_entries": 2})
    (group,) = group_views(seen)
    assert group.members[0].remarks == ()
    assert [text.split(":")[0] for text in group.members[1].remarks] == [
        "may have lost entries",
        "scrub",
    ]
    assert group.members[2].remarks == ("no NameServer knows it",)


# ------------------------------------------------------------------------------ topics, groups


def test_a_topic_that_differs_between_groups_is_marked() -> None:
    one = TopicConfig("t", 4, 4, 6, attributes={"retention.ms": "5"})
    row = topic_row("t", {"b": TopicConfig("t", 4, 8, 4), "a": one})
    differs = "differs between groups"
    assert (row.groups, row.queues) == (["a", "b"], 12)
    assert (row.permission, row.kept) == (differs, differs)
    assert topic_row("t", {"a": one}).kept == "5 ms"
    unknown = topic_row("t", {})
    assert (unknown.queues, unknown.permission, unknown.kept) == (None, "not known", "not known")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orders", False),
        ("%DLQ%g", True),
        ("%RETRY%g", True),
        ("RMQ_SYS_TRACE_TOPIC", True),
        ("c", True),
        ("c_REPLY_TOPIC", True),
        ("x_REPLY_TOPIC", False),
    ],
)
def test_topics_of_brokers_themselves_are_known(name: str, expected: bool) -> None:
    assert is_system(name, {"c"}) is expected


def test_a_group_whose_messages_wait_without_member_is_stuck() -> None:
    assert group_row("g", None, True, {"t": 3, "%RETRY%g": 1}).is_stuck
    assert group_row("g", None, True, {"t": 3, "%RETRY%g": 1}).topics == ("t",)
    assert not group_row("g", None, False, {"t": 3}).is_stuck
    assert group_row("g", None, False, {"t": 3}).members is None
    assert group_row("g", None, True, None).lag is None
    connection = ConsumerConnection(
        [ClientConnection("c")], {"t": SubscriptionData("t")}, message_model=MessageModel.CLUSTERING
    )
    row = group_row("g", connection, True, {"t": 3})
    assert (row.members, row.model, row.is_stuck) == (1, "shared", False)


def test_reset_time_takes_one_of_three() -> None:
    assert reset_time({"to": "first"}) == FIRST_MS
    assert reset_time({"to": "last"}) == LAST_MS
    assert reset_time({"to": "time", "time": "1970-01-01T00:00:05"}) == 5_000
    for form in ({}, {"to": "time"}, {"to": "time", "time": "soon"}, {"to": "time", "time": "0"}):
        with pytest.raises(RefusedError):
            reset_time(form)


# ------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [
        (None, "-"),
        (0, "0 ms"),
        (999, "999 ms"),
        (61_000, "1 min 1 s"),
        (3_600_000, "1 h"),
        (90_061_000, "1 d 1 h"),
    ],
)
def test_durations_have_two_units(value_ms: int | None, text: str) -> None:
    assert texts.duration_text(value_ms) == text


def test_sizes_and_figures_have_units() -> None:
    assert texts.bytes_text(1023) == "1,023 B"
    assert texts.bytes_text(1536) == "1.5 KiB"
    assert texts.bytes_text(3 << 40) == "3,072.0 GiB"
    assert texts.number_text(1234567) == "1,234,567"
    assert texts.number_text(2.0) == "2"
    assert texts.number_text(2.25) == "2.2"
    assert texts.number_text(None) == "-"


def test_times_are_utc_and_any_number_is_shown() -> None:
    assert texts.time_text(1_000_000_000_007) == "2001-09-09 01:46:40.007"
    assert texts.time_text(0) == "-"
    assert texts.time_text(1 << 62).endswith(" ms")
    assert texts.time_ms("2001-09-09T01:46:40") == 1_000_000_000_000
    assert texts.time_ms("2001-09-09T03:46:40+02:00") == 1_000_000_000_000
    assert texts.time_ms("1000000000000") == 1_000_000_000_000
    assert texts.time_ms("") is None


def test_a_body_is_text_or_escapes() -> None:
    assert texts.body_text("héllo\n\u202eabc".encode()) == "héllo\n\\u202eabc"
    assert texts.body_text(b"\xff\x00ab") == "\\xff\\x00ab"
    assert texts.body_text("é".encode() * texts.BODY_SHOWN_BYTES).startswith("éé")
    assert texts.body_text(b"") == ""


def test_pages_cover_every_row_once() -> None:
    names = [f"t{number:05}" for number in range(10_000)]
    seen: list[str] = []
    number: int | None = 1
    while number is not None:
        page = paged(names, str(number), q="T", system="")
        seen += page.rows
        assert len(page.rows) <= PAGE_ROWS
        number = number + 1 if page.after else None
    assert seen == names
    assert paged(names, "2", q="t 0", system="").before == "?q=t+0&page=1"
    assert paged(names, "99999").number == 200
    assert paged(names, "-1").number == 1
    assert (paged([], "x").number, paged([], "x").first_row) == (1, 0)
    assert paged(["Orders", "x"], None, q="ORD der").rows == ["Orders"]


def test_member_that_refuses_is_no_silent_one() -> None:
    refused = look(2, 0, 0, 1, 2)
    refused.refused = set(refused.groups["g"])
    (view,) = group_views(refused)
    assert not view.healthy
    assert [row.role for row in view.members] == ["refused"] * 3
    assert [text for text in view.reasons if "not answer" in text] == []


@pytest.mark.parametrize(
    ("code", "remark", "is_refused"),
    [
        (ResponseCode.NO_PERMISSION, "no", True),
        (ResponseCode.SYSTEM_ERROR, "x.AclException: Check signature failed", True),
        (ResponseCode.SYSTEM_ERROR, "x.AclException: ... Without access control it is", False),
        (ResponseCode.SYSTEM_ERROR, "disk full", False),
    ],
)
def test_refusal_of_an_account_is_known(code: int, remark: str, *, is_refused: bool) -> None:
    assert is_access_refusal(RequestFailedError("", code=code, remark=remark)) is is_refused


async def test_a_member_that_answers_nonsense_ends_no_look() -> None:
    async with open_world() as world:
        await _look_at_nonsense(world)


async def _look_at_nonsense(world: World) -> None:
    world.group.registered[7] = f"{'a' * 64}:1"
    for broker in world.group.brokers[1:]:
        broker.on(RequestCode.GET_BROKER_RUNTIME_INFO, fixed(body=b"[1"))
    async with world.client() as client:
        look = await look_at(Admin(client), None, 0)
    answers = {address: said is not None for address, said in look.groups["g"].items()}
    assert answers == {b.address: True for b in world.group.brokers} | {f"{'a' * 64}:1": False}
    assert look.figures == {}
