"""Receives that share requests: which gets what, and what becomes of those that are cancelled."""

import pytest
import trio

from dledger.client.consumer.pop_calls import ROCKETMQ_MESSAGES_MAX
from dledger.client.consumer.receive_rounds import ALONE_MESSAGES_MIN, ROUND_MESSAGES_MAX
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.errors import ClientClosedError, RequestTimedOutError
from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.codes import RequestCode
from tests.unit.client.consumer.popping import PopBroker

POP, CHANGE = RequestCode.POP_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME


@pytest.fixture
def broker(nursery: trio.Nursery) -> PopBroker:
    return PopBroker(nursery)


@pytest.fixture
def consumer(broker: PopBroker) -> SimpleConsumer:
    return SimpleConsumer(broker.instance, "g", {"T": "*"})


class Calls:
    """Receives under way at the same time, and what each of them got."""

    def __init__(self, consumer: SimpleConsumer, nursery: trio.Nursery) -> None:
        self._consumer = consumer
        self._nursery = nursery
        self.got: dict[str, list[int]] = {}
        self.errors: dict[str, MQError] = {}
        self.scopes: dict[str, trio.CancelScope] = {}
        self.ended_s: dict[str, float] = {}

    def begin(
        self, name: str, count: int = 1, wait_s: float = 15.0, invisible_s: float | None = None
    ) -> None:
        self.scopes[name] = trio.CancelScope()
        self._nursery.start_soon(self._receive, name, count, wait_s, invisible_s)

    async def _receive(
        self, name: str, count: int, wait_s: float, invisible_s: float | None
    ) -> None:
        with self.scopes[name]:
            try:
                messages = await self._consumer.receive(count, invisible_s, wait_s)
            except MQError as error:
                self.errors[name] = error
            else:
                self.got[name] = [message.queue_offset for message in messages]
            self.ended_s[name] = trio.current_time()


@pytest.fixture
def calls(consumer: SimpleConsumer, nursery: trio.Nursery) -> Calls:
    return Calls(consumer, nursery)


def pops(broker: PopBroker) -> list[int]:
    return [count for code, count in broker.seen if code == POP]


async def test_receives_of_one_moment_share_a_request(broker: PopBroker, calls: Calls) -> None:
    broker.send(10)
    for name, count in (("a", 1), ("b", 3), ("c", 2)):
        calls.begin(name, count)
    await trio.sleep(1)
    assert pops(broker) == [6]
    assert sorted(map(len, calls.got.values())) == [1, 2, 3]
    assert sorted(offset for got in calls.got.values() for offset in got) == [0, 1, 2, 3, 4, 5]
    assert {offset for _, offset in broker.out} == {0, 1, 2, 3, 4, 5}, "no more than was asked for"


async def test_lone_receive_leaves_at_once(broker: PopBroker, consumer: SimpleConsumer) -> None:
    broker.send(2)
    before_s = trio.current_time()
    assert [message.queue_offset for message in await consumer.receive(1)] == [0]
    assert trio.current_time() - before_s == pytest.approx(broker.delay_s)
    assert pops(broker) == [1]


async def test_receives_wait_for_the_request_under_way(broker: PopBroker, calls: Calls) -> None:
    broker.send(10)
    calls.begin("first")
    await trio.sleep(broker.delay_s / 2)
    for name in "abc":
        calls.begin(name)
    await trio.sleep(1)
    assert pops(broker) == [1, 3]
    assert calls.got["first"] == [0]
    assert sorted(calls.got[name] for name in "abc") == [[1], [2], [3]]


async def test_full_round_waits_for_none(broker: PopBroker, calls: Calls) -> None:
    broker.send(1000)
    calls.begin("under way")
    await trio.sleep(broker.delay_s / 2)
    began_s = trio.current_time()
    for number in range(2 * ROUND_MESSAGES_MAX):
        calls.begin(f"{number}")
    await trio.sleep(broker.delay_s / 4)
    assert pops(broker) == [1, ROUND_MESSAGES_MAX, ROUND_MESSAGES_MAX]
    calls.begin("many", 100)
    await trio.sleep(1)
    assert pops(broker)[3:] == [100], "one call alone may ask for more"
    assert len(calls.got["many"]) == 100
    assert max(calls.ended_s.values()) - began_s < 2 * broker.delay_s
    got = [offset for offsets in calls.got.values() for offset in offsets]
    assert sorted(got) == list(range(1 + 2 * ROUND_MESSAGES_MAX + 100))


