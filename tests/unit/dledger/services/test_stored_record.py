"""A checksum is compared before it is renewed: no valid one ever covers a rotten body."""

import ast
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trio

import dledger
from dledger.client.admin.messages import resend_copy
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import BODY_OFFSET, decode_record, encode_record
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.topic_names import (
    HALF_TOPIC,
    SET_ASIDE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from dledger.services.delayed_message import due_ms, timed_properties, with_real_destination
from dledger.services.leader_loop import DAMAGE_FINAL_S
from dledger.services.stored_record import StoredRecords, copy_of
from tests.harness.fake_group import FakeConnection
from tests.harness.leader_services import DAY_S, LeaderServices
from tests.harness.rotten import flip_bit, records_of, valid_with_body

BODY = b"pay 100 EUR"
ROTTEN = b"pay 900 EUR"
DIGIT = BODY.index(b"1")
EIGHT = 8
"""The bit between the digits 1 and 9."""


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[LeaderServices]:
    leader = LeaderServices(tmp_path)
    yield leader
    leader.group.close()


def rot_body(leader: LeaderServices, position: int) -> None:
    flip_bit(leader.root, position + BODY_OFFSET + DIGIT, bit=EIGHT)
    assert ROTTEN in [bytes(record.body) for record in records_of(leader.group)]


def scheduled(leader: LeaderServices, properties: bytes = b"") -> int:
    return leader.store(SCHEDULE_TOPIC, properties or with_real_destination(b"", "T", 0), BODY)


def timed(leader: LeaderServices, delay_s: float) -> int:
    due = due_ms(leader.clock.wall_ms() + int(delay_s * 1000))
    return leader.store(TIMER_TOPIC, timed_properties(b"", "T", 0, due), BODY)


def half(leader: LeaderServices) -> int:
    return leader.store(HALF_TOPIC, with_real_destination(b"PGROUP\x01p\x02", "T", 0), BODY)


def end(leader: LeaderServices, position: int) -> None:
    ext = {
        "producerGroup": "p", "tranStateTableOffset": "0", "commitLogOffset": str(position),
        "commitOrRollback": "8", "fromTransactionCheck": "false", "msgId": "M",
        "transactionId": "M",
    }  # fmt: skip
    assert leader.broker.call(RequestCode.END_TRANSACTION, ext).code != 0


def send_back(level: int) -> Callable[[LeaderServices, int], None]:
    def back(leader: LeaderServices, position: int) -> None:
        ext = {"offset": str(position), "group": "g", "delayLevel": str(level)}
        assert leader.broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, ext).code != 0

    return back


def nothing(_leader: LeaderServices, _position: int) -> None:
    pass


PATHS: list[Any] = [
    pytest.param(scheduled, nothing, 0, id="delay level"),
    pytest.param(lambda leader: timed(leader, 1), nothing, 0, id="timer"),
    pytest.param(lambda leader: timed(leader, 2.5 * DAY_S), nothing, 2 * DAY_S - 30, id="roll"),
    pytest.param(half, nothing, 0, id="question to producers"),
    pytest.param(half, nothing, 3 * DAY_S - 30, id="transaction given up"),
    pytest.param(half, end, 0, id="commit"),
    pytest.param(lambda leader: leader.store("T", b"", BODY), send_back(1), 0, id="retry"),
    pytest.param(lambda leader: leader.store("T", b"", BODY), send_back(-1), 0, id="dead letter"),
    pytest.param(
        lambda leader: scheduled(leader, b"REAL_TOPIC\x01../x\x02"), nothing, 0, id="set aside"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "then", "rots_after_s", "is_alone"),
    [
        pytest.param(*path.values, at % 2 == 1, id=f"{path.id}{' alone' if at % 2 else ''}")
        for at, path in enumerate([*PATHS, PATHS[0]])
    ],
)
async def test_no_valid_checksum_covers_a_rotten_body(
    leader: LeaderServices,
    nursery: trio.Nursery,
    store: Callable[[LeaderServices], int],
    then: Callable[[LeaderServices, int], None],
    rots_after_s: float,
    is_alone: bool,
) -> None:
    leader.group.has_other_members = not is_alone
    producer = FakeConnection()
    clients = leader.broker.processors.clients
    there: list[_Client] = []
    clients.producers = lambda _group: there  # type: ignore[method-assign,assignment,return-value]  # producers the test chooses
    position = store(leader)
    if rots_after_s:
        nursery.start_soon(leader.serve)
        await trio.sleep(rots_after_s)
    there.append(_Client(producer))
    rot_body(leader, position)
    then(leader, position)
    if not rots_after_s:
        nursery.start_soon(leader.serve)
    await trio.sleep(2 * DAMAGE_FINAL_S)
    assert valid_with_body(leader.group, ROTTEN) == []
    assert producer.asked == []
    of_client = position in [
        record.phy_offset for record in records_of(leader.group) if record.topic == "T"
    ]
    assert leader.group.state.max_offset("T", 0) == of_client
    assert leader.read(TRANS_CHECK_MAX_TIME_TOPIC) == []
    notes = leader.read(SET_ASIDE_TOPIC)
    is_waiting = then in (nothing, end)
    assert len(notes) == (1 if is_alone and is_waiting else 0)
    assert not any(BODY in note.body.tobytes() or ROTTEN in note.body.tobytes() for note in notes)  # type: ignore[union-attr]  # notes have bodies as views
    assert set(leader.group.damage_reports) == {(position, 1)}
    nursery.cancel_scope.cancel()


