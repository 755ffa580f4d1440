"""The members of a group: their list, its entries in the log, and the rules of change.

The whole list stands in one CONFIG entry and is in force as soon as that entry is in the log,
committed or not (Raft thesis §4.1); when the entry is cut, the list before it is in force again. A
member is a name *and* an incarnation. Changes go one at a time, so that any majority before and any
majority after have a member in common::

    absent ──► learner ──► voter ──► absent
       └─────► observer ─────┘ (asked to vote, as a learner)

An observer is a learner that stays one: a copy at another site, which nothing waits for.

A folder that was lost and made again takes the same steps; the voter it replaces is removed first.
The steps are decided from the list in the log and the connections of the leader, so that the next
leader continues where the last one stopped.

Pure: `dledger.raft.journal` appends, `dledger.raft.leader` decides when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import cbor2
from typing_extensions import Buffer

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.errors import CorruptEntryError
from dledger.raft.wire import is_host, is_incarnation, is_name, is_port, parse_address
from dledger.remoting.addresses import join_address

LIST_VERSION: Final = 1
"""Version of the encoded list; another one stops the node rather than being guessed at."""

MEMBERS_MAX: Final = 16
"""Members of one group, learners included: an append is sent to each of them."""


class Standing(StrEnum):
    """What a member may do."""

    VOTER = "voter"
    """Counted in majorities; may lead."""
    LEARNER = "learner"
    """Gets every entry, is counted nowhere and never campaigns; a voter when it has caught up."""
    OBSERVER = "observer"
    """A learner that does not become a voter before it is asked to."""


@dataclass(frozen=True, slots=True)
class Member:
    """One replica: a name, the incarnation of its data folder, and its addresses."""

    name: str
    incarnation: str
    host: str = ""
    port: int = 0
    """Address of its peer listener; empty when unknown."""
    client_address: str = ""
    standing: Standing = Standing.VOTER

    @property
    def is_voter(self) -> bool:
        """Whether it is counted."""
        return self.standing is Standing.VOTER

    @property
    def is_usable(self) -> bool:
        """Whether a member can have these names and addresses; unknown ones are empty."""
        return (
            is_name(self.name)
            and is_incarnation(self.incarnation)
            and ((not self.host and not self.port) or (is_host(self.host) and is_port(self.port)))
            and (not self.client_address or parse_address(self.client_address) is not None)
        )

    @property
    def key(self) -> tuple[str, str]:
        """Name and incarnation."""
        return self.name, self.incarnation


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group, sorted. At most one voter and one other have the same name."""

    members: tuple[Member, ...]
    voter_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of the voters, sorted."""

    def __post_init__(self) -> None:
        voters = tuple(member.name for member in self.members if member.is_voter)
        object.__setattr__(self, "voter_names", voters)

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """Return the list of *members* in its one order.

        Raises ChangeRefusedError: two voters or two learners of one name, or too many.
        """
        ordered = tuple(sorted(members, key=lambda member: (member.name, member.incarnation)))
        taken = [(member.name, member.is_voter) for member in ordered]
        if len(set(taken)) != len(taken) or len({m.key for m in ordered}) != len(ordered):
            raise ChangeRefusedError("two members of one name; nothing was changed")
        if len(ordered) > MEMBERS_MAX:
            raise ChangeRefusedError(f"a group has at most {MEMBERS_MAX} members")
        return cls(ordered)

    @classmethod
    def bootstrap(
        cls,
        voters: Mapping[str, str],
        addresses: Mapping[str, tuple[str, int]],
        client_addresses: Mapping[str, str],
    ) -> Members:
        """Return the first list: *voters* (name to incarnation), all of them equal."""
        return cls.of(
            Member(
                name,
                incarnation,
                *addresses.get(name, ("", 0)),
                client_address=client_addresses.get(name, ""),
            )
            for name, incarnation in voters.items()
        )

    # -- reading ---------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, once, sorted."""
        return tuple(sorted({member.name for member in self.members}))

    def find(self, name: str, incarnation: str) -> Member | None:
        """Return that very member."""
        key = (name, incarnation)
        return next((member for member in self.members if member.key == key), None)

    def voter(self, name: str) -> Member | None:
        """Return the voter of that name."""
        return next((m for m in self.members if m.name == name and m.is_voter), None)

    def learner(self, name: str) -> Member | None:
        """Return the learner of that name, or the observer."""
        return next((m for m in self.members if m.name == name and not m.is_voter), None)

    def is_voter(self, name: str, incarnation: str) -> bool:
        """Whether that member is counted."""
        member = self.find(name, incarnation)
        return member is not None and member.is_voter

    def addresses(self, name: str) -> list[tuple[str, int]]:
        """Return where *name* may be reached, the newest place first."""
        found = [self.learner(name), self.voter(name)]
        return [(member.host, member.port) for member in found if member and member.host]

    # -- changing --------------------------------------------------------------------------

    def with_learner(self, member: Member, standing: Standing = Standing.LEARNER) -> Members:
        """Return the list with *member* as a learner, in place of one of the same name."""
        rest = [m for m in self.members if m.is_voter or m.name != member.name]
        return Members.of([*rest, replace(member, standing=standing)])

    def asked_to_vote(self, observer: Member) -> Members:
        """Return the list with *observer* as a learner, which is promoted when it has caught up."""
        return self._with(observer, replace(observer, standing=Standing.LEARNER))

    def promoted(self, member: Member) -> Members:
        """Return the list with the learner *member* as a voter."""
        return self._with(member, replace(member, standing=Standing.VOTER))

    def moved(self, member: Member, host: str, port: int, client_address: str) -> Members:
        """Return the list with *member* at another address."""
        return self._with(
            member, replace(member, host=host, port=port, client_address=client_address)
        )

    def without(self, member: Member) -> Members:
        """Return the list without *member*."""
        return Members.of(m for m in self.members if m.key != member.key)

    def _with(self, old: Member, new: Member) -> Members:
        return Members.of([*(m for m in self.members if m.key != old.key), new])

    def check_usable(self) -> None:
        """Check that a group can work with this list.

        Raises ChangeRefusedError: no member has a vote, or a member has a name or an address that
        none can have.
        """
        if not self.voter_names:
            raise ChangeRefusedError("a group without voters; nothing was changed")
        for member in self.members:
            if not member.is_usable:
                raise ChangeRefusedError("a member of an impossible name or address")

    # -- bytes -----------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the list as canonical CBOR: equal lists give equal bytes."""
        rows = [
            [m.name, m.incarnation, m.host, m.port, m.client_address, m.standing.value]
            for m in self.members
        ]
        return cbor2.dumps({"v": LIST_VERSION, "members": rows}, canonical=True)

    @classmethod
    def decode(cls, body: Buffer) -> Members:
        """Return the list in *body*, a result of `encode`.

        Raises CorruptEntryError: it is of another version, or no list.
        """
        try:
            value: Any = cbor2.loads(bytes(body))
            version, rows = value["v"], value["members"]
            if version != LIST_VERSION:
                raise CorruptEntryError(
                    f"a list of members of version {version}; known here is {LIST_VERSION}"
                )
            members = [
                Member(name, incarnation, host, port, client, Standing(standing))
                for name, incarnation, host, port, client, standing in rows
            ]
            whole = all(
                isinstance(m.port, int)
                and all(
                    isinstance(text, str)
                    for text in (m.name, m.incarnation, m.host, m.client_address)
                )
                for m in members
            )
            found = cls(tuple(members))
            if not whole or Members.of(members) != found:
                raise CorruptEntryError("a list of members that this version would not write")
        except (cbor2.CBORDecodeError, ChangeRefusedError, KeyError, TypeError, ValueError) as e:
            raise CorruptEntryError(f"a list of members that cannot be read: {e}") from e
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the members for people and JSON.

        Without a secret, incarnations keep strangers out: of each there are eight digits of its
        sum, which are others for another folder.
        """
        return [
            {
                "name": m.name,
                "folder": hashlib.sha256(m.incarnation.encode()).hexdigest()[:8],
                "address": join_address(m.host, m.port) if m.host else None,
                "client_address": m.client_address or None,
                "standing": m.standing.value,
            }
            for m in self.members
        ]


def check_change(before: Members, after: Members, leader: tuple[str, str]) -> None:
    """Check that a change is one safe step (Raft thesis §4.1: majorities before and after overlap).

    Args:
        leader: Name and incarnation of the member that makes the change.
    Raises:
        ChangeRefusedError: It would remove the leader, leave no voter, change more than one vote,
            or make a voter of a member that was no learner.
    """
    if not any(member.is_voter for member in after.members):
        raise ChangeRefusedError("a group without voters; nothing was changed")
    if not after.is_voter(*leader):
        raise ChangeRefusedError("the leader stays; transfer its leadership first")
    old = {member.key: member for member in before.members}
    new = {member.key: member for member in after.members}
    touched = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    counted = [
        key
        for key in touched
        if any(list_[key].is_voter for list_ in (old, new) if key in list_)
        and not (key in old and key in new and old[key].is_voter and new[key].is_voter)
    ]
    if len(counted) > 1:
        raise ChangeRefusedError("more than one member in one change; nothing was changed")
    for key in counted:
        was = old.get(key)
        is_learner = was is not None and was.standing is Standing.LEARNER
        if key in new and new[key].is_voter and not is_learner:
            raise ChangeRefusedError(f"{key[0]} was no learner before; nothing was changed")


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of one name, as the leader sees it now."""

    incarnation: str
    """The incarnation of its last hello."""
    settled: bool
    """No other incarnation of the name has sent a hello for a while."""
    caught_up: bool
    """It has almost all there is, and had so for a while."""
    host: str = ""
    port: int = 0
    client_address: str = ""


