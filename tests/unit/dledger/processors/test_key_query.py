"""Messages by key: what is found, in which order, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from commitlog.entry import Run
from commitlog.java_hash import index_key_hash
from commitlog.properties import encode_properties
from commitlog.record import encode_record, iter_records
from dledger.processors import queries
from dledger.state.state_record import TopicsChange, state_batch
from dledger.testing.clocks import EPOCH_MS, ManualClock
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import batch_of

NEVER = (1 << 63) - 1


async def query(broker: Broker, key: str = "k", **changes: Any) -> RemotingCommand:
    ext = {
        "topic": "T",
        "key": key,
        "maxNum": "32",
        "beginTimestamp": "0",
        "endTimestamp": str(NEVER),
        **{name: str(value) for name, value in changes.items()},
    }
    answer = await broker.handle(request(RequestCode.QUERY_MESSAGE, ext))
    assert isinstance(answer, RemotingCommand)
    return answer


def bodies(answer: RemotingCommand) -> list[bytes]:
    assert answer.code == 0, answer.remark
    return [bytes(record.body) for record in iter_records(bytes(answer.body))]


def put(broker: Broker, body: bytes, keys: str = "", uniq: str = "", topic: str = "T") -> None:
    properties = encode_properties({"UNIQ_KEY": uniq, "KEYS": keys})
    broker.group.put(topic, 0, body, properties=properties)


def clock_of(broker: Broker) -> ManualClock:
    assert isinstance(broker.clock, ManualClock)
    return broker.clock


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    broker.make_topic("U", 4)
    for i in range(5):
        put(broker, b"m%d" % i, keys="k other" if i % 2 else "other k", uniq=f"id{i}")
        clock_of(broker).now_s += 10
    put(broker, b"else", keys="kk", uniq="k5")
    put(broker, b"other topic", keys="k", topic="U")
    return broker


async def test_all_with_the_key_come_in_the_order_of_the_log(filled: Broker) -> None:
    answer = await query(filled)
    assert bodies(answer) == [b"m0", b"m1", b"m2", b"m3", b"m4"]
    index = filled.group.key_index
    assert answer.ext == {
        "indexLastUpdateTimestamp": str(index.last_timestamp_ms),
        "indexLastUpdatePhyoffset": str(index.end_phy_offset),
    }


async def test_the_newest_are_kept_when_there_are_more(filled: Broker) -> None:
    assert bodies(await query(filled, maxNum=2)) == [b"m3", b"m4"]


async def test_nothing_found_is_told(filled: Broker) -> None:
    for answer in (
        await query(filled, "x"),
        await query(filled, topic="V"),
        await query(filled, maxNum=0),
        await query(filled, maxNum=-1),
        await query(filled, beginTimestamp=5, endTimestamp=4),
    ):
        assert (answer.code, answer.ext["outcome"]) == (22, "not_stored")


async def test_the_time_counts_to_the_millisecond(filled: Broker) -> None:
    second = EPOCH_MS + 10_000
    assert bodies(await query(filled, beginTimestamp=second, endTimestamp=second)) == [b"m1"]
    assert (await query(filled, beginTimestamp=second + 1, endTimestamp=second + 999)).code == 22
    clock_of(filled).skew_ms = 700
    put(filled, b"later", keys="k")
    stored = EPOCH_MS + 50_700
    assert bodies(await query(filled, beginTimestamp=stored, endTimestamp=stored)) == [b"later"]
    assert (await query(filled, beginTimestamp=stored + 1)).code == 22


async def test_a_message_is_found_by_its_id(filled: Broker) -> None:
    assert bodies(await query(filled, "id3")) == [b"m3"]
    unique = {"_UNIQUE_KEY_QUERY": "true"}
    assert bodies(await query(filled, "id3", maxNum=0, **unique)) == [b"m3"]
    assert (await query(filled, "k", **unique)).code == 22, "a key of the user's is no id"


@pytest.mark.parametrize(
    ("guessed_ms", "more"),
    [
        # mqadmin 4.9: the time in the id, one second before; the sender's clock was ahead, or the
        # tool stands in another time zone, or the message is of last month.
        (EPOCH_MS + 31_000 + 5_000 - 1_000, {}),
        (EPOCH_MS + 31_000 + 5 * 3_600_000, {}),
        (EPOCH_MS + 31_000 + 31 * 24 * 3_600_000, {}),
        # mqadmin 5: three days back, and it names the kind of index it means.
        (EPOCH_MS + 31_000 + 24 * 3_600_000, {"indexType": "U"}),
        (0, {"indexType": "U"}),
    ],
)
async def test_mqadmin_finds_an_id_whatever_time_it_guesses(
    filled: Broker, guessed_ms: int, more: dict[str, str]
) -> None:
    answer = await query(
        filled, "id3", beginTimestamp=guessed_ms, **{"_UNIQUE_KEY_QUERY": "true", **more}
    )
    assert bodies(answer) == [b"m3"]


async def test_of_repeated_sends_the_time_asked_for_chooses(filled: Broker) -> None:
    put(filled, b"m3 again", uniq="id3")
    unique = {"_UNIQUE_KEY_QUERY": "true"}
    assert bodies(await query(filled, "id3", **unique)) == [b"m3", b"m3 again"]
    later = await query(filled, "id3", beginTimestamp=EPOCH_MS + 40_000, **unique)
    assert bodies(later) == [b"m3 again"]
    early = await query(filled, "id3", endTimestamp=EPOCH_MS + 40_000, **unique)
    assert bodies(early) == [b"m3"]


async def test_another_key_of_the_same_hash_is_left_out(filled: Broker) -> None:
    assert index_key_hash("T", "Aa") == index_key_hash("T", "BB")
    for i in range(3):
        put(filled, b"a%d" % i, keys="Aa")
        put(filled, b"b%d" % i, keys="BB")
    assert bodies(await query(filled, "Aa", maxNum=2)) == [b"a1", b"a2"]
    assert bodies(await query(filled, "BB")) == [b"b0", b"b1", b"b2"]


async def test_many_of_another_key_hide_none(filled: Broker) -> None:
    put(filled, b"the one", keys="Aa")
    for _ in range(150):
        put(filled, b"b", keys="BB")
    assert bodies(await query(filled, "Aa")) == [b"the one"]


async def test_a_search_that_finds_no_end_says_so(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_RECORDS", 64)
    put(filled, b"the one", keys="Aa")
    for _ in range(150):
        put(filled, b"b", keys="BB")
    answer = await query(filled, "Aa")
    assert answer.code == 1
    assert "end the time range earlier" in (answer.remark or "")
    put(filled, b"the newest", keys="Aa")
    assert bodies(await query(filled, "Aa")) == [b"the newest"]


async def test_a_long_chain_lets_others_work(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "ENTRIES_AT_A_TIME", 2)
    for i in range(100):
        put(filled, b"x", keys=f"key{i}")
    assert len(bodies(await query(filled))) == 5


async def test_what_is_not_committed_is_not_found(filled: Broker) -> None:
    group = filled.group
    record = encode_record(topic="T", queue_id=0, body=b"x", properties=b"KEYS\x01new\x02")
    group.propose(batch_of([record], Run("T", 0, 1)), lambda _: None)
    group.append()
    assert (await query(filled, "new")).code == 22
    group.apply()
    assert bodies(await query(filled, "new")) == [b"x"]


async def test_messages_of_a_topic_that_was_deleted_are_gone(filled: Broker) -> None:
    filled.group.propose(state_batch(TopicsChange(delete=("T",))), lambda _: None)
    filled.group.settle()
    assert (await query(filled)).code == 22
    filled.make_topic("T", 4)
    put(filled, b"new", keys="k")
    assert bodies(await query(filled)) == [b"new"], "the old ones have offsets of the new queue"


async def test_messages_that_are_not_kept_any_more_are_gone(filled: Broker) -> None:
    filled.group.state.queues["T", 0].min_offset = 3
    assert bodies(await query(filled)) == [b"m3", b"m4"]


async def test_an_answer_is_limited_but_one_message_always_comes(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_ANSWER_BYTES", 1)
    assert bodies(await query(filled)) == [b"m4"]


async def test_a_damaged_message_is_reported_and_the_query_refused_for_now(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = filled.group.log.read

    def bad_read(position: int, size: int) -> memoryview:
        return memoryview(bytes(read(position, size)).replace(b"m2", b"m!"))

    monkeypatch.setattr(filled.group.log, "read", bad_read)
    answer = await query(filled)
    assert (answer.code, answer.ext["retriable"]) == (14, "true")
    place = int(filled.group.queues.queue("T", 0).read(2, 1)["phy_offset"][0])
    assert [at for at, _ in filled.group.damage_reports] == [place]


async def test_the_leader_answers_behind_the_read_barrier(filled: Broker) -> None:
    filled.group.barriers_pass = False
    answers: list[RemotingCommand] = []

    async def ask() -> None:
        answers.append(await query(filled))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        filled.group.pass_barriers()
    assert len(bodies(answers[0])) == 5


async def test_a_follower_says_what_it_has_and_never_that_there_is_nothing(
    filled: Broker,
) -> None:
    filled.group.step_down("10.0.0.2:10911")
    assert len(bodies(await query(filled))) == 5
    answer = await query(filled, "x")
    assert (answer.code, answer.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
