"""Pages as their visitors get them: hostile content, long lists, and clusters in trouble."""

import re
from collections.abc import Collection
from functools import partial
from html import unescape

import pytest

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import decode_record
from dledger.console.console import PAGES
from dledger.remoting.protocol.bodies import (
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.signature import is_signed_by
from tests.harness.console_content import HOSTILE, HOSTILE_KEY
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.dledger.console.conftest import Visitor, visible, visiting

pytestmark = pytest.mark.slow

QUEUE = MessageQueue("T", "g", 0)


async def send(client: ClientInstance, *messages: Message) -> None:
    async with Producer(client, "p") as producer:
        for message in messages:
            await producer.send_to(QUEUE, message)


async def test_console_states_that_it_is_alive(visitor: Visitor) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await visitor.get(path)
        assert (answer.status_code, answer.text) == (200, "alive\n")
        assert "set-cookie" not in answer.headers


# --------------------------------------------------------------------------- hostile content


async def test_a_hostile_message_shows_as_text(visitor: Visitor) -> None:
    hostile = Message(
        "T", HOSTILE.encode(), keys=HOSTILE_KEY, tags="<i>", properties={"<u>": HOSTILE}
    )
    await send(visitor.console.client, hostile, Message("T", "\u202eabc\x1b[2J".encode()))
    listed = await visitor.get("/messages?by=queue&topic=T&broker=g&queue=0&offset=0")
    page = await visitor.get("/message?topic=T&broker=g&queue=0&offset=0")
    for answer in (listed, page):
        assert answer.status_code == 200
        for tag in ("<script>document", "<img", "<b>key", "<i>", "<u>"):
            assert tag not in answer.text, tag
    assert "&lt;script&gt;document.title=" in page.text
    assert "&lt;b&gt;key&lt;/b&gt;&amp;amp;" in page.text
    other = await visitor.get("/message?topic=T&broker=g&queue=0&offset=1")
    assert "\\u202eabc\\x1b[2J" in other.text
    assert "\x1b" not in other.text


@pytest.mark.parametrize(
    "path",
    [
        "/topics?q={}",
        "/topic?name={}",
        "/groups?q={}",
        "/group?name={}",
        "/group/plan?name={}&topic={}&to={}&time={}",
        "/messages?by=key&topic={}&wanted={}",
        "/messages?by=id&topic={}&wanted={}",
        "/messages?by=time&topic={}&from={}",
        "/messages?by={}",
        "/messages?by=queue&topic={}&broker={}&queue=0&offset=0",
        "/message?at={}",
        "/message?topic={}&broker={}&queue=0&offset=0",
        "/message?topic={}&broker={}&queue={}&offset={}",
        "/dead-letters?q={}",
        "/dead-letters/group?name={}&from={}",
        "/clients?q={}",
        "/settings?q={}&all={}",
        "/{}",
    ],
)
async def test_a_hostile_address_shows_as_text(visitor: Visitor, path: str) -> None:
    hostile = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E%E2%80%AE%00"
    answer = await visitor.get(path.replace("{}", hostile))
    assert answer.status_code < 500, answer.text
    assert "<script>alert" not in answer.text
    assert '"><script' not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/messages?by=queue&topic=T&broker=g&queue=0&offset={}",
        "/messages?by=queue&topic=T&broker=g&queue={}&offset=0",
        "/messages?by=time&topic=T&from={}",
        "/message?topic=T&broker=g&queue=0&offset={}",
        "/dead-letters/group?name=billing&from=g/0/{}",
        "/group/plan?name=billing&topic=T&to=time&time={}",
        "/topics?page={}",
    ],
)
@pytest.mark.parametrize("digits", [20, 5_000])
async def test_number_that_is_too_large_is_none(visitor: Visitor, path: str, digits: int) -> None:
    answer = await visitor.get(path.format("9" * digits))
    assert answer.status_code in (200, 400, 404)


