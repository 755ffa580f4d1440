"""Transactions of the SDK against a cluster in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendStatus
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.commitlog.errors import ConfigError
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.client.producer.fake_transactions import POSITION, FakeTransactions

COMMIT, ROLLBACK, UNKNOWN = (
    LocalTransactionState.COMMIT,
    LocalTransactionState.ROLLBACK,
    LocalTransactionState.UNKNOWN,
)
ORDER = Message("T", b"order", tags="A", properties={"who": "me"})


class Checks:
    """What the application would say; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[MessageExt] = []
        self.state = UNKNOWN
        self.error: Exception | None = None

    async def __call__(self, message: MessageExt) -> LocalTransactionState:
        self.asked.append(message)
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.state


class Stage(NamedTuple):
    """A cluster, a client and its transaction producer."""

    world: World
    transactions: FakeTransactions
    client: ClientInstance
    producer: TransactionProducer
    checks: Checks


@asynccontextmanager
async def opened(
    config: TransactionProducerConfig | None = None, *, rocketmq: bool = False
) -> AsyncIterator[Stage]:
    async with open_world(rocketmq=rocketmq) as world, world.client() as client:
        checks = Checks()
        transactions = FakeTransactions(world.group)
        async with TransactionProducer(client, "pg", checks, config) as producer:
            yield Stage(world, transactions, client, producer, checks)


async def commit(_: HalfMessage) -> LocalTransactionState:
    await trio.lowlevel.checkpoint()
    return COMMIT


async def test_the_local_part_decides_when_the_half_message_is_stored() -> None:
    async with opened() as stage:
        seen: list[HalfMessage] = []

        async def local(half: HalfMessage) -> LocalTransactionState:
            seen.append(half)
            assert len(stage.transactions.halves) == 1
            assert stage.transactions.ends == []
            await trio.sleep(1)
            return COMMIT

        result = await stage.producer.send_in_transaction(ORDER, local)
    assert (result.state, result.is_confirmed, result.end_error) == (COMMIT, True, None)
    (half,) = seen
    assert result.half is half
    assert (half.half_offset, half.position, half.broker_name) == (0, POSITION, "g")
    assert half.message is ORDER
    assert stage.transactions.decisions == {0: 8}
    assert stage.producer.counters.commits == 1


