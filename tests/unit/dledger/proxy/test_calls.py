"""What calls of the gRPC protocol ask for: ids, queues, times, routes, settings."""

import pytest
from google.protobuf.duration_pb2 import Duration
from trio.testing import MockClock

from dledger.client.core.errors import SubscriptionIllegalError
from dledger.client.core.route import MessageQueue, TopicRoute
from dledger.commitlog.errors import ConfigError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import ANSWER_MARGIN_S, TIMEOUT_S, TIMEOUT_S_MIN, Caller
from dledger.proxy.command import ProxyConfig, address_of
from dledger.proxy.messages import duration
from dledger.proxy.receives import (
    INVISIBLE_MS,
    REFUSED_MS,
    batch_size_of,
    invisible_ms_of,
    kept_ms_of,
    receipt_of,
    wanted_by,
)
from dledger.proxy.routes import accepted_types, endpoints, wire_assignments, wire_queues
from dledger.proxy.sends import TransactionId, queue_of_group
from dledger.proxy.settings import (
    DELAY_MS_MAX,
    RETRY_DELAYS_MS,
    for_consumer,
    for_producer,
    retry_policy,
)
from dledger.proxy.status import RefusedError
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.bodies import GroupRetryPolicy, SubscriptionGroupConfig

QUEUES = tuple(MessageQueue("Orders", "broker-a", number) for number in range(4))
TOPIC = pb.Resource(name="Orders")
PROXIES = endpoints([("127.0.0.1", 8081)])
ALL = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)


def test_transaction_id_names_the_place() -> None:
    place = TransactionId("broker-a", 5, 1 << 40)
    assert TransactionId.decode(place.encode()) == place


ODD_IDS = ("0x5-6-a", " 5-6-a", "1_0-6-a", "\u0665-6-a", "+5-6-a", "5-6_0-a", f"{1 << 63:x}-6-a")