@pytest.mark.parametrize("field", ["queues", "read_queues"])
async def test_field_that_is_too_large_is_refused(
    world: World, visitor: Visitor, field: str
) -> None:
    world.group.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"aclEnable=false\n"))
    fields = {"name": "New", "queues": "4", "read_queues": "4", field: "9" * 5_000}
    if field == "read_queues":
        fields |= {"name": "T", "write_queues": "4", "permission": "6"}
        configs = TopicConfigSerializeWrapper(topic_config_table={"T": TopicConfig("T")})
        world.group.on(RequestCode.GET_ALL_TOPIC_CONFIG, fixed(body=configs.encode()))
    path = "/topic/create" if field == "queues" else "/topic/update"
    answer = await visitor.post(path, **fields)
    assert answer.status_code == 303
    change = visitor.note
    assert (change.is_done, "a number from" in change.remark) == (False, True)


async def test_hostile_names_of_topics_and_groups_show_as_text(
    world: World, visitor: Visitor
) -> None:
    world.group.topics["<script>t</script>"] = 4
    world.group.register()
    name = "<script>g</script>"
    table = SubscriptionGroupWrapper({name: SubscriptionGroupConfig(name)})
    world.group.on(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, fixed(body=table.encode()))
    for path in ("/topics", "/groups"):
        answer = await visitor.get(path)
        assert "<script>t" not in answer.text
        assert "<script>g" not in answer.text
        assert "&lt;script&gt;" in answer.text


# ------------------------------------------------------------------------------- big clusters


async def test_ten_thousand_topics_come_by_the_page(world: World, visitor: Visitor) -> None:
    world.group.topics |= {f"topic-{number:05}": 4 for number in range(10_000)}
    world.group.register()
    first = await visitor.get("/topics")
    assert len(first.text) < 60_000
    assert "topic-00048" in first.text
    assert "topic-00060" not in first.text
    assert "of 10,001 topics" in visible(first)
    last = await visitor.get("/topics?page=201")
    assert "topic-09999" in last.text
    found = await visitor.get("/topics?q=09999")
    assert "1 to 1 of 1 topics" in visible(found)


# ------------------------------------------------------------------------------ in trouble


@pytest.mark.parametrize("path", [address for address, _ in PAGES])
async def test_every_page_is_there_when_nothing_answers(path: str) -> None:
    async with open_world() as world, world.client() as client, visiting(client) as visitor:
        await visitor.get("/cluster")
        await world.name_servers[0].kill()
        for broker in world.group.brokers:
            await broker.kill()
        await visitor.console.look()
        answer = await visitor.get(path)
        assert answer.status_code == 200
        if path not in ("/accounts", "/messages"):
            assert "Not everything is known now" in answer.text


async def test_members_are_shown_without_a_name_server(world: World, visitor: Visitor) -> None:
    await visitor.get("/cluster")
    await world.name_servers[0].kill()
    await visitor.console.look()
    text = visible(await visitor.get("/cluster"))
    assert "no NameServer answers" in text
    assert text.count("follower") == 2
    assert text.count(" leader ") >= 1


async def test_half_of_the_members_missing_are_named(world: World, visitor: Visitor) -> None:
    await visitor.get("/cluster")
    await world.group.brokers[1].kill()
    await world.group.brokers[2].kill()
    await visitor.console.look()
    text = visible(await visitor.get("/cluster"))
    assert "2 of 3 members of g do not answer" in text
    assert text.count("no answer") == 2


async def test_a_leader_that_is_lost_shows_on_every_look(world: World, visitor: Visitor) -> None:
    await visitor.console.look()
    await world.group.brokers[0].kill()
    await visitor.console.look()
    assert "g has no leader now" in visible(await visitor.get("/cluster"))
    world.group.elect(2)
    await visitor.console.look()
    text = visible(await visitor.get("/cluster/live"))
    assert "has no leader" not in text


async def test_a_refusal_of_a_broker_costs_its_part_alone(world: World, visitor: Visitor) -> None:
    world.group.on(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, fixed(ResponseCode.NO_PERMISSION))
    answer = await visitor.get("/groups")
    assert answer.status_code == 200
    assert "the list of groups" in visible(answer)
    assert "refused with code 16" in visible(answer)