class _Client:
    def __init__(self, channel: FakeConnection) -> None:
        self.channel = channel


async def test_a_rotten_destination_is_damage_too(
    leader: LeaderServices, nursery: trio.Nursery
) -> None:
    position = scheduled(leader)
    flip_bit(leader.root, position + BODY_OFFSET + len(BODY) + 1 + len(SCHEDULE_TOPIC) + 2 + 11)
    nursery.start_soon(leader.serve)
    await trio.sleep(10)
    assert [key for key in leader.group.state.queues if key[0] not in (SCHEDULE_TOPIC,)] == [
        key for key in leader.group.state.queues if key[0].startswith("RMQ_SYS")
    ]
    assert set(leader.group.damage_reports) == {(position, 1)}
    nursery.cancel_scope.cancel()


async def test_a_copy_compares_what_it_computes(leader: LeaderServices) -> None:
    position = scheduled(leader)
    record = StoredRecords(leader.group).read(position)
    assert decode_record(copy_of(record, Run("T", 3, 1))).queue_id == 3
    rot_body(leader, position)  # after it was read, before it is used
    with pytest.raises(CorruptRecordError, match="does not fit its checksum"):
        copy_of(record, Run("T", 3, 1))


async def test_only_the_begin_of_a_record_is_one(leader: LeaderServices) -> None:
    inside = encode_record(topic="T", queue_id=0, body=b"forged", properties=b"")
    position = leader.store("T", b"", inside)
    assert (
        bytes(decode_record(leader.group.log.record_at(position + BODY_OFFSET)).body) == b"forged"
    )
    with pytest.raises(CorruptRecordError, match="no record begins"):
        StoredRecords(leader.group).read(position + BODY_OFFSET)
    assert bytes(StoredRecords(leader.group).read(position).body) == inside


async def test_an_entry_is_looked_at_once_by_each_reader(leader: LeaderServices) -> None:
    positions = [scheduled(leader), scheduled(leader)]
    records = StoredRecords(leader.group)
    assert [bytes(records.read(each).body) for each in positions] == [BODY, BODY]
    before = records.checked_bytes
    records.read(positions[1])
    assert records.checked_bytes == before
    rot_body(leader, positions[1])
    with pytest.raises(CorruptEntryError):
        StoredRecords(leader.group).read(positions[1])


def test_the_sdk_gives_no_rotten_dead_letter_back() -> None:
    record = bytearray(encode_record(topic="%DLQ%g", queue_id=0, body=BODY, properties=b""))
    assert resend_copy(MessageExt(memoryview(record), 0, "b"), "g").body == BODY
    record[BODY_OFFSET + DIGIT] ^= EIGHT
    with pytest.raises(CorruptRecordError):
        resend_copy(MessageExt(memoryview(record), 0, "b"), "g")


# -- what may be written in the program ----------------------------------------------------

ENCODERS = {
    "processors/send.py": "bytes of a client",
    "processors/send_records.py": "bytes of a client, which were verified",
    "processors/reply.py": "bytes of a client",
    "services/leader_loop.py": "a note of our own",
    "services/stored_record.py": "the one place for copies",
    "state/state_record.py": "state",
    "cli/bench_store.py": "a measurement",
    "testing/group_contract.py": "messages of a check",
}
"""Modules that may encode a record, and what they make it of."""


@cache
def modules() -> list[tuple[str, str]]:
    root = Path(dledger.__file__).parent
    return [
        (path.relative_to(root).as_posix(), path.read_text()) for path in sorted(root.rglob("*.py"))
    ]


def calls(text: str, name: str) -> list[ast.Call]:
    if name not in text:
        return []
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") == name or getattr(node.func, "attr", "") == name)
    ]


def test_the_daemon_decodes_no_record_unchecked() -> None:
    unchecked = [
        f"{module}:{call.lineno}"
        for module, text in modules()
        for name in ("decode_record", "iter_records")
        for call in calls(text, name)
        if any(keyword.arg == "check_crc" for keyword in call.keywords)
    ]
    assert unchecked == []


def test_stored_records_are_encoded_in_one_place() -> None:
    assert {module for module, text in modules() if calls(text, "encode_record")} <= set(ENCODERS)
    made = {
        module
        for module, text in modules()
        if calls(text, "StoredRecord") or calls(text, "StoredBytes")
    }
    assert made == {"services/stored_record.py"}


def test_bytes_are_no_stored_record() -> None:
    with pytest.raises(AttributeError):
        copy_of(memoryview(b""), Run("T", 0, 1))  # type: ignore[arg-type]  # what is refused
