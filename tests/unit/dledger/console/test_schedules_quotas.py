"""Pages of schedules and quotas, and the changes that their forms ask for."""

from __future__ import annotations

from html import unescape

import pytest

from dledger.console.console import ConsoleSettings, RefusedError
from dledger.console.quotas_page import limits_in, quota_rows
from dledger.console.schedules_page import ScheduleRow, schedule_rows
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.quota_bodies import QuotaHeader, QuotaInfo, QuotaList
from dledger.remoting.protocol.schedule_bodies import (
    ComingInstants,
    ScheduleBody,
    ScheduleInfo,
    ScheduleList,
)
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.console.conftest import Visitor, visible, visiting

DUE_MS = 1_800_000_000_000
HOSTILE = "<script>x</script>"


class Tables:
    """Schedules and quotas of the group "g", as its brokers answer and change them."""

    def __init__(self, world: World) -> None:
        self.schedules: dict[str, ScheduleInfo] = {}
        self.quotas: dict[tuple[str, str], QuotaInfo] = {}
        for broker in world.groups["g"].brokers:
            broker.on(RequestCode.LIST_SCHEDULES, self._list_schedules)
            broker.on(RequestCode.PUT_SCHEDULE, self._put_schedule)
            broker.on(RequestCode.PAUSE_SCHEDULE, self._pause_schedule)
            broker.on(RequestCode.DELETE_SCHEDULE, self._delete_schedule)
            broker.on(RequestCode.LIST_QUOTAS, self._list_quotas)
            broker.on(RequestCode.CHANGE_QUOTA, self._change_quota)
            broker.on(
                RequestCode.GET_BROKER_CONFIG,
                lambda asked: response_to(asked, 0, None, {}, b"aclEnable=false\n"),
            )

    def schedule(self, name: str, **fields: object) -> None:
        given = {"topic": "T", "expression": "0 9 * * *", "time_zone": "Asia/Tokyo"}
        self.schedules[name] = ScheduleInfo(**{"name": name, **given, **fields})  # type: ignore[arg-type]  # by name

    def _list_schedules(self, asked: RemotingCommand) -> RemotingCommand:
        name = asked.ext.get("name")
        found = [each for each in self.schedules.values() if name in (None, each.name)]
        return response_to(asked, 0, None, {}, ScheduleList(schedules=found).encode())

    def _put_schedule(self, asked: RemotingCommand) -> RemotingCommand:
        body = ScheduleBody.decode(asked.body)
        if body.expression == "never":
            return response_to(asked, ResponseCode.SYSTEM_ERROR, "no instant comes any more")
        self.schedules[asked.ext["name"]] = ScheduleInfo(
            asked.ext["name"],
            asked.ext["topic"],
            body.expression,
            body.time_zone,
            properties=body.properties,
            body=body.body,
            begin_ms=body.begin_ms,
            end_ms=body.end_ms,
            paused=body.paused,
        )
        return response_to(asked, 0, None, {}, ComingInstants(coming_ms=[DUE_MS]).encode())

    def _pause_schedule(self, asked: RemotingCommand) -> RemotingCommand:
        self.schedules[asked.ext["name"]].paused = asked.ext["paused"] == "true"
        return response_to(asked)

    def _delete_schedule(self, asked: RemotingCommand) -> RemotingCommand:
        del self.schedules[asked.ext["name"]]
        return response_to(asked)

    def _list_quotas(self, asked: RemotingCommand) -> RemotingCommand:
        return response_to(
            asked, 0, None, {}, QuotaList(quotas=list(self.quotas.values())).encode()
        )

    def _change_quota(self, asked: RemotingCommand) -> RemotingCommand:
        header = QuotaHeader.decode(asked.ext)
        fields = {field: getattr(header, field) for field in QuotaHeader.__slots__}
        op, name = fields.pop("op"), fields.pop("name") or ""
        self.quotas.pop((header.kind, name), None)
        if op == "put":
            self.quotas[header.kind, name] = QuotaInfo(name=name, **fields)
        return response_to(asked)


@pytest.fixture
def tables(world: World) -> Tables:
    return Tables(world)


def newest(visitor: Visitor) -> tuple[bool, str, str]:
    change = visitor.console.changes.newest[0]
    assert change.who == "no account from 127.0.0.1"
    return change.is_done, change.what, change.remark


# ------------------------------------------------------------------------------- schedules