async def test_a_group_that_no_broker_knows_is_named(world: World, visitor: Visitor) -> None:
    world.group.on(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, fixed(body=b"{}"))
    world.group.on(RequestCode.GET_CONSUME_STATS, fixed(body=b"{}"))
    world.group.on(RequestCode.GET_CONSUMER_CONNECTION_LIST, fixed(206))
    text = visible(await visitor.get("/group?name=billling"))
    assert "no broker knows a group billling" in text


# ------------------------------------------------------------------------------- dead letters


async def test_ticked_letters_are_given_back_and_no_other(world: World, visitor: Visitor) -> None:
    world.group.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"aclEnable=false\n"))
    await send(visitor.console.client, *(Message("T", b"%d" % number) for number in range(3)))
    for stored in list(world.group.queue("T", 0)):
        world.group.store("%DLQ%billing", 0, decode_record(stored))
    world.group.topics["%RETRY%billing"] = 1
    world.group.register()
    page = await visitor.get("/dead-letters/group?name=billing")
    assert page.text.count('type="checkbox"') == 3
    await visitor.post("/dead-letters/resend", name="billing", which="chosen", letter_2="g/0/1")
    change = visitor.note
    assert (change.is_done, change.remark) == (True, "1 given back")
    assert world.group.bodies("%RETRY%billing") == [b"1"]
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=bytes(world.group.queue("T", 0)[1])))
    assert visible(await visitor.get("/dead-letters/group?name=billing")).count("1 times") == 1
    await visitor.post("/dead-letters/resend", name="billing", which="chosen")
    assert "no letter is ticked" in visitor.note.remark
    await visitor.post("/dead-letters/resend", name="billing", which="all")
    assert visitor.note.remark == "3 given back"
    assert world.group.bodies("%RETRY%billing") == [b"1", b"0", b"1", b"2"]


async def test_letters_of_every_queue_come_by_the_page(world: World, visitor: Visitor) -> None:
    group, other = world.group, await world.add_group("h", 1, 11_000)
    await send(visitor.console.client, *(Message("T", b"%d" % number) for number in range(25)))
    for stored in list(group.queue("T", 0)):
        group.store("%DLQ%billing", 0, decode_record(stored))
    for stored in list(group.queue("T", 0))[:3]:
        other.store("%DLQ%billing", 0, decode_record(stored))
    for each in (group, other):
        each.topics["%RETRY%billing"] = 1
        each.register()
    shown: list[str] = []
    address = "/dead-letters/group?name=billing"
    for _ in range(3):
        page = await visitor.get(address)
        shown += re.findall(r'value="([gh]/0/[0-9]+)"', page.text)
        following = re.search(r'rel="next" href="([^"]+)"', page.text)
        if following is None:
            break
        address = "/dead-letters/group" + unescape(following[1])
    assert shown == [*(f"g/0/{n}" for n in range(25)), *(f"h/0/{n}" for n in range(3))]


# --------------------------------------------------------------------------- settings, accounts


async def test_settings_that_differ_are_marked(world: World, visitor: Visitor) -> None:
    def answer(text: bytes, asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, text)

    for number, broker in enumerate(world.group.brokers):
        text = f"fileReservedTime={72 if number else 48}\nlistenPort={number}\nbrokerName=g\n"
        broker.on(RequestCode.GET_BROKER_CONFIG, partial(answer, text.encode()))
    page = await visitor.get("/settings")
    assert "fileReservedTime" in page.text
    assert "listenPort" not in page.text
    assert "brokerName" not in page.text
    whole = await visitor.get("/settings?all=1")
    assert "brokerName" in whole.text
    assert visible(whole).count("differs") == 1