async def test_half_message_is_marked_as_one() -> None:
    async with opened() as stage:
        result = await stage.producer.send_in_transaction(ORDER, commit)
    ((header, body),) = stage.transactions.halves
    assert (header.producer_group, header.topic, body) == ("pg", "T", b"order")
    assert header.sys_flag == 4
    assert header.properties == (
        f"UNIQ_KEY\x01{result.half.transaction_id}\x02TAGS\x01A\x02who\x01me\x02"
        "TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    )
    assert ORDER.properties == {"who": "me"}


async def test_the_end_names_the_half_message_and_wants_an_answer() -> None:
    async with opened() as stage:
        result = await stage.producer.send_in_transaction(ORDER, commit)
    (end,) = stage.transactions.ends
    assert (end.producer_group, end.commit_or_rollback) == ("pg", 8)
    assert (end.tran_state_table_offset, end.commit_log_offset) == (0, POSITION)
    assert end.msg_id == end.transaction_id == result.half.transaction_id
    assert (end.from_transaction_check, end.topic, end.bname) == (False, "T", "g")
    assert stage.transactions.oneway == 0


@pytest.mark.parametrize(("state", "decisions"), [(ROLLBACK, {0: 12}), (UNKNOWN, {})])
async def test_every_state_is_sent(state: LocalTransactionState, decisions: dict[int, int]) -> None:
    async with opened() as stage:

        async def local(_: HalfMessage) -> LocalTransactionState:
            await trio.lowlevel.checkpoint()
            return state

        result = await stage.producer.send_in_transaction(ORDER, local)
    assert (result.state, result.is_confirmed) == (state, True)
    assert stage.transactions.decisions == decisions
    assert [end.commit_or_rollback for end in stage.transactions.ends] == [state.value]


@pytest.mark.parametrize(
    "message",
    [
        Message("T", b"x", delay_level=1),
        Message("T", b"x", delay_ms=1_000),
        Message("T", b"x", deliver_at_ms=1),
        Message("T", b"x", properties={"TIMER_DELAY_SEC": "1"}),
        Message("T", b"x", properties={"TIMER_DELIVER_MS": "1"}),
    ],
)
async def test_a_transactional_message_cannot_be_delayed(message: Message) -> None:
    async with opened() as stage:
        with pytest.raises(MessageIllegalError, match="cannot be delayed"):
            await stage.producer.send_in_transaction(message, commit)
    assert stage.transactions.halves == []


async def test_half_message_stored_less_safely_is_rolled_back() -> None:
    async with opened() as stage:
        stage.transactions.send_code = 10

        async def never(_: HalfMessage) -> LocalTransactionState:
            raise AssertionError("the local part ran")

        result = await stage.producer.send_in_transaction(ORDER, never)
    assert (result.state, result.is_confirmed) == (ROLLBACK, True)
    assert result.half.send_result.status is SendStatus.FLUSH_DISK_TIMEOUT
    assert stage.transactions.decisions == {0: 12}


async def test_half_message_of_unknown_outcome_is_not_sent_again() -> None:
    async with opened() as stage:
        sent = 0

        def lost(asked: RemotingCommand) -> Handled:
            nonlocal sent
            sent += 1
            return response_to(asked, 1, "no majority", {"outcome": "unknown"})

        stage.world.group.brokers[0].intercept = lost

        async def never(_: HalfMessage) -> LocalTransactionState:
            raise AssertionError("the local part ran")

        with pytest.raises(UnknownOutcomeError):
            await stage.producer.send_in_transaction(ORDER, never)
    assert sent == 1


async def test_a_local_part_that_raises_leaves_the_transaction_open() -> None:
    async with opened() as stage:

        async def broken(_: HalfMessage) -> LocalTransactionState:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await stage.producer.send_in_transaction(ORDER, broken)
        assert stage.transactions.ends == []
        stage.checks.state = ROLLBACK
        stage.transactions.ask(0)
        await trio.sleep(1)
    assert stage.transactions.decisions == {0: 12}
    (message,) = stage.checks.asked
    assert message.message_id == stage.transactions.ends[0].transaction_id


async def test_a_fail_over_between_half_and_end_is_followed() -> None:
    async with opened() as stage:
        group = stage.world.group

        async def local(_: HalfMessage) -> LocalTransactionState:
            group.leader = None
            await group.brokers[0].kill()
            return COMMIT

        async def elect() -> None:
            await trio.sleep(2)
            group.elect(2)

        stage.world.nursery.start_soon(elect)
        result = await stage.producer.send_in_transaction(ORDER, local)
    assert result.is_confirmed
    assert stage.transactions.decisions == {0: 8}
    assert group.brokers[2].count(RequestCode.END_TRANSACTION) >= 1


async def test_end_without_an_answer_is_sent_again() -> None:
    async with opened() as stage:
        answers = 0

        def first_is_lost(asked: RemotingCommand) -> Handled:
            nonlocal answers
            answers += 1
            if answers == 1:
                stage.transactions.decide(asked)
                return response_to(asked, 1, "no majority", {"outcome": "unknown"})
            return None

        stage.transactions.answer_end = first_is_lost
        result = await stage.producer.send_in_transaction(ORDER, commit)
    assert result.is_confirmed
    assert len(stage.transactions.ends) == 2
    assert stage.transactions.decisions == {0: 8}


async def test_end_that_does_not_arrive_is_left_to_check_back() -> None:
    async with opened(TransactionProducerConfig(end_timeout_s=3)) as stage:
        group = stage.world.group

        async def local(_: HalfMessage) -> LocalTransactionState:
            group.leader = None
            for broker in group.brokers:
                await broker.kill()
            return COMMIT

        result = await stage.producer.send_in_transaction(ORDER, local)
    assert (result.state, result.is_confirmed) == (COMMIT, False)
    assert isinstance(result.end_error, BrokerUnreachableError)
    assert stage.producer.counters.ends_failed == 1


async def test_end_may_be_sent_once_only() -> None:
    async with opened(TransactionProducerConfig(retry_end=False)) as stage:
        stage.transactions.answer_end = lambda asked: response_to(
            asked, 1, "no majority", {"outcome": "unknown"}
        )
        result = await stage.producer.send_in_transaction(ORDER, commit)
    assert isinstance(result.end_error, UnknownOutcomeError)
    assert len(stage.transactions.ends) == 1


async def test_end_refused_after_an_unknown_attempt_is_unknown() -> None:
    async with opened() as stage:
        answers = 0

        def answer(asked: RemotingCommand) -> Handled:
            nonlocal answers
            answers += 1
            outcome = "unknown" if answers == 1 else "not_stored"
            return response_to(asked, 1, "no half message any more", {"outcome": outcome})

        stage.transactions.answer_end = answer
        result = await stage.producer.send_in_transaction(ORDER, commit)
    assert isinstance(result.end_error, UnknownOutcomeError)
    assert answers == 2


@pytest.mark.parametrize("code", [1, 17, 604])
async def test_end_refused_raises(code: int) -> None:
    async with opened() as stage:
        stage.transactions.answer_end = lambda asked: response_to(
            asked, code, "no", {"outcome": "not_stored"}
        )
        result = await stage.producer.send_in_transaction(ORDER, commit)
    assert isinstance(result.end_error, BrokerRefusedError)
    assert (result.end_error.code, result.end_error.outcome) == (code, "not_stored")
    assert len(stage.transactions.ends) == 1


@pytest.mark.parametrize(
    ("is_answered", "error", "text"),
    [
        (True, BrokerRefusedError, "refused with code 1: not now"),
        (False, UnknownOutcomeError, "may or may not count"),
    ],
)
async def test_end_by_an_account_that_is_not_let_in(
    is_answered: bool, error: type[ClientError], text: str
) -> None:
    async with opened() as stage:
        group = stage.world.group

        async def lose_connection() -> None:
            group.let_nobody_in()
            await group.brokers[0].kill()
            await group.brokers[0].start()

        async def lost() -> RemotingCommand:
            stage.world.nursery.start_soon(lose_connection)
            await trio.sleep_forever()

        async def commit_after(_: HalfMessage) -> LocalTransactionState:
            if is_answered:
                await lose_connection()
            else:
                stage.transactions.answer_end = lambda _: lost()
            return COMMIT

        begin_s = trio.current_time()
        result = await stage.producer.send_in_transaction(ORDER, commit_after)
        assert trio.current_time() - begin_s < 1.0
    assert type(result.end_error) is error
    assert text in str(result.end_error)


async def test_a_decision_that_came_too_late_is_an_error() -> None:
    async with opened() as stage:
        stage.transactions.decisions[0] = 12
        with pytest.raises(TransactionDecidedError, match="decided as ROLLBACK") as caught:
            await stage.producer.send_in_transaction(ORDER, commit)
    assert (caught.value.decision, caught.value.outcome) == ("rollback", "not_stored")
    assert not caught.value.retriable


async def test_a_question_is_answered_by_the_application() -> None:
    async with opened() as stage:
        half = await stage.producer.begin(ORDER)
        await stage.producer.leave_open(half)
        await trio.sleep(1)  # heartbeats are on their way
        stage.transactions.ask(0)
        await trio.sleep(1)
        assert stage.transactions.decisions == {}
        stage.checks.state = COMMIT
        stage.transactions.ask(0)
        await trio.sleep(1)
        first, second = stage.transactions.ends
    assert (first.commit_or_rollback, second.commit_or_rollback) == (0, 8)
    assert first.from_transaction_check
    assert second.from_transaction_check
    assert (second.tran_state_table_offset, second.commit_log_offset) == (0, POSITION)
    message = stage.checks.asked[0]
    assert (message.message_id, message.body_bytes) == (half.transaction_id, b"order")
    assert (message.topic, message.properties["who"]) == ("T", "me")
    assert (stage.producer.counters.checks, stage.producer.counters.commits) == (2, 1)


async def test_check_back_answer_searches_for_the_leader() -> None:
    async with opened() as stage:
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        await trio.sleep(1)
        group = stage.world.group
        asking = group.leader
        stage.client.leaders.suspect("g", asking or "")
        group.leader = None
        stage.checks.state = COMMIT
        stage.transactions.ask(0, address=asking)
        await trio.sleep(1)
        group.elect(1)
        await trio.sleep(3)
    assert stage.transactions.decisions == {0: 8}
    assert stage.transactions.oneway == 0


async def test_while_the_local_part_runs_the_answer_is_not_yet() -> None:
    async with opened() as stage:

        async def slow(_: HalfMessage) -> LocalTransactionState:
            await trio.sleep(1)
            stage.transactions.ask(0)
            await trio.sleep(1)
            return COMMIT

        result = await stage.producer.send_in_transaction(ORDER, slow)
    assert stage.checks.asked == []
    assert [end.commit_or_rollback for end in stage.transactions.ends] == [0, 8]
    assert result.is_confirmed


async def test_an_application_that_fails_to_answer_does_not_know() -> None:
    async with opened() as stage:
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        await trio.sleep(1)
        stage.checks.error = ZeroDivisionError()
        stage.transactions.ask(0)
        await trio.sleep(1)
        stage.checks.error, stage.checks.state = None, ROLLBACK
        stage.transactions.ask(0)
        await trio.sleep(1)
    assert [end.commit_or_rollback for end in stage.transactions.ends] == [0, 12]
    assert stage.producer.counters.checks_failed == 1


async def test_another_process_of_the_group_answers_for_it() -> None:
    async with opened() as stage:
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        stage.transactions.known.clear()
        others = Checks()
        others.state = COMMIT
        config = TransactionProducerConfig(topics=("T",))
        async with (
            stage.world.client(instance_name="other") as client,
            TransactionProducer(client, "pg", others, config),
        ):
            await trio.sleep(1)  # known without having sent anything
            stage.transactions.ask(0)
            await trio.sleep(1)
    assert stage.transactions.decisions == {0: 8}
    assert len(others.asked) == 1


async def test_every_broker_of_the_group_knows_the_producer() -> None:
    async with opened() as stage:
        await stage.producer.send_in_transaction(ORDER, commit)
        await trio.sleep(1)
        addresses = [broker.address for broker in stage.world.group.brokers]
        assert sorted(stage.transactions.known) == sorted(addresses)
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        stage.world.group.elect(1)
        stage.checks.state = COMMIT
        stage.transactions.ask(1, address=addresses[1])
        await trio.sleep(1)
    assert stage.transactions.decisions == {0: 8, 1: 8}


async def test_questions_for_other_groups_are_left_alone() -> None:
    async with opened() as stage:
        await stage.producer.begin(ORDER)
        await trio.sleep(1)
        header, _ = stage.transactions.halves[0]
        header.properties = (header.properties or "").replace("PGROUP\x01pg", "PGROUP\x01other")
        stage.transactions.ask(0)
        await trio.sleep(1)
        assert stage.producer.counters.checks == 0
    assert stage.transactions.ends == []


async def test_a_group_has_one_producer_in_an_instance() -> None:
    async with opened() as stage:
        with pytest.raises(ConfigError, match="pg"):
            async with TransactionProducer(stage.client, "pg", Checks()):
                pass


async def test_too_many_questions_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.client.producer.transaction_producer.QUESTIONS_MAX", 1)
    async with opened(TransactionProducerConfig(checks_at_once=1)) as stage:
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        await trio.sleep(1)
        for _ in range(5):
            stage.transactions.ask(0)
        await trio.sleep(1)
        counters = stage.producer.counters
        assert counters.checks == 5
        assert 0 < counters.checks_dropped < 5
        assert len(stage.checks.asked) == 5 - counters.checks_dropped


async def test_end_for_a_real_rocketmq_is_one_way() -> None:
    async with opened(rocketmq=True) as stage:
        result = await stage.producer.send_in_transaction(ORDER, commit)
        await trio.sleep(1)
        assert (result.state, result.is_confirmed, result.end_error) == (COMMIT, False, None)
        assert stage.transactions.oneway == 1
        await stage.producer.leave_open(await stage.producer.begin(ORDER))
        stage.checks.state = ROLLBACK
        stage.transactions.ask(1, bname=None)  # 4.x does not name its group
        await trio.sleep(1)
    assert stage.transactions.oneway == 2
    assert stage.transactions.decisions == {0: 8, 1: 12}


async def test_a_cancelled_local_part_leaves_the_transaction_open() -> None:
    async with opened() as stage:

        async def forever(_: HalfMessage) -> LocalTransactionState:
            await trio.sleep_forever()
            raise AssertionError

        with trio.move_on_after(5):
            await stage.producer.send_in_transaction(ORDER, forever)
        assert stage.transactions.ends == []
        stage.checks.state = ROLLBACK
        stage.transactions.ask(0)
        await trio.sleep(1)
        assert len(stage.checks.asked) == 1
    assert stage.transactions.decisions == {0: 12}
