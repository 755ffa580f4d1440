"""Invariants of one broker group, checked after every step of every replica.

===================  =======================================================================
one leader           a term has one leader, as every node sees it; an old leader that runs
                     gives up within `GIVE_UP_ELECTIONS`
leader complete      a new leader has every entry that was ever committed
log matching         what one node shows as committed every node has there, chain and all; two
                     logs that end with the same index and term end with the same entry
commit               never goes back while a process runs, never beyond the log; a leader counts
                     entries of its own term only; followers show nothing as committed that no
                     leader has
members              the list in force was brought by an entry that is in the log; what leaders
                     write of them is looked at by `member_lists`
durability           a process that starts again still has what it had shown as committed,
                     unless its disk has lost what it had flushed
state machines       equal tables at equal applied index
floor                `Floors`: the log begins later only by a record that the model of retention
                     allows, with the settings of the plan and by what the log holds
queue floor          `Floors`: a queue begins later by itself only where its topic has a retention
nothing else         `Floors`: no queue begins behind its first message after the floor
saved                `Floors`: a leader gives up nothing that its newest checkpoint does not cover
store time           `StoreTime`: not far ahead of the time, where at most one date is years off
===================  =======================================================================
"""

from __future__ import annotations

from typing import Any, Final

import trio

from dledger.commitlog.entry import KIND_CONFIG, parse_header
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.group import Group
from dledger.jepsen_like.checkers.retention import Keeps, mistake_in
from dledger.jepsen_like.history.operation import FloorMove
from dledger.jepsen_like.simulation.event_trace import Event
from dledger.jepsen_like.simulation.member_lists import MemberLists
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld
from dledger.jepsen_like.simulation.promises import (
    DiskCopies,
    Promises,
    check_recovered,
    check_stable,
)
from dledger.jepsen_like.simulation.reference_replica import ReferenceReplica, digests_by_field
from dledger.jepsen_like.simulation.virtual_time import EPOCH_MS
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.jepsen_like.workloads.final_read import HOUR_MS, Queue, kept_offsets, move_of, rows_of
from dledger.log_clock import JUMP_MAX_MS
from dledger.services.retention import retention_ms
from dledger.state.apply import Applied
from dledger.state.state_record import FloorChange, QueueFloorsChange, TimersChange
from dledger.state.tables import StateTables

GIVE_UP_ELECTIONS: Final = 3
"""An old leader that runs must have noticed within this number of election timeouts."""

LAG_ENTRIES: Final = 5
"""A voter that lacks this number of committed entries lags."""