async def test_signing_in_is_checked_by_a_broker(world: World, visitor: Visitor) -> None:
    world.group.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"aclEnable=true\n"))

    def figures(asked: RemotingCommand) -> RemotingCommand:
        if asked.ext.get("AccessKey") == "operator" and is_signed_by(asked, "a-secret"):
            return response_to(asked, 0, None, {}, b'{"table":{}}')
        return response_to(asked, ResponseCode.NO_PERMISSION, "no such account")

    world.group.on(RequestCode.GET_BROKER_RUNTIME_INFO, figures)
    await visitor.post("/sign-in", page="/accounts", access_key="mallory", secret_key="a-secret")
    assert "brokers do not take this name" in visible(await visitor.get("/accounts"))
    before = visitor.http.cookies["dledger_console"]
    await visitor.post("/sign-in", page="/accounts", access_key="operator", secret_key="a-secret")
    assert visitor.http.cookies["dledger_console"] != before
    page = await visitor.get("/accounts")
    assert "Signed in as operator" in visible(page)
    assert "a-secret" not in page.text
    await visitor.post("/sign-out", page="/accounts")
    assert "Sign in" in visible(await visitor.get("/accounts"))


ACCESS = "org.apache.rocketmq.acl.common.AclException: "


def admitting(world: World, admin: str, *others: str, white: Collection[str] = ()) -> None:
    """Let brokers answer *admin*; *others* are accounts, and nothing else is.

    Args:
        white: Addresses of brokers that take an account without a signature.
    """

    def answer(is_white: bool, body: bytes, asked: RemotingCommand) -> RemotingCommand:
        name = asked.ext.get("AccessKey")
        is_proved = is_white or is_signed_by(asked, "a-secret")
        if name == admin and is_proved:
            return response_to(asked, 0, None, {}, body)
        text = "No accessKey is configured"
        if name in others and is_proved:
            text = f"Need admin permission for request code=1, but accessKey={name} is not"
        elif name:
            text = f"Check signature failed for accessKey={name}"
        return response_to(asked, ResponseCode.SYSTEM_ERROR, ACCESS + text)

    for broker in world.group.brokers:
        for code, body in (
            (RequestCode.RAFT_STATUS, b"{}"),
            (RequestCode.GET_BROKER_CONFIG, b"aclEnable=true\n"),
            (RequestCode.GET_BROKER_RUNTIME_INFO, b'{"table":{}}'),
        ):
            broker.on(code, partial(answer, broker.address in white, body))


async def test_members_that_refuse_are_shown_as_refused(world: World, visitor: Visitor) -> None:
    admitting(world, "operator")
    text = visible(await visitor.get("/cluster"))
    assert "3 of 3 members of g refuse the account of this console" in text
    assert text.count("answers, and refuses the account") == 3
    assert "not answer" not in text.replace("The console does not answer", "")
    assert "has no leader" not in text
    assert "Brokers check accounts." in visible(await visitor.get("/accounts"))


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("mallory", "brokers do not take this name with this secret"),
        ("clerk", "signed in"),
        ("operator", "signed in"),
    ],
)
async def test_account_is_proved_where_brokers_refuse(
    world: World, visitor: Visitor, name: str, remark: str
) -> None:
    admitting(world, "operator", "clerk")
    await visitor.post("/sign-in", page="/accounts", access_key=name, secret_key="a-secret")
    assert visitor.note.remark == remark


@pytest.mark.parametrize("name", ["clerk", "operator"])
@pytest.mark.parametrize(("white", "is_proved"), [(1, True), (3, False)])
async def test_broker_without_check_proves_no_account(
    world: World, visitor: Visitor, name: str, white: int, is_proved: bool
) -> None:
    addresses = [broker.address for broker in world.group.brokers]
    admitting(world, "operator", "clerk", white=sorted(addresses)[:white])
    await visitor.post("/sign-in", page="/accounts", access_key=name, secret_key="a-secret")
    remark = visitor.note.remark
    assert ("signed in" if is_proved else "with any secret from this console's address") in remark
    shown = visible(await visitor.get("/accounts"))
    assert (f"Signed in as {name}" in shown) is is_proved
    await visitor.post("/sign-in", page="/accounts", access_key=name, secret_key="a-guess")
    assert visitor.note.remark != "signed in"
