"""What one member knows: of the others, which it counts, calls and refuses; of itself, its state.

The list in the log decides which members are counted. The frames of a few more are *handled*, but
never those of a member that no known member confirms:

* a member of the list in force, or of the one before it while a truncation may restore that: by
  name and incarnation;
* a member that one of those vouches for: a member that lags behind has an old list, and must still
  follow a leader that this list does not name. Members send their lists when they answer a call;
* a member that a majority of the listed voters' names vouch for, each answering where this node
  finds that name and each naming this node, too: all others of an old list may be replaced;
* a process that answers at the address where this node finds a member: a folder that was lost and
  made again (same name, other incarnation), one that is invited, and before the log has a list the
  configured ones. It may answer; it may lead, campaign or fetch only before there is a list.

Links send the frames that wait here (`dledger.raft.links`); nothing here waits.

All roles share one `RaftState`, the owner's callbacks and the first failure. As in etcd's ``raft``
struct there is one state; `dledger.raft.leader`, `.follower` and `.candidate` are the step
functions over it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dledger.commitlog.errors import FlushFailedError, InvariantBroken, RemoteProtocolError
from dledger.raft.identity import Hello, Identity, Vouched
from dledger.raft.journal import CommitLogJournal
from dledger.raft.library import RaftCore
from dledger.raft.membership import Member, Members, MembersLog
from dledger.raft.settings import Guards, RaftSettings
from dledger.raft.wire import Kind
from dledger.remoting.seams import Clock
from dledger.waiting import Wakeup

CONTROL_QUEUE_FRAMES: Final = 64
"""Heartbeats and votes waiting for a link, frames; older ones are dropped, Raft repeats them."""


@dataclass(slots=True)
class Outgoing:
    """A frame without connection numbers; the link adds them."""

    kind: Kind
    term: int
    fields: tuple[Any, ...]
    payload_crc: int | None = None
    """CRC-32 of the bytes that follow its head, where that is known already."""


@dataclass(slots=True)
class PeerState:
    """One other member as this node knows it, and the frames that wait for its links."""

    name: str
    hello: Hello | None = None
    control: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    replies: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    control_wake: Wakeup = field(default_factory=Wakeup)
    data_wake: Wakeup = field(default_factory=Wakeup)
    up: set[str] = field(default_factory=set)
    wanted: tuple[int, int] | None = None
    """Entries it asked for, because its own are damaged."""
    hello_since_s: float = 0.0
    """Since when its hellos are of this incarnation."""
    close_since_s: float | None = None
    """Since when it has been a learner that has almost everything."""
    close_commit_index: int = 0
    """What was committed when that began."""

    push: Callable[[], None] | None = None
    """Sends data at once; set while the data link waits for some, and its stream can do so."""

    def send_data(self) -> None:
        """Let the data link send what there is: now if it can, else in a turn of its own."""
        if self.push is None:
            self.data_wake.set()
        else:
            self.push()

    @property
    def is_connected(self) -> bool:
        """Whether heartbeats and votes reach it, as far as known."""
        return "control" in self.up


class Peers(dict[str, PeerState]):
    """The state of each other member that this node has connected to, by name."""

    def __init__(self, names: Iterable[str], core: RaftCore) -> None:
        """Create the states of *names*; a frame carries the term of *core* when it is made."""
        super().__init__((name, PeerState(name)) for name in names)
        self._core = core

    def of(self, name: str) -> PeerState:
        """Return the state of *name*, which is empty when the name is new."""
        state = self.get(name)
        if state is None:
            state = self[name] = PeerState(name)
        return state

    def send(self, name: str, kind: Kind, *fields: Any) -> None:
        """Send a frame over the control link, ahead of all data."""
        self.send_made(name, Outgoing(kind, self._core.term, fields))

    def send_made(self, name: str, frame: Outgoing) -> None:
        """Send a frame that was made earlier over the control link."""
        state = self.of(name)
        state.control.append(frame)
        state.control_wake.set()

    def reply(self, name: str, kind: Kind, *fields: Any) -> None:
        """Send a frame over the data link, ahead of entries."""
        state = self.of(name)
        state.replies.append(Outgoing(kind, self._core.term, fields))
        state.send_data()


NAMES_MAX: Final = 64
"""Names this node connects to at a time: all members, and vouched ones, which change."""

SHOWN_MAX: Final = 8
"""Incarnations kept of diallers under one name: one is the member's, the rest are strangers'."""


class Roster:
    """The members as this node knows them: counted ones, known ones, connected ones.

    Args:
        log: The list in force, kept by the journal.
        configured: Host and port of every configured member, this one included.
    """

    def __init__(
        self,
        log: MembersLog,
        identity: Identity,
        self_id: str,
        configured: Mapping[str, tuple[str, int]],
    ) -> None:
        self.log = log
        self.identity = identity
        self.self_id = self_id
        self.configured = dict(configured)
        self.hellos: dict[str, Hello] = {}
        self.invited: dict[str, tuple[str, int]] = {}
        self.guests: Counter[str] = Counter()
        self.leaving: dict[str, int] = {}
        """Leader: members that were removed, and the entry that removes them; see `followers`."""
        self._found: dict[str, str] = {}
        self._vouched: dict[str, tuple[int, frozenset[Vouched]]] = {}
        self._claims: dict[str, tuple[int, frozenset[Vouched]]] = {}
        self._shown: dict[str, deque[str]] = {}
        self._listed: tuple[int, frozenset[Vouched]] = (-1, frozenset())
        self._others: tuple[Members | None, tuple[str, ...]] = (None, ())

    def note_bootstrap(self) -> None:
        """Use the voters agreed on at bootstrap as the list, until the log has one."""
        if self.log.members is None and self.identity.voters:
            clients = {name: hello.client_address for name, hello in self.hellos.items()}
            self.log.reset(0, Members.bootstrap(self.identity.voters, self.configured, clients))

    @property
    def members(self) -> Members | None:
        """The list in force; None before bootstrap."""
        return self.log.members

    # -- members that count ----------------------------------------------------------------

    def member(self, name: str) -> Member | None:
        """Return the member with the newest hello of *name*, if it is in the list."""
        hello, members = self.hellos.get(name), self.members
        if hello is None or members is None:
            return None
        return members.find(name, hello.incarnation)

    def is_voter(self, name: str) -> bool:
        """Whether the member with the newest hello of *name* is counted."""
        member = self.member(name)
        return member is not None and member.is_voter

    @property
    def is_self_voter(self) -> bool:
        """Whether this node itself is counted."""
        members = self.members
        return members is not None and members.is_voter(self.self_id, self.identity.incarnation)

    @property
    def voters(self) -> int:
        """How many voters are counted."""
        members = self.members
        return len(self.configured) if members is None else len(members.voter_names)

    @property
    def other_voters(self) -> tuple[str, ...]:
        """Names of the other voters; before bootstrap the configured names."""
        members = self.members
        if members is None:
            return tuple(sorted(set(self.configured) - {self.self_id}))
        of, others = self._others
        if of is not members:
            others = tuple(name for name in members.voter_names if name != self.self_id)
            self._others = (members, others)
        return others

    # -- members whose frames are handled --------------------------------------------------

    def is_listed(self, key: Vouched) -> bool:
        """Whether exactly that member is in the list in force or in one that may be restored."""
        version, keys = self._listed
        if version != self.log.version:
            lists = (self.log.members, self.log.before())
            keys = frozenset(m.key for members in lists if members for m in members.members)
            self._listed = (self.log.version, keys)
        return key in keys

    def is_member(self, key: Vouched) -> bool:
        """Whether that member may be followed, voted for and sent entries."""
        return (
            self.is_listed(key)
            or self._is_vouched_for(key)
            or self._is_of_successors(key)
            or (self._finds_by_address and key[0] in self.configured and self.is_found(key))
        )

    @property
    def _finds_by_address(self) -> bool:
        """Whether members are those that answer at configured addresses.

        So it is before this node has a list, and as long as no list of its own names its present
        incarnation: with a new folder it copies a log whose old lists name its predecessor, and
        members that are long replaced. None of these lists counts it, so it decides nothing.
        """
        own = (self.self_id, self.identity.incarnation)
        return not self.log.index or not self.is_listed(own)

    def _is_vouched_for(self, key: Vouched) -> bool:
        # A list older than one's own does not count: it names members that have left since.
        oldest = self.log.oldest_index
        return any(key in vouched for index, vouched in self._vouched.values() if index >= oldest)

    def _is_of_successors(self, key: Vouched) -> bool:
        """Whether a majority of the listed names, maybe all under new incarnations, vouch for it.

        One that answers at the address of a member that is down is not enough: a majority has to.
        """
        voters = () if self.log.members is None else self.log.members.voter_names
        own, oldest = (self.self_id, self.identity.incarnation), self.log.oldest_index
        vouching = 0
        for name in voters:
            index, claimed = self._claims.get(name, (-1, frozenset()))
            successor = (name, self._found.get(name, ""))
            vouching += index >= oldest and claimed >= {successor, own, key}
        return bool(voters) and vouching > len(voters) // 2

    def is_known(self, key: Vouched) -> bool:
        """Whether answers of that member are handled."""
        return self.is_member(key) or (self.is_found(key) and key[0] in self.expected())

    def is_answered(self, key: Vouched, shown: Collection[str] = ()) -> bool:
        """Whether that dialler gets this node's hello.

        *shown*: incarnations of this node that the dialler has seen, by its own account.
        """
        # Before there is a list every configured member must be able to learn the incarnations.
        return (
            self.is_known(key)
            or (not self.log.index and key[0] in self.configured)
            or (key[0] in self.expected() and self.identity.incarnation in shown)
        )

    def note_shown(self, hello: Hello) -> None:
        """Keep the incarnation of a refused dialler, if this node dials its name."""
        if hello.name in self.expected():
            shown = self._shown.setdefault(hello.name, deque(maxlen=SHOWN_MAX))
            if hello.incarnation not in shown:
                shown.append(hello.incarnation)

    def shown_by(self, name: str) -> tuple[str, ...]:
        """Return the incarnations that refused diallers have shown under *name*."""
        return tuple(self._shown.get(name, ()))

    def is_found(self, key: Vouched) -> bool:
        """Whether that incarnation was the last to answer at the addresses of its name."""
        return self._found.get(key[0]) == key[1]

    def found(self, hello: Hello) -> None:
        """Record the hello that answered our call, and the members that its sender vouches for."""
        self._found[hello.name] = hello.incarnation
        self._shown.pop(hello.name, None)
        self._vouched.pop(hello.name, None)
        self._claims[hello.name] = (hello.members_index, frozenset(hello.members))
        if hello.members and self.is_member(hello.key):
            self._vouched[hello.name] = (hello.members_index, frozenset(hello.members))

    def vouches_for(self) -> tuple[Vouched, ...]:
        """Return the members that this node vouches for: all in its lists."""
        lists = (self.log.members, self.log.before())
        return tuple(sorted({m.key for members in lists if members for m in members.members}))

    def forget(self, name: str) -> None:
        """Drop what is known of a name that is neither wanted nor connected any more."""
        self.hellos.pop(name, None)
        self._found.pop(name, None)
        self._vouched.pop(name, None)
        self._claims.pop(name, None)
        self._shown.pop(name, None)

    # -- members to connect to -------------------------------------------------------------

    def note_leaving(self) -> None:
        """Leader: record the members that the newest list removes."""
        before, members = self.log.before(), self.members
        if before is not None and members is not None:
            for name in set(before.names) - set(members.names) - {self.self_id}:
                self.leaving[name] = self.log.index
        for name in [] if members is None else members.names:
            self.leaving.pop(name, None)

    def followers(self) -> tuple[str, ...]:
        """Names a leader sends to: all members, those just leaving, and invited ones."""
        names = {*self.invited, *self.leaving}
        for members in (self.members, self.log.before()):
            names.update(() if members is None else members.names)
        if self.members is None:
            names.update(self.configured)
        return tuple(sorted(names - {self.self_id}))

    def expected(self) -> frozenset[str]:
        """Names that this node dials by itself."""
        names = {*self.followers()}
        if self._finds_by_address:
            # The bootstrap value of others, or the list so far, may be long out of date.
            names.update(self.configured)
        return frozenset(names - {self.self_id})

    def talked_to(self) -> tuple[str, ...]:
        """Names that this node keeps a connection to."""
        return tuple(sorted({*self.expected(), *self.guests} - {self.self_id}))

    def addresses(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return the addresses of *name*, to be tried one after the other."""
        found: list[tuple[str, int]] = []
        if name in self.invited:
            found.append(self.invited[name])
        members, hello = self.members, self.hellos.get(name)
        if hello is not None and hello.peer_address is not None:
            found.append(hello.peer_address)
        if members is not None:
            found.extend(members.addresses(name))
        if name in self.configured:
            found.append(self.configured[name])
        return tuple(dict.fromkeys(found))

    def client_address(self, name: str) -> str | None:
        """Return where clients find *name*, as far as known."""
        hello, members = self.hellos.get(name), self.members
        if hello is not None:
            return hello.client_address
        member = None if members is None else members.voter(name)
        return member.client_address or None if member is not None else None