async def test_schedules_are_listed_with_their_figures(tables: Tables, visitor: Visitor) -> None:
    tables.schedule("nightly", next_ms=DUE_MS, fired=1234, missed=5)
    tables.schedule("resting", paused=True)
    tables.schedule("stuck", next_ms=DUE_MS, held="topic T may not be written")
    text = visible(await visitor.get("/schedules"))
    assert (
        "nightly 0 9 * * * T active 2027-01-15 08:00:00.000"
        " 2027-01-15T17:00:00+09:00 Asia/Tokyo 1,234 5 g" in text
    )
    assert "resting 0 9 * * * T paused - Asia/Tokyo 0 0 g" in text
    assert "held: topic T may not be written" in text
    assert "1 to 3 of 3 schedules" in text
    found = visible(await visitor.get("/schedules?q=NIGHT"))
    assert "1 to 1 of 1 schedules" in found
    assert "resting" not in found


async def test_a_schedule_shows_its_message(tables: Tables, visitor: Visitor) -> None:
    tables.schedule("s", next_ms=DUE_MS, body=b"make\xff", properties={"TAGS": "night"})
    page = await visitor.get("/schedule?name=s")
    text = visible(page)
    assert "TAGS night" in text
    assert "6d 61 6b 65 ff" in text
    assert "Pause the schedule" in text
    missing = await visitor.get("/schedule?name=other")
    assert missing.status_code == 404
    assert "No broker group has a schedule of this name" in visible(missing)


async def test_a_schedule_is_added_with_all_its_fields(tables: Tables, visitor: Visitor) -> None:
    answer = await visitor.post(
        "/schedule/add",
        name="nightly",
        expression="30 3 * * *",
        time_zone="Asia/Tokyo",
        topic="T",
        tag="night",
        key="a b",
        begin="2027-01-15T08:00:00",
        body="make the report",
    )
    assert newest(visitor) == (
        True,
        "add schedule nightly: 30 3 * * * Asia/Tokyo, to topic T",
        "it is in g, and due at 2027-01-15T17:00:00+09:00",
    )
    made = tables.schedules["nightly"]
    assert (made.expression, made.time_zone, made.body) == (
        "30 3 * * *",
        "Asia/Tokyo",
        b"make the report",
    )
    assert made.properties == {"TAGS": "night", "KEYS": "a b"}
    assert (made.begin_ms, made.end_ms, made.paused) == (DUE_MS, 0, False)
    assert "Done: add schedule nightly" in visible(await visitor.get(answer.headers["location"]))


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"name": "there"}, "there exists already; nothing was changed"),
        ({"end": "tomorrow"}, "end: a date and a time, or nothing"),
        ({"expression": "never"}, "no instant comes any more"),
        ({"body": ""}, "body"),
    ],
)
async def test_a_schedule_that_cannot_be_is_not_added(
    tables: Tables, visitor: Visitor, fields: dict[str, str], remark: str
) -> None:
    tables.schedule("there", body=b"as it was")
    before = dict(tables.schedules)
    given = {"name": "n", "expression": "@daily", "topic": "T", "body": "b"}
    await visitor.post("/schedule/add", **{**given, **fields})
    is_done, _, said = newest(visitor)
    assert not is_done
    assert remark in said
    assert tables.schedules == before


async def test_a_schedule_rests_and_goes_on(tables: Tables, visitor: Visitor) -> None:
    tables.schedule("s", next_ms=DUE_MS)
    answer = await visitor.post("/schedule/pause", name="s")
    assert newest(visitor) == (True, "pause schedule s", "it is paused in g")
    assert "Resume the schedule" in visible(await visitor.get(answer.headers["location"]))
    await visitor.post("/schedule/resume", name="s")
    assert newest(visitor) == (True, "resume schedule s", "it goes on in g")
    assert not tables.schedules["s"].paused
    await visitor.post("/schedule/pause", name="other")
    assert not newest(visitor)[0]


async def test_a_schedule_is_removed_by_its_typed_name(tables: Tables, visitor: Visitor) -> None:
    tables.schedule("s")
    await visitor.post("/schedule/remove", name="s", again="t")
    assert newest(visitor)[2] == "the name that was typed is another one; nothing was removed"
    assert "s" in tables.schedules
    await visitor.post("/schedule/remove", name="s", again="s")
    assert newest(visitor) == (True, "remove schedule s", "removed from g")
    assert tables.schedules == {}


