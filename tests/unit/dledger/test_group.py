"""A group of replicas on virtual time: group commit, outcomes, fail-over."""

from collections import Counter
from pathlib import Path

import pytest
import trio

from dledger.applier import APPLY_AT_ONCE_ENTRIES, APPLY_INTERVAL_S, Applier
from dledger.broker_errors import (
    CommitNotExpectedError,
    NotLeaderError,
    PendingFullError,
    ShuttingDownError,
    UnknownOutcomeError,
)
from dledger.commitlog.entry import Run
from dledger.commitlog.record import decode_record, encode_record
from dledger.group_api import OffsetCommit, Proposed
from dledger.proposals import BATCHES_PER_TURN, ENTRY_IN_BATCHES
from dledger.state.state_record import ConsumerOffsetsChange, state_batch
from dledger.waiting import CALLS_PER_TURN
from tests.harness.fake_group import batch_of
from tests.harness.groups import Groups, bodies, running_groups
from tests.harness.raft_cluster import batch

pytestmark = pytest.mark.slow


async def test_what_is_submitted_is_on_every_replica_at_the_same_place(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        proposed = [await leader.submit(batch(str(n).encode())) for n in range(20)]
        await groups.settle()
        for replica in groups.replicas.values():
            assert bodies(replica.group) == [str(n).encode() for n in range(20)]
            for number, where in enumerate(proposed):
                record = decode_record(replica.group.log.record_at(where.phy_offset))
                assert (record.queue_offset, record.phy_offset) == (number, where.phy_offset)
                assert where.first_offsets == (number,)
        chains = {replica.group.state.applied_chain for replica in groups.replicas.values()}
        assert len(chains) == 1


async def test_what_arrives_during_one_flush_becomes_one_entry(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        before = leader.state.applied_index
        results: list[Proposed] = []
        for number in range(50):
            leader.propose(batch(str(number).encode(), queue_id=number % 4), results.append)
        leader.kick()
        while len(results) < 50:
            await trio.sleep(0.01)
        assert {result.index for result in results} == {before + 1}
        assert [result.first_offsets[0] for result in results] == [n // 4 for n in range(50)]


class Steps(trio.abc.Instrument):
    """Numbers the steps of tasks."""

    number = 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.number += 1


async def test_crowd_is_sealed_and_answered_in_turns(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader, steps = (await groups.leader()).group, Steps()
        before = leader.state.applied_index
        answers: list[tuple[int, Proposed]] = []
        trio.lowlevel.add_instrument(steps)
        for _ in range(BATCHES_PER_TURN + 200):
            leader.propose(batch(b"x"), lambda proposed: answers.append((steps.number, proposed)))
        leader.kick()
        while len(answers) < BATCHES_PER_TURN + 200:
            await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(steps)
        sizes = Counter(proposed.index for _, proposed in answers)
        assert sizes == {before + 1: BATCHES_PER_TURN, before + 2: 200}
        offsets = [proposed.first_offsets for _, proposed in answers]
        assert offsets == [(offset,) for offset in range(len(answers))]
        assert max(Counter(step for step, _ in answers).values()) <= CALLS_PER_TURN


async def test_crowd_of_steps_is_sealed_in_turns(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        answers = list[Proposed]()
        for number in range(600):
            change = ConsumerOffsetsChange.of((("g", "T", number // 2, 1),))
            commit = OffsetCommit("g", "T", number // 2, 1, expected=-1)
            leader.propose(state_batch(change), answers.append, commits=[commit])
        before = leader.log.last_index
        leader.kick()
        assert leader.log.last_index - before <= BATCHES_PER_TURN // ENTRY_IN_BATCHES
        while len(answers) < 600:
            await trio.sleep(0.01)
        outcomes = Counter(answer.outcome for answer in answers)
        assert outcomes == {"stored": 300, "not_stored": 300}


async def test_commit_that_a_step_expects_counts_what_waits_before_it(tmp_path: Path) -> None:
    """Of those that wait for one flush each is compared with all before it."""
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        results: dict[str, Proposed] = {}

        def propose(name: str, offset: int, expected: int | None) -> None:
            def on_done(proposed: Proposed) -> None:
                results[name] = proposed

            change = ConsumerOffsetsChange.of((("g", "T", 0, offset),))
            commit = OffsetCommit("g", "T", 0, offset, expected)
            leader.propose(state_batch(change), on_done, commits=[commit])

        for name, offset, expected in (
            ("plain", 1, None), ("early", 5, 0), ("right", 2, 1), ("twice", 3, 1),
            ("behind", 3, None), ("last", 4, 3), ("beyond", 9, 8),
        ):  # fmt: skip
            propose(name, offset, expected)
        leader.kick()
        with trio.fail_after(60):
            while len(results) < 7:
                await trio.sleep(0.01)
        stored = {name for name, proposed in results.items() if proposed.outcome == "stored"}
        assert stored == {"plain", "right", "behind", "last"}
        refused = [results[name].error for name in ("early", "twice", "beyond")]
        assert all(isinstance(error, CommitNotExpectedError) for error in refused)
        assert [error.committed for error in refused] == [1, 2, 4]  # type: ignore[union-attr]  # seen above
        assert leader.state.consumer_offset("g", "T", 0) == 4


async def test_a_send_is_answered_when_it_is_committed(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        await leader.submit(batch(b"first"))
        results: list[tuple[Proposed, int]] = []

        def on_done(proposed: Proposed) -> None:
            results.append((proposed, leader.state.applied_index))

        for number in range(3):
            leader.propose(batch(str(number).encode()), on_done, is_applied=False)
            leader.kick()
            with trio.fail_after(5):
                while len(results) <= number:
                    await trio.sleep(0.001)
        assert [result.first_offsets for result, _ in results] == [(1,), (2,), (3,)]
        assert all(applied < result.index for result, applied in results)
        assert leader.node.commit_index >= results[-1][0].index > leader.state.applied_index
        leader.catch_up()
        assert leader.state.applied_index == results[-1][0].index
        assert bodies(leader) == [b"first", b"0", b"1", b"2"]


async def test_a_barrier_shows_what_was_answered_early(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        seen: list[int] = []

        def on_done(proposed: Proposed) -> None:
            index = proposed.index
            leader.read_barrier(lambda _: seen.append(leader.state.applied_index - index))

        leader.propose(batch(b"early"), on_done, is_applied=False)
        leader.kick()
        with trio.fail_after(5):
            while not seen:
                await trio.sleep(0.001)
        assert seen[0] >= 0


def record(queue_id: int) -> bytes:
    return encode_record(topic="T", queue_id=queue_id, body=b"x", properties=b"")


async def test_read_sees_all_that_was_answered_early_whatever_it_costs(tmp_path: Path) -> None:
    queues = [Run("T", queue_id, 2) for queue_id in range(300)]
    records = [record(run.queue_id) for run in queues for _ in range(run.count)]
    async with running_groups(tmp_path) as groups:
        leader, answered, lags = (await groups.leader()).group, list[int](), list[int]()

        def on_done(proposed: Proposed) -> None:
            answered.append(proposed.index)
            if len(answered) == 3:
                lags.append(proposed.index - leader.state.applied_index)
                leader.catch_up()
                lags.append(proposed.index - leader.state.applied_index)

        for _ in range(3):
            leader.propose(batch_of(records, *queues), on_done, is_applied=False)
            leader.kick()
            await trio.sleep(0.005)
        with trio.fail_after(60):
            while not lags:
                await trio.sleep(0.001)
        assert lags[0] > 1
        assert lags[1] == 0


async def test_sends_answered_early_are_applied_in_time(tmp_path: Path) -> None:
    """Little of it may wait: a leader is never far behind what it has answered."""
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        lags: list[int] = []

        def on_done(proposed: Proposed) -> None:
            lags.append(proposed.index - leader.state.applied_index)

        for number in range(300):
            leader.propose(batch(str(number).encode()), on_done, is_applied=False)
            leader.kick()
            with trio.fail_after(5):
                while len(lags) <= number:
                    await trio.sleep(0.0001)
        assert 1 < max(lags) <= APPLY_AT_ONCE_ENTRIES
        await trio.sleep(2 * APPLY_INTERVAL_S)
        assert len(bodies(leader)) == 300


async def test_offsets_go_on_where_the_dead_leader_left_them(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        for number in range(5):
            await first.group.submit(batch(str(number).encode()))
        first.kill()
        del groups.replicas[first.name]
        second = await groups.leader()
        proposed = await second.group.submit(batch(b"5"))
        assert proposed.first_offsets == (5,)
        again = await groups.start(first.name)
        await groups.settle()
        assert bodies(again.group) == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_cut_off_leader_answers_unknown_or_not_stored(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        old = await groups.leader()
        await old.group.submit(batch(b"before"))
        await groups.isolate(old.name)
        with pytest.raises((UnknownOutcomeError, NotLeaderError)) as failure:
            await old.group.submit(batch(b"lost"))
        assert failure.value.outcome in ("unknown", "not_stored")
        assert old.group.leadership is None
        with pytest.raises(NotLeaderError):
            old.group.propose(batch(b"late"), lambda _: None)
        new = await groups.leader(among=groups.others(old.name))
        await new.group.submit(batch(b"after"))
        groups.heal()
        await groups.settle()
        for replica in groups.replicas.values():
            assert bodies(replica.group) == [b"before", b"after"]
        assert old.group.node.journal.truncations == 1


async def test_the_leadership_scope_ends_when_the_leader_steps_down(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        running = trio.Event()
        ended = trio.Event()

        async def service(_: object) -> None:
            running.set()
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

        for replica in groups.replicas.values():
            if replica is not leader:
                replica.group.services.append(service)
        await groups.isolate(leader.name)
        second = await groups.leader(among=groups.others(leader.name))
        await running.wait()
        assert not ended.is_set()
        await groups.isolate(second.name)
        with trio.fail_after(3):
            await ended.wait()
        assert second.group.leadership is None


async def test_failing_service_leaves_others_running(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        group, term = leader.group, leader.group.term
        runs: list[str] = []
        heard: list[int] = []

        async def failing(_: object) -> None:
            runs.append("failing")
            raise ValueError("a message it did not expect")

        async def steady(_: object) -> None:
            runs.append("steady")
            await trio.sleep_forever()

        def listener(_: object) -> None:
            raise KeyError("T")

        def answered(_: Proposed) -> None:
            raise RuntimeError("no client reads the answer")

        group.services += [failing, steady]
        group.on_applied += [listener, lambda _: heard.append(1)]
        await group.transfer_leadership()
        await groups.leader()
        while group.leadership is None:
            await trio.sleep(0.5)
            other = await groups.leader()
            if other is not leader:
                await other.group.transfer_leadership(leader.name)
        heard.clear()
        before = group.service_counts.listener_failures
        group.propose(batch(b"a"), answered)
        await group.submit(batch(b"b"))
        await trio.sleep(4)
        assert runs.count("failing") == 3
        assert runs.count("steady") == 1
        (name,) = +group.service_counts.restarts
        assert "failing" in name
        assert len(heard) >= 1
        assert group.service_counts.listener_failures >= before + 2
        assert bodies(group) == [b"a", b"b"]
        assert group.term > term
        assert group.leadership is not None


async def test_clean_close_applies_all_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        group = leader.group
        with monkeypatch.context() as patch:
            patch.setattr(Applier, "apply", lambda *_: None)
            for number in range(APPLY_AT_ONCE_ENTRIES + 9):
                group.propose(batch(str(number).encode()), lambda _: None)
                group.kick()
                await trio.sleep(0.005)
            leader.scope.cancel()
            await trio.sleep(0.1)
        assert group.node.commit_index - group.store.derived_index > APPLY_AT_ONCE_ENTRIES
        await group.close()
        assert group.store.derived_index == group.node.commit_index


async def test_a_restarted_replica_replays_from_its_checkpoint(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        for number in range(10):
            await leader.group.submit(batch(str(number).encode()))
        await trio.sleep(4)
        for number in range(10, 15):
            await leader.group.submit(batch(str(number).encode()))
        leader.kill()
        again = await groups.start("n0")
        assert bodies(again.group)[:10] == [str(n).encode() for n in range(10)]
        await groups.leader()
        assert bodies(again.group) == [str(n).encode() for n in range(15)]


async def test_too_much_in_flight_is_refused_and_not_stored(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery)
        groups.settings.max_pending_bytes = 20_000
        for name in groups.names:
            await groups.start(name)
        leader = await groups.leader()
        await groups.isolate(leader.name)
        for _ in range(2):
            leader.group.propose(batch(bytes(9_000)), lambda _: None)
        with pytest.raises(PendingFullError) as failure:
            leader.group.propose(batch(bytes(9_000)), lambda _: None)
        assert (failure.value.outcome, failure.value.retriable) == ("not_stored", True)
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)


async def test_draining_group_takes_nothing_new(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        results: list[Proposed] = []
        leader.group.propose(batch(b"x"), results.append)
        leader.group.kick()
        assert await leader.group.drain(5.0)
        assert [result.outcome for result in results] == ["stored"]
        with pytest.raises(ShuttingDownError):
            leader.group.propose(batch(b"y"), results.append)


async def test_sizes_are_reported_once_per_applied_unit(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = (await groups.leader()).group
        reported: list[tuple[str, int, list[int]]] = []
        leader.on_units.append(
            lambda units: reported.extend(
                (item.topic, item.first, item.units["size"].tolist()) for item in units
            )
        )
        proposed = [await leader.submit(batch(b"a")), await leader.submit(batch(b"bcd"))]
        sizes = [decode_record(leader.log.record_at(where.phy_offset)).size for where in proposed]
        assert reported == [("T", 0, [sizes[0]]), ("T", 1, [sizes[1]])]
        assert sizes[1] == sizes[0] + 2
