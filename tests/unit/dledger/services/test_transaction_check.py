"""Check-back on virtual time: which producer is asked when, and how the undecided end."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.commitlog.record import decode_record
from dledger.group_api import Proposed
from dledger.processors.client_table import Client
from dledger.processors.transactions import CheckBack
from dledger.remoting.errors import ConnectionLostError
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import CheckTransactionStateHeader
from dledger.remoting.protocol.topic_names import STATE_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from dledger.services.half_message import HalfMessage
from dledger.services.stored_record import StoredRecords
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings.tables import BrokerTable, StoreTable
from dledger.state.topics import TRANSACTIONS_QUEUE
from dledger.state.transactions import TransactionDecision
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeConnection
from tests.harness.half_messages import COMMIT, PROPERTIES, ROLLBACK, begin, end, records
from tests.harness.leader_services import ServedGroup

GIVEN_UP = TransactionDecision.GIVEN_UP


class World(ServedGroup):
    """A broker with its check-back on virtual time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, segment_bytes=4 << 20)
        self.broker = Broker(self.group)
        self.broker.make_topic()
        self.settings = BrokerTable(transaction_check_max=3)
        self.store = StoreTable(file_reserved_time=1)
        self.floor_wanted = 0

    def producer(self, group: str = "pg") -> FakeConnection:
        """Let a producer of *group* send its heartbeat."""
        connection = FakeConnection()
        client: Client[Any] = Client(connection, f"c{id(connection)}", "", "JAVA", 407)
        self.broker.processors.clients.register_producer(group, client)
        return connection

    def gone(self, connection: Any) -> None:
        """End a producer."""
        self.broker.processors.clients.close_channel(connection)

    @property
    def checks(self) -> dict[int, int]:
        """How often each open half message was asked for, as the tables say."""
        return {at: half.checks for at, half in self.group.state.transactions.open.items()}

    @property
    def discarded(self) -> list[bytes]:
        """Bodies of what was given up."""
        return [bytes(record.body) for record in records(self.group, TRANS_CHECK_MAX_TIME_TOPIC, 0)]

    async def serve(self) -> None:
        """Run the service as a leadership does."""
        processors = self.broker.processors
        service = TransactionCheckService(
            self.group,
            processors.topics,
            processors.transactions,
            CheckBack(processors.clients, self.broker.settings),
            self.settings,
            self.store,
            clock=self.clock,
            floor_wanted=lambda: self.floor_wanted,
        )
        await self.lead(service.run, self.settle_kicked)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


def asked(connection: FakeConnection) -> list[tuple[int, int]]:
    """Return half offset and number of each question."""
    found = []
    for command in connection.asked:
        assert command.code == RequestCode.CHECK_TRANSACTION_STATE
        header = CheckTransactionStateHeader.decode(command.ext)
        record = decode_record(command.body)
        times = record.property_map["TRANSACTION_CHECK_TIMES"]
        found.append((header.tran_state_table_offset, int(times)))
    return found


