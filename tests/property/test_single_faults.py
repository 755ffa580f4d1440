"""One fault in one small file of a replica that was killed: what its start makes of it.

Every folder is played with every small file in it: bytes flipped, the file missing, cut to its
half or to nothing, and an older version in place of the newest, as a lost write leaves it. Of each
the start makes one of these; what may be acknowledged is never lost without a sign.

=========  ========================================================================
same       log, vote, tables, queues and key index are those of the sound folder,
           once the entries that it has are applied
voteless   the replica follows until a leader has refilled it; it does not vote
refused    it does not start, and names the file
stranger   it is a new member without a vote
trusting   it forgets that it may not vote, which one file alone records
=========  ========================================================================
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.commitlog.mark import SLOT_HEADER_BYTES, SLOT_STRIDE_BYTES
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.identity import Identity
from dledger.raft.journal import TermVote, load_term_vote
from dledger.state.snapshot import snapshot
from dledger.state.state_record import FloorChange, state_batch
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk, Inode
from tests.harness.expired import EXPIRED
from tests.harness.extent import examples
from tests.harness.keyed_messages import ALWAYS
from tests.harness.replica_folders import SEGMENT_BYTES, install_at_once, settings, usual

ROOT = "/n0"
PATHS = StorePaths(ROOT)
OWNER = {"cluster": "C", "group": "G", "name": "n0"}
TERM = 3
FLIPS_MAX = examples(6)
"""Bytes of a file that are flipped, one at a time; all of a slot's fields are among them."""


class Killed(BaseException):
    """The process ends at once."""


@dataclass
class Folder:
    """A replica's folder as a killed process left it."""

    frames: list[bytes]
    """The log; all that the replica holds of it may be acknowledged."""
    queue_files: int = MAX_OPEN_FILES
    disk: CrashDisk = field(default_factory=CrashDisk)
    older: dict[str, bytes] = field(default_factory=dict)
    """Small files as they were before the newest change."""

    def open(self) -> ReplicaStore:
        """Start once more with what the last process wrote."""
        self.disk = self.disk.copy()
        self.disk.fault = self.keep_older
        return ReplicaStore(
            self.disk, settings(Path(ROOT)), StateTables, queue_files_max=self.queue_files
        )

    def keep_older(self, kind: str, path: str) -> None:
        if kind in ("write", "replace") and path in self.disk.files:
            self.older[path] = bytes(self.disk.files[path].content)


def append(store: ReplicaStore, frames: list[bytes]) -> None:
    for frame in frames:
        store.log.append(frame)
    store.log.flush()


def apply(store: ReplicaStore, last: int) -> None:
    for index in range(store.derived_index + 1, last + 1):
        store.apply(index)


def save(store: ReplicaStore, last: int) -> None:
    """Apply up to *last* and write a checkpoint."""
    apply(store, last)
    taken = store.begin_checkpoint(last)
    assert taken is not None
    taken.write()


def vote(store: ReplicaStore, term: int) -> None:
    written = TermVote(store.vote_slots)
    written.set(term, "n1")
    written.write(written.snapshot()[1])


def begun(folder: Folder, frames: list[bytes]) -> ReplicaStore:
    """Return the store of a replica that has *frames* and wrote two checkpoints."""
    store = folder.open()
    Identity(folder.disk, PATHS.identity, **OWNER, rng=random.Random(1)).agree([], {})
    vote(store, TERM - 1)
    append(store, frames[:10])
    save(store, 8)
    append(store, frames[10:])
    save(store, 20)
    vote(store, TERM)
    return store


# ------------------------------------------------------------------------------------ the folders


def running() -> Folder:
    folder = Folder(usual(40).frames)
    save(begun(folder, folder.frames), 30)
    return folder


def stopped() -> Folder:
    folder = running()
    store = folder.open()
    save(store, len(folder.frames))
    store.close(clean=True)
    return folder


def sharing() -> Folder:
    """Queues whose units stand in a file that all of them share."""
    folder = Folder(usual(40).frames, queue_files=1)
    begun(folder, folder.frames)
    return folder


def conflicting() -> tuple[list[bytes], list[bytes], int]:
    """Return the log of a leader, one that leaves it, and how many entries both have."""
    leader = usual(20)
    other, common = copy.deepcopy(leader), len(leader.frames)
    other.messages("T", 0, 3)
    other.some(6)
    leader.term = TERM
    leader.no_op()
    leader.some(12)
    return leader.frames, other.frames, common


def truncated() -> Folder:
    frames, others, common = conflicting()
    folder = Folder(frames)
    store = begun(folder, others)
    store.log.truncate_from(common + 1)
    append(store, frames[common:])
    return folder