async def test_rocketmq_broker_is_asked_for_what_it_gives(broker: PopBroker, calls: Calls) -> None:
    broker.send(50)
    broker.names_stale = False
    for number in range(40):
        calls.begin(f"{number}")
    await trio.sleep(1)
    assert pops(broker) == [ROCKETMQ_MESSAGES_MAX, 40 - ROCKETMQ_MESSAGES_MAX]
    assert sorted(offset for got in calls.got.values() for offset in got) == list(range(40))


async def test_call_for_many_shares_no_request(broker: PopBroker, calls: Calls) -> None:
    broker.send(100)
    for name, count in (("a", 1), ("b", ALONE_MESSAGES_MIN), ("c", 1)):
        calls.begin(name, count)
    await trio.sleep(1)
    assert sorted(pops(broker)) == [2, ALONE_MESSAGES_MIN]
    assert {name: len(got) for name, got in calls.got.items()} == {"a": 1, "b": 32, "c": 1}


async def test_first_call_gets_the_first_message(broker: PopBroker, calls: Calls) -> None:
    """Those that got nothing wait on, in front of those that came later."""
    for name in "abcd":
        calls.begin(name)
        await trio.sleep(broker.delay_s)
    for number, name in enumerate("abcde"):
        broker.send()
        await trio.sleep(1)
        assert calls.got[name] == [number]
        if name == "a":
            assert pops(broker) == [1, 3], "the others are asked for together"
            calls.begin("e")
            await trio.sleep(broker.delay_s)
    assert set(calls.got) == set("abcde")


async def test_call_that_does_not_wait_asks_by_itself(broker: PopBroker, calls: Calls) -> None:
    calls.begin("waits")
    await trio.sleep(1)
    began_s = trio.current_time()
    calls.begin("does not", wait_s=0)
    await trio.sleep(1)
    assert calls.got == {"does not": []}
    assert calls.ended_s["does not"] - began_s == pytest.approx(broker.delay_s)
    broker.send()
    await trio.sleep(1)
    assert calls.got["waits"] == [0]


async def test_each_call_waits_its_own_time(broker: PopBroker, calls: Calls) -> None:
    began_s = trio.current_time()
    for name, wait_s in (("one", 1.0), ("three", 3.0), ("two", 2.0)):
        calls.begin(name, wait_s=wait_s)
    await trio.sleep(10)
    assert calls.got == {"one": [], "two": [], "three": []}
    for name, wait_s in (("one", 1.0), ("two", 2.0), ("three", 3.0)):
        assert calls.ended_s[name] - began_s == pytest.approx(wait_s, abs=5 * broker.delay_s)
    assert len(pops(broker)) == 3


async def test_calls_of_nearly_one_time_end_together(broker: PopBroker, calls: Calls) -> None:
    for number in range(20):
        calls.begin(f"{number}", wait_s=1 + number / 1000)
    await trio.sleep(5)
    assert list(calls.got.values()) == [[]] * 20
    assert len(pops(broker)) == 1


async def test_other_invisible_times_share_nothing(broker: PopBroker, calls: Calls) -> None:
    broker.send(2)
    calls.begin("short", invisible_s=2)
    calls.begin("long", invisible_s=20)
    await trio.sleep(1)
    assert pops(broker) == [1, 1]
    now_s = trio.current_time()
    assert broker.out[0, calls.got["short"][0]].ends_s < now_s + 2
    assert broker.out[0, calls.got["long"][0]].ends_s > now_s + 10


async def test_new_subscription_waits_for_no_old_request(
    broker: PopBroker, consumer: SimpleConsumer, calls: Calls
) -> None:
    calls.begin("before")
    await trio.sleep(1)
    consumer.subscribe("T", "*")
    calls.begin("after")
    await trio.sleep(1)
    assert pops(broker) == [1, 1]


