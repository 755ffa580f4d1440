"""The one table: condition → code, outcome, retriable."""

import pytest

from dledger.commitlog.errors import (
    DiskFullError,
    FlushFailedError,
    MQError,
    OffsetOutOfRangeError,
    RemoteProtocolError,
)
from dledger.remoting.errors import BadRequestError, BusyError, ConnectionLostError
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.outcome import (
    ANSWERS,
    Condition,
    answer,
    answer_error,
    condition_of,
    outcome_of,
)

# Written out a second time on purpose: changing what a client is answered takes two edits.
TABLE = """
    stored                0  stored      final
    flush_disk_timeout   10  stored      final
    slave_not_available  11  stored      final
    flush_slave_timeout  12  stored      final
    quorum_timeout        1  unknown     retriable
    leadership_lost       1  unknown     retriable
    internal_error        1  unknown     final
    not_leader           14  not_stored  retriable
    shutting_down        14  not_stored  retriable
    not_ready            14  not_stored  retriable
    disk_full            14  not_stored  retriable
    pending_full          2  not_stored  retriable
    busy                  2  not_stored  retriable
    timer_flow_control    1  not_stored  retriable
    message_illegal      13  not_stored  final
    timer_not_enabled     1  not_stored  final
    already_delivered   604  not_stored  final
    bad_request           1  not_stored  final
    not_supported         3  not_stored  final
    no_permission        16  not_stored  final
    table_full           16  not_stored  final
    access_refused        1  not_stored  final
    topic_not_exist      17  not_stored  final
    group_not_exist      26  not_stored  final
    invalid_queue        29  not_stored  final
    subscription_illegal 23  not_stored  final
    subscription_not_exist  24  not_stored  retriable
    subscription_not_latest 25  not_stored  retriable
    not_found            22  not_stored  final
    offset_moved         21  not_stored  final
    sequence_gap          2  not_stored  retriable
    sequence_too_old      1  unknown     final
    sequence_undecided    1  unknown     retriable
    reply_unconfirmed 1 unknown retriable
    requester_away 1 not_stored retriable
    producer_unknown      1  unknown     final
    sequence_reused      13  not_stored  final
    illegal_operation   604  not_stored  final
    stale_lock_token        51151 not_stored final
    commit_not_expected     51153 not_stored final
    stale_receipt           208 not_stored final
    pop_at_work             16 not_stored retriable
    consumer_not_online     206 not_stored final
    client_silent           207 unknown    retriable
"""


def test_outcome_table_is_the_documented_one() -> None:
    reported = {
        f"{condition} {code:d} {outcome} {'retriable' if retriable else 'final'}"
        for condition, (code, outcome, retriable) in ANSWERS.items()
    }
    assert reported == {" ".join(line.split()) for line in TABLE.strip().splitlines()}
    assert set(ANSWERS) == set(Condition)


def test_outcome_stored_is_exactly_what_is_in_the_log() -> None:
    for code, outcome, _ in ANSWERS.values():
        assert (code in (0, 10, 11, 12)) == (outcome == "stored")


def test_not_leader_names_the_leader() -> None:
    asked = request(310, serialize=SerializeType.CBOR)
    response = answer(
        asked, Condition.NOT_LEADER, "not leader", leaderAddr="127.0.0.1:10911", term=7, x=None
    )
    assert response.code == 14
    assert response.serialize is SerializeType.CBOR
    assert response.ext == {
        "leaderAddr": "127.0.0.1:10911",
        "term": "7",
        "outcome": "not_stored",
        "retriable": "true",
    }


@pytest.mark.parametrize(
    ("condition", "pause_ms"), [(Condition.BUSY, "20"), (Condition.PENDING_FULL, "100")]
)
def test_refusal_for_now_has_when_to_ask_again(condition: Condition, pause_ms: str) -> None:
    response = answer(request(310), condition, "64 requests are open")
    assert (response.code, response.ext["retryAfterMs"]) == (2, pause_ms)
    assert response.remark == f"64 requests are open; retry after {pause_ms} ms"


def test_other_refusals_ask_for_no_wait() -> None:
    for condition in set(Condition) - {Condition.BUSY, Condition.PENDING_FULL}:
        assert "retryAfterMs" not in answer(request(310), condition, "x").ext


class LostLeaderError(MQError):
    condition = Condition.NOT_LEADER

    def __init__(self) -> None:
        super().__init__("n2 leads")
        self.answer_fields = {"leaderAddr": "n2:1", "term": 3}


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (BusyError("x"), Condition.BUSY),
        (BadRequestError("x"), Condition.BAD_REQUEST),
        (DiskFullError("x"), Condition.DISK_FULL),
        (OffsetOutOfRangeError("x"), Condition.NOT_FOUND),
        (LostLeaderError(), Condition.NOT_LEADER),
        (FlushFailedError("x"), Condition.INTERNAL_ERROR),
        (ValueError("x"), Condition.INTERNAL_ERROR),
    ],
)
def test_errors_stand_for_conditions(error: Exception, condition: Condition) -> None:
    assert condition_of(error) is condition


def test_error_brings_its_own_fields() -> None:
    response = answer_error(request(310), LostLeaderError())
    assert (response.code, response.remark) == (14, "n2 leads")
    assert response.ext["leaderAddr"] == "n2:1"
    assert response.ext["term"] == "3"


def test_protocol_error_of_a_third_party_is_not_the_callers() -> None:
    response = answer_error(request(310), RemoteProtocolError("peer sent garbage"))
    assert (response.code, response.ext["outcome"]) == (1, "unknown")


def test_foreign_exception_is_code_1_and_unknown() -> None:
    response = answer_error(request(310), ValueError("odd"))
    assert (response.code, response.remark, response.ext["outcome"]) == (1, "odd", "unknown")
    assert answer_error(request(310), KeyError()).remark == "KeyError"


class HarmlessError(MQError):
    retriable = True


def test_own_error_outside_the_table_knows_its_outcome() -> None:
    response = answer_error(request(310), HarmlessError("later"))
    assert (response.code, response.ext["outcome"]) == (1, "not_stored")
    assert response.ext["retriable"] == "true"


@pytest.mark.parametrize(
    ("code", "ext", "outcome"),
    [
        (0, {}, "stored"),
        (10, {}, "stored"),
        (1, {}, "unknown"),
        (14, {}, "not_stored"),
        (1, {"outcome": "not_stored"}, "not_stored"),
        (2, {"outcome": "unknown"}, "unknown"),
        (1, {"outcome": "nonsense"}, "unknown"),
    ],
)
def test_outcome_is_read_from_field_or_code(code: int, ext: dict[str, str], outcome: str) -> None:
    assert outcome_of(RemotingCommand(code, ext=ext)) == outcome


def test_lost_connection_knows_whether_the_request_had_left() -> None:
    assert ConnectionLostError("x", sent=False).outcome == "not_stored"
    assert ConnectionLostError("x", sent=True).outcome == "unknown"
