"""Which member a reader is sent to: alive, with almost everything, RocketMQ's id 1 first."""

from collections.abc import Mapping
from typing import Any

import pytest

from dledger.services.read_suggestion import ALIVE_MS, FOLLOWERS_AGE_S, ReadSuggestion
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.fake_group import FakeGroup

RECENT = 1000
SLOW, FAST = RECENT + 1, RECENT
G = SubscriptionGroupConfig("g")


def row(match_index: int | None = 1, **changes: Any) -> dict[str, Any]:
    return {
        "connected": True,
        "voter": True,
        "match_index": match_index,
        "acked_ms_ago": 10,
        **changes,
    }


class Followers:
    """What the leader knows of the others, as a test sets it."""

    def __init__(self, group: FakeGroup, clock: ManualClock, **settings: Any) -> None:
        self.peers: dict[str, Mapping[str, Any]] = {}
        self.looks = 0
        group.status = self.status  # type: ignore[method-assign]  # what the test is about
        self.suggestion = ReadSuggestion(
            group,
            **{
                "own_id": 3,
                "follower_ids": {},
                "recent_bytes": RECENT,
                "slave_read_enable": True,
                "clock": clock,
                **settings,
            },
        )

    def status(self) -> Mapping[str, Any]:
        self.looks += 1
        return {"peers": self.peers}

    def suggests(self, behind: int, config: SubscriptionGroupConfig = G) -> int:
        return self.suggestion.broker_id(config, behind)


@pytest.fixture
def followers(group: FakeGroup, clock: ManualClock) -> Followers:
    group.put("T", 0, b"x" * 100)
    return Followers(group, clock)


def test_recent_reads_stay_at_the_leader(followers: Followers) -> None:
    followers.peers = {"n0": row()}
    assert followers.suggests(FAST) == 0
    assert followers.looks == 0


def test_a_slow_reader_is_sent_to_id_one_first(followers: Followers) -> None:
    followers.peers = {"n1": row(), "n0": row()}
    assert followers.suggests(SLOW) == 1


def test_without_id_one_the_lowest_takes_its_place(followers: Followers) -> None:
    followers.peers = {"n2": row(), "n1": row()}
    assert followers.suggests(SLOW) == 2


def test_the_group_may_want_another_one(followers: Followers) -> None:
    followers.peers = {"n0": row(), "n1": row()}
    wants = SubscriptionGroupConfig("g", which_broker_when_consume_slowly=2)
    assert followers.suggests(SLOW, wants) == 2
    followers.peers = {"n0": row()}
    assert followers.suggests(SLOW, SubscriptionGroupConfig("g", broker_id=1)) == 1
    leader_always = SubscriptionGroupConfig("g", which_broker_when_consume_slowly=0)
    assert followers.suggests(SLOW, leader_always) == 0


def test_group_may_always_read_from_a_live_follower(
    followers: Followers, clock: ManualClock
) -> None:
    always = SubscriptionGroupConfig("g", broker_id=2)
    followers.peers = {"n0": row(), "n1": row()}
    assert followers.suggests(FAST, always) == 2
    followers.peers = {"n0": row(), "n1": row(connected=False)}
    clock.now_s += FOLLOWERS_AGE_S
    assert followers.suggests(FAST, always) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"connected": False},
        {"voter": False},
        {"match_index": None},
        {"match_index": 0},
        {"acked_ms_ago": None},
        {"acked_ms_ago": ALIVE_MS + 1},
        {"match_index": 999},
    ],
)
def test_one_that_is_away_or_has_too_little_is_not_recommended(
    followers: Followers, changes: dict[str, Any]
) -> None:
    followers.peers = {"n0": row(**changes)}
    assert followers.suggests(SLOW) == 0
    followers.peers = {"n0": row(**changes), "n1": row()}
    followers.suggestion._followers_since_s = None
    assert followers.suggests(SLOW) == 2


def test_one_that_is_far_behind_is_not_recommended(
    followers: Followers, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.services.read_suggestion.CAUGHT_UP_BYTES", 300)
    for _ in range(3):
        group.put("T", 0, b"x" * 100)
    last = group.log.last_index
    followers.peers = {"n0": row(1), "n1": row(last)}
    assert followers.suggests(SLOW) == 2


def test_followers_are_looked_up_once_a_second(followers: Followers, clock: ManualClock) -> None:
    followers.peers = {"n0": row()}
    assert [followers.suggests(SLOW) for _ in range(3)] == [1, 1, 1]
    assert followers.looks == 1
    followers.peers = {}
    assert followers.suggests(SLOW) == 1
    clock.now_s += FOLLOWERS_AGE_S
    assert followers.suggests(SLOW) == 0


def test_follower_keeps_slow_readers_only(followers: Followers, group: FakeGroup) -> None:
    group.step_down("elsewhere:1")
    assert followers.suggests(SLOW) == 3
    assert followers.suggests(FAST) == 0
    assert followers.suggests(FAST, SubscriptionGroupConfig("g", broker_id=3)) == 3
    assert followers.suggests(FAST, SubscriptionGroupConfig("g", broker_id=1)) == 0
    assert followers.looks == 0


def test_closed_followers_keep_reads_at_the_leader(group: FakeGroup, clock: ManualClock) -> None:
    followers = Followers(group, clock, slave_read_enable=False)
    followers.peers = {"n0": row()}
    assert followers.suggests(SLOW) == 0
