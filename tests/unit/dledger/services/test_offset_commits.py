"""Offsets reach the log at least once a second."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import trio

from dledger.commitlog.errors import DiskFullError
from dledger.group_api import Proposed
from dledger.services import offset_commits
from dledger.services.offset_commits import OffsetCommits
from dledger.testing.doubles import VirtualClock
from tests.harness.beside import beside
from tests.harness.fake_group import FakeGroup


async def test_commits_are_flushed_every_second(tmp_path: Path) -> None:
    group = FakeGroup(tmp_path, VirtualClock())
    offsets = OffsetCommits(group, VirtualClock())
    async with beside(offsets.run):
        await trio.sleep(0.5)
        offsets.commit("g", "TBW102", 0, 4)
        await trio.sleep(0.6)
        group.settle()
        assert group.state.consumer_offset("g", "TBW102", 0) == 4
        offsets.commit("g", "TBW102", 0, 5)
    group.step_down()
    assert offsets.offset("g", "TBW102", 0) == 4
    group.lead()
    offsets.flush()
    assert group.waiting == 0
    assert offsets.offset("g", "TBW102", 0) == 4
    group.close()


def test_what_the_log_refuses_is_flushed_later(group: FakeGroup, monkeypatch: Any) -> None:
    offsets = OffsetCommits(group, group.clock)
    offsets.commit("g", "TBW102", 0, 7)
    with monkeypatch.context() as full:
        full.setattr(group, "propose", Mock(side_effect=DiskFullError("full")))
        offsets.flush()
    assert offsets.offset("g", "TBW102", 0) == 7
    offsets.flush()
    group.settle()
    assert group.state.consumer_offset("g", "TBW102", 0) == 7


def test_too_many_dirty_offsets_are_flushed_at_once(group: FakeGroup, monkeypatch: Any) -> None:
    monkeypatch.setattr(offset_commits, "MAX_DIRTY_OFFSETS", 5)
    offsets = OffsetCommits(group, group.clock)
    for queue_id in range(5):
        offsets.commit("g", "TBW102", queue_id, 1)
    assert group.waiting == 1


def test_a_read_finds_the_newest_offset_whatever_is_answered(group: FakeGroup) -> None:
    """Commits of a few queues wait, are in flight or are applied, in any order of steps."""
    offsets = OffsetCommits(group, group.clock)
    rng = random.Random(905)
    newest: dict[int, int] = {}
    answers: list[Proposed] = []
    reads_in_flight = 0
    for step in range(3_000):
        queue_id, offset = rng.randrange(3), rng.randrange(50)
        match rng.choice(("commit", "commit_now", "flush", "append", "apply")):
            case "commit":
                offsets.commit("g", "TBW102", queue_id, offset)
                newest[queue_id] = offset
            case "commit_now":
                offsets.commit_now([(("g", "TBW102", queue_id), offset)], answers.append)
                newest[queue_id] = offset
            case "flush":
                offsets.flush()
            case "append":
                group.append()
            case "apply":
                group.apply()
        for known in range(3):
            assert offsets.offset("g", "TBW102", known) == newest.get(known), step
            reads_in_flight += offsets.is_on_its_way(("g", "TBW102", known))
    offsets.flush()
    group.settle()
    assert group.state.consumer_offsets["g", "TBW102"] == newest
    assert reads_in_flight > 1_000
    assert {answer.outcome for answer in answers} == {"stored"}
