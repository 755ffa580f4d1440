"""Which members this node knows, counts, talks to, and where it finds them.

The list in the log decides who is counted. Who is *heard* is a little more, and never somebody
that nobody answers for:

* who stands in the list in force, or in the one before it while that may come back: by name and
  incarnation;
* whom one of those vouches for: a member that lags behind holds an old list, and must still hear a
  leader it does not know from it. Members say who belongs to the group when they answer a call;
* whom a majority of the listed voters' names vouch for, each answering where this node looks for
  that name and each naming this node, too: all others of an old list may have been replaced;
* who answers at an address where this node looks for a member: a folder that was lost and made
  anew (same name, other incarnation), one that is invited, and before the log brings a list the
  configured ones. It may answer; it may lead, stand or fetch only before there is a list.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Final

from dledger.raft.identity import Hello, Identity, Vouched
from dledger.raft.membership import Member, Members, MembersLog

NAMES_MAX: Final = 64
"""Names this node talks to at a time: all members, and vouched ones that come and go."""

SHOWN_MAX: Final = 8
"""Incarnations kept of callers under one name: of a member there is one, the rest are strangers."""


class Roster:
    """The members as this node sees them; `RaftNode` owns it, its rooms ask it.

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
        """Take the voters agreed on at bootstrap for the list, until the log brings one."""
        if self.log.members is None and self.identity.voters:
            clients = {name: hello.client_address for name, hello in self.hellos.items()}
            self.log.reset(0, Members.bootstrap(self.identity.voters, self.configured, clients))

    @property
    def members(self) -> Members | None:
        """The list in force; None before bootstrap."""
        return self.log.members

    # -- who is counted --------------------------------------------------------------------

    def member(self, name: str) -> Member | None:
        """Return the member that speaks as *name* now, if it stands in the list."""
        hello, members = self.hellos.get(name), self.members
        if hello is None or members is None:
            return None
        return members.find(name, hello.incarnation)

    def is_voter(self, name: str) -> bool:
        """Whether the one that speaks as *name* now is counted."""
        member = self.member(name)
        return member is not None and member.is_voter

    @property
    def is_self_voter(self) -> bool:
        """Whether this node itself is counted."""
        members = self.members
        return members is not None and members.is_voter(self.self_id, self.identity.incarnation)

    @property
    def voters(self) -> int:
        """How many are counted."""
        members = self.members
        return len(self.configured) if members is None else len(members.voter_names)

    @property
    def other_voters(self) -> tuple[str, ...]:
        """Names of the others who are counted; before bootstrap the configured ones."""
        members = self.members
        if members is None:
            return tuple(sorted(set(self.configured) - {self.self_id}))
        of, others = self._others
        if of is not members:
            others = tuple(name for name in members.voter_names if name != self.self_id)
            self._others = (members, others)
        return others

    # -- who is heard ----------------------------------------------------------------------

    def is_listed(self, key: Vouched) -> bool:
        """Whether that very member stands in the list in force or in the one that may come back."""
        version, keys = self._listed
        if version != self.log.version:
            lists = (self.log.members, self.log.before())
            keys = frozenset(m.key for members in lists if members for m in members.members)
            self._listed = (self.log.version, keys)
        return key in keys

    def is_member(self, key: Vouched) -> bool:
        """Whether that one may be followed, voted for and given entries."""
        return (
            self.is_listed(key)
            or self._is_vouched_for(key)
            or self._is_of_successors(key)
            or (self._finds_by_address and key[0] in self.configured and self.is_found(key))
        )

    @property
    def _finds_by_address(self) -> bool:
        """Whether members are those that answer at configured addresses.

        So it is before this node has a list, and as long as no list of its own names it as it is
        now: with a new folder it copies a log whose old lists name its predecessor, and members
        that are long replaced. It is counted by none of these lists, so it decides nothing.
        """
        own = (self.self_id, self.identity.incarnation)
        return not self.log.index or not self.is_listed(own)

    def _is_vouched_for(self, key: Vouched) -> bool:
        # A list older than one's own says nothing: who has left since stands in it.
        oldest = self.log.oldest_index
        return any(key in said for index, said in self._vouched.values() if index >= oldest)

    def _is_of_successors(self, key: Vouched) -> bool:
        """Whether a majority of the listed names, maybe all under new incarnations, vouch for it.

        One that answers at the address of a member that is down is not enough: a majority has to.
        """
        voters = () if self.log.members is None else self.log.members.voter_names
        own, oldest = (self.self_id, self.identity.incarnation), self.log.oldest_index
        vouching = 0
        for name in voters:
            index, said = self._claims.get(name, (-1, frozenset()))
            successor = (name, self._found.get(name, ""))
            vouching += index >= oldest and said >= {successor, own, key}
        return bool(voters) and vouching > len(voters) // 2

    def is_known(self, key: Vouched) -> bool:
        """Whether the answers of that one are heard."""
        return self.is_member(key) or (self.is_found(key) and key[0] in self.expected())

    def is_answered(self, key: Vouched, shown: Collection[str] = ()) -> bool:
        """Whether that one is answered with who this node is when it calls.

        Args:
            shown: Incarnations of this node that the caller says it has been shown.
        """
        # Before there is a list everybody must be able to find out who the others are.
        return (
            self.is_known(key)
            or (not self.log.index and key[0] in self.configured)
            or (key[0] in self.expected() and self.identity.incarnation in shown)
        )

    def note_shown(self, hello: Hello) -> None:
        """Keep the incarnation of a caller that was refused, if its name is looked for here."""
        if hello.name in self.expected():
            shown = self._shown.setdefault(hello.name, deque(maxlen=SHOWN_MAX))
            if hello.incarnation not in shown:
                shown.append(hello.incarnation)

    def shown_by(self, name: str) -> tuple[str, ...]:
        """Return the incarnations that refused callers have shown under *name*."""
        return tuple(self._shown.get(name, ()))

    def is_found(self, key: Vouched) -> bool:
        """Whether that incarnation answered last where this node looks for its name."""
        return self._found.get(key[0]) == key[1]

    def found(self, hello: Hello) -> None:
        """Take note of who answered where this node looks for a member, and whom it vouches for."""
        self._found[hello.name] = hello.incarnation
        self._shown.pop(hello.name, None)
        self._vouched.pop(hello.name, None)
        self._claims[hello.name] = (hello.members_index, frozenset(hello.members))
        if hello.members and self.is_member(hello.key):
            self._vouched[hello.name] = (hello.members_index, frozenset(hello.members))

    def vouches_for(self) -> tuple[Vouched, ...]:
        """Return whom this node vouches for: all that stand in its lists."""
        lists = (self.log.members, self.log.before())
        return tuple(sorted({m.key for members in lists if members for m in members.members}))

    def forget(self, name: str) -> None:
        """Keep nothing of one that is neither talked to nor connected any more."""
        self.hellos.pop(name, None)
        self._found.pop(name, None)
        self._vouched.pop(name, None)
        self._claims.pop(name, None)
        self._shown.pop(name, None)

    # -- who is talked to ------------------------------------------------------------------

    def note_leaving(self) -> None:
        """Leader: take note of who is removed by the newest list."""
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
        """Names that this node looks for by itself."""
        names = {*self.followers()}
        if self._finds_by_address:
            # The bootstrap value of others, or the list so far, may be long out of date.
            names.update(self.configured)
        return frozenset(names - {self.self_id})

    def talked_to(self) -> tuple[str, ...]:
        """Names that this node keeps a connection to."""
        return tuple(sorted({*self.expected(), *self.guests} - {self.self_id}))

    def addresses(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return where *name* may be found, to be tried one after the other."""
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