REPEAT_S: Final = 60.0
"""How often the same reason gets a line."""

REASONS_MAX: Final = 64
"""Reasons kept. A new one replaces the oldest, which gets a line again when it returns."""


class NotAMemberError(RemoteProtocolError):
    """The sender may not send this: it is no member, or not yet, or not any more.

    Nothing was changed; its connection is closed.
    """


class ContradictionError(RemoteProtocolError):
    """A peer's frame contradicts what this member has on its own disk.

    Which of the two is wrong cannot be known here, so nothing was changed or acknowledged: the
    connection is closed, and the contradiction is counted and logged as an error.
    """


class Refusals:
    """Counts refusals by reason, and limits the lines about each in the log."""

    def __init__(self) -> None:
        self._lines: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def note(self, reason: str, now_s: float) -> int | None:
        """Count a refusal.

        Returns:
            How often it happened since the last line about it, this time included, when it is time
            for a line; else None.
        """
        last_s = self._lines.get(reason)
        if last_s is not None and now_s - last_s < REPEAT_S:
            self._silent[reason] += 1
            return None
        times = 1 + self._silent.get(reason, 0)
        self._lines.pop(reason, None)  # moves to the end: the oldest line is first
        if len(self._lines) >= REASONS_MAX:
            oldest = next(iter(self._lines))
            del self._lines[oldest], self._silent[oldest]
        self._lines[reason], self._silent[reason] = now_s, 0
        return times


