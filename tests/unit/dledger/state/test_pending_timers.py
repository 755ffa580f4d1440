"""Which timer messages wait: a set of offsets, whatever the pieces it is kept in."""

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.errors import InvariantBroken
from dledger.state.pending_timers import PIECE_OFFSETS, RECALLED_KEPT, PendingTimers
from tests.harness.check_table import encoded

OFFSETS = st.sets(st.integers(0, 3 * PIECE_OFFSETS + 5), max_size=40)


def loaded_again(timers: PendingTimers) -> PendingTimers:
    loaded = PendingTimers()
    for table, kept in ((loaded.pieces, timers.pieces), (loaded.recalled, timers.recalled)):
        table.load(cbor2.loads(encoded(kept)))
    loaded.count()
    return loaded


@given(OFFSETS, st.data())
def test_it_is_a_set_of_offsets(added: set[int], data: st.DataObject) -> None:
    timers = PendingTimers()
    timers.add(sorted(added))
    done = data.draw(st.sets(st.sampled_from(sorted(added)))) if added else set()
    recalled = data.draw(st.sets(st.sampled_from(sorted(done)))) if done else set()
    timers.finish(sorted(done - recalled))
    timers.recall(sorted(recalled))
    left = added - done
    assert len(timers) == len(left)
    assert timers.lowest == min(left, default=None)
    first, count = PIECE_OFFSETS - 3, PIECE_OFFSETS + 6
    mask = timers.mask(first, count)
    assert [first + i for i, waits in enumerate(mask) if waits] == sorted(
        offset for offset in left if first <= offset < first + count
    )
    assert all((offset in timers) == (offset in left) for offset in added)
    again = loaded_again(timers)
    assert again == timers
    assert (len(again), again.lowest) == (len(timers), timers.lowest)
    assert all(again.was_recalled(offset) for offset in recalled)
    assert not any(again.was_recalled(offset) for offset in added - recalled)


def test_loaded_timers_go_on_at_the_edges_of_pieces() -> None:
    timers = PendingTimers()
    edges = [0, 7, 8, PIECE_OFFSETS - 8, PIECE_OFFSETS - 1, PIECE_OFFSETS, 2 * PIECE_OFFSETS - 1]
    timers.add(edges)
    loaded = loaded_again(timers)
    for done, offset in enumerate(edges, 1):
        loaded.finish([offset])
        assert len(loaded) == len(edges) - done
        assert [each for each in edges if each in loaded] == edges[done:]
        assert loaded.lowest == next(iter(edges[done:]), None)
    assert loaded.pieces == {}


def test_done_timers_hold_no_memory() -> None:
    timers = PendingTimers()
    timers.add(range(3 * PIECE_OFFSETS))
    timers.finish(range(PIECE_OFFSETS + 1, 3 * PIECE_OFFSETS))
    assert list(timers.pieces) == [0, 1]
    timers.finish(range(PIECE_OFFSETS))
    assert list(timers.pieces) == [1]
    assert timers.lowest == PIECE_OFFSETS


def test_nothing_is_done_twice() -> None:
    timers = PendingTimers()
    timers.add([5])
    timers.finish([5])
    with pytest.raises(InvariantBroken, match="timer message 5"):
        timers.finish([5])
    with pytest.raises(InvariantBroken, match="timer message 6"):
        timers.recall([6])


def test_the_newest_recalls_are_remembered() -> None:
    timers = PendingTimers()
    timers.add(range(RECALLED_KEPT + 2))
    timers.recall(range(RECALLED_KEPT + 2))
    assert not timers.was_recalled(1)
    assert timers.was_recalled(2)
    assert timers.was_recalled(RECALLED_KEPT + 1)