async def test_message_of_a_cancelled_call_goes_to_the_next(
    broker: PopBroker, calls: Calls
) -> None:
    calls.begin("gone")
    await trio.sleep(1)
    calls.begin("next")
    await trio.sleep(1)
    calls.scopes["gone"].cancel()
    broker.send()
    await trio.sleep(1)
    assert calls.got == {"next": [0]}
    assert broker.handed_out[0] == 1
    assert broker.seen.count((CHANGE, 1)) == 0
    calls.begin("later")
    await trio.sleep(1)
    broker.send()
    await trio.sleep(1)
    assert calls.got == {"next": [0], "later": [1]}, "the one that has ended takes no more"


async def test_message_of_the_last_call_goes_back(broker: PopBroker, calls: Calls) -> None:
    calls.begin("gone")
    await trio.sleep(1)
    calls.scopes["gone"].cancel()
    broker.send()
    await trio.sleep(0.1)
    assert broker.count(CHANGE) == 1
    calls.begin("next")
    await trio.sleep(0.1)
    assert calls.got == {"next": [0]}, "long before the invisible time is over"
    assert broker.handed_out[0] == 2, "an attempt, as it was handed out"


async def test_message_dealt_to_a_cancelled_call_is_not_lost(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    """Cancelled and dealt to in one tick: its task finds the message while it ends."""
    broker.send()
    with trio.CancelScope() as scope:
        line_before = consumer._receives._lines

        async def cancel_at_the_deal() -> None:
            while not any(line.rounds for line in line_before.values()):
                await trio.lowlevel.checkpoint()
            (line,) = line_before.values()
            (under_way,) = line.rounds
            (call,) = under_way.calls
            deal = line.deal

            await trio.sleep(broker.delay_s - 0.000_001)
            scope.cancel()
            assert not deal([call], [])
            call.messages = ["a message"]  # type: ignore[list-item]  # only where it goes counts

        returned: list[object] = []
        consumer._receives._return = returned.extend  # type: ignore[assignment, method-assign]
        nursery.start_soon(cancel_at_the_deal)
        await consumer.receive(1)
    assert scope.cancelled_caught
    assert returned == ["a message"]


async def test_failure_reaches_the_calls_of_its_request(broker: PopBroker, calls: Calls) -> None:
    broker.send(10)
    broker.failures.append(RequestTimedOutError("no answer"))
    calls.begin("a")
    calls.begin("b")
    await trio.sleep(broker.delay_s / 2)
    calls.begin("c")
    await trio.sleep(1)
    assert {name: type(error) for name, error in calls.errors.items()} == {
        "a": RequestTimedOutError,
        "b": RequestTimedOutError,
    }
    assert calls.errors["a"] is not calls.errors["b"]
    assert calls.got == {"c": [2]}


async def test_in_order_each_call_asks_by_itself(broker: PopBroker, nursery: trio.Nursery) -> None:
    broker.send(3)
    calls = Calls(SimpleConsumer(broker.instance, "g", {"T": "*"}, in_order=True), nursery)
    calls.begin("a")
    calls.begin("b")
    await trio.sleep(1)
    assert pops(broker) == [1, 1]


async def test_receives_of_a_closed_client_fail(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    calls = Calls(consumer, nursery)
    async with trio.open_nursery() as broker.nursery:
        calls.begin("under way")
        await trio.sleep(1)
        calls.begin("waits")
        await trio.sleep(1)
        broker.is_closed = True
        broker.nursery.cancel_scope.cancel()
    await trio.sleep(1)
    calls.begin("late")
    await trio.sleep(1)
    assert {name: type(error) for name, error in calls.errors.items()} == {
        "under way": RequestTimedOutError,
        "waits": ClientClosedError,
        "late": ClientClosedError,
    }


async def test_nothing_is_kept_of_what_has_ended(
    broker: PopBroker, consumer: SimpleConsumer, calls: Calls
) -> None:
    broker.send(1)
    for number in range(5):
        calls.begin(f"{number}", wait_s=number % 2, invisible_s=1 + number)
    calls.scopes["3"].cancel()
    await trio.sleep(20)
    assert consumer._receives._lines == {}
