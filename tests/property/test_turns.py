"""No crowd takes more than a turn of the event loop, counted in lines of code and not in time.

The limits of a turn are small here, so that a crowd is many times as large as any of them, and one
of three times the size must not make the longest turn longer. A service without a crowd fails.
"""

import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import trio
import trio.testing

from dledger.broker_errors import PendingFullError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.group_api import SERVICES
from dledger.processors import operator_offsets
from dledger.processors.client_table import Client
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import ConsumerData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.topic_names import SET_ASIDE_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from dledger.services import stored_record
from dledger.services.retention import RetentionService
from dledger.settings.tables import BrokerTable, StoreTable
from dledger.state.pop import PULL_MODE, RequestMode
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.topics import TopicConfig
from tests.harness.fake_group import FakeConnection
from tests.harness.half_messages import PROPERTIES, begin
from tests.harness.leader_services import DAY_S, LeaderServices
from tests.harness.pops import fields
from tests.harness.pulls import hold

LIMITS: Final = re.compile(
    "(CALLS|ROWS|CHECKS|OFFSETS|DELIVERIES|REQUESTS|QUEUES)_PER_|LOAD_UNITS|ROLLED_|MAX_FORGOTTEN"
)
AT_ONCE = 8
FEW, MANY = 5 * AT_ONCE, 15 * AT_ONCE

LINES_PER_MORE = 6
"""Of the longest turn, for each that is due beyond `FEW`: lists are made and copied with it. A
crowd of 50,000 adds 15 ms by that; what is done for one of it takes more lines."""


class Due(NamedTuple):
    """A crowd: how many of it are *served* so far, of *expected* (None: all), after *event*."""

    served: Callable[[], int]
    event: Callable[[], object] = lambda: None
    expected: int | None = None
    within_s: float = 65.0


class Leader(LeaderServices):
    def __init__(self, root: Path, patch: pytest.MonkeyPatch, crowd: int) -> None:
        super().__init__(root, max_held_pulls=crowd)
        self.patch, self.crowd, self.processors = patch, crowd, self.broker.processors
        self.broker.make_topic("T", 4)
        log, clock = self.group.log, self.clock
        self.retention = RetentionService(
            self.group, lambda: log, StoreTable(),
            clock=clock, saved_index=lambda: 0, disk_ratio=lambda: 0.0,
        )  # fmt: skip

    async def serve(self) -> None:
        services = (*self.services, self.retention, self.processors.offsets, self.processors)
        settle = partial(self.settle_kicked, pause_s=0.0)
        await self.lead(*(service.run for service in services), settle)

    def end_of(self, topic: str) -> Callable[[], int]:
        return lambda: self.group.state.max_offset(topic, 0)

    def member(self, *groups: str, producer: str = "pg") -> FakeConnection:
        connection = FakeConnection()
        client: Client[Any] = Client(connection, f"c{id(connection)}", "", "JAVA", 407)
        for name in groups:
            self.processors.clients.register_consumer(ConsumerData(name), client)
        self.processors.clients.register_producer(producer, client)
        connection.on_close.append(self.processors.clients_processor._closed)
        return connection

    def asked(self, code: int, **ext: object) -> None:
        command = request(code, {name: str(value) for name, value in ext.items()})
        assert self.broker.handle(command) is DEFERRED

    def answers(self) -> int:
        return len(self.broker.connection.replies)

    def depose(self) -> None:
        self.group.step_down()
        self.processors.role_changed()


def sent(properties: str, leader: Leader) -> Due:
    for _ in range(leader.crowd):
        leader.send(properties)
    return Due(leader.end_of("T"))


def unreadable(topic: str, leader: Leader) -> Due:
    for _ in range(leader.crowd):
        leader.store(topic, b"TIMER_OUT_MS\x011\x02")
    return Due(leader.end_of(SET_ASIDE_TOPIC))


def damaged(crowd: Callable[[Leader], Due], leader: Leader) -> Due:
    suspects = SimpleNamespace(suspects=[1])
    leader.patch.setattr(stored_record, "check_entries", lambda *_: suspects)
    return crowd(leader)._replace(expected=0, within_s=35.0)