@pytest.mark.parametrize("text", ["", "5", "5-6", "5-6-", "x-6-broker-a", "5--broker-a", *ODD_IDS])
def test_no_transaction_id_is_refused(text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        TransactionId.decode(text)
    assert caught.value.code == pb.INVALID_TRANSACTION_ID


def test_message_group_has_one_queue() -> None:
    found = {queue_of_group(QUEUES, f"group {number}") for number in range(100)}
    assert found == set(QUEUES)
    assert queue_of_group(QUEUES, "a") == queue_of_group(list(QUEUES), "a")


def test_invisible_time_is_what_is_asked() -> None:
    asked = pb.ReceiveMessageRequest(invisible_duration=duration(15_500))
    assert invisible_ms_of(asked) == 15_500
    asked.auto_renew = True
    assert invisible_ms_of(asked) == INVISIBLE_MS
    assert invisible_ms_of(pb.ReceiveMessageRequest()) == INVISIBLE_MS


@pytest.mark.parametrize("length_ms", [0, 12 * 3_600_000 + 1])
def test_invisible_time_out_of_bounds_is_refused(length_ms: int) -> None:
    with pytest.raises(RefusedError) as caught:
        invisible_ms_of(pb.ReceiveMessageRequest(invisible_duration=duration(length_ms)))
    assert caught.value.code == pb.ILLEGAL_INVISIBLE_TIME


def test_no_receipt_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        receipt_of("a b c")
    assert caught.value.code == pb.INVALID_RECEIPT_HANDLE


def test_filter_is_by_tag_or_sql() -> None:
    assert wanted_by(pb.FilterExpression()).text == "*"
    assert wanted_by(pb.FilterExpression(type=pb.TAG, expression="a||b")).tags == {"a", "b"}
    assert wanted_by(pb.FilterExpression(type=pb.SQL, expression="a = 1")).is_sql
    with pytest.raises(SubscriptionIllegalError):
        wanted_by(pb.FilterExpression(type=pb.SQL))
    with pytest.raises(RefusedError) as caught:
        wanted_by(pb.FilterExpression(type=9, expression="a"))  # type: ignore[arg-type]
    assert caught.value.code == pb.BAD_REQUEST


def test_negative_batch_size_is_refused() -> None:
    assert [batch_size_of(asked, 32, 64) for asked in (0, 5, 100)] == [32, 5, 64]
    with pytest.raises(RefusedError) as caught:
        batch_size_of(-1, 32, 64)
    assert caught.value.code == pb.BAD_REQUEST


@pytest.mark.parametrize("length_ms", [-1, 12 * 3_600_000 + 1])
def test_changed_time_out_of_bounds_is_refused(length_ms: int) -> None:
    assert kept_ms_of(duration(0)) == REFUSED_MS
    with pytest.raises(RefusedError) as caught:
        kept_ms_of(Duration(seconds=length_ms // 1000, nanos=length_ms % 1000 * 1_000_000))
    assert caught.value.code == pb.ILLEGAL_INVISIBLE_TIME


@pytest.mark.parametrize(
    ("left_s", "expected_s"),
    [
        (None, TIMEOUT_S),
        (3.0, 3.0 - ANSWER_MARGIN_S),
        (60.0, TIMEOUT_S),
        (0.04, 0.03),
        (0.0, TIMEOUT_S_MIN),
    ],
)
def test_brokers_have_what_the_caller_leaves(left_s: float | None, expected_s: float) -> None:
    assert Caller("a", time_left_s=left_s).timeout_s() == pytest.approx(expected_s)


async def test_later_steps_have_what_is_left(mock_clock: MockClock) -> None:
    clock = TrioClock()
    caller = Caller("a", time_left_s=3.0).begun(clock)
    assert caller.timeout_s() == pytest.approx(3.0 - ANSWER_MARGIN_S)
    mock_clock.jump(2.5)
    assert caller.timeout_s() == pytest.approx(0.5 - ANSWER_MARGIN_S)
    mock_clock.jump(1.0)
    assert caller.timeout_s() == TIMEOUT_S_MIN
    assert Caller("a").begun(clock).timeout_s() == TIMEOUT_S


@pytest.mark.parametrize(
    ("attribute", "types"),
    [("NORMAL", (pb.NORMAL,)), ("FIFO", (pb.FIFO,)), ("MIXED", ALL), ("?", ALL)],
)
def test_topic_takes_what_it_states(attribute: str, types: tuple[pb.MessageType, ...]) -> None:
    assert accepted_types({"message.type": attribute}) == types
    assert accepted_types({}) == ALL


@pytest.mark.parametrize(
    ("host", "scheme"), [("127.0.0.1", pb.IPv4), ("::1", pb.IPv6), ("mq.example", pb.DOMAIN_NAME)]
)
def test_endpoints_have_the_scheme_of_their_hosts(host: str, scheme: pb.AddressScheme) -> None:
    assert endpoints([(host, 1)]).scheme == scheme


def test_queues_stay_writable_during_an_election() -> None:
    led = TopicRoute("Orders", QUEUES, QUEUES, {"broker-a": {0: "a:1", 1: "b:1"}})
    electing = TopicRoute("Orders", (), QUEUES, {"broker-a": {1: "b:1"}})
    read_only = TopicRoute("Orders", (), QUEUES, {"broker-a": {0: "a:1"}})
    for route, permission in ((led, 4), (electing, 4), (read_only, 2)):
        queues = wire_queues(route, TOPIC, PROXIES, ALL)
        assert [queue.id for queue in queues] == [0, 1, 2, 3]
        assert {queue.permission for queue in queues} == {permission}
        assert queues[0].broker.endpoints == PROXIES
        assert tuple(queues[0].accept_message_types) == ALL


def test_consumer_is_assigned_each_broker_group_once() -> None:
    other = tuple(MessageQueue("Orders", "broker-b", number) for number in range(2))
    route = TopicRoute("Orders", (), (*QUEUES, *other), {"broker-a": {}, "broker-b": {}})
    queues = [each.message_queue for each in wire_assignments(route, TOPIC, PROXIES, ALL)]
    assert [(queue.broker.name, queue.id) for queue in queues] == [
        ("broker-a", -1),
        ("broker-b", -1),
    ]


def test_producer_gets_limits_and_pauses() -> None:
    asked = pb.Settings(publishing=pb.Publishing(topics=[TOPIC], max_body_size=1 << 30))
    settings = for_producer(asked)
    assert list(settings.publishing.topics) == [TOPIC]
    assert settings.publishing.max_body_size == 4 << 20
    assert settings.publishing.validate_message_type
    assert settings.backoff_policy.max_attempts == 3
    assert settings.HasField("metric")


def test_consumer_gets_the_policy_of_its_group() -> None:
    asked = pb.Settings(subscription=pb.Subscription(long_polling_timeout=duration(7_000)))
    plain = for_consumer(asked, SubscriptionGroupConfig("g", retry_max_times=3))
    assert plain.backoff_policy.max_attempts == 4
    delays = plain.backoff_policy.customized_backoff.next
    assert [delay.seconds * 1000 for delay in delays] == list(RETRY_DELAYS_MS)
    assert plain.subscription.long_polling_timeout == duration(7_000)
    assert not plain.subscription.fifo
    own = GroupRetryPolicy(customized_retry_policy={"next": [1_500, 2_000]})
    config = SubscriptionGroupConfig("g", consume_message_orderly=True, group_retry_policy=own)
    ordered = for_consumer(pb.Settings(subscription=pb.Subscription()), config)
    assert list(ordered.backoff_policy.customized_backoff.next) == [duration(1500), duration(2000)]
    assert ordered.subscription.fifo
    growing = GroupRetryPolicy(type="EXPONENTIAL", exponential_retry_policy={"initial": 100})
    config = SubscriptionGroupConfig("g", group_retry_policy=growing)
    backoff = for_consumer(asked, config).backoff_policy.exponential_backoff
    assert (backoff.initial, backoff.multiplier) == (duration(100), 2)


def test_policy_beyond_the_protocol_is_bounded() -> None:
    """Brokers keep a group as it was written: its consumers must start all the same."""
    for_ever = SubscriptionGroupConfig("g", retry_max_times=2**31 - 1)
    assert retry_policy(for_ever).max_attempts == 2**31 - 1
    far = GroupRetryPolicy(customized_retry_policy={"next": [1_000, 10**30]})
    delays = retry_policy(SubscriptionGroupConfig("g", group_retry_policy=far)).customized_backoff
    assert list(delays.next) == [duration(1_000), duration(DELAY_MS_MAX)]
    for bad in ([-5], [0], [True], ["1"], [1.5], [], 7):
        policy = GroupRetryPolicy(customized_retry_policy={"next": bad})
        found = retry_policy(SubscriptionGroupConfig("g", group_retry_policy=policy))
        assert [each.seconds * 1000 for each in found.customized_backoff.next] == list(
            RETRY_DELAYS_MS
        )
    grows = {"initial": -1, "max": 10**30, "multiplier": "x"}
    policy = GroupRetryPolicy(type="EXPONENTIAL", exponential_retry_policy=grows)
    backoff = retry_policy(
        SubscriptionGroupConfig("g", group_retry_policy=policy)
    ).exponential_backoff
    assert (backoff.initial, backoff.max) == (duration(5_000), duration(DELAY_MS_MAX))
    assert backoff.multiplier == 2


@pytest.mark.parametrize("text", ["", "8081", ":8081", "host:", "host:99999", "host:x"])
def test_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        address_of(text)


def test_settings_that_contradict_are_refused() -> None:
    assert ProxyConfig.load(options={"server.listen": "[::1]:0"}).server.listen == "[::1]:0"
    assert address_of("[::1]:0") == ("::1", 0)
    with pytest.raises(ConfigError, match="tls_key_file"):
        ProxyConfig.load(options={"server.tls_cert_file": "chain.pem"})
