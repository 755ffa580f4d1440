"""Sessions of idempotent producers: what is remembered, for how long, and in which order."""

import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.state.producer_sessions import SESSION_IDLE_MAX_MS, ProducerSessions, StoredSend
from tests.harness.present import present

A, B, C = b"A" * 16, b"B" * 16, b"C" * 16


def known(sessions: ProducerSessions) -> list[bytes]:
    return list(sessions.table)


def test_a_stored_sequence_is_found_at_its_place() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 1000)
    sessions.note(A, 7, 0, 0, StoredSend(500), 1001)
    sessions.note(A, 7, 1, 0, StoredSend(900, (2,)), 1002)
    session = present(sessions.get(A))
    assert (session.epoch, session.floor, session.used_ms) == (7, 0, 1002)
    assert session.stored == {0: StoredSend(500), 1: StoredSend(900, (2,))}
    assert sessions.get(B) is None


def test_what_the_producer_has_settled_is_forgotten() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 0)
    for sequence in range(5):
        sessions.note(A, 7, sequence, max(0, sequence - 1), StoredSend(sequence), 0)
    session = present(sessions.get(A))
    assert session.floor == 3
    assert sorted(session.stored) == [3, 4]


def test_session_floor_never_goes_back() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 0)
    sessions.note(A, 7, 9, 8, StoredSend(1), 0)
    sessions.note(A, 7, 5, 4, StoredSend(2), 0)
    session = present(sessions.get(A))
    assert (session.floor, sorted(session.stored)) == (8, [9])


def test_a_sequence_that_is_stored_twice_stops_the_node() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 0)
    sessions.note(A, 7, 0, 0, StoredSend(500), 0)
    with pytest.raises(InvariantBroken, match="sequence 0 of epoch 7 stands at 500"):
        sessions.note(A, 7, 0, 0, StoredSend(900), 0)


def test_new_epoch_replaces_the_old_one() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 0)
    sessions.note(A, 7, 0, 0, StoredSend(500), 0)
    sessions.open(A, 12, 0)
    sessions.note(A, 7, 1, 0, StoredSend(900), 0)
    session = present(sessions.get(A))
    assert (session.epoch, session.floor, session.stored) == (12, 0, {})


def test_an_epoch_that_does_not_grow_stops_the_node() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 7, 0)
    with pytest.raises(InvariantBroken, match="epoch 7"):
        sessions.open(A, 7, 0)


def test_a_session_unused_for_too_long_by_store_time_is_closed() -> None:
    sessions = ProducerSessions()
    sessions.open(A, 1, 0)
    sessions.open(B, 2, 10)
    sessions.note(A, 1, 0, 0, StoredSend(1), 20)
    sessions.open(C, 3, SESSION_IDLE_MAX_MS + 10)
    assert known(sessions) == [B, A, C]
    sessions.note(C, 3, 0, 0, StoredSend(1), SESSION_IDLE_MAX_MS + 11)
    assert known(sessions) == [A, C]


def test_over_the_limit_the_session_used_longest_ago_goes() -> None:
    sessions = ProducerSessions(sessions_max=2)
    sessions.open(A, 1, 0)
    sessions.open(B, 2, 0)
    sessions.note(A, 1, 0, 0, StoredSend(1), 0)
    sessions.open(C, 3, 0)
    assert known(sessions) == [A, C]
    assert (len(sessions), sessions.forgotten) == (2, 1)


def test_send_restarts_an_expired_session() -> None:
    sessions = ProducerSessions()
    sessions.note(A, 7, 5, 3, StoredSend(500), 0)
    session = present(sessions.get(A))
    assert (session.epoch, session.floor, session.stored) == (7, 5, {5: StoredSend(500)})
