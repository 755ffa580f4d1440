"""The sender's bookkeeping: what goes out next, and that it never goes out without need."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dledger.raft.replicator import REFILL_HOLD_S, Replicator
from dledger.raft.settings import ALL_ON

ENTRY_BYTES = 100


@dataclass
class FlatLog:
    """A log of equal entries, all of term 1."""

    last_index: int
    anchor_index: int = 0

    def term_at(self, index: int) -> int:
        assert self.anchor_index <= index <= self.last_index
        return 1

    def end_position_of(self, index: int) -> int:
        return index * ENTRY_BYTES


@dataclass
class FlatReplicator(Replicator):
    """A sender whose log the test can let grow."""

    log: FlatLog


def leadership(last_index: int, *, window: int = 10) -> FlatReplicator:
    sender = FlatReplicator(
        FlatLog(last_index),
        window_bytes=window * ENTRY_BYTES,
        append_bytes=4 * ENTRY_BYTES,
        stall_s=1.0,
        guards=ALL_ON,
    )
    sender.start(["b"], 0.0)
    return sender


def send(sender: Replicator) -> tuple[int, int] | None:
    """Send what is due; return (first, last) of the entries in it."""
    append = sender.next_append("b", 0)
    if append is None:
        return None
    count = append.max_bytes // ENTRY_BYTES if not append.is_empty else 0
    last = min(append.first + count - 1, sender.log.last_index)
    sender.sent("b", last, (last - append.first + 1) * ENTRY_BYTES)
    return append.first, last


def test_leadership_begins_with_one_probe() -> None:
    sender = leadership(5)
    assert send(sender) == (6, 5)
    assert send(sender) is None
    assert not sender.has_work("b")


def test_window_fills_ahead_of_answers() -> None:
    sender = leadership(10)
    send(sender)
    sender.matched("b", 10, 0.0)
    sender.log.last_index = 40
    assert [send(sender) for _ in range(4)] == [(11, 14), (15, 18), (19, 20), None]
    sender.matched("b", 14, 0.0)
    assert send(sender) == (21, 24)


def test_an_answer_never_moves_the_next_index_back() -> None:
    sender = leadership(10)
    send(sender)
    sender.matched("b", 10, 0.0)
    sender.log.last_index = 18
    sent = [send(sender), send(sender)]
    sender.matched("b", 12, 0.0)
    assert sent == [(11, 14), (15, 18)]
    assert send(sender) is None


def test_rejection_goes_back_in_one_round() -> None:
    sender = leadership(1000)
    send(sender)
    sender.rejected("b", 200, 0.0)
    assert send(sender) == (200, 203)
    assert send(sender) is None


def test_a_follower_that_lost_its_disk_is_sent_everything_again() -> None:
    sender = leadership(10)
    send(sender)
    sender.matched("b", 8, 0.0)
    sender.rejected("b", 1, 0.0)
    assert send(sender) == (1, 4)
    assert sender.peers["b"].match_index == 0


def test_a_silent_follower_is_probed_again_after_the_stall_time() -> None:
    sender = leadership(10)
    send(sender)
    assert not sender.stalled("b", 0.9)
    assert sender.stalled("b", 1.1)
    assert send(sender) == (11, 10)


def test_the_commit_index_travels_with_entries_and_never_alone() -> None:
    sender = leadership(10)
    send(sender)
    sender.matched("b", 10, 0.0)
    assert sender.next_append("b", 7) is None
    sender.log.last_index += 1
    append = sender.next_append("b", 7)
    assert append is not None
    assert (append.is_empty, append.commit_index) == (False, 7)


@given(st.lists(st.sampled_from(["grow", "send", "match", "reject", "reset", "stall"])), st.data())
def test_match_stays_below_next_and_window_holds(events: list[str], data: st.DataObject) -> None:
    sender = leadership(5)
    progress = sender.peers["b"]
    now = 0.0
    for event in events:
        now += 0.3
        match event:
            case "grow":
                sender.log.last_index += data.draw(st.integers(0, 20))
            case "send":
                send(sender)
            case "match":
                sender.matched(
                    "b", data.draw(st.integers(progress.match_index, progress.next_index - 1)), now
                )
            case "reject":
                sender.rejected("b", data.draw(st.integers(0, sender.log.last_index + 1)), now)
            case "reset":
                sender.link_reset("b")
            case "stall":
                sender.stalled("b", now)
        assert 0 <= progress.match_index < progress.next_index <= sender.log.last_index + 1
        if progress.match_index and not progress.probing:
            on_its_way = (progress.next_index - 1 - progress.match_index) * ENTRY_BYTES
            assert on_its_way <= sender.window_bytes + ENTRY_BYTES


def test_refill_holds_log_for_a_bounded_time() -> None:
    sender = leadership(40)
    assert not sender.holds_log(0.0)
    sender.offered("b", 30)
    assert sender.holds_log(5.0)
    sender.matched("b", 29, 6.0)
    assert sender.holds_log(7.0)
    sender.matched("b", 30, 8.0)
    assert not sender.holds_log(9.0)
    sender.offered("b", 40)
    assert sender.holds_log(100.0)
    assert sender.holds_log(100.0 + REFILL_HOLD_S - 1)
    sender.offered("b", 41)  # a newer one does not begin the time again
    assert not sender.holds_log(100.0 + REFILL_HOLD_S)


def test_absent_follower_holds_no_log() -> None:
    sender = leadership(40)
    sender.offered("b", 30)
    sender.follow([], 1.0)
    assert not sender.holds_log(1.0)