def test_rows_of_schedules_are_sorted_by_name() -> None:
    one, two = (ScheduleInfo(name, "T", "@daily", "UTC") for name in ("b", "a"))
    rows = schedule_rows({"y": [one], "x": [two, one]}, "")
    assert [(row.info.name, row.broker) for row in rows] == [("a", "x"), ("b", "x"), ("b", "y")]
    assert (rows[0].state, rows[0].mark, rows[0].next_local) == ("ended", "", "")
    held = ScheduleInfo("s", "T", "@daily", "UTC", held="no topic", next_ms=DUE_MS)
    assert (ScheduleRow("x", held).mark, ScheduleRow("x", one).mark) == ("bad", "")


# ---------------------------------------------------------------------------------- quotas


async def test_quotas_are_listed_with_their_use(tables: Tables, visitor: Visitor) -> None:
    for info in (
        QuotaInfo(
            "account",
            "orders",
            sent_messages_per_s=2000,
            sent_bytes_per_s=4 << 20,
            connections=50,
            throttled_ms=1500,
            refused=7,
            open_connections=3,
        ),
        QuotaInfo("client", "", received_bytes_per_s=1024),
    ):
        tables.quotas[info.kind, info.name] = info
    page = await visitor.get("/quotas")
    text = visible(page)
    assert "account orders g 2,000 messages/s, 4.0 MiB/s no limit 3 / 50 1 s 7" in text
    assert "each client without a quota of its own g no limit 1.0 KiB/s no limit 0 ms 0" in text
    assert 'href="/quota?kind=client&name="' in unescape(page.text)
    one = await visitor.get("/quota?kind=account&name=orders")
    assert 'name="sent_messages_per_s" type="number" min="1" step="1"' in one.text
    assert 'value="2000"' in one.text
    assert (await visitor.get("/quota?kind=account&name=other")).status_code == 404


async def test_a_quota_is_set_as_a_whole(tables: Tables, visitor: Visitor) -> None:
    answer = await visitor.post(
        "/quota/set", kind="account", name="orders", sent_messages_per_s="2000", connections="5"
    )
    assert newest(visitor) == (
        True,
        "set the quota of account orders: messages sent per second 2000, connections 5",
        "it is in g",
    )
    assert answer.headers["location"] == "/quota?kind=account&name=orders&done=1"
    assert tables.quotas["account", "orders"] == QuotaInfo(
        "account", "orders", sent_messages_per_s=2000, connections=5
    )
    await visitor.post("/quota/set", kind="account", name="orders", sent_bytes_per_s="9")
    assert tables.quotas["account", "orders"] == QuotaInfo("account", "orders", sent_bytes_per_s=9)
    await visitor.post("/quota/set", kind="client", name="", unlimited="1")
    assert tables.quotas["client", ""] == QuotaInfo("client", "")


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"is_new": "1", "connections": "5"}, "this quota exists already; nothing was changed"),
        ({}, "give a limit, or tick that there is none; nothing was changed"),
        ({"connections": "0"}, "Connections: a whole number from 1 on, or nothing for no limit"),
        ({"connections": "1.5"}, "Connections: a whole number from 1 on"),
        ({"kind": "group", "connections": "5"}, "a quota is one of account or client"),
    ],
)
async def test_what_makes_no_quota_changes_nothing(
    tables: Tables, visitor: Visitor, fields: dict[str, str], remark: str
) -> None:
    tables.quotas["account", "orders"] = QuotaInfo("account", "orders", connections=2)
    await visitor.post("/quota/set", **{"kind": "account", "name": "orders", **fields})
    is_done, _, said = newest(visitor)
    assert not is_done
    assert remark in said
    assert tables.quotas == {("account", "orders"): QuotaInfo("account", "orders", connections=2)}


async def test_a_quota_is_removed_where_it_is(tables: Tables, visitor: Visitor) -> None:
    tables.quotas["client", "10.0.0.1"] = QuotaInfo("client", "10.0.0.1", connections=2)
    await visitor.post("/quota/remove", kind="client", name="10.0.0.1")
    assert newest(visitor) == (True, "remove the quota of client 10.0.0.1", "removed from g")
    assert tables.quotas == {}
    await visitor.post("/quota/remove", kind="client", name="10.0.0.1")
    assert newest(visitor)[2] == "there is no such quota; nothing was changed"


