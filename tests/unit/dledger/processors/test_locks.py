"""LOCK_BATCH_MQ and UNLOCK_BATCH_MQ over the fake group; what their tokens are good for."""

import json
from typing import Any

import pytest

from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import TOKENS_FIELD
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.services.queue_locks import FORGOTTEN_LEASES, LEASE_S, MAX_QUEUES_PER_CHANGE
from dledger.state.queue_lock import QueueLock
from dledger.state.state_record import TopicsChange
from dledger.state.topics import QUEUE_LOCKS_QUEUE
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeConnection, FakeGroup
from tests.harness.pulls import pull

GROUP = "g"


def command(
    code: RequestCode, client_id: str, *queue_ids: int, topic: str = "T", **ext: str
) -> RemotingCommand:
    queues = [MessageQueue(topic, BROKER, queue_id) for queue_id in queue_ids]
    body = LockBatchRequestBody(GROUP, client_id, mq_set=queues)
    return request(code, dict(ext), body.encode())


def lock(broker: Broker, client_id: str, *queue_ids: int, **more: str) -> RemotingCommand:
    asked = command(RequestCode.LOCK_BATCH_MQ, client_id, *queue_ids, **more)
    return broker.call(asked.code, asked.ext, bytes(asked.body))


def unlock(broker: Broker, client_id: str, *queue_ids: int, **more: str) -> RemotingCommand:
    asked = command(RequestCode.UNLOCK_BATCH_MQ, client_id, *queue_ids, **more)
    return broker.call(asked.code, asked.ext, bytes(asked.body))


def granted(response: RemotingCommand) -> list[int]:
    assert response.code == 0, response
    body = LockBatchResponseBody.decode(response.body)
    return [queue.queue_id for queue in body.lock_ok_mq_set]


def tokens(broker: Broker, client_id: str, *queue_ids: int) -> list[int]:
    text = lock(broker, client_id, *queue_ids, lockTokens="wanted").ext[TOKENS_FIELD]
    return [int(part) for part in str(text).split(",") if part]


@pytest.fixture
def locking(broker: Broker) -> Broker:
    broker.make_topic("T", queues=4)
    return broker


def lock_entries(broker: Broker) -> int:
    return broker.group.state.max_offset(STATE_TOPIC, QUEUE_LOCKS_QUEUE)


def test_a_grant_is_an_entry_and_its_index_the_token(locking: Broker) -> None:
    response = lock(locking, "a", 0, 2, lockTokens="wanted")
    index = locking.group.state.applied_index
    assert json.loads(bytes(response.body)) == {
        "lockOKMQSet": [
            {"brokerName": BROKER, "queueId": 0, "topic": "T"},
            {"brokerName": BROKER, "queueId": 2, "topic": "T"},
        ]
    }
    assert response.ext[TOKENS_FIELD] == f"{index},{index}"
    assert locking.group.state.queue_locks == {
        (GROUP, "T", 0): QueueLock("a", index),
        (GROUP, "T", 2): QueueLock("a", index),
    }


def test_old_clients_get_no_tokens(locking: Broker) -> None:
    assert lock(locking, "a", 0).ext == {}


def test_groups_lock_for_themselves(locking: Broker) -> None:
    lock(locking, "a", 0)
    body = LockBatchRequestBody("other", "b", mq_set=[MessageQueue("T", BROKER, 0)])
    response = locking.call(RequestCode.LOCK_BATCH_MQ, {}, body.encode())
    assert granted(response) == [0]


def test_a_renewal_takes_no_entry_and_keeps_the_token(locking: Broker, clock: ManualClock) -> None:
    (token,) = tokens(locking, "a", 0)
    for _ in range(5):
        clock.now_s += LEASE_S - 1
        assert tokens(locking, "a", 0) == [token]
    assert lock_entries(locking) == 1
    assert granted(lock(locking, "b", 0)) == []


def test_a_renewal_waits_for_the_read_barrier(locking: Broker) -> None:
    lock(locking, "a", 0)
    locking.group.barriers_pass = False
    connection = FakeConnection()
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "a", 0), connection)
    assert connection.replies == [], "a leader that may be deposed renews nothing"
    locking.group.pass_barriers()
    assert granted(connection.reply_) == [0]


def test_unconfirmed_renewal_is_refused(locking: Broker) -> None:
    lock(locking, "a", 0)
    locking.group.barriers_pass = False
    connection = FakeConnection()
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "a", 0), connection)
    locking.group.step_down("10.0.0.2:10911")
    assert connection.reply_.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert connection.reply_.ext["leaderAddr"] == "10.0.0.2:10911"


def test_a_new_leader_honours_grants_for_a_whole_lease(locking: Broker, clock: ManualClock) -> None:
    lock(locking, "a", 0)
    clock.now_s += 10 * LEASE_S
    locking.group.step_down()
    locking.processors.role_changed()
    locking.group.lead()
    locking.processors.role_changed()
    clock.now_s += LEASE_S - 0.001
    assert granted(lock(locking, "b", 0)) == []
    clock.now_s += 0.001
    assert granted(lock(locking, "b", 0)) == [0]


