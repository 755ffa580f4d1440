"""What a consumer subscribes to, and which queues of that are its own."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.client.consumer.rebalance import (
    AllocateMessageQueueStrategy,
    Averagely,
    AveragelyByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    HashRing,
    NearbyMachineRoom,
    known_members,
    queue_text,
    ring_hash,
    room_of,
)
from dledger.client.consumer.subscriptions import SubscriptionExpression, Subscriptions
from dledger.client.core.errors import SubscriptionIllegalError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.java_hash import tags_code
from dledger.commitlog.record import encode_record
from dledger.testing.doubles import EPOCH_MS, ManualClock


@pytest.mark.parametrize(
    ("answers", "members"),
    [
        ([["a", "b"]], ["a", "b"]),
        ([["b", "a"], ["a", "b"], []], ["a", "b"]),  # one broker has just started
        ([["a"], ["a"], ["a", "b"]], ["a"]),  # one has not noticed the end of b
        ([["a", "b"], ["a"]], ["a", "b"]),  # of two, none is known to be right
        ([["a"], [], []], []),
        ([["a", "a"], [], []], []),
        ([[]], []),
    ],
)
def test_members(answers: list[list[str]], members: list[str]) -> None:
    assert known_members(answers) == members


ROOMS = ("r1", "r2", "r3")


def queues_of(count: int, broker: str = "b", topic: str = "T") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, number) for number in range(count)]


def room_of_queue(queue: MessageQueue) -> str:
    return queue.broker_name.split("@")[0]


def room_of_client(client: str) -> str:
    return client.split("-")[0]


def ids(
    strategy: AllocateMessageQueueStrategy, client: str, count: int, clients: Sequence[str]
) -> list[int]:
    return [q.queue_id for q in strategy.allocate("g", client, queues_of(count), clients)]


STRATEGIES: tuple[AllocateMessageQueueStrategy, ...] = (
    Averagely(),
    AveragelyByCircle(),
    ByMachineRoom(rooms=ROOMS),
    ConsistentHash(),
    NearbyMachineRoom(Averagely(), room_of_queue, room_of_client),
    NearbyMachineRoom(AveragelyByCircle(), room_of_queue, room_of_client),
    NearbyMachineRoom(ConsistentHash(), room_of_queue, room_of_client),
)

queues = st.lists(
    st.builds(
        MessageQueue,
        st.just("T"),
        st.sampled_from([f"{room}@{name}" for room in ROOMS for name in "ab"]),
        st.integers(0, 15),
    ),
    unique=True,
    max_size=40,
).map(sorted)
clients = st.lists(
    st.builds(lambda room, n: f"{room}-{n}", st.sampled_from((*ROOMS, "far")), st.integers(0, 99)),
    unique=True,
    min_size=1,
    max_size=12,
).map(sorted)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@given(queues=queues, clients=clients)
def test_strategies_deal_disjoint_and_complete_parts(
    strategy: AllocateMessageQueueStrategy, queues: list[MessageQueue], clients: list[str]
) -> None:
    parts = [strategy.allocate("g", client, queues, clients) for client in clients]
    dealt = [queue for part in parts for queue in part]
    assert sorted(dealt) == queues
    assert strategy.allocate("g", "nobody", queues, clients) == []


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=lambda s: s.name)
@given(queues=queues, clients=clients)
def test_parts_differ_by_one_queue_at_most(
    strategy: AllocateMessageQueueStrategy, queues: list[MessageQueue], clients: list[str]
) -> None:
    sizes = [len(strategy.allocate("g", client, queues, clients)) for client in clients]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(queues=queues, clients=clients, gone=st.integers(0, 11))
def test_hash_ring_moves_only_queues_of_the_leaving_client(
    queues: list[MessageQueue], clients: list[str], gone: int
) -> None:
    strategy = ConsistentHash()
    leaver = clients[gone % len(clients)]
    stay = [client for client in clients if client != leaver]
    for client in stay:
        before = set(strategy.allocate("g", client, queues, clients))
        assert before <= set(strategy.allocate("g", client, queues, stay))


@given(queues=queues, clients=clients)
def test_nearby_keeps_queues_of_a_location_in_it(
    queues: list[MessageQueue], clients: list[str]
) -> None:
    strategy = NearbyMachineRoom(Averagely(), room_of_queue, room_of_client)
    inhabited = {room_of_client(client) for client in clients}
    for client in clients:
        for queue in strategy.allocate("g", client, queues, clients):
            room = room_of_queue(queue)
            assert room == room_of_client(client) or room not in inhabited


def test_blocks_begin_where_the_ones_before_end() -> None:
    parts = [ids(Averagely(), client, 8, ["c0", "c1", "c2"]) for client in ("c0", "c1", "c2")]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert ids(Averagely(), "c1", 2, ["c0", "c1", "c2"]) == [1]
    assert ids(Averagely(), "c2", 2, ["c0", "c1", "c2"]) == []


def test_a_circle_deals_like_cards() -> None:
    parts = [
        ids(AveragelyByCircle(), client, 8, ["c0", "c1", "c2"]) for client in ("c0", "c1", "c2")
    ]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_by_location_deals_the_rest_from_the_end() -> None:
    near = queues_of(8, "r1@b")
    strategy = ByMachineRoom(rooms={"r1"})
    everything = sorted([*near, *queues_of(4, "r2@b"), *queues_of(4, "plain")])
    parts = [strategy.allocate("g", c, everything, ["c0", "c1", "c2"]) for c in ("c0", "c1", "c2")]
    assert [[q.queue_id for q in part] for part in parts] == [[0, 1, 6], [2, 3, 7], [4, 5]]
    assert {q.broker_name for part in parts for q in part} == {"r1@b"}


@pytest.mark.parametrize(
    ("broker", "room"), [("r1@b", "r1"), ("b", None), ("a@b@c", None), ("r1@", None)]
)
def test_location_stands_before_the_only_separator(broker: str, room: str | None) -> None:
    assert room_of(broker) == room


def test_config_strategy_gives_its_queues_that_exist() -> None:
    own = [MessageQueue("T", "b", 2), MessageQueue("T", "b", 9), MessageQueue("U", "b", 0)]
    strategy = ByConfig(own)
    assert strategy.allocate("g", "no client listed", queues_of(4), ["c"]) == [own[0]]


def test_nearby_shares_a_location_without_consumers() -> None:
    strategy = NearbyMachineRoom(Averagely(), room_of_queue, room_of_client)
    everything = sorted([*queues_of(2, "r1@b"), *queues_of(4, "r2@b")])
    parts = [strategy.allocate("g", c, everything, ["r1-0", "r3-0"]) for c in ("r1-0", "r3-0")]
    assert [[(room_of_queue(q), q.queue_id) for q in part] for part in parts] == [
        [("r1", 0), ("r1", 1), ("r2", 0), ("r2", 1)],
        [("r2", 2), ("r2", 3)],
    ]


def test_the_ring_is_that_of_the_java_client() -> None:
    """Places computed with md5sum: a-0 … b-9, and the three queues as Java prints them."""
    assert (
        queue_text(MessageQueue("T", "b", 0)) == "MessageQueue [topic=T, brokerName=b, queueId=0]"
    )
    assert [ring_hash(queue_text(q)) for q in queues_of(3)] == [0x218A9C35, 0xE2AE4B25, 0x75FF8207]
    assert ring_hash("b-0") in {
        0x107DF04E, 0x2D553264, 0x34F25F6F, 0x3F8CB6FF, 0x55739E90,
        0xA67E0915, 0xB1D10DB2, 0xE570C68B, 0xF474CE9D,
    }  # fmt: skip
    # 218a… is followed by 2d55… (b), e2ae… by e570… (b), 75ff… by 85b3… (a).
    assert ids(ConsistentHash(), "a", 3, ["a", "b"]) == [2]
    assert ids(ConsistentHash(), "b", 3, ["a", "b"]) == [0, 1]


def test_the_ring_is_closed_and_a_place_belongs_to_itself() -> None:
    ring = HashRing(["a"], 1)
    assert ring.node_of("a-0") == "a"
    assert ring.node_of("anything") == "a"
    assert HashRing([]).node_of("x") is None


def test_strategies_are_named_as_in_rocketmq() -> None:
    assert [s.name for s in STRATEGIES] == [
        *("AVG", "AVG_BY_CIRCLE", "MACHINE_ROOM", "CONSISTENT_HASH", "MACHINE_ROOM_NEARBY-AVG"),
        *("MACHINE_ROOM_NEARBY-AVG_BY_CIRCLE", "MACHINE_ROOM_NEARBY-CONSISTENT_HASH"),
    ]
    assert ByConfig().name == "CONFIG"


def test_every_change_is_newer_also_when_the_clock_goes_back() -> None:
    clock = ManualClock()
    subscriptions = Subscriptions(clock)
    subscriptions.put("T", "a || b")
    clock.skew_ms = -500
    subscriptions.put("U", SubscriptionExpression.by_sql("x > 1"))
    first, second = subscriptions.data()
    assert (first.topic, first.tags_set, first.sub_version) == ("T", ["a", "b"], EPOCH_MS)
    assert (second.expression_type, second.sub_version) == ("SQL92", EPOCH_MS + 1)
    subscriptions.put("T")
    (changed, _) = subscriptions.data()
    assert (changed.sub_string, changed.sub_version) == ("*", EPOCH_MS + 2)


def test_what_is_removed_is_not_wanted() -> None:
    subscriptions = Subscriptions(ManualClock())
    subscriptions.put("T")
    assert (list(subscriptions), len(subscriptions)) == (["T"], 1)
    assert subscriptions.get("T") == SubscriptionExpression()
    assert subscriptions.remove("T")
    assert not subscriptions.remove("T")
    assert subscriptions.get("T") is None


def message(tag: str) -> MessageExt:
    properties = f"TAGS\x01{tag}\x02".encode() if tag else b""
    return MessageExt(
        memoryview(encode_record(topic="T", queue_id=0, body=b"x", properties=properties)), 0
    )


@pytest.mark.parametrize("text", ["", "*"])
def test_everything_is_the_default(text: str) -> None:
    assert SubscriptionExpression.by_tag(text) == SubscriptionExpression()
    data = SubscriptionExpression.by_tag(text).subscription_data("T")
    assert (data.sub_string, data.tags_set, data.code_set) == ("*", [], [])
    assert data.expression_type == "TAG"
    assert SubscriptionExpression().admits(message("A"))
    assert SubscriptionExpression().admits(message(""))


def test_tags_are_cut_at_the_bars() -> None:
    wanted = SubscriptionExpression.by_tag(" A||  B b || ")
    assert wanted.tags == {"A", "B b"}
    data = wanted.subscription_data("T", 7)
    assert data.topic == "T"
    assert data.sub_string == "A || B b"
    assert data.tags_set == ["A", "B b"]
    assert data.code_set == [tags_code("A"), tags_code("B b")]
    assert (data.sub_version, data.expression_type, data.class_filter_mode) == (7, "TAG", False)


def test_bars_without_a_tag_are_refused() -> None:
    with pytest.raises(SubscriptionIllegalError, match="no tag"):
        SubscriptionExpression.by_tag(" || ")


def test_the_tag_counts_and_not_its_hash() -> None:
    assert tags_code("Aa") == tags_code("BB")
    wanted = SubscriptionExpression.by_tag("Aa")
    assert [wanted.admits(message(tag)) for tag in ("Aa", "BB", "")] == [True, False, False]


def test_an_sql_expression_is_for_the_broker_to_judge() -> None:
    wanted = SubscriptionExpression.by_sql("a > 5")
    assert wanted.is_sql
    assert not SubscriptionExpression.by_tag("a").is_sql
    assert wanted.admits(message("")), "the broker's word is final"
    data = wanted.subscription_data("T", 3)
    assert (data.sub_string, data.expression_type, data.sub_version) == ("a > 5", "SQL92", 3)
    assert (data.tags_set, data.code_set) == ([], [])


def test_a_blank_sql_expression_is_refused() -> None:
    with pytest.raises(SubscriptionIllegalError, match="blank"):
        SubscriptionExpression.by_sql(" \n")