def truncated_by_a_start() -> Folder:
    """A truncation that the next start made whole."""
    frames, others, common = conflicting()
    folder = Folder(frames)
    store = begun(folder, others)

    def kill(_kind: str, path: str) -> None:
        if path.startswith(PATHS.commitlog):
            raise Killed

    folder.disk.fault = kill
    with suppress(Killed):
        store.log.truncate_from(common + 1)
    store = folder.open()
    assert store.log.last_index == common
    append(store, frames[common:])
    return folder


def with_floors(*segments: int) -> list[bytes]:
    """Return a log with entries that make all replicas give up *count* of the first segments."""
    writer = usual(40)
    store = ReplicaStore(CrashDisk(), settings(Path(ROOT)), StateTables)
    append(store, writer.frames)
    log = store.log
    positions = {index: log.position_at(index) for index in range(1, log.last_index + 1)}
    for count in segments:
        first = next(i for i, at in positions.items() if at >= count * SEGMENT_BYTES)
        writer.batch(state_batch(FloorChange(log.anchor_at(first), EXPIRED)))
        writer.some(3)
    return writer.frames


def shortened() -> Folder:
    """A log whose begin was given up, twice."""
    folder = Folder(with_floors(1, 2))
    store = begun(folder, folder.frames)
    for last in (len(folder.frames) - 4, len(folder.frames)):
        save(store, last)
        anchor = store.tables.floor
        assert store.log.drop_before(anchor) > 0
        store.derived.delete_before(anchor, store.tables)
    return folder


def given_a_snapshot(upto: int | None) -> tuple[Folder, ReplicaStore]:
    """Return a replica that took a leader's snapshot, and some of the log from its floor on."""
    folder = Folder(with_floors(3))
    leader = ReplicaStore(CrashDisk(), settings(Path(ROOT)), StateTables)
    append(leader, folder.frames)
    apply(leader, len(folder.frames) - 2)
    first = leader.tables.floor.first_index
    store = begun(folder, folder.frames[: first - 2])
    assert install_at_once(store, snapshot(leader.tables), 20)
    folder.frames = folder.frames[:upto]
    append(store, folder.frames[first - 1 :])
    return folder, store


def refilling() -> Folder:
    return given_a_snapshot(-4)[0]


def installed() -> Folder:
    folder, store = given_a_snapshot(None)
    save(store, len(folder.frames))
    return folder


def voteless() -> Folder:
    """A replica that lost what it had acknowledged."""
    folder = running()
    store = folder.open()
    store._note_damaged_log("log_damaged")
    return folder


# ---------------------------------------------------------------------------- what is to be found


@dataclass(frozen=True)
class Found:
    """All that counts of a replica; queues and keys are not looked at while it is refilled."""

    doubt: tuple[bool, bool]
    vote: tuple[int, str | None]
    incarnation: str
    first_index: int
    frames: list[bytes]
    refilling: bool
    tables: bytes
    units: dict[tuple[str, int], list[Any]]
    keys: list[list[int]]


def find(folder: Folder, disk: CrashDisk) -> Found:
    """Start with *disk* and apply all that the log has, as a leader would have it done."""
    store = ReplicaStore(disk, settings(Path(ROOT)), StateTables)
    voted = load_term_vote(store.vote_slots, has_taken_part=store.log.end_position > 0)
    identity = Identity(disk, PATHS.identity, **OWNER, rng=random.Random(2))
    log, last = store.log, len(folder.frames)
    assert store.restored_commit_index <= last
    units: dict[tuple[str, int], list[Any]] = {}
    keys: list[list[int]] = []
    if log.last_index == last and not store.torn | store.refilling:
        apply(store, last)
        while store.put_missing_units(1 << 20):
            pass
        for key, bounds in store.tables.queues.items():
            count = bounds.max_offset - bounds.min_offset
            units[key] = store.queues.queue(*key).read(bounds.min_offset, count).tolist()
        kept = range(log.first_position, log.end_position)
        for word in ("k1", "k2"):
            positions = whole_query(store, word)
            keys.append([position for position in positions if position in kept])
    return Found(
        (store.damaged, store.torn),
        (voted.term, voted.voted_for),
        identity.incarnation,
        log.first_index,
        [bytes(log.frame(index)) for index in range(log.first_index, log.last_index + 1)],
        store.refilling,
        snapshot(store.tables),
        units,
        keys,
    )


def whole_query(store: ReplicaStore, word: str) -> list[int]:
    """Return the positions of a key, once a query has met no damage."""
    while True:
        positions = store.key_index.query("T", word, 64, *ALWAYS)
        if not store.keys.is_behind:
            return positions
        job = store.put_missing_keys(1 << 20, skip_damaged=False)
        if job is not None:
            job.run()
            store.key_index.end_flush()


def outcome(folder: Folder, disk: CrashDisk, sound: Found) -> str:
    try:
        found = find(folder, disk)
    except (CorruptStoreError, ForeignStoreError):
        return "refused"
    if found == sound:
        return "same"
    if replace(found, incarnation=sound.incarnation) == sound:
        return "stranger"
    if found.doubt < sound.doubt and (found.vote, found.frames) == (sound.vote, sound.frames):
        return "trusting"
    if any(found.doubt) and found.doubt >= sound.doubt and found.vote == sound.vote:
        return "voteless"
    differing = [name for name in vars(sound) if getattr(found, name) != getattr(sound, name)]
    return f"another {', '.join(differing)}"