def test_what_others_hold_cannot_be_unlocked(locking: Broker) -> None:
    (token,) = tokens(locking, "a", 0)
    assert unlock(locking, "b", 0).code == 0
    assert unlock(locking, "a", 0, lockTokens=str(token - 1)).code == 0
    assert granted(lock(locking, "b", 0)) == []
    assert lock_entries(locking) == 1
    assert unlock(locking, "a", 0, lockTokens=str(token)).code == 0
    assert granted(lock(locking, "b", 0)) == [0]


def test_requests_beside_an_entry_share_the_next(locking: Broker) -> None:
    connections = [FakeConnection() for _ in range(5)]
    for number, connection in enumerate(connections):
        asked = command(RequestCode.LOCK_BATCH_MQ, f"c{number}", number % 4)
        assert locking.handle(asked, connection) is DEFERRED
    locking.group.settle()
    assert granted(connections[0].reply_) == [0]
    assert [len(connection.replies) for connection in connections[1:]] == [0] * 4
    locking.group.settle()
    assert [granted(connection.reply_) for connection in connections[1:]] == [[1], [2], [3], []]
    assert lock_entries(locking) == 2


def test_grant_without_a_majority_is_unknown(locking: Broker) -> None:
    first, second = FakeConnection(), FakeConnection()
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "a", 0), first)
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "b", 0), second)
    locking.group.append()
    locking.group.time_out()
    assert (first.reply_.code, first.reply_.ext["outcome"]) == (1, "unknown")
    assert (second.reply_.code, second.reply_.ext["outcome"]) == (2, "not_stored")
    third = lock(locking, "b", 0)
    assert (third.code, third.ext["outcome"]) == (2, "not_stored")
    locking.group.apply()
    assert granted(lock(locking, "b", 0)) == [], "it was stored after all"
    assert granted(lock(locking, "a", 0)) == [0]


def test_end_of_leadership_answers_waiting_clients(locking: Broker) -> None:
    first, second = FakeConnection(), FakeConnection()
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "a", 0), first)
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "b", 0), second)
    locking.group.append()
    locking.group.step_down()
    locking.processors.role_changed()
    assert first.reply_.ext["outcome"] == "unknown"
    assert second.reply_.code == ResponseCode.SERVICE_NOT_AVAILABLE
    locking.group.lead()
    assert granted(lock(locking, "b", 0)) == []
    assert granted(lock(locking, "a", 0)) == [0]


def test_queues_that_do_not_exist_are_not_granted(locking: Broker) -> None:
    assert granted(lock(locking, "a", 4)) == []
    assert granted(lock(locking, "a", 0, topic="nowhere")) == []
    assert lock_entries(locking) == 0


def test_topic_under_deletion_takes_no_locks(locking: Broker) -> None:
    lock(locking, "a", 0)
    gone, held = FakeConnection(), FakeConnection()
    delete = request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert locking.handle(delete, gone) is DEFERRED
    unlocked = locking.handle(command(RequestCode.UNLOCK_BATCH_MQ, "a", 0), held)
    assert unlocked.code == 0
    locking.group.settle()
    assert gone.reply_.code == 0
    assert locking.group.state.queue_locks == {}


def test_grants_of_clients_that_never_came_back_are_forgotten(
    locking: Broker, clock: ManualClock
) -> None:
    lock(locking, "dead", 0, 1)
    clock.now_s += FORGOTTEN_LEASES * LEASE_S
    lock(locking, "b", 2)
    assert list(locking.group.state.queue_locks) == [(GROUP, "T", 2)]


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (LockBatchRequestBody("a/b", "c"), 1, "a/b"),
        (LockBatchRequestBody("g", ""), 1, "client id"),
        (LockBatchRequestBody("g", "x" * 256), 1, "client id"),
        (
            LockBatchRequestBody(
                "g",
                "c",
                mq_set=[MessageQueue("T", BROKER, i) for i in range(MAX_QUEUES_PER_CHANGE + 1)],
            ),
            1,
            "4097 queues",
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    locking: Broker, body: LockBatchRequestBody, code: int, says: str
) -> None:
    response = locking.call(RequestCode.LOCK_BATCH_MQ, {}, body.encode())
    assert response.code == code
    assert says in (response.remark or "")


def test_tokens_must_fit_the_queues(locking: Broker) -> None:
    assert unlock(locking, "a", 0, 1, lockTokens="3").code == 1
    assert unlock(locking, "a", 0, lockTokens="x").code == 1


def test_a_group_that_may_not_be_made_locks_nothing(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_subscription_group=False)
    broker.make_topic("T")
    assert lock(broker, "a", 0).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


# -- what a token is good for ----------------------------------------------------------------


def commit(broker: Broker, offset: int, **more: Any) -> RemotingCommand:
    ext = {"consumerGroup": GROUP, "topic": "T", "queueId": "0", "commitOffset": str(offset)}
    return broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**ext, **more})