def of_ending_topic(crowd: Callable[[Leader], Due], leader: Leader) -> Due:
    for service in leader.services:
        leader.patch.setattr(service, "is_deleting", lambda _: True, raising=False)
    return crowd(leader)._replace(expected=0, within_s=35.0)


def rolled(leader: Leader) -> Due:
    leader.patch.setattr(leader.services[1], "roll_window_ms", 1000)
    sent("TIMER_DELAY_MS\x0180000000\x02", leader)
    return Due(leader.end_of(TIMER_TOPIC), expected=2 * leader.crowd, within_s=100.0)


def halves(leader: Leader, properties: str = PROPERTIES) -> Due:
    for _ in range(leader.crowd):
        begin(leader.broker, properties=properties)
    return Due(leader.end_of(TRANS_CHECK_MAX_TIME_TOPIC), expected=0, within_s=40.0)


def given_up(leader: Leader) -> Due:
    leader.services[2].settings = BrokerTable(transaction_check_max=1)
    leader.member()
    return halves(leader)._replace(expected=None, within_s=60.0)


def offsets(leader: Leader, *, are_gone: bool = False, is_busy: bool = False) -> Due:
    for queue_id in range(leader.crowd):
        leader.processors.offsets.commit("g", "T", queue_id, 1)
    if are_gone:
        leader.processors.offsets.exists = lambda _topic: False
    leader.group.refuse = PendingFullError("full") if is_busy else None
    rows = leader.group.state.consumer_offsets
    expected = 0 if are_gone or is_busy else None
    return Due(lambda: len(rows.get(("g", "T"), ())), expected=expected)


def own_retention(leader: Leader, keeps: str, expected: int | None = None) -> Due:
    config = TopicConfig("R", leader.crowd, leader.crowd, 6, attributes={"retention.ms": keeps})
    leader.group.propose(state_batch(TopicsChange(put=(config,))), lambda _: None)
    for queue_id in range(leader.crowd):
        leader.group.put("R", queue_id, b"x")
    bounds = leader.group.state.queues_of["R"].values()
    return Due(lambda: sum(each.min_offset for each in bounds), expected=expected, within_s=100.0)


def pulls(leader: Leader, event: str = "put") -> Due:
    for _ in range(leader.crowd):
        hold(leader.broker)
    if event == "unseen":
        leader.group.on_applied.clear()
    wakes = partial(leader.group.put, "T", 0, b"x")
    return Due(leader.answers, wakes if event != "over" else lambda: None)


def receives(leader: Leader, event: str) -> Due:
    for number in range(leader.crowd):
        ext = fields(pollTime=15_000, consumerGroup=f"g{number}")
        leader.asked(RequestCode.POP_MESSAGE, **ext)
        leader.group.settle()
    if event == "over":
        return Due(leader.answers)
    wakes = partial(leader.group.put, "T", 0, b"x")
    return Due(leader.answers, wakes if event == "put" else leader.depose)


def silent(leader: Leader) -> Due:
    members = [leader.member(f"g{number}") for number in range(leader.crowd)]
    return Due(lambda: sum(bool(each.closed) for each in members), within_s=200.0)


def left(leader: Leader) -> Due:
    leaving, others = leader.member("g"), [leader.member("g") for _ in range(leader.crowd)]
    return Due(lambda: sum(len(each.asked) for each in others), leaving.close, within_s=5.0)


def locks(leader: Leader, event: str) -> Due:
    answered: list[object] = []
    for number in range(leader.crowd):
        client = f"c{number if event == 'grants' else 0}"
        leader.processors.locks.lock(client, [("g", "T", number % 4)] * 20, answered.append)
    settle = leader.depose if event == "deposed" else leader.group.settle
    return Due(lambda: len(answered), settle)


def samples(leader: Leader) -> Due:
    for number in range(leader.crowd):
        leader.processors.throughput.count_pull(1, 1, f"t{number}", "g")
    return Due(lambda: leader.processors.throughput.got)