class Checks:
    """The invariants of one broker group.

    Attributes:
        leaders: Term to the name of the member that was seen to lead it.
        committed: Index to the chain of the entry first seen committed there.
        states: Applied index to the digest of the tables there.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._every = world.settings.compare_state_every
        self.leaders: dict[int, str] = {}
        self.promises = Promises(world, self.leaders)
        self.floors = Floors(world)
        self.store_time = StoreTime(world)
        self.reference = ReferenceReplica(world)
        self.reference.compare = self.compare_digests
        self.copies = DiskCopies(world)
        self.lists = MemberLists(world)
        self.committed: dict[int, int] = {}
        self.states: dict[int, tuple[str, dict[str, bytes]]] = {}
        self.last_committed = 0
        self.led_commit = 0
        """Newest index that a leader has shown as committed."""
        self.led_since_s = 0.0
        """When the newest leader began."""
        self._ends: dict[tuple[int, int], int] = {}
        self._awaited: list[trio.Event] = []
        self._newest_leader = ""
        self._led: dict[str, int] = {}  # by member: the newest incarnation

    async def next_leader(self) -> str:
        """Wait until a replica begins to lead, or to serve as leader; return its name."""
        begun = trio.Event()
        self._awaited.append(begun)
        await begun.wait()
        return self._newest_leader

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Look at a replica that has just started, and at every step it makes from now on."""
        raft, journal = group.node, group.node.journal
        world = self._world
        if (
            node.is_trusted
            and journal.last_index < node.seen_commit
            and group.node.settings.sync_flush
        ):
            world.violate(
                "durability",
                f"{node.name} had shown {node.seen_commit} as committed and came back with a log "
                f"up to {journal.last_index}",
            )
        if group.store.log.report.torn_tail:
            world.sometimes["torn_tail_cut"] += 1
        if group.store.damaged:
            world.sometimes["damaged_start"] += 1
        if node.is_trusted and not group.store.damaged:
            check_recovered(world, node, group)
        self.promises.watch(node, group)
        self.floors.watch(group)
        self.lists.watch(node, group)
        self.reference.watch(node, group)
        node.seen_commit = raft.commit_index
        self.led_commit = max(self.led_commit, raft.commit_index)
        node.seen_truncations = journal.truncations
        node.seen_list = -1
        node.seen_led_term = 0
        node.seen_log = None
        settled = raft.owner.on_settled

        def on_settled() -> None:
            settled()
            if node.group is group:
                self.after_step(node, group)

        raft.owner.on_settled = on_settled
        apply_next = group.store.apply_next

        def apply_and_look(last: int) -> Applied:
            result = apply_next(last)
            if node.group is group:
                self.floors.applied(node, group, result)
                self.store_time.applied(node, group, result)
                self.reference.feed(node, group)
            return result

        group.store.apply_next = apply_and_look  # type: ignore[method-assign]
        group.on_role_change.append(lambda: self.role_changed(node, group))
        group.on_applied.append(lambda _touched: self.applied(node, group))

    def after_step(self, node: BrokerNode, group: Group) -> None:
        """Look at one replica."""
        raft = group.node
        commit = raft.commit_index
        seen = node.seen_commit
        if raft.is_leader and node is not self._world.last_leader:
            self._leads(node, group)
        self.copies.after_step(node, group)
        if commit != seen:
            self._commit_moved(node, group, seen, commit)
        self._compare_end(node, group)
        check_stable(self._world, node, group)
        self.lists.after_step(node, group)
        truncations = raft.journal.truncations
        if truncations != node.seen_truncations:
            self._world.sometimes["truncation"] += truncations - node.seen_truncations
            node.seen_truncations = truncations
            self._check_list(node, group)
            if raft.journal.last_index < commit:
                self._world.violate(
                    "committed_truncated",
                    f"{node.name} cut its log to {raft.journal.last_index}, committed was {commit}",
                )
        if raft.roster.log.version != node.seen_list:
            node.seen_list = raft.roster.log.version
            members = raft.roster.members
            voters = () if members is None else members.voter_names
            if raft.is_leader:
                self._count_promotion(node, voters)
            node.seen_voters = voters
            self._check_list(node, group)
        if raft.is_leader and raft.term < self._world.last_term:
            self._check_given_up(node, raft.term)
        node.seen_led_term = raft.term if raft.is_leader else 0

    def _count_promotion(self, leader: BrokerNode, voters: tuple[str, ...]) -> None:
        """Count a list that makes a member a voter while another voter lacks entries."""
        before, brokers = leader.seen_voters, self._world.brokers
        if not before or set(voters) <= set(before):
            return
        lags = [
            name
            for name in before
            if name in brokers and brokers[name].seen_commit + LAG_ENTRIES <= leader.seen_commit
        ]
        self._world.sometimes["promoted_while_another_lags"] += bool(lags)

    def _check_list(self, node: BrokerNode, group: Group) -> None:
        log, index = group.node.journal.log, group.node.roster.log.index
        if index <= group.state.members_index:  # tables may be ahead of a log
            return
        if index > log.last_index:
            self._world.violate(
                "members",
                f"{node.name} follows a list of entry {index}; its log ends at {log.last_index}",
            )
        elif (
            index >= log.first_index
            and index not in log.damaged
            and parse_header(log.frame(index)).kind != KIND_CONFIG
        ):
            self._world.violate(
                "members", f"{node.name} follows a list of entry {index}, which brings none"
            )

    def _check_given_up(self, node: BrokerNode, term: int) -> None:
        world = self._world
        since_s = max(self.led_since_s, node.ran_since_s)
        limit_s = GIVE_UP_ELECTIONS * world.settings.election_timeout_ms / 1000
        if world.now_s - since_s > limit_s:
            world.violate(
                "two_leaders_for_long",
                f"{node.name} still leads term {term}, {limit_s} s after term {world.last_term} "
                "began",
            )

    def _leads(self, node: BrokerNode, group: Group) -> None:
        world, term = self._world, group.node.term
        first = self.leaders.get(term)
        if first is None:
            self.leaders[term] = node.name
            # One that wins late, its term over already, need not have what later terms committed.
            if term == max(self.leaders):
                self._is_complete(node, group)
        elif first != node.name:
            world.violate("two_leaders", f"{first} and {node.name} both lead term {term}")

    def _is_complete(self, node: BrokerNode, group: Group) -> None:
        """Raft, §5.4.3: a leader has every entry committed in an earlier term."""
        journal, index = group.node.journal, self.last_committed
        chain = self.committed.get(index)
        if chain is None or index < journal.log.first_index:
            return
        if index > journal.last_index or journal.log.chain_at(index) != chain:
            self._world.violate(
                "leader_incomplete",
                f"{node.name} leads term {group.node.term} without the committed entry {index}; "
                f"its log ends at {journal.last_index}",
            )

    def _compare_end(self, node: BrokerNode, group: Group) -> None:
        journal = group.node.journal
        end = (journal.last_term, journal.last_index)
        if end == node.seen_end:
            return
        node.seen_end = end
        chain = journal.log.last_chain
        if self._ends.setdefault(end, chain) != chain:
            self._world.violate(
                "log_matching", f"{node.name} has another entry {end[1]} of term {end[0]}"
            )

    def _commit_moved(self, node: BrokerNode, group: Group, seen: int, commit: int) -> None:
        world = self._world
        node.seen_commit = commit
        self.promises.promise(node, group, commit)
        if commit < seen:
            world.violate("commit_went_back", f"{node.name}: commit index {seen} to {commit}")
            return
        if commit > (stable := group.node.journal.stable_index):
            world.violate(
                "commit_not_stable",
                f"{node.name} shows {commit} as committed, stable here is {stable}",
            )
        if group.node.is_leader or self._led_to(node, group, commit):
            if commit > self.led_commit:  # else it learnt of it as a follower
                if group.node.is_leader:
                    self._counted_right(node, group, commit)
                self.copies.counted(node, group, seen, commit)
            self.led_commit = max(self.led_commit, commit)
        elif commit > self.led_commit:
            world.violate(
                "commit_ahead",
                f"{node.name} follows and shows {commit} as committed; leaders {self.led_commit}",
            )
        chain_at, committed = group.node.journal.log.chain_at, self.committed
        for index in range(seen + 1, commit + 1):
            try:
                chain = chain_at(index)
            except MQError:
                continue  # below the first kept entry: came with a snapshot
            first = committed.setdefault(index, chain)
            if first != chain:
                world.violate(
                    "log_matching",
                    f"{node.name} has {chain:016x} committed at {index}, others {first:016x}",
                )
                return
        self.last_committed = max(self.last_committed, commit)

    def _led_to(self, node: BrokerNode, group: Group, commit: int) -> bool:
        """Whether it counted, as leader of the entry's term, what its own disk has only now."""
        raft = group.node
        term = raft.journal.term_at(commit)
        return term in (raft.term, node.seen_led_term) and self.leaders.get(term) == node.name

    def _counted_right(self, node: BrokerNode, group: Group, commit: int) -> None:
        """A leader has moved its commit index: it must have had the right to."""
        raft = group.node
        if raft.journal.term_at(commit) != raft.term:
            self._world.violate(
                "old_term_counted",
                f"{node.name} commits {commit} of term {raft.journal.term_at(commit)} by counting "
                f"in term {raft.term} (§5.4.2)",
            )

    def role_changed(self, node: BrokerNode, group: Group) -> None:
        """A replica believes something new about which member leads."""
        if node.group is not group:
            return
        world, raft = self._world, group.node
        world.trace.note(Event.ROLE, node.number, raft.term, int(raft.is_leader))
        if not raft.is_leader:
            return
        node.led_s = world.elapsed_s
        for waiting in self._awaited:
            waiting.set()
        self._awaited.clear()
        self._newest_leader = node.name
        self._leads(node, group)
        if world.last_leader is not node or world.last_term != raft.term:
            if world.last_leader is not None:
                world.sometimes["leader_change"] += 1
            world.last_leader, world.last_term = node, raft.term
            world.sometimes["led_again"] += self._led.get(node.name) == node.incarnation
            self._led[node.name] = node.incarnation
            self.led_since_s = world.now_s
        if any(other.leads for other in world.brokers.values() if other is not node):
            world.sometimes["two_believe_they_lead"] += 1

    def applied(self, node: BrokerNode, group: Group) -> None:
        """A replica has applied an entry."""
        if node.group is not group:
            return
        tables: Any = group.state
        index = tables.applied_index
        self._world.trace.note(Event.APPLIED, node.number, index, tables.applied_chain >> 1)
        if index % self._every == 0:
            self.compare_state(node, index, tables)

    def compare_state(self, node: BrokerNode, index: int, tables: Any) -> None:
        """Compare a replica's tables with what others had at the same index."""
        self.floors.check_tables(node, index, tables)
        self.compare_digests(node.name, index, tables)

    def compare_digests(self, name: str, index: int, tables: StateTables) -> None:
        """Compare tables, of whatever has them, with the first ones seen at the same index."""
        digests = digests_by_field(tables)
        other, first = self.states.setdefault(index, (name, digests))
        if first != digests:
            differ = ", ".join(field for field in digests if first.get(field) != digests[field])
            self._world.violate(
                "state_machines", f"{name} and {other} differ at {index} in their {differ}"
            )