async def test_groups_whose_limits_differ_are_named(
    tables: Tables, world: World, visitor: Visitor
) -> None:
    tables.quotas["account", "a"] = QuotaInfo("account", "a", connections=2)
    other = await world.add_group("h", 1, 11_000)
    rows = QuotaList(quotas=[QuotaInfo("account", "a", connections=3)])
    for broker in other.brokers:
        broker.on(
            RequestCode.LIST_QUOTAS, lambda asked: response_to(asked, 0, None, {}, rows.encode())
        )
    text = visible(await visitor.get("/quota?kind=account&name=a"))
    assert "The groups have different limits: these are those of g." in text


def test_rows_of_quotas_are_sorted_and_searched() -> None:
    infos = [QuotaInfo("client", "x"), QuotaInfo("account", "b"), QuotaInfo("account", "")]
    rows = quota_rows({"g": infos}, "")
    assert [(row.info.kind, row.info.name) for row in rows] == [
        ("account", ""),
        ("account", "b"),
        ("client", "x"),
    ]
    assert [row.info.name for row in quota_rows({"g": infos}, "ACCOUNT b")] == ["b"]
    assert [row.info.name for row in quota_rows({"g": infos}, "client x")] == ["x"]


def test_limits_of_a_form_are_whole_numbers() -> None:
    assert limits_in({"sent_bytes_per_s": " 12 "})["sent_bytes_per_s"] == 12
    for text in ("1.5", "-1", "0", "1e3", "9" * 19, "٣"):
        with pytest.raises(RefusedError, match="whole number from 1 on"):
            limits_in({"sent_bytes_per_s": text})


# -------------------------------------------------------------------------------- protection


CHANGES = (
    "/schedule/add",
    "/schedule/pause",
    "/schedule/resume",
    "/schedule/remove",
    "/quota/set",
    "/quota/remove",
)
CODES = (
    RequestCode.PUT_SCHEDULE,
    RequestCode.PAUSE_SCHEDULE,
    RequestCode.DELETE_SCHEDULE,
    RequestCode.CHANGE_QUOTA,
)
FIELDS = {
    "name": "s",
    "again": "s",
    "kind": "account",
    "connections": "5",
    "expression": "@daily",
    "topic": "T",
    "body": "b",
}


@pytest.mark.parametrize("path", CHANGES)
async def test_change_needs_a_form_of_this_console(
    world: World, tables: Tables, visitor: Visitor, path: str
) -> None:
    assert (await visitor.get(path)).status_code == 405
    answer = await visitor.http.post(path, data={**FIELDS, "token": "0" * 64})
    assert answer.status_code == 403
    assert [world.count(code) for code in CODES] == [0] * len(CODES)
    assert not visitor.console.changes.newest


@pytest.mark.parametrize("path", CHANGES)
async def test_change_is_refused_where_pages_only_show(
    world: World, tables: Tables, path: str
) -> None:
    tables.schedule("s")
    tables.quotas["account", "s"] = QuotaInfo("account", "s", connections=2)
    async with world.client() as client, visiting(client, ConsoleSettings()) as visitor:
        await visitor.post(path, **FIELDS)
        is_done, _, remark = newest(visitor)
        assert not is_done
        assert "--allow-changes" in remark
        for page in ("/schedules", "/schedule?name=s", "/quotas", "/quota?kind=account&name=s"):
            assert 'method="post"' not in (await visitor.get(page)).text, page
    assert [world.count(code) for code in CODES] == [0] * len(CODES)


async def test_hostile_schedules_and_quotas_show_as_text(tables: Tables, visitor: Visitor) -> None:
    tables.schedule(HOSTILE, expression=HOSTILE, time_zone=HOSTILE, held=HOSTILE, topic=HOSTILE)
    tables.schedules[HOSTILE].properties = {HOSTILE: HOSTILE}
    tables.schedules[HOSTILE].body = HOSTILE.encode()
    tables.quotas["account", HOSTILE] = QuotaInfo("account", HOSTILE, connections=2)
    for path in ("/schedules", "/schedule?name=", "/quotas", "/quota?kind=account&name="):
        address = path + "%3Cscript%3Ex%3C/script%3E" if path.endswith("=") else path
        answer = await visitor.get(address)
        assert answer.status_code == 200
        assert "<script>x" not in answer.text, path
        assert "&lt;script&gt;" in answer.text, path
