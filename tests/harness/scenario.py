"""A small language for the doings of a group, and the player that writes down what happens.

A scenario is a text file. Lines that begin at the margin are commands; indented lines are what
each command is expected to print; ``#`` begins a comment. The commands are the ``do_`` methods of
`Scenario`, described there. What is printed::

    n0 > n1 term 1 APPEND prev 3/1 commit 2 entries 4..5/1    a letter is delivered
    n0 x n1 term 1 APPEND ...                                 a letter is lost
    * n1 writes 4..5/1, flushes to 5, commits to 2            what became of it

``4/1`` is the entry at index 4, of term 1; ``4..5/1`` is a row of them. After every command it is
checked that no term had two leaders and that what is committed is the same everywhere and stays.

Everything is in memory and comes from one seed: a scenario prints the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from dledger.broker_errors import ReplicationError
from dledger.raft.follower import split_frames
from dledger.raft.membership import Member as Listed
from dledger.raft.membership import Members
from dledger.raft.wire import Kind, PeerFrame
from dledger.testing.crash_disk import CrashDisk
from tests.harness.raft_cluster import Letter, Member
from tests.harness.scenario_cluster import ScenarioCluster, ScenarioError

INDENT: Final = "  "


ELECTION_S: Final = 1.0
"""More than the shortest election timeout: no member has a leader any more."""


HEARTBEAT_S: Final = 0.1


# -- words ---------------------------------------------------------------------------------


def runs(entries: Iterable[tuple[int, int]]) -> str:
    """Return (index, term) pairs as rows of one term: ``1..3/1 4/2``."""
    rows: list[list[int]] = []
    for index, term in entries:
        if rows and rows[-1][1] == index - 1 and rows[-1][2] == term:
            rows[-1][1] = index
        else:
            rows.append([index, index, term])
    words = (f"{a}/{term}" if a == b else f"{a}..{b}/{term}" for a, b, term in rows)
    return " ".join(words) or "none"


def listed_names(members: Members | None) -> str:
    """Return a list of members: voters, then learners in brackets."""
    if members is None:
        return "no member"
    voters = [member.name for member in members.members if member.is_voter]
    learners = [f"({member.name})" for member in members.members if not member.is_voter]
    return " ".join([*voters, *learners])


def frame_words(frame: PeerFrame) -> str:
    """Return the contents of a frame as text."""
    fields = frame.fields
    match frame.kind:
        case Kind.PRE_VOTE:
            words = f"for term {fields[0]} last {fields[1]}/{fields[2]}"
        case Kind.PRE_VOTE_REPLY:
            words = f"for term {fields[0]} {'granted' if fields[1] else 'refused'}"
        case Kind.VOTE:
            words = f"last {fields[0]}/{fields[1]}" + (" transfer" if fields[2] else "")
        case Kind.APPEND:
            found = [(f.header.index, f.header.term) for f in split_frames(frame.payload)]
            words = f"prev {fields[0]}/{fields[1]} commit {fields[2]} entries {runs(found)}"
        case Kind.APPEND_REPLY:
            words = f"has {fields[1]}" if fields[0] else f"wants {fields[1]}"
        case Kind.HEARTBEAT:
            words = f"{fields[0]} commit {fields[1]}"
        case Kind.HEARTBEAT_REPLY:
            words = f"{fields[0]}" + (" not eligible" if fields[1] else "")
        case Kind.SNAPSHOT:
            words = f"of {fields[0]}" + (f" from byte {fields[1]}" if fields[1] else "")
        case Kind.SNAPSHOT_REPLY:
            words = f"of {fields[0]} " + (f"next {fields[2]}" if fields[2] else f"at {fields[1]}")
        case Kind.TIMEOUT_NOW:
            words = f"last {fields[0]}"
        case _:
            words = " ".join(map(str, fields))
    return f"term {frame.term} {frame.kind.name} {words}".rstrip()


def letter_words(letter: Letter, arrow: str) -> str:
    """Return one line for a letter."""
    return f"{letter.sender} {arrow} {letter.receiver} {frame_words(letter.frame)}"


# -- the group -----------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """A member as it was when it was looked at last."""

    role: str = "follower"
    term: int = 0
    first: int = 1
    entries: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Term and chain by index."""
    log_state: tuple[object, ...] = ()
    """What changes whenever `entries` does."""
    stable: int = 0
    commit: int = 0
    doubtful: bool = False
    members: str = "nobody"
    transferring: bool = False


