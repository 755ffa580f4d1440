"""The table of POP beside a model that keeps the whole history, over any leader's proposals."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dledger.state.pop import (
    HAS_ROW,
    PopChange,
    PopGrant,
    PopKey,
    PopMark,
    PopRow,
    PopRows,
    apply_pop,
)
from tests.harness.extent import examples

KEYS: tuple[PopKey, ...] = (("g", "T", 0), ("g", "T", 1), ("h", "T", 0))
MESSAGES = 12


@dataclass
class Delivery:
    """What one consumer was given: message, token, and until when it has it."""

    offset: int
    token: int
    until_ms: int


@dataclass
class Queue:
    """The history of one queue for one group."""

    deliveries: list[Delivery] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)

    def newest(self, offset: int) -> Delivery | None:
        found = [each for each in self.deliveries if each.offset == offset]
        return found[-1] if found else None


class PopTable(RuleBasedStateMachine):
    """Changes of leaders that may be wrong: what they break is found in what was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: PopRows = {}
        self.committed: dict[PopKey, int] = {}
        self.model = {key: Queue() for key in KEYS}
        self.index = 0
        self.now_ms = 0

    def apply(self, change: PopChange) -> dict[PopKey, dict[int, tuple[int, int]]]:
        """Apply one entry; return the attempts and tokens that it made, by queue and offset."""
        self.index += 1
        floors = apply_pop(self.rows, change, self.index, self.now_ms, self.committed.get)
        self.committed |= floors
        made: dict[PopKey, dict[int, tuple[int, int]]] = {}
        for key, row in self.rows.items():
            found = {
                offset: (out.attempts, out.expires_ms)
                for offset, out in row.out.items()
                if out.token == self.index
            }
            if found:
                made[key] = found
        return made

    @rule(ms=st.integers(0, 60))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(
        key=st.sampled_from(KEYS),
        count=st.integers(0, 3),
        skip=st.integers(0, 1),
        since=st.none() | st.integers(0, MESSAGES),
        wrong_token=st.booleans(),
        wrong_offset=st.booleans(),
        invisible_ms=st.integers(1, 80),
    )
    def grant(
        self,
        key: PopKey,
        count: int,
        skip: int,
        since: int | None,
        wrong_token: bool,
        wrong_offset: bool,
        invisible_ms: int,
    ) -> None:
        had_row = key in self.rows
        row = self.rows.get(key, PopRow(0, self.committed.get(key, 0)))
        begin = row.next_offset if since is None else since
        fresh = tuple(range(begin + skip, min(begin + skip + count, MESSAGES)))
        again = tuple((at, out.token + wrong_token) for at, out in row.out.items())
        end = max(begin, *fresh, 0) + bool(fresh)
        found = self.committed.get(key)
        if wrong_offset:
            found = HAS_ROW
        made = self.apply(
            PopChange(grants=(PopGrant(key, invisible_ms, begin, end, fresh, again, found),))
        )
        assert not (wrong_offset and key in made and not had_row), "a grant found another offset"
        queue = self.model[key]
        for offset, (attempts, until_ms) in made.get(key, {}).items():
            before = queue.newest(offset)
            assert offset not in queue.done, "an acknowledged message came again"
            assert before is None or before.until_ms <= self.now_ms, "two grants stand"
            queue.attempts[offset] += 1
            assert attempts == queue.attempts[offset]
            assert until_ms == self.now_ms + invisible_ms
            queue.deliveries.append(Delivery(offset, self.index, until_ms))

    @precondition(lambda self: any(queue.deliveries for queue in self.model.values()))
    @rule(
        data=st.data(), acked=st.booleans(), invisible_ms=st.integers(1, 80), unseen=st.booleans()
    )
    def use_a_handle(
        self, data: st.DataObject, acked: bool, invisible_ms: int, unseen: bool
    ) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if self.model[key].deliveries]))
        queue = self.model[key]
        used = data.draw(st.sampled_from(queue.deliveries))
        mark = PopMark(key, used.offset, used.token, invisible_ms, unseen)
        made = self.apply(PopChange(acked=(mark,)) if acked else PopChange(changed=(mark,)))
        is_current = queue.newest(used.offset) is used and used.offset not in queue.done
        if acked:
            if is_current:
                queue.done.add(used.offset)
            row = self.rows.get(key)
            assert row is None or not is_current or used.offset not in row.out
        elif is_current:
            assert made[key][used.offset][1] == self.now_ms + invisible_ms
            # The same delivery, with a new handle.
            used.token, used.until_ms = self.index, self.now_ms + invisible_ms
            queue.attempts[used.offset] = max(0, queue.attempts[used.offset] - unseen)
        else:
            assert not made, "an old handle changed a message"

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every message below the next one is out, acknowledged, or was passed over."""
        for key, queue in self.model.items():
            row = self.rows.get(key)
            delivered = {each.offset for each in queue.deliveries}
            out = set(row.out) if row is not None else set()
            assert out == delivered - queue.done
            if row is not None:
                assert row.floor == min(row.out) == self.committed[key]
                ends = {at: grant.expires_ms for at, grant in row.out.items()}
                assert row.next_expiry_ms() == min(ends.values())
                over = {at for at, end in ends.items() if end <= self.now_ms}
                assert set(row.expired(self.now_ms)) == over
            elif key in self.committed:
                assert all(at in queue.done for at in delivered)

    @invariant()
    def snapshot_round_trip_is_equal(self) -> None:
        for row in self.rows.values():
            assert PopRow.from_state(row.copied().to_state()) == row


TestPopTable = PopTable.TestCase
TestPopTable.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