def _no_snapshot() -> tuple[int, bytes]:
    raise InvariantBroken("this node has no tables to send")


def _ignore_snapshot(leader: str, data: bytes) -> None:
    raise InvariantBroken(f"no owner installs the snapshot of {len(data)} bytes from {leader}")


def _ignore_fetched(peer: str, entries: memoryview) -> None:
    """Drop the answer: this owner repairs nothing."""


@dataclass(slots=True)
class Owner:
    """The callbacks of a node's owner, which may be replaced at any time, also while it runs."""

    on_settled: Callable[[], None]
    """Called at the end of every event, synchronously; may append. Observers wrap this callback."""
    may_lead: Callable[[], bool] = lambda: True
    """Whether this member could serve if it led."""
    take_snapshot: Callable[[], tuple[int, bytes]] = _no_snapshot
    """Return the applied index of the tables, and the encoded tables."""
    on_snapshot: Callable[[str, bytes], None] = _ignore_snapshot
    """A whole snapshot has arrived from that leader; `RaftNode.installed`, `RaftNode.declined` or
    `RaftNode.refused` must follow."""
    on_suspect: Callable[[int], bool] = lambda _index: False
    """The entry at an index may be damaged; return whether it is."""
    on_fetched: Callable[[str, memoryview], None] = _ignore_fetched
    """That member's answer to `Sender.fetch`: whole entries, or nothing."""


class Failure:
    """The first error that a node cannot continue after; every later event raises it again."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def raise_again(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def of_disk(self, error: OSError) -> FlushFailedError:
        """Keep a disk's error, and return what to raise."""
        # By its type it would pass for the error of a connection, which links merely dial again.
        failure = self.error = FlushFailedError(f"the disk failed: {error}")
        return failure


@dataclass(eq=False, slots=True)
class RaftState:
    """The state of one member, which its roles read and change.

    Attributes:
        journal: The log, and what of term and vote is on disk.
        roster: Which members this node knows and counts.
        peers: The state of each other member, with the frames that wait for its links.
        noop_index: Index of the first entry of this leader's term; 0 while it does not lead.
    """

    settings: RaftSettings
    guards: Guards
    clock: Clock
    owner: Owner
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    peers: Peers
    failure: Failure = field(default_factory=Failure)
    noop_index: int = 0

    @property
    def has_hole(self) -> bool:
        """Whether entries are damaged here that another voter may have."""
        return len(self.journal.log.damaged) > 0 and bool(self.roster.other_voters)
