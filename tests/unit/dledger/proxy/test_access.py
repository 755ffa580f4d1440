"""Access keys of a proxy's clients: the signature, and the rights of each call."""

from pathlib import Path
from typing import Any

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.access import RIGHTS, Access, host_of, signature
from dledger.proxy.caller import Caller
from dledger.proxy.command import ProxyConfig
from dledger.proxy.status import RefusedError
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import Right
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS, TRACE_TOPIC

ORDERS = pb.Resource(name="Orders")
CLERKS = pb.Resource(name="clerks")
TIME = "20261124T150000Z"
RIGHT = signature("a secret of some length", TIME)


ACCOUNTS = """
[accounts.clerk-key]
secret_key = "a secret of some length"
topics = {Orders = "PUB|SUB", Bills = "SUB"}
groups = {clerks = "SUB"}

[accounts.reader-key]
secret_key = "a secret of some length"
default_topic_perm = "PUB|SUB"
default_group_perm = "SUB"
groups = {denied = "DENY"}
"""


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNTS)
    return Access(AccountStore(OsDisk(), str(path)))


def caller(
    key: str = "clerk-key",
    signed: str = RIGHT,
    headers: str = "x-mq-date-time",
    date_time: str = TIME,
) -> Caller:
    text = f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders={headers}, Signature={signed}"
    return Caller(
        "c", peer="ipv4:10.0.0.1:4711", authorization=text if key else "", date_time=date_time
    )


def send(topic: str) -> pb.SendMessageRequest:
    return pb.SendMessageRequest(messages=[pb.Message(topic=pb.Resource(name=topic))])


def refusal(access: Access, request: Any, asked: Caller, name: str = "SendMessage") -> int | None:
    try:
        access.admit(name, request, asked)
    except RefusedError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "key", ["clerk-key", "clerk-key/eu/RocketMQ", "clerk-key eu", "clerk-key/"]
)
def test_key_ends_where_the_region_begins(key: str) -> None:
    found = caller(key).signed
    assert found is not None
    assert (found["key"], found["signed"], found["signature"]) == (
        "clerk-key",
        "x-mq-date-time",
        RIGHT,
    )


@pytest.mark.parametrize(
    "text",
    [
        "Credential=" + "a" * 200_000,
        "Credential=a/" + "b/" * 100_000,
        "Credential=a," + " " * 200_000,
    ],
)
def test_long_header_is_read_once(text: str) -> None:
    """Every call has one, with an account or without: two ways to read it would take minutes."""
    asked = Caller("c", authorization=f"MQv2-HMAC-SHA1 {text}")
    assert (asked.signed, asked.name) == (None, "c")


def test_signature_is_that_of_the_protocol() -> None:
    # What Apache's Python client makes of the two.
    assert signature("secret", "20261124T150000Z") == "c309069cf5589dc42e8bce2f3c5e2401b3736f27"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (caller(), None),
        (caller(signed=RIGHT.upper()), None),
        (caller("clerk-key/region/RocketMQ"), None),
        (caller(headers="x-mq-date-time;host"), None),
        (caller(signed="00" * 20), pb.UNAUTHORIZED),
        (caller("other-key"), pb.UNAUTHORIZED),
        (caller(date_time="20261124T150001Z"), pb.UNAUTHORIZED),
        (caller(headers="host"), pb.UNAUTHORIZED),
        (caller(""), pb.UNAUTHORIZED),
    ],
    ids=map(str, range(9)),
)
def test_call_is_signed_or_refused(access: Access, asked: Caller, code: int | None) -> None:
    assert refusal(access, send("Orders"), asked) == code


@pytest.mark.parametrize(
    ("name", "request_", "code"),
    [
        ("SendMessage", send("Orders"), None),
        ("SendMessage", send("Bills"), pb.FORBIDDEN),
        ("AckMessage", pb.AckMessageRequest(topic=ORDERS, group=CLERKS), None),
        (
            "AckMessage",
            pb.AckMessageRequest(topic=ORDERS, group=pb.Resource(name="others")),
            pb.FORBIDDEN,
        ),
        (
            "QueryOffset",
            pb.QueryOffsetRequest(message_queue=pb.MessageQueue(topic=pb.Resource(name="Else"))),
            pb.FORBIDDEN,
        ),
        ("QueryRoute", pb.QueryRouteRequest(topic=pb.Resource(name="Else")), None),
        ("Heartbeat", pb.HeartbeatRequest(group=pb.Resource(name="others")), pb.FORBIDDEN),
        ("Heartbeat", pb.HeartbeatRequest(), None),
    ],
    ids=map(str, range(8)),
)
def test_call_has_its_right_or_is_refused(
    access: Access, name: str, request_: Any, code: int | None
) -> None:
    assert refusal(access, request_, caller(), name) == code


@pytest.mark.parametrize("topic", sorted({*CLOSED_TOPICS, TRACE_TOPIC, "rmq_sys_x", "%DLQ%denied"}))
def test_no_default_grants_a_topic_of_the_broker(access: Access, topic: str) -> None:
    named = pb.Resource(name=topic)
    queue = pb.MessageQueue(topic=named, id=0, broker=pb.Broker(name="broker-a"))
    calls: dict[str, Any] = {
        "SendMessage": send(topic),
        "PullMessage": pb.PullMessageRequest(message_queue=queue, group=CLERKS),
        "ReceiveMessage": pb.ReceiveMessageRequest(message_queue=queue, group=CLERKS),
        "AckMessage": pb.AckMessageRequest(topic=named, group=CLERKS),
        "QueryOffset": pb.QueryOffsetRequest(message_queue=queue),
    }
    for name, request_ in calls.items():
        assert refusal(access, request_, caller("reader-key"), name) == pb.FORBIDDEN
    assert refusal(access, send("Any"), caller("reader-key")) is None


def test_every_call_states_its_rights() -> None:
    methods = pb.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name
    assert set(RIGHTS) == set(methods)


def test_settings_name_topics_and_group() -> None:
    publishing = pb.Settings(publishing=pb.Publishing(topics=[ORDERS]))
    subscription = pb.Settings(subscription=pb.Subscription(group=CLERKS))
    found = [
        list(RIGHTS["Telemetry"](pb.TelemetryCommand(settings=settings)))
        for settings in (publishing, subscription, pb.Settings())
    ]
    names = [[right.name for right in rights] for rights in found]
    assert names == [["Orders"], ["clerks"], []]
    assert all(isinstance(right, Right) for rights in found for right in rights)


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "10.0.0.1"), ("ipv6:%5B::1%5D:4711", "::1"), ("unix:", "")],
)
def test_host_is_that_of_the_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_access_control_needs_accounts() -> None:
    with pytest.raises(ConfigError, match="acl_file"):
        ProxyConfig.load(options={"server.acl_enable": True})