# ------------------------------------------------------------------------------------- the faults


def flips(path: str, content: bytes) -> Iterator[bytes]:
    """Yield *content* with one bit flipped, in several ways."""
    rng = random.Random(path)
    places = [at for at, byte in enumerate(content) if byte]
    if len(content) > SLOT_STRIDE_BYTES and path not in (PATHS.snapshot, PATHS.install):
        slots = [at for at in places if at % SLOT_STRIDE_BYTES < 2 * SLOT_HEADER_BYTES]
        places = slots or places
    for at in rng.sample(places, min(FLIPS_MAX, len(places))):
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        yield bytes(flipped)


def faults(folder: Folder, path: str, content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name of a fault and what it leaves of a file; None: the file is missing."""
    for flipped in flips(path, content):
        yield "flipped", flipped
    yield "missing", None
    if content:
        yield "half", content[: len(content) // 2]
        yield "empty", b""
    if folder.older.get(path, content) != content:
        yield "older", folder.older[path]


def with_file(disk: CrashDisk, path: str, content: bytes | None) -> CrashDisk:
    left = disk.copy()
    if content is None:
        left.unlink(path)
        left.flush_dir(path.rpartition("/")[0])
    else:
        left.files[path] = left.durable_names[path] = Inode.holding(content)
    return left


SAME = frozenset({"same"})
REFUSED = frozenset({"refused"})
VOTELESS = frozenset({"voteless"})
SLOTS = {"half": REFUSED}
"""Without one of its slots a file is none that a crash leaves."""

RIGHT: dict[str, dict[str, frozenset[str]]] = {
    "abort": {},
    "checkpoint": {},
    "consumequeue.shared": {},
    "index": {},
    "raft/anchor": {
        **dict.fromkeys(("flipped", "half", "empty"), REFUSED),
        **dict.fromkeys(("missing", "older"), VOTELESS),
    },
    "raft/commit_mark": SLOTS,
    # That it was there is written nowhere else.
    "raft/doubt": {"missing": frozenset({"trusting"})},
    "raft/entryindex": {},
    "raft/extent": SLOTS,
    "raft/format": {
        # A bit may make another space of a space.
        "flipped": REFUSED | SAME,
        **dict.fromkeys(("missing", "half", "empty"), REFUSED),
    },
    "raft/identity": {
        **dict.fromkeys(("flipped", "half", "empty"), REFUSED),
        "missing": frozenset({"stranger"}),
    },
    "raft/install": {
        "flipped": VOTELESS | REFUSED,
        **dict.fromkeys(("missing", "half", "empty"), VOTELESS),
    },
    "raft/installation": SLOTS | dict.fromkeys(("missing", "empty"), VOTELESS | SAME),
    # A log without its begin is of no use without them.
    "raft/snapshot": dict.fromkeys(
        ("flipped", "missing", "half", "empty", "older"), VOTELESS | SAME
    ),
    "raft/truncation": SLOTS,
    "raft/vote": dict.fromkeys(("missing", "half", "empty"), REFUSED),
}
"""What a start may make of a fault, by file or folder; where nothing stands: the same."""


def small_files(disk: CrashDisk) -> dict[str, str]:
    """Return the paths of a folder's small files, and where they stand in `RIGHT`."""
    left_out = (f"{PATHS.commitlog}/", f"{PATHS.consumequeue}/", PATHS.lock)
    found = {}
    for path in sorted(disk.files):
        if not path.startswith(left_out):
            name = path.removeprefix(f"{ROOT}/")
            found[path] = name if name in RIGHT else name.rpartition("/")[0]
    return found


MAKERS: tuple[Callable[[], Folder], ...] = (
    running,
    stopped,
    sharing,
    truncated,
    truncated_by_a_start,
    shortened,
    refilling,
    installed,
    voteless,
)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_fault_in_a_small_file_loses_nothing_in_silence(make: Callable[[], Folder]) -> None:
    folder = make()
    disk = folder.disk.copy()
    sound = find(folder, disk.copy())
    assert sound.frames == folder.frames[sound.first_index - 1 :]
    assert sound.vote == (TERM, "n1")
    wrong = {}
    for path, name in small_files(disk).items():
        for fault, content in faults(folder, path, disk.read(path)):
            made = outcome(folder, with_file(disk, path, content), sound)
            if made not in RIGHT[name].get(fault, SAME):
                wrong[path, fault] = made
    assert wrong == {}


def test_every_small_file_is_played() -> None:
    played = {name for make in MAKERS for name in small_files(make().disk).values()}
    assert played == set(RIGHT)