def next_list(members: Members, seen: Mapping[str, Sight]) -> Members | None:
    """Return the list after the next step towards "every member that is connected and able votes".

    Returns:
        None when there is nothing to do. The steps of a replacement, in this order: the new
        incarnation becomes a learner; caught up, its predecessor goes; then it is promoted.
    Raises:
        ChangeRefusedError: Nothing is left to do but to take in a learner, and the list is full.
    """
    full: ChangeRefusedError | None = None
    for name in members.names:
        sight = seen.get(name)
        if sight is None:
            continue
        voter, learner = members.voter(name), members.learner(name)
        if learner is not None and learner.incarnation == sight.incarnation:
            if sight.caught_up and learner.standing is not Standing.OBSERVER:
                return members.promoted(learner) if voter is None else members.without(voter)
        elif voter is not None and voter.incarnation == sight.incarnation:
            if learner is not None and sight.settled:
                return members.without(learner)  # the old folder is in use again
        elif sight.settled:
            known = learner or voter
            assert known is not None
            joining = Member(
                name,
                sight.incarnation,
                sight.host or known.host,
                sight.port or known.port,
                sight.client_address or known.client_address,
            )
            observes = voter is None and known.standing is Standing.OBSERVER
            if learner is None and len(members.members) >= MEMBERS_MAX:
                # The steps of others may follow, and one of them may free a place.
                full = full or ChangeRefusedError(
                    f"{name} has lost its folder, and a group has at most {MEMBERS_MAX} members:"
                    f" remove one, at best {name}, then add it"
                )
                continue
            return members.with_learner(
                joining, Standing.OBSERVER if observes else Standing.LEARNER
            )
    if full is not None:
        raise full
    return None