DELAYED: Final = partial(sent, "DELAY\x013\x02")
TIMED: Final = partial(sent, "TIMER_DELAY_MS\x0130000\x02")
IMMUNE: Final = PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x013000\x02"

CROWDS: Final[dict[str, tuple[Callable[[Leader], Due], ...]]] = {
    "delay_levels": (
        DELAYED, partial(unreadable, SCHEDULE_TOPIC), partial(damaged, DELAYED),
        partial(of_ending_topic, DELAYED),
    ),
    "timer": (
        TIMED, partial(unreadable, TIMER_TOPIC), partial(damaged, TIMED),
        partial(of_ending_topic, TIMED), rolled,
    ),
    "transactions": (
        halves, partial(halves, properties=IMMUNE), given_up, partial(damaged, halves),
    ),
    "consumer_offsets": (offsets, partial(offsets, are_gone=True), partial(offsets, is_busy=True)),
    "retention": (
        partial(own_retention, keeps="1000"),
        partial(own_retention, keeps=str(DAY_S * 1000), expected=0),
    ),
    "PullProcessor.run": (pulls, partial(pulls, event="unseen"), partial(pulls, event="over")),
    "PopGrants.run": tuple(partial(receives, event=name) for name in ("put", "over", "deposed")),
    "ClientsProcessor.run": (silent, left),
    "Turns.run": tuple(partial(locks, event=name) for name in ("renewals", "grants", "deposed")),
    "every_second": (samples,),
}  # fmt: skip
"""Crowds for the branches of each service, or of each task that is one."""


class Work(trio.abc.Instrument):
    """Counts the lines of the broker that each step of a task runs."""

    longest, lines, where = 0, 0, ""

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.lines = 0
        sys.settrace(self._trace)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        sys.settrace(None)
        if self.lines > self.longest:
            self.longest, self.where = self.lines, task.name

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        self.lines += event == "line"
        return self._trace if str(frame.f_globals.get("__name__")).startswith("dledger.") else None


async def longest_turn(leader: Leader, crowd: Callable[[Leader], Due]) -> tuple[int, str]:
    """Return the lines of the longest turn while a crowd is served, and whose they were."""
    due, work = crowd(leader), Work()

    async def event() -> None:
        due.event()

    async with trio.open_nursery() as nursery:
        trio.lowlevel.add_instrument(work)
        nursery.start_soon(leader.serve)
        nursery.start_soon(event)
        await trio.sleep(due.within_s)
        trio.lowlevel.remove_instrument(work)
        sys.settrace(None)
        nursery.cancel_scope.cancel()
    assert due.served() == (leader.crowd if due.expected is None else due.expected)
    leader.group.close()
    return work.longest, work.where


