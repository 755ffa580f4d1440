"""The log against a plain list, over appends, truncations, flushes, kills and power cuts."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptEntryError, CorruptStoreError
from dledger.commitlog.log_reader import FlushTicket
from dledger.commitlog.mark import Mark
from dledger.commitlog.recovery import DamagedLogError
from dledger.commitlog.store_paths import StorePaths
from dledger.testing.crash_disk import SECTOR_BYTES, CrashDisk, Inode
from tests.harness.entry_frames import next_frame, next_no_op
from tests.harness.extent import examples

ROOT = "/store"
PATHS = StorePaths(ROOT)
SEGMENT = 4 * SECTOR_BYTES


def open_log(disk: CrashDisk, trusted: Mark | None, *, repair: bool = False) -> EntryLog:
    return EntryLog.open(
        disk, ROOT, segment_bytes=SEGMENT, index_units_per_file=16, trusted=trusted, repair=repair
    )


class EntryLogModel(RuleBasedStateMachine):
    """`entries` is what the log must hold, `acknowledged` how much of it was reported durable."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashDisk()
        self.log = open_log(self.disk, None)
        self.entries: list[tuple[int, bytes]] = []
        self.promised = 0
        self.mark: Mark | None = None
        self.term = 1
        self.tickets: list[FlushTicket] = []

    @initialize()
    def begin(self) -> None:
        self.log.append(next_no_op(self.log, term=0))
        self.entries.append((0, bytes(self.log.frame(1))))

    @rule(
        sizes=st.lists(st.integers(0, 900) | st.sampled_from([0, 1]), min_size=1, max_size=6),
        new_term=st.booleans(),
    )
    def append(self, sizes: list[int], new_term: bool) -> None:
        self.term += new_term
        for size in sizes:
            frame = next_frame(self.log, size, term=self.term, fill=1 + size % 250)
            self.log.append(frame, sealed_here=bool(size % 2))
            self.entries.append((self.term, frame))

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        floor = self.mark.index if self.mark is not None else 0
        if len(self.entries) > floor:
            index = floor + 1 + int(share * (len(self.entries) - floor))
            self.log.truncate_from(index)
            del self.entries[index - 1 :]
            self.promised = min(self.promised, len(self.entries))

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.promised = len(self.entries)

    @rule()
    def begin_flush(self) -> None:
        ticket = self.log.begin_flush()
        assert ticket is not None or self.promised == len(self.entries)
        if ticket is not None:
            self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(at=st.integers(0, 10), complete=st.booleans())
    def run_ticket(self, at: int, complete: bool) -> None:
        ticket = self.tickets.pop(at % len(self.tickets))
        ticket.run()
        if complete and self.log.complete_flush(ticket):
            self.promised = max(self.promised, ticket.last_index)

    @rule()
    def reserve(self) -> None:
        self.log.allocator.reserve_next()

    @rule()
    def commit(self) -> None:
        if self.promised:
            self.mark = self.log.mark_at(self.promised)

    @rule(keep_mark=st.booleans())
    def kill(self, keep_mark: bool) -> None:
        self.reopen(self.mark if keep_mark else None)
        assert len(self.entries) == self.log.last_index

    @rule(keep_mark=st.booleans())
    def close(self, keep_mark: bool) -> None:
        self.log.close()
        self.reopen(self.mark if keep_mark else None)
        assert len(self.entries) == self.log.last_index

    @rule(seed=st.integers(0, 1 << 32), odds=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    def power_cut(self, seed: int, odds: float) -> None:
        rng = random.Random(seed)
        self.disk = self.disk.power_cut(lambda: rng.random() < odds)
        self.reopen(self.mark)

    def reopen(self, trusted: Mark | None) -> None:
        damage = None
        try:
            self.log = open_log(self.disk, trusted)
        except DamagedLogError as error:
            damage = error.damage
            self.log = open_log(self.disk, trusted, repair=True)
        # Sectors of a later entry may outlive those of an earlier one, but nothing that was
        # acknowledged may be missing.
        assert damage is None or len(self.entries) - self.promised >= 2
        assert damage is None or damage.index > self.promised
        assert self.log.mark_valid
        assert self.log.last_index >= self.promised
        del self.entries[self.log.last_index :]
        self.promised = len(self.entries)
        self.tickets.clear()

    @invariant()
    def the_log_holds_what_the_model_holds(self) -> None:
        log, entries = self.log, self.entries
        assert log.last_index == len(entries)
        assert log.durable_index == self.promised
        assert log.last_term == (entries[-1][0] if entries else 0)
        assert [bytes(log.frame(i + 1)) for i in range(len(entries))] == [e[1] for e in entries]
        assert [log.term_at(i + 1) for i in range(len(entries))] == [e[0] for e in entries]
        if entries:
            middle = (len(entries) + 1) // 2
            joined = b"".join(log.frames(middle, 1 << 20))
            assert joined == b"".join(e[1] for e in entries[middle - 1 :])

    @invariant()
    def nothing_stands_behind_the_end(self) -> None:
        end = self.log.end_position
        base = end - end % SEGMENT
        path = PATHS.segment(base)
        if path in self.disk.files:
            assert not any(self.disk.files[path].content[end - base :])


TestEntryLogModel = EntryLogModel.TestCase
TestEntryLogModel.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


def damaged_log() -> tuple[CrashDisk, Mark, list[bytes]]:
    disk = CrashDisk()
    log = open_log(disk, None)
    for n in range(40):
        log.append(next_frame(log, 37 * n % 300, term=1 + n // 10))
    log.flush()
    frames = [bytes(log.frame(i)) for i in range(1, 41)]
    return disk, log.mark_at(25), frames


DISK, MARK, FRAMES = damaged_log()


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    mutations=st.integers(0, 4),
    cut_file=st.booleans(),
    with_mark=st.booleans(),
    beside=st.booleans(),
)
def test_damaged_files_are_refused_or_opened_clean(
    seed: int, mutations: int, cut_file: bool, with_mark: bool, beside: bool
) -> None:
    """Random bytes changed, files cut short: a prefix of the true log or CorruptStoreError."""
    rng = random.Random(seed)
    disk = DISK.copy()
    folders = [PATHS.commitlog, PATHS.entry_index] if beside else [PATHS.commitlog]
    paths = [path for path in sorted(disk.files) if path.rsplit("/", 1)[0] in folders]
    for _ in range(mutations):
        content = disk.files[rng.choice(paths)].content
        at, size = rng.randrange(len(content)), rng.choice([1, 1, 1, 8, 600])
        content[at : at + size] = rng.randbytes(len(content[at : at + size]))
    if cut_file:
        path = rng.choice(paths)
        content = disk.files[path].content
        disk.files[path] = Inode.holding(content[: rng.randrange(len(content))])
    try:
        log = open_log(disk, MARK if with_mark else None)
    except CorruptStoreError:
        return
    count = log.last_index
    assert not with_mark or not log.mark_valid or count >= MARK.index
    readable = []
    for i in range(1, count + 1):
        try:
            readable.append((i, bytes(log.frame(i))))
        except (CorruptStoreError, CorruptEntryError):
            assert with_mark
            assert i <= MARK.index
    unchecked = MARK.index if with_mark else 0
    assert all(frame == FRAMES[i - 1] or i <= unchecked for i, frame in readable)
    log.append(next_frame(log))
    assert log.last_index == count + 1