# -- the player ----------------------------------------------------------------------------


class Scenario:
    """Plays commands, one by one. A method ``do_x`` is the command ``x``; its docstring explains.

    A command in front of which ``quietly`` stands prints nothing.
    """

    def __init__(self) -> None:
        self._group: ScenarioCluster | None = None
        self.lines: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._drawer: list[Letter] = []
        self._leaders: dict[int, str] = {}
        self._committed: dict[int, int] = {}

    @property
    def group(self) -> ScenarioCluster:
        """The group; ``members`` must come first."""
        if self._group is None:
            raise ScenarioError("a scenario begins with `members N`")
        return self._group

    @staticmethod
    def commands() -> dict[str, str]:
        """Return each command with what it does."""
        found = {}
        for name, handler in vars(Scenario).items():
            if name.startswith("do_"):
                found[name.removeprefix("do_").replace("_", "-")] = handler.__doc__ or ""
        return found

    def play(self, command: str) -> list[str]:
        """Do one command and return what it printed.

        Raises:
            ScenarioError: It is none, or cannot be done here.
        """
        word, *rest = command.split()
        if word == "quietly":
            self.play(" ".join(rest))
            return []
        handler: Callable[..., None] | None = getattr(self, "do_" + word.replace("-", "_"), None)
        if handler is None:
            raise ScenarioError(f"no command {word!r}; there are {', '.join(self.commands())}")
        self.lines = []
        try:
            handler(*rest)
        except ReplicationError as error:
            self._say(f"refused: {error}")
        self._look()
        self._check()
        return self.lines

    # -- commands: the group ---------------------------------------------------------------

    def do_members(self, count: str) -> None:
        """``members N``: a new group n0, n1, ...; all of them run and know each other."""
        self._group = ScenarioCluster(int(count))
        self._seen = {name: Seen() for name in self.group.names}
        self._look()
        self.lines.clear()

    def do_status(self, *names: str) -> None:
        """``status [NAME ...]``: one line per member."""
        for name in names or self.group.names:
            member = self.group.members.get(name)
            self._say(f"{name} down" if member is None else self._status(member))

    def do_lists(self) -> None:
        """``lists``: the list of members that each one goes by; learners in brackets."""
        for name, member in self.group.members.items():
            self._say(f"{name} goes by {listed_names(member.node.roster.members)}")

    # -- commands: time and leadership -----------------------------------------------------

    def do_wait(self, seconds: str) -> None:
        """``wait SECONDS``: time passes and every member reads the clock; nothing is sent."""
        self.group.clock.now_s += float(seconds)
        for name in self._running():
            self.group.node(name).settle()
            self._look()

    def do_stand(self, *names: str) -> None:
        """``stand NAME ...``: the election timers of these ran out, in this order."""
        for name in names:
            self.group.node(name).begin_election()
            self.group.node(name).settle()
            self._look()

    def do_elect(self, name: str) -> None:
        """``elect NAME``: ``wait 1``, ``stand NAME``, ``settle``."""
        self.do_wait(str(ELECTION_S))
        self.do_stand(name)
        self.do_settle()
        if not self.group.node(name).is_leader:
            self._say(f"{name} was not elected")

    def do_heartbeat(self, name: str, times: str = "1") -> None:
        """``heartbeat NAME [TIMES]``: 0.1 s passes, a heartbeat leaves; ``settle``."""
        for _ in range(int(times)):
            self.group.clock.now_s += HEARTBEAT_S
            self.group.node(name).leader.send_heartbeats()
            self._look()
            self.do_settle()

    def do_transfer(self, leader: str, target: str) -> None:
        """``transfer LEADER TARGET``: the leader begins to hand its leadership over."""
        node = self.group.node(leader)
        node.transfers.begin(target)
        node.settle()

    # -- commands: the log -----------------------------------------------------------------

    def do_append(self, name: str, *bodies: str) -> None:
        """``append NAME BODY ...``: one entry for each; ``x*900`` is a body of 900 bytes."""
        node = self.group.node(name)
        for body in bodies:
            if not node.is_leader:
                self._say(f"refused: {name} does not lead")
            elif node.transfers.is_under_way:
                self._say(f"refused: {name} is handing its leadership over")
            else:
                text, _, times = body.partition("*")
                self.group.append(name, text.encode() * int(times or 1))

    def do_retain(self, name: str, index: str) -> None:
        """``retain NAME INDEX``: segments before the one that holds INDEX are removed there."""
        self.group.retain(name, int(index))

    # -- commands: members -----------------------------------------------------------------

    def do_add(self, leader: str, name: str) -> None:
        """``add LEADER NAME``: NAME starts with an empty folder and is taken in as a learner."""
        node = self.group.node(leader)
        if name not in self.group.members:
            self._seen[name] = Seen()
            self.group.join(name)
        hello, members = self.group.node(name).contacts.hello("control"), node.roster.members
        if members is None:
            raise ScenarioError("no member was elected yet")
        new = Listed(name, hello.incarnation, "127.0.0.1", 1, hello.client_address)
        node.changes.change(members.with_learner(new))
        node.settle()

    def do_remove(self, leader: str, name: str) -> None:
        """``remove LEADER NAME``: the leader takes the voter NAME off the list."""
        node = self.group.node(leader)
        members = node.roster.members
        voter = None if members is None else members.voter(name)
        if members is None or voter is None:
            raise ScenarioError(f"{name} is no voter")
        node.changes.change(members.without(voter))
        node.settle()

    # -- commands: letters -----------------------------------------------------------------

    def do_step(self) -> None:
        """``step``: disks flush, everybody sends what it has, all letters arrive once."""
        self._step()

    def do_settle(self) -> None:
        """``settle``: ``step`` until nothing is on its way."""
        for _ in range(60):
            if not self._step():
                return
        raise ScenarioError("still busy after 60 steps")

    def do_collect(self) -> None:
        """``collect``: disks flush, everybody posts what it has to send; nothing arrives."""
        self._collect()

    def do_deliver(self, sender: str, receiver: str, kind: str = "") -> None:
        """``deliver FROM TO [KIND]``: the oldest such letter in the post arrives."""
        self._deliver(self._take(sender, receiver, kind))

    def do_drop(self, sender: str, receiver: str, kind: str = "") -> None:
        """``drop FROM TO [KIND]``: the oldest such letter in the post is lost."""
        self._say(letter_words(self._take(sender, receiver, kind), "x"))

    def do_copy(self, sender: str, receiver: str, kind: str = "") -> None:
        """``copy FROM TO [KIND]``: a copy of the oldest such letter goes into the drawer."""
        letter = self._take(sender, receiver, kind)
        self.group.post.insert(0, letter)
        self._drawer.append(letter)

    def do_delay(self, sender: str, receiver: str, kind: str = "") -> None:
        """``delay FROM TO [KIND]``: the oldest such letter goes into the drawer."""
        self._drawer.append(self._take(sender, receiver, kind))

    def do_late(self) -> None:
        """``late``: everything in the drawer arrives now."""
        letters, self._drawer = self._drawer, []
        for letter in letters:
            self._deliver(letter)

    # -- commands: links -------------------------------------------------------------------

    def do_cut(self, one: str, other: str) -> None:
        """``cut NAME NAME``: what either sends to the other is lost, and neither is informed."""
        self.group.cut |= {(one, other), (other, one)}

    def do_isolate(self, name: str) -> None:
        """``isolate NAME``: cut from everybody."""
        for other in self.group.names:
            if other != name:
                self.do_cut(name, other)

    def do_heal(self) -> None:
        """``heal``: no link is cut; connections over links that were are made again."""
        cut, self.group.cut = self.group.cut, set()
        for one, other in sorted({(min(pair), max(pair)) for pair in cut}):
            if {one, other} <= self.group.members.keys():
                self.group.reconnect(one, other)

    # -- commands: members and their disks -------------------------------------------------

    def do_hold(self, name: str) -> None:
        """``hold NAME``: its disk flushes only on request."""
        self.group.members[name].flushes_by_itself = False

    def do_release(self, name: str) -> None:
        """``release NAME``: its disk flushes by itself again."""
        self.group.members[name].flushes_by_itself = True

    def do_flush(self, name: str) -> None:
        """``flush NAME``: everything it has written, and its vote, is on its disk now."""
        self.group.members[name].flush()

    def do_pause(self, name: str) -> None:
        """``pause NAME``: it does nothing; letters to it wait."""
        self.group.paused.add(name)

    def do_resume(self, name: str) -> None:
        """``resume NAME``: it goes on as if no time had passed."""
        self.group.paused.discard(name)

    def do_kill(self, name: str) -> None:
        """``kill NAME``: the process ends at once; what it has written stays."""
        self.group.end(name, self.group.disk(name).power_cut(lambda: True))

    def do_power_cut(self, name: str, *kept: str) -> None:
        """``power-cut NAME [SECTOR ...]``: what was not flushed is lost.

        Except these sectors of the log, of 512 bytes, counted from the first unflushed one as 1.
        """
        disk = self.group.disk(name)
        unflushed = [
            (inode, sector)
            for path, inode in sorted(disk.files.items())
            if "/commitlog/" in path
            for sector in sorted(inode.undo)
        ]
        for inode, sector in [unflushed[int(ordinal) - 1] for ordinal in kept]:
            inode.undo.pop(sector, None)
        self.group.end(name, disk.power_cut(lambda: False))

    def do_start(self, name: str) -> None:
        """``start NAME``: it runs again on what its disk has, and connects to everybody."""
        member = self.group.start(name)
        report = member.log.report
        entries = runs((i, member.log.term_at(i)) for i in range(1, member.log.last_index + 1))
        torn = ", a torn tail was cut" if report.torn_tail else ""
        torn = ", damage was cut" if report.damage else torn
        self._say(f"* {name} starts in term {member.node.term} with {entries}{torn}")
        self._seen[name] = self._view(member)
        self._seen[name].doubtful = False
        self._look()
        for other in self.group.members:
            if other != name:
                self.group.reconnect(name, other)

    def do_wipe(self, name: str) -> None:
        """``wipe NAME``: it is ended, its folder is lost, and it starts with an empty one."""
        if name in self.group.members:
            self.group.end(name, CrashDisk())
        self.group.disks[name] = CrashDisk()
        self._seen[name] = Seen()
        self.group.join(name)

    # -- how it is done --------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self.lines.append(line)

    def _running(self) -> list[str]:
        return [name for name in self.group.members if name not in self.group.paused]

    def _take(self, sender: str, receiver: str, kind: str) -> Letter:
        post = self.group.post
        for letter in post:
            found = letter.frame.kind.name
            if (letter.sender, letter.receiver) == (sender, receiver) and kind in ("", found):
                post.remove(letter)
                return letter
        raise ScenarioError(f"no letter {sender} > {receiver} {kind} is in the post")

    def _collect(self) -> None:
        for name in self._running():
            member = self.group.members[name]
            if member.flushes_by_itself:
                if name in self.group.installs:
                    self.group.install(name)
                member.flush()
                self._look()
            self.group.collect(name)
        for letter in self.group.lost:
            self._say(letter_words(letter, "x"))
        self.group.lost.clear()

    def _step(self) -> bool:
        self._collect()
        letters = [x for x in self.group.post if x.receiver not in self.group.paused]
        self.group.post = [x for x in self.group.post if x.receiver in self.group.paused]
        for letter in letters:
            self._deliver(letter)
        return bool(letters)

    def _deliver(self, letter: Letter) -> None:
        self._say(letter_words(letter, ">"))
        self.group.deliver(letter)
        self._look()

    def _status(self, member: Member) -> str:
        seen = self._view(member)
        known = ((index, term) for index, (term, _) in sorted(seen.entries.items()))
        last = member.node.journal.last_index
        words = (
            f"{member.name} {seen.role:9} term {seen.term} "
            f"last {last}/{member.node.journal.last_term} stable {seen.stable} "
            f"commit {seen.commit} log {runs(known)}"
        )
        marks = {
            "not eligible": seen.doubtful,
            "no voter": not member.node.roster.is_self_voter,
            "paused": member.name in self.group.paused,
            "held": not member.flushes_by_itself,
        }
        return ", ".join([words, *(mark for mark, holds in marks.items() if holds)])

    def _view(self, member: Member) -> Seen:
        node, log = member.node, member.log
        before = self._seen.get(member.name)
        log_state = (log, log.generation, log.first_index, log.last_index)
        if before is not None and before.log_state == log_state:
            entries = before.entries
        else:
            rows = range(log.first_index, log.last_index + 1)
            entries = {index: (log.term_at(index), log.chain_at(index)) for index in rows}
        return Seen(
            role=node.core.role.value,
            term=node.term,
            first=log.first_index,
            entries=entries,
            log_state=log_state,
            stable=log.durable_index,
            commit=node.commit_index,
            doubtful=node.eligibility.doubtful,
            members=listed_names(node.roster.members),
            transferring=node.transfers.is_under_way,
        )

    def _look(self) -> None:
        """Say what has changed since the last look."""
        for name, member in self.group.members.items():
            before, now = self._seen[name], self._view(member)
            self._seen[name] = now
            news = list(_news(before, now))
            if news:
                self._say(f"* {name} {', '.join(news)}")

    def _check(self) -> None:
        for name, member in self.group.members.items():
            node = member.node
            if node.is_leader:
                assert self._leaders.setdefault(node.term, name) == name, f"two lead {node.term}"
            for index, chain in member.committed:
                assert self._committed.setdefault(index, chain) == chain, f"{index} differs"
            for index in range(member.log.first_index, node.commit_index + 1):
                assert member.log.chain_at(index) == self._committed[index], f"{index} was cut"