def test_an_old_token_commits_nothing(locking: Broker, clock: ManualClock) -> None:
    (old,) = tokens(locking, "a", 0)
    assert commit(locking, 5, sync="true", lockToken=str(old)).code == 0
    clock.now_s += LEASE_S
    (new,) = tokens(locking, "b", 0)
    refused = commit(locking, 9, sync="true", lockToken=str(old))
    assert refused.code == ResponseCode.STALE_LOCK_TOKEN
    assert refused.ext["outcome"] == "not_stored"
    assert locking.group.state.consumer_offset(GROUP, "T", 0) == 5
    assert commit(locking, 7, sync="true", lockToken=str(new)).code == 0
    assert locking.group.state.consumer_offset(GROUP, "T", 0) == 7


def test_commit_without_a_token_stays_possible(locking: Broker) -> None:
    lock(locking, "a", 0)
    assert commit(locking, 3, sync="true").code == 0


@pytest.mark.parametrize("token", [0, 10**9])
def test_ungranted_token_is_refused(locking: Broker, token: int) -> None:
    lock(locking, "a", 0)
    response = commit(locking, 3, sync="true", lockToken=str(token))
    assert response.code == ResponseCode.STALE_LOCK_TOKEN


def test_a_token_that_was_given_back_is_refused(locking: Broker) -> None:
    (token,) = tokens(locking, "a", 0)
    unlock(locking, "a", 0)
    assert commit(locking, 3, lockToken=str(token)).code == ResponseCode.STALE_LOCK_TOKEN


def test_token_ends_at_the_proposal_of_the_next_grant(locking: Broker, clock: ManualClock) -> None:
    (old,) = tokens(locking, "a", 0)
    clock.now_s += LEASE_S
    locking.handle(command(RequestCode.LOCK_BATCH_MQ, "b", 0), FakeConnection())
    response = commit(locking, 9, lockToken=str(old))
    assert response.code == ResponseCode.STALE_LOCK_TOKEN


def test_one_way_commit_precedes_the_next_grant(locking: Broker, clock: ManualClock) -> None:
    (old,) = tokens(locking, "a", 0)
    clock.now_s += LEASE_S
    assert commit(locking, 9, lockToken=str(old)).code == 0
    lock(locking, "b", 0)
    assert locking.group.state.consumer_offset(GROUP, "T", 0) == 9


@pytest.mark.parametrize(
    "code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.BULK_PULL]
)
def test_an_old_token_pulls_nothing(locking: Broker, clock: ManualClock, code: RequestCode) -> None:
    locking.group.put("T", 0, b"x")
    (old,) = tokens(locking, "a", 0)
    assert pull(locking, code, lockToken=str(old)).code == 0
    clock.now_s += LEASE_S
    (new,) = tokens(locking, "b", 0)
    refused = pull(locking, code, lockToken=str(old), sysFlag="5", commitOffset="8")
    assert refused.code == ResponseCode.STALE_LOCK_TOKEN
    assert locking.processors.offsets.offset(GROUP, "T", 0) is None
    assert pull(locking, code, lockToken=str(new), sysFlag="5", commitOffset="1").code == 0
    locking.group.settle()
    assert locking.group.state.consumer_offset(GROUP, "T", 0) == 1


def test_a_follower_refuses_what_it_knows_to_be_old(locking: Broker, clock: ManualClock) -> None:
    locking.group.put("T", 0, b"x")
    (old,) = tokens(locking, "a", 0)
    clock.now_s += LEASE_S
    (new,) = tokens(locking, "b", 0)
    locking.group.step_down()
    code = RequestCode.PULL_MESSAGE
    assert pull(locking, code, lockToken=str(old)).code == ResponseCode.STALE_LOCK_TOKEN
    assert pull(locking, code, lockToken=str(new)).code == 0
    assert pull(locking, code, lockToken=str(new + 5)).code == 0, "it may only be behind"


def test_a_token_that_is_no_number_is_refused(locking: Broker) -> None:
    assert commit(locking, 1, lockToken="x").code == ResponseCode.SYSTEM_ERROR


def test_group_holds_a_lock_while_a_lease_or_a_grant_lasts(
    locking: Broker, clock: ManualClock
) -> None:
    locks = locking.processors.locks
    assert not locks.holds_any(GROUP)
    lock(locking, "a", 0, 1)
    assert (locks.holds_any(GROUP), locks.holds_any("h")) == (True, False)
    unlock(locking, "a", 0)
    assert locks.holds_any(GROUP)
    unlock(locking, "a", 1)
    assert not locks.holds_any(GROUP)
    lock(locking, "b", 2)
    assert locks.holds_any(GROUP)
    clock.now_s += LEASE_S
    assert not locks.holds_any(GROUP), "its lease is over"
    lock(locking, "b", 2)
    assert locks.holds_any(GROUP)
    locking.group.store(TopicsChange(delete=("T",)))
    assert not locks.holds_any(GROUP), "it went with its topic"
    asked = command(RequestCode.LOCK_BATCH_MQ, "c", 3)
    locking.make_topic("T", queues=4)
    assert locking.handle(asked) is DEFERRED
    assert locks.holds_any(GROUP), "one is on its way"