def make_limits_small(patch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        names = [*vars(module)] if name.startswith("dledger.") else []
        for limit in filter(LIMITS.search, names):
            patch.setattr(module, limit, AT_ONCE)


@pytest.mark.parametrize(
    ("service", "branch"), [(name, at) for name in CROWDS for at in range(len(CROWDS[name]))]
)
async def test_crowd_is_served_in_turns(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, service: str, branch: int
) -> None:
    turns = []
    for size in (FEW, MANY):
        with pytest.MonkeyPatch.context() as patch:
            make_limits_small(patch)
            leader = Leader(tmp_path / str(size), patch, size)
            turns.append(await longest_turn(leader, CROWDS[service][branch]))
    (few, _), (many, where) = turns
    assert many - few <= LINES_PER_MORE * (MANY - FEW), f"{many} lines, not {few}: {where}"


async def test_each_service_has_its_crowds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    nursery.start_soon(Leader(tmp_path, monkeypatch, FEW).processors.run)
    await trio.testing.wait_all_tasks_blocked()
    (task,) = nursery.child_tasks
    (inner,) = task.child_nurseries
    tasks = {".".join(each.name.rsplit(".", 2)[1:]) for each in inner.child_tasks}
    assert {name.removeprefix("waiting.") for name in tasks} | {*SERVICES, "Turns.run"} == {*CROWDS}


def with_rows(leader: Leader) -> Leader:
    """Have as many of whatever an answer lists as the crowd is large."""
    changes = [TopicsChange(put=(TopicConfig("Q", leader.crowd, leader.crowd, 6),))]
    changes += [TopicsChange(put=(TopicConfig(f"t{n}"),)) for n in range(leader.crowd)]
    for change in changes:
        leader.group.propose(state_batch(change), lambda _: None)
    for number in range(leader.crowd):
        leader.broker.make_group(f"g{number}")
        leader.group.put("Q", number, b"x")
        leader.member("g", f"g{number}", producer="pg" if number % 2 else f"pg{number}")
        for slot in (("g", "Q", number), (f"g{number}", "Q", 0), ("g", f"t{number}", 0)):
            leader.processors.offsets.commit(*slot, 0)
        for topic, group in (("Q", f"g{number}"), (f"t{number}", "g")):
            modes = leader.group.state.request_modes
            modes[topic, group] = RequestMode(group, topic, PULL_MODE, 0)
    leader.processors.offsets.flush()
    leader.group.settle()
    return leader


ASKED: Final = b'{"topic":"Q","consumerGroup":"g0","clientId":"%s","messageModel":"CLUSTERING"}'
ANSWERS: Final[dict[RequestCode, dict[str, str]]] = {
    RequestCode.GET_ALL_TOPIC_CONFIG: {},
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: {},
    RequestCode.GET_ALL_CONSUMER_OFFSET: {},
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: {},
    RequestCode.GET_ALL_PRODUCER_INFO: {},
    RequestCode.GET_CONSUMER_CONNECTION_LIST: {"consumerGroup": "g"},
    RequestCode.GET_PRODUCER_CONNECTION_LIST: {"producerGroup": "pg"},
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: {"consumerGroup": "g"},
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: {"topic": "Q"},
    RequestCode.QUERY_TOPICS_BY_CONSUMER: {"group": "g"},
    RequestCode.GET_TOPIC_STATS_INFO: {"topic": "Q"},
    RequestCode.GET_CONSUME_STATS: {"consumerGroup": "g"},
    RequestCode.GET_BROKER_CONSUME_STATS: {"isOrder": "false"},
    RequestCode.QUERY_CONSUME_TIME_SPAN: {"group": "g", "topic": "Q"},
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: {
        "group": "g", "topic": "Q", "timestamp": "0", "isForce": "true",
    },
    RequestCode.QUERY_ASSIGNMENT: {},
}  # fmt: skip
"""Requests whose answers have a row for each of a crowd."""


@pytest.mark.parametrize("code", ANSWERS)
async def test_answer_of_many_rows_is_made_in_turns(tmp_path: Path, code: RequestCode) -> None:
    turns, sizes = [], []
    for size in (FEW, MANY):
        with pytest.MonkeyPatch.context() as patch:
            leader = with_rows(Leader(tmp_path / str(size), patch, size))
            members = leader.processors.clients.consumer_group("g0")
            assert members is not None
            (client_id,) = members.client_ids
            command = request(code, dict(ANSWERS[code]), ASKED % client_id.encode())
            make_limits_small(patch)
            patch.setattr(operator_offsets, "CALLED_AT_ONCE", AT_ONCE)
            work = Work()
            trio.lowlevel.add_instrument(work)
            await trio.lowlevel.checkpoint()
            handled = leader.broker.handle(command)
            if isinstance(handled, Awaitable):
                handled = await leader.broker.finish(handled)
            await trio.lowlevel.checkpoint()
            trio.lowlevel.remove_instrument(work)
            sys.settrace(None)
            turns.append((work.longest, work.where))
            sizes.append(len(handled.body))
    (few, _), (many, where) = turns
    assert sizes[1] > 2 * sizes[0]
    assert many - few <= LINES_PER_MORE * (MANY - FEW), f"{many} lines, not {few}: {where}"
