"""Leader: the list of members, one safe step at a time.

Which step is the next is decided in `dledger.raft.membership`, from the list in the log and what
the leader sees; here it is seen, checked against what could commit, and appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from commitlog.errors import DiskFullError, LogBusyError
from dledger.broker_errors import ChangePendingError, ChangeRefusedError
from dledger.raft.contacts import Contacts
from dledger.raft.core import RaftCore
from dledger.raft.election import majority
from dledger.raft.failure import Failure
from dledger.raft.handover import Handover
from dledger.raft.identity import Hello
from dledger.raft.journal import CommitLogJournal, ConfigProposal
from dledger.raft.membership import Members, Sight, check_change, next_list
from dledger.raft.peers import Peers, PeerState
from dledger.raft.replicator import Replicator
from dledger.raft.roster import Roster
from dledger.raft.settings import RaftSettings

log = structlog.get_logger(__name__)

CLOSE_BYTES: Final = 1 << 20
"""A learner that lacks no more than this, one append, is close.

It has caught up when it has been close for an election timeout, and has what was committed at its
begin: in a short log everybody is close, also one whose disk stands still (thesis, 4.2.1: rounds).
"""

LEAVER_TIMEOUTS: Final = 10.0
"""Election timeouts for which a removed member is sent the list without it, once that is committed.

One that is down never hears of it; it may stand then, and the others, who hear a leader, refuse.
"""


def could_commit(members: Members, connected: Iterable[Hello]) -> bool:
    """Whether the leader and those who are *connected* and have a vote are a majority of a list.

    One whose majority is gone, or has no vote, could never commit, and would hold.
    """
    able = sum(
        1
        for hello in connected
        if members.is_voter(hello.name, hello.incarnation) and not hello.doubtful
    )
    return 1 + able >= majority(len(members.voter_names))


@dataclass(eq=False)
class Reconfiguration:
    """Changes of the list. *noop_index* is where the reign begins: nothing goes before that."""

    settings: RaftSettings
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    replicator: Replicator
    peers: Peers
    contacts: Contacts
    handover: Handover
    failure: Failure
    _leaves_at_s: dict[str, float] = field(default_factory=dict, init=False)
    """Until when a removed member is waited for."""

    def write_first(self) -> None:
        """The first leader of all puts the voters agreed at bootstrap into the log."""
        members = self.journal.members
        if members.index or members.members is None:
            return
        clients = {name: hello.client_address for name, hello in self.roster.hellos.items()}
        clients[self.settings.self_id] = self.settings.client_address
        self._append(Members.bootstrap(self.roster.identity.voters, self.settings.peers, clients))

    def change(self, after: Members, noop_index: int) -> int:
        """Append the list *after* as leader and return its index.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: Another change, the no-op of this reign or a transfer comes first,
                or too few of the voters after it are connected and free of doubt.
            ChangeRefusedError: The change is not one safe step.
            DiskFullError: No space. In all cases nothing was appended.
        """
        self.handover.check_leads()
        before, commit_index = self.journal.members, self.core.commit_index
        if self.handover.is_under_way:
            raise ChangePendingError("leadership is being handed over; nothing was changed")
        if before.members is None or not 0 < noop_index <= commit_index:
            raise ChangePendingError("this leader has not committed anything yet")
        if before.index > commit_index:
            raise ChangePendingError("the change before this one is not committed yet")
        check_change(
            before.members, after, (self.settings.self_id, self.roster.identity.incarnation)
        )
        if not could_commit(after, self._connected()):
            raise ChangePendingError(
                "no majority of the voters after it is connected and free of doubt now"
            )
        return self._append(after)

    def tend(self, now: float, noop_index: int) -> None:
        """Take the next step towards "everybody who is there and able votes"."""
        self._tend_leaving(now)
        members = self.journal.members
        if self.handover.is_under_way or members.members is None:
            return
        try:
            if not members.index:
                self.write_first()
                return
            if not 0 < max(noop_index, members.index) <= self.core.commit_index:
                return
            after = next_list(members.members, self._sights(members.members, now))
            if after is not None:
                self.change(after, noop_index)
        except DiskFullError as error:
            log.error("members_without_space", error=str(error))
        except (ChangePendingError, ChangeRefusedError) as error:
            log.info("members_wait", reason=str(error))

    def _tend_leaving(self, now: float) -> None:
        for name, index in list(self.roster.leaving.items()):
            wait_s = LEAVER_TIMEOUTS * self.settings.election_timeout_s
            if index > self.core.commit_index:
                self._leaves_at_s[name] = now + wait_s
                continue
            knows = self.replicator.peers[name].match_index >= index
            if knows or now >= self._leaves_at_s.setdefault(name, now + wait_s):
                self._leaves_at_s.pop(name, None)
                self.contacts.forget_leaving(name)

    def _append(self, members: Members) -> int:
        try:
            index = self.core.append(ConfigProposal(members))
        except LogBusyError as error:
            raise ChangePendingError(f"{error}; try again") from error
        except OSError as error:
            raise self.failure.of_disk(error) from error
        log.info("members_changed", index=index, members=members.rows())
        self.contacts.note_members()
        return index

    # -- seeing ----------------------------------------------------------------------------

    def _connected(self) -> Iterable[Hello]:
        return (
            hello for name, hello in self.roster.hellos.items() if self.peers[name].is_connected
        )

    def _sights(self, members: Members, now: float) -> dict[str, Sight]:
        timeout_s = self.settings.election_timeout_s
        seen = {}
        for name in members.names:
            state = self.peers.get(name)
            if state is None or state.hello is None or not state.is_connected:
                continue
            hello = state.hello
            self._note_lag(state, now)
            host, port = hello.peer_address or ("", 0)
            seen[name] = Sight(
                incarnation=hello.incarnation,
                settled=now - state.hello_since_s >= timeout_s,
                caught_up=self._has_caught_up(state, now) and not hello.doubtful,
                host=host,
                port=port,
                client_address=hello.client_address,
            )
        return seen

    def _note_lag(self, state: PeerState, now: float) -> None:
        known = state.name in self.replicator.peers
        lag = self.replicator.lag_bytes(state.name) if known else None
        if lag is None or lag > CLOSE_BYTES:
            state.close_since_s = None
        elif state.close_since_s is None:
            state.close_since_s, state.close_commit_index = now, self.core.commit_index

    def _has_caught_up(self, state: PeerState, now: float) -> bool:
        since_s = state.close_since_s
        if since_s is None or now - since_s < self.settings.election_timeout_s:
            return False
        return self.replicator.peers[state.name].match_index >= state.close_commit_index