class StoreTime:
    """The store times of one broker group.

    *ahead_max_ms*: how far store time may be ahead of the world's; None: no limit. It never goes
    back, so a group that is ahead expires messages that are not old.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self.ahead_max_ms: float | None = None
        self._rolled_index = 0

    def allow(self, moved_ns: int) -> None:
        """Look from now on, where the dates of most brokers are off by *moved_ns* at most."""
        self.ahead_max_ms = JUMP_MAX_MS + moved_ns / 1e6

    def applied(self, node: BrokerNode, group: Group, result: Applied) -> None:
        """Look at the store time of one entry."""
        world = self._world
        if result.index > self._rolled_index:
            self._rolled_index = result.index
            if number := rolled(result):
                world.sometimes["timer_rolled"] += number
        if self.ahead_max_ms is None:
            return
        ahead_ms = group.state.last_store_time_ms - EPOCH_MS - 1000 * world.elapsed_s
        if ahead_ms > self.ahead_max_ms:
            world.violate(
                "store_time",
                f"{node.name}, entry {result.index}: {ahead_ms:.0f} ms ahead of the time",
            )


def rolled(result: Applied) -> int:
    """Return how many messages with a time of their own an entry stores again. Pure."""
    if not any(isinstance(change, TimersChange) and change.done for change in result.changes):
        return 0
    return sum(len(item.units) for item in result.units if item.topic == TIMER_TOPIC)


KEEP_HOURS: Final = 72
"""`fileReservedTime` where no option sets it."""


def keeps_of(settings: WorldSettings) -> Keeps:
    """Return what the brokers of a world keep. By the log alone, dates may be wrong."""
    options = settings.options
    return Keeps(
        keep_bytes=int(str(options.get("store.keep_bytes", 0))),
        keep_ms=int(str(options.get("store.file_reserved_time", KEEP_HOURS))) * HOUR_MS,
        segment_bytes=settings.segment_bytes,
        date_error_ns=None,
    )


class Floors:
    """What one broker group has given up.

    Attributes:
        floors: First index kept, of every record that moved the floor.
        queues: Topics whose queues begin elsewhere for another reason: a retention of their own, or
            they were deleted.
        rows: Of the history, every move once, from the first replica whose log could be read.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._keeps = keeps_of(world.settings)
        self.floors: set[int] = set()
        self.queues: set[str] = set()
        self.rows: list[FloorMove] = []
        self._moves: set[int] = set()
        self._begins: dict[int, dict[Queue, int]] = {1: {}}
        """By first index kept: where queues may begin at most."""

    def watch(self, group: Group) -> None:
        """Take what a process applied when it started."""
        # The others have the same record before them.
        self.floors.add(group.state.floor.first_index)

    def applied(self, node: BrokerNode, group: Group, result: Applied) -> None:
        """Look at the changes of one entry, and at where the log begins after it."""
        tables: Any = group.state
        self.queues.update(result.deleted_topics)
        for change in result.changes:
            if isinstance(change, FloorChange):
                self.floors.add(change.floor.first_index)
                self._world.sometimes["floor_moved"] += 1
                self._check_saved(node, group, result.index, change)
                if result.index not in self._moves:
                    self._judge(node, group, result.index, change)
            elif isinstance(change, QueueFloorsChange):
                self._check_queues(node, tables, result.index, change)
        first = tables.floor.first_index
        if first not in self.floors:
            self._violate(node, result.index, f"the log begins with entry {first} without a record")

    def _judge(self, node: BrokerNode, group: Group, index: int, change: FloorChange) -> None:
        at_ns = round(self._world.elapsed_s * 1e9)
        first, log = change.floor.first_index, group.store.log
        try:
            move = move_of(log, index, change, node=node.name, at_ns=at_ns)
            kept = kept_offsets(log, group.state, first, index)
        except (MQError, OSError):
            return  # damaged here: another replica has it
        self._moves.add(index)
        before = self._begins[max(known for known in self._begins if known <= first)]
        self.rows += rows_of(move, kept, before=before)
        self._begins[first] = kept
        if mistake := mistake_in(move, self._keeps):
            self._violate(node, index, f"all before byte {move.position} goes {mistake}")
        if change.floor.position != log.position_at(first):
            self._violate(node, index, f"entry {first} is at {log.position_at(first)}")
        if (move.keep_bytes, move.keep_ms) != (self._keeps.keep_bytes, self._keeps.keep_ms):
            text = f"{move.keep_bytes} bytes and {move.keep_ms} ms; the plan has {self._keeps}"
            self._violate(node, index, f"the settings of the record are {text}")

    def _check_saved(self, node: BrokerNode, group: Group, index: int, change: FloorChange) -> None:
        """A leader moves the floor no further than its newest checkpoint has come."""
        raft, first, saved = group.node, change.floor.first_index, group.store.saved_index
        if raft.is_leader and raft.journal.term_at(index) == raft.term and first > saved:
            self._violate(node, index, f"up to {first} goes; the checkpoint covers {saved}")

    def _check_queues(
        self, node: BrokerNode, tables: Any, index: int, change: QueueFloorsChange
    ) -> None:
        keeps = dict(change.retention_ms)
        for topic, _, _ in change.floors:
            self.queues.add(topic)
            config = tables.topics.get(topic)
            if config is not None and retention_ms(config.attributes) != keeps.get(topic):
                self._violate(node, index, f"{topic} has another retention than {keeps.get(topic)}")

    def check_tables(self, node: BrokerNode, index: int, tables: Any) -> None:
        """Compare where queues begin with where the floor lets them."""
        begins = self._begins.get(tables.floor.first_index)
        if begins is None:
            return  # no log that could be read showed that move
        for (topic, queue_id), bounds in tables.queues.items():
            if bounds.min_offset > begins.get((topic, queue_id), 0) and topic not in self.queues:
                text = f"{topic} {queue_id} begins at {bounds.min_offset}, it may at "
                self._violate(node, index, text + str(begins.get((topic, queue_id), 0)))

    def _violate(self, node: BrokerNode, index: int, text: str) -> None:
        self._world.violate("given_up", f"{node.name}, entry {index}: {text}")