def _news(before: Seen, now: Seen) -> Iterable[str]:
    if (before.role, before.term) != (now.role, now.term):
        yield f"is {now.role} in term {now.term}"
    if before.first != now.first:
        yield f"has a log that begins at {now.first}"
    kept = {index for index in now.entries if before.entries.get(index) == now.entries[index]}
    cut = [(i, term) for i, (term, _) in before.entries.items() if i >= now.first and i not in kept]
    new = [(i, term) for i, (term, _) in now.entries.items() if i not in kept]
    if cut:
        yield f"cuts {runs(cut)}"
    if new:
        yield f"writes {runs(new)}"
    if now.stable > before.stable:
        yield f"flushes to {now.stable}"
    if now.commit != before.commit:
        yield f"commits to {now.commit}"
    if now.members != before.members:
        yield f"goes by {now.members}"
    if now.doubtful != before.doubtful:
        yield "is not eligible" if now.doubtful else "is eligible again"
    if now.transferring != before.transferring:
        yield "hands over" if now.transferring else "hands over no longer"


# -- files ---------------------------------------------------------------------------------


def replay(text: str) -> str:
    """Play the commands of *text* and return it with what they print now.

    Raises:
        ScenarioError: A command is wrong; the message names its line.
    """
    scenario, left = Scenario(), []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(INDENT):
            continue
        left.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            left.extend(INDENT + printed for printed in scenario.play(line))
        except (ScenarioError, AssertionError) as error:
            raise ScenarioError(f"line {number}, `{line}`: {error}") from error
    return "\n".join(left) + "\n"