async def test_check_asks_the_producer_at_intervals(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    await trio.sleep(1)
    half = begin(world.broker)
    await trio.sleep(5.9)
    assert asked(producer) == []
    await trio.sleep(0.2)
    assert asked(producer) == [(half.offset, 1)]
    await trio.sleep(29.8)
    assert asked(producer) == [(half.offset, 1)]
    await trio.sleep(0.3)
    assert asked(producer) == [(half.offset, 1), (half.offset, 2)]


async def test_check_carries_the_half_message(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    begin(world.broker, b"other")
    half = begin(world.broker, b"mine")
    await trio.sleep(7)
    _, question = producer.asked
    header = CheckTransactionStateHeader.decode(question.ext)
    assert (header.tran_state_table_offset, header.commit_log_offset) == half
    assert (header.msg_id, header.transaction_id) == ("ABC", "ABC")
    assert (header.topic, header.bname) == ("T", BROKER)
    record = decode_record(question.body)
    assert (record.topic, record.queue_id, bytes(record.body)) == ("T", 2, b"mine")
    assert (record.queue_offset, record.phy_offset) == half
    assert record.property_map["WAIT"] == "false"
    answer = end(world.broker, half, COMMIT, fromTransactionCheck="true")
    assert answer.code == 0


async def test_the_decided_are_not_asked_for(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    first, second = begin(world.broker), begin(world.broker)
    end(world.broker, first, ROLLBACK)
    await trio.sleep(7)
    assert asked(producer) == [(second.offset, 1)]
    end(world.broker, second, COMMIT)
    await trio.sleep(100)
    assert asked(producer) == [(second.offset, 1)]


async def test_check_skips_closed_producers(world: World, nursery: trio.Nursery) -> None:
    first, second, other = world.producer(), world.producer(), world.producer("other")
    nursery.start_soon(world.serve)
    for _ in range(6):
        begin(world.broker)
    await trio.sleep(7)
    assert (len(asked(first)), len(asked(second)), asked(other)) == (3, 3, [])

    def dead(_: RemotingCommand) -> None:
        raise ConnectionLostError("gone", sent=False)

    first.invoke_oneway = dead  # type: ignore[assignment, method-assign]  # its connection fails
    await trio.sleep(30)
    assert len(asked(second)) == 9


async def test_check_without_a_producer_counts_nothing(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    half = begin(world.broker)
    before = world.group.log.last_index
    await trio.sleep(200)
    assert world.checks == {half.offset: 0}
    assert world.group.log.last_index == before  # a wait costs no log
    producer = world.producer()
    await trio.sleep(31)
    assert asked(producer) == [(half.offset, 1)]


async def test_after_the_last_question_it_is_given_up(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    half = begin(world.broker, b"lost")
    await trio.sleep(6 + 60 + 29)
    assert asked(producer) == [(half.offset, n) for n in (1, 2, 3)]
    assert world.discarded == []
    await trio.sleep(2)
    assert world.discarded == [b"lost"]
    assert world.group.state.transactions.decided == {half.offset: GIVEN_UP}
    config = world.group.state.topic_config(TRANS_CHECK_MAX_TIME_TOPIC)
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums) == (1, 1)
    late = end(world.broker, half, COMMIT, fromTransactionCheck="true")
    assert (late.code, late.ext["decision"]) == (1, "given_up")
    await trio.sleep(100)
    assert (world.discarded, len(producer.asked)) == ([b"lost"], 3)


@pytest.mark.slow
async def test_check_gives_up_what_retention_passed(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    begin(world.broker, b"old")
    await trio.sleep(3_590)
    assert world.discarded == []
    await trio.sleep(45)
    assert world.discarded == [b"old"]


async def test_check_gives_up_what_holds_retention(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    begin(world.broker, b"in the way")
    second = begin(world.broker, b"behind")
    world.floor_wanted = second.position
    await trio.sleep(6 + 3 * 30 - 1)
    assert world.discarded == []
    await trio.sleep(32)
    assert world.discarded == [b"in the way"]
    assert list(world.group.state.transactions.open) == [second.offset]


async def test_the_immune_are_not_asked_for_before_their_time(
    world: World, nursery: trio.Nursery
) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    properties = PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x0120\x02"
    immune = begin(world.broker, properties=properties)
    usual = begin(world.broker)
    await trio.sleep(19.9)
    assert asked(producer) == [(usual.offset, 1)]
    await trio.sleep(0.2)
    assert asked(producer) == [(usual.offset, 1), (immune.offset, 1)]


async def test_immunity_holds_retention_no_longer(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    properties = PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x013000\x02"
    begin(world.broker, b"in the way", properties)
    second = begin(world.broker, b"behind", properties)
    world.floor_wanted = second.position
    await trio.sleep(6 + 3 * 30 - 1)
    assert world.discarded == []
    await trio.sleep(32)
    assert world.discarded == [b"in the way"]
    assert world.checks == {second.offset: 0}


async def test_a_new_leader_goes_on_counting(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    half = begin(world.broker)
    await trio.sleep(40)
    assert asked(producer) == [(half.offset, 1), (half.offset, 2)]
    world.depose()
    await trio.sleep(10)
    world.group.lead()
    nursery.start_soon(world.serve)
    await trio.sleep(15)
    assert len(producer.asked) == 2  # an interval since the last one of any leader
    await trio.sleep(5)
    assert asked(producer)[2:] == [(half.offset, 3)]


async def test_a_clock_that_is_behind_delays_by_one_wait_at_most(
    world: World, nursery: trio.Nursery
) -> None:
    producer = world.producer()
    half = begin(world.broker)
    world.clock.skew_ms = -3_600_000
    nursery.start_soon(world.serve)
    await trio.sleep(6.1)
    assert asked(producer) == [(half.offset, 1)]


async def test_immunity_is_over_once_for_a_clock_that_goes_back(
    world: World, nursery: trio.Nursery
) -> None:
    producer = world.producer()
    nursery.start_soon(world.serve)
    half = begin(world.broker, properties=PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x0120\x02")
    await trio.sleep(20.1)
    assert asked(producer) == [(half.offset, 1)]
    world.clock.skew_ms = -3_600_000
    await trio.sleep(30.2)
    assert asked(producer) == [(half.offset, 1), (half.offset, 2)]


async def test_count_of_unknown_outcome_is_waited_for(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    half = begin(world.broker)
    world.group.stalled = True
    nursery.start_soon(world.serve)
    await trio.sleep(7)
    world.group.time_out()
    await trio.sleep(100)
    assert asked(producer) == []
    world.group.stalled = False
    world.group.apply()
    await trio.sleep(0.1)
    assert asked(producer) == [(half.offset, 1)]
    await trio.sleep(31)
    assert world.checks == {half.offset: 2}


async def test_a_decision_in_flight_is_not_asked_for(world: World, nursery: trio.Nursery) -> None:
    producer = world.producer()
    half = begin(world.broker)
    world.group.stalled = True
    found = StoredRecords(world.group).read(half.position)
    message = HalfMessage.of(found).committed(2)
    outcomes: list[Proposed] = []
    decisions = world.broker.processors.transactions
    decisions.decide(half.offset, TransactionDecision.COMMIT, outcomes.append, message)
    world.group.append()
    nursery.start_soon(world.serve)
    await trio.sleep(20)
    assert (asked(producer), outcomes) == ([], [])
    world.group.stalled = False
    world.group.apply()
    await trio.sleep(100)
    assert asked(producer) == []
    assert [each.outcome for each in outcomes] == ["stored"]


async def test_each_round_is_one_record_however_many_are_asked_for(
    world: World, nursery: trio.Nursery
) -> None:
    producer = world.producer()
    for _ in range(100):
        begin(world.broker)
    before = world.group.log.end_position
    nursery.start_soon(world.serve)
    await trio.sleep(7)
    assert len(producer.asked) == 100
    assert world.group.state.max_offset(STATE_TOPIC, TRANSACTIONS_QUEUE) == 1
    assert world.group.log.end_position - before < 1000


async def test_what_is_planned_does_not_outgrow_what_is_open(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.services.transaction_check.STALE_PLANS", 4)
    forgotten: list[int] = []
    original = TransactionCheckService._forget_decided

    def counted(service: TransactionCheckService) -> None:
        original(service)
        forgotten.append(len(service._plans))

    monkeypatch.setattr(TransactionCheckService, "_forget_decided", counted)
    nursery.start_soon(world.serve)
    await trio.sleep(1)
    for _ in range(40):
        end(world.broker, begin(world.broker), ROLLBACK)
    assert len(forgotten) >= 5
    assert max(forgotten) <= 2