class MembersLog:
    """The list in force, and those before it that a truncation may bring back.

    *version*: raised by every change of the list in force or of the one before it.
    """

    def __init__(self, index: int = 0, members: Members | None = None) -> None:
        """Start from the list of the entry at *index*, which is committed; None when unknown."""
        self._stack: list[tuple[int, Members]] = []
        self.version = 0
        self.reset(index, members)

    def reset(self, index: int, members: Members | None) -> None:
        """Forget all lists and start from a committed one."""
        self._stack = [] if members is None else [(index, members)]
        self.version += 1

    @property
    def members(self) -> Members | None:
        """The list in force; None before the first one is known."""
        return self._stack[-1][1] if self._stack else None

    @property
    def index(self) -> int:
        """Index of the entry that holds it; 0 when it stands in no entry."""
        return self._stack[-1][0] if self._stack else 0

    @property
    def oldest_index(self) -> int:
        """Index of the oldest list that may be in force again; 0 when it is in no entry."""
        return self._stack[0][0] if self._stack else 0

    def become(self, other: MembersLog) -> None:
        """Adopt the lists of *other*: the log was read again."""
        self._stack = list(other._stack)
        self.version += 1

    def before(self) -> Members | None:
        """Return the list that would be in force if the newest were cut."""
        return self._stack[-2][1] if len(self._stack) > 1 else None

    def append(self, index: int, members: Members) -> None:
        """Add the list of the entry at *index*."""
        if self._stack and index <= self.index:
            return  # refilling a log below a snapshot that has a newer list already
        self._stack.append((index, members))
        self.version += 1

    def truncate_from(self, index: int) -> None:
        """Drop the lists at *index* and above, which were cut; the oldest list known stays."""
        kept = [*self._stack[:1], *(item for item in self._stack[1:] if item[0] < index)]
        if len(kept) != len(self._stack):
            self._stack = kept
            self.version += 1

    def committed(self, index: int) -> None:
        """Drop lists that no truncation can restore: older than the newest one up to *index*."""
        while len(self._stack) > 1 and self._stack[1][0] <= index:
            del self._stack[0]
            self.version += 1
