"""Raft and our own protocol: RAFT_CHANGE (51105), RAFT_STATUS (51102), CAPABILITIES (51100).

The leader carries out changes of the members; each ends when its entry is committed. What follows
by itself (a learner that has caught up is promoted, the predecessor of a replaced one removed) is
`dledger.raft.membership`'s business and shows in the status of the group.

RAFT_CHANGE adds, removes and replaces members and transfers the leadership; the leader answers it.
Header fields: ``op`` is ``add``, ``observe``, ``promote``, ``remove``, ``replace`` or ``transfer``;
``name`` the member's id; ``address`` its peer address ``host:port`` for ``add``, ``observe`` and
``replace``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from dledger.broker_errors import (
    ChangePendingError,
    ChangeRefusedError,
    NotLeaderError,
    UnknownOutcomeError,
)
from dledger.group import Group
from dledger.group_api import BrokerGroup
from dledger.processors.answers import bad_request
from dledger.processors.handles import Limit, handles
from dledger.raft.identity import Hello
from dledger.raft.membership import Member, Members, Standing
from dledger.raft.wire import parse_address
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.addresses import is_loopback
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import NAMES_STALE_FIELD
from dledger.remoting.seams import Clock
from dledger.settings.parts import BrokerSettings

# ------------------------------------------------------------------------------- changes of members


CONTACT_TIMEOUT_S: Final = 5.0
"""How long a new member has to answer at its peer address; it should run already."""

CHANGE_TIMEOUT_S: Final = 10.0
"""How long a change waits for those before it, and then for its own commit."""

LOOK_S: Final = 0.02


class MembershipChanges:
    """Adds, removes and replaces members, and moves the leadership."""

    def __init__(self, group: Group, clock: Clock) -> None:
        self._group = group
        self._clock = clock

    async def add(self, name: str, address: tuple[str, int]) -> None:
        """Take *name*, which runs at the peer address *address*, in as a learner.

        Raises:
            NotLeaderError: Ask the leader; nothing was changed.
            ChangeRefusedError: It is a member already, or does not answer; nothing was changed.
            ChangePendingError: Other changes came first for too long; nothing was changed.
            UnknownOutcomeError: Leadership ended first; look at the status.
        """
        members = self._members()
        if members.voter(name) is not None:
            raise ChangeRefusedError(f"{name} is a member already; see replace")
        learner = members.learner(name)
        if learner is not None and learner.standing is Standing.OBSERVER:
            raise ChangeRefusedError(f"{name} is an observer; see promote")
        await self._invite(name, address)

    async def observe(self, name: str, address: tuple[str, int]) -> None:
        """Take *name* in as an observer: a learner that does not become a voter by itself.

        Raises: Like `add`.
        """
        members = self._members()
        learner = members.learner(name)
        if members.voter(name) is not None or (
            learner is not None and learner.standing is not Standing.OBSERVER
        ):
            raise ChangeRefusedError(
                f"{name} is a member that votes, or will; remove it first. Nothing was changed"
            )
        await self._invite(name, address, Standing.OBSERVER)

    async def promote(self, name: str) -> None:
        """Let the observer *name* become a voter as soon as it has caught up.

        Raises: Like `add`.
        """
        learner = self._members().learner(name)
        if learner is None:
            raise ChangeRefusedError(f"{name} is no observer; nothing was changed")

        def after(now: Members) -> Members:
            found = now.find(*learner.key)
            observes = found is not None and found.standing is Standing.OBSERVER
            return now.asked_to_vote(found) if observes and found is not None else now

        await self._change(after)

    async def replace(self, name: str, address: tuple[str, int]) -> None:
        """Let the one that runs at *address* under the name of a member take that one's place.

        Raises: Like `add`.
        """
        if self._members().voter(name) is None:
            raise ChangeRefusedError(f"{name} is no member; see add")
        self._refuse_self(name)
        await self._invite(name, address)

    async def remove(self, name: str) -> None:
        """Remove *name*, whether it runs or not; errors as `add`."""
        members = self._members()
        self._refuse_self(name)
        if name not in members.names:
            raise ChangeRefusedError(f"{name} is no member; nothing was changed")
        await self._change(lambda now: Members.of(m for m in now.members if m.name != name))

    async def transfer(self, name: str | None) -> None:
        """Hand the leadership to *name*, or to the voter that has most.

        Raises:
            NotLeaderError, ChangeRefusedError: Nothing was begun.
            ChangePendingError: It did not succeed; this node goes on leading.
        """
        if not await self._group.transfer_leadership(name):
            raise ChangePendingError("the transfer did not succeed in time; try again")

    def _members(self) -> Members:
        members = self._group.node.roster.members
        if self._group.leadership is None or members is None:
            raise NotLeaderError(self._group.leader_address, self._group.term)
        return members

    def _refuse_self(self, name: str) -> None:
        if name == self._group.node.settings.self_id:
            raise ChangeRefusedError(
                f"{name} leads; transfer its leadership first: dledger raft transfer-leader"
            )

    async def _invite(
        self, name: str, address: tuple[str, int], standing: Standing = Standing.LEARNER
    ) -> None:
        self._refuse_self(name)
        node = self._group.node
        if not node.settings.is_guarded and not all(
            map(is_loopback, (address[0], node.settings.peers[node.settings.self_id][0]))
        ):
            raise ChangeRefusedError(
                f"{name} is on another machine, and the members have neither raft.secret_file nor"
                " raft.tls_cert_file: anybody could pass for one; nothing was changed"
            )
        node.contacts.invite(name, address)
        try:
            hello = await self._contact(name, address)
            host, port = address
            joining = Member(name, hello.incarnation, host, port, hello.client_address)

            def after(now: Members) -> Members:
                known = now.find(*joining.key)
                if known is None:
                    return now.with_learner(joining, standing)
                return now.moved(known, host, port, hello.client_address)

            await self._change(after)
        finally:
            node.contacts.uninvite(name)

    async def _contact(self, name: str, address: tuple[str, int]) -> Hello:
        node, clock = self._group.node, self._clock
        deadline = clock.monotonic() + CONTACT_TIMEOUT_S
        while clock.monotonic() < deadline:
            hello, state = node.roster.hellos.get(name), node.peers.get(name)
            if hello and state and "control" in state.up and hello.peer_address == address:
                return hello
            await clock.sleep(LOOK_S)
        hello, state = node.roster.hellos.get(name), node.peers.get(name)
        is_up = hello is not None and state is not None and "control" in state.up
        where = f"; it calls itself {hello.peer}" if hello is not None and is_up else ""
        raise ChangeRefusedError(
            f"{name} does not answer at {address[0]}:{address[1]}{where}; nothing was changed"
        )

    async def _change(self, change: Callable[[Members], Members]) -> None:
        group, clock = self._group, self._clock
        deadline = clock.monotonic() + CHANGE_TIMEOUT_S
        while True:
            now = self._members()
            after = change(now)
            if after == now:
                return
            try:
                index = group.node.changes.change(after)
                break
            except ChangePendingError:
                if clock.monotonic() >= deadline:
                    raise
            await clock.sleep(LOOK_S)
        term = group.term
        group.node.settle()
        while group.node.commit_index < index:
            if group.term != term or clock.monotonic() >= deadline:
                raise UnknownOutcomeError("the change is not committed yet; see raft status")
            await clock.sleep(LOOK_S)


# ---------------------------------------------------------------------------------- requests


class RaftChangeProcessor:
    """Answers 51105 when the change is committed."""

    def __init__(self, changes: MembershipChanges) -> None:
        self._changes = changes

    @handles(RequestCode.RAFT_CHANGE, limit=Limit.RAFT_CHANGE, rule=ADMIN, local=True)
    async def handle(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Carry the change out.

        Raises:
            RefusedError: The request is no change; nothing was changed.
            MQError: What `MembershipChanges` raises.
        Cancellation: The change may go on.
        """
        op, name = _text(command, "op"), _text(command, "name")
        if not name and op != "transfer":
            raise bad_request("the name of the member is missing")
        match op:
            case "add":
                await self._changes.add(name, _address(command))
            case "observe":
                await self._changes.observe(name, _address(command))
            case "promote":
                await self._changes.promote(name)
            case "replace":
                await self._changes.replace(name, _address(command))
            case "remove":
                await self._changes.remove(name)
            case "transfer":
                await self._changes.transfer(name or None)
            case _:
                raise bad_request(
                    f"op {op!r} is not add, observe, promote, remove, replace or transfer"
                )
        return response_to(command)


def _text(command: RemotingCommand, field: str) -> str:
    value = (command.ext or {}).get(field)
    return value if isinstance(value, str) else ""


def _address(command: RemotingCommand) -> tuple[str, int]:
    text = _text(command, "address")
    address = parse_address(text)
    if address is None:
        raise bad_request(f"address {text!r} is not host:port")
    return address


class RaftStatusProcessor:
    """Answers 51102 with a JSON object, on every replica."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings) -> None:
        self._group = group
        self._settings = settings

    @handles(RequestCode.RAFT_STATUS, limit=Limit.CLIENT, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return role, term, indexes and peers, and the names of this broker."""
        status = {
            "cluster": self._settings.broker.cluster_name,
            "brokerName": self._settings.broker.broker_name,
            "address": self._settings.address,
            **self._group.status(),
        }
        return response_to(command, body=msgspec.json.encode(status))


DISTRIBUTION = "dledger-mq"


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


class CapabilitiesProcessor:
    """Answers 51100. A real RocketMQ answers 3, which means: JSON headers, no record batches."""

    def __init__(self, group: BrokerGroup, broker_name: str) -> None:
        self._group = group
        self._ext = {
            "cbor": "true",
            "records": "true",
            "bulkPull": "true",
            "idempotent": "true",
            NAMES_STALE_FIELD: "true",
            "lockTokens": "true",
            "version": _version(),
            "brokerName": broker_name,
        }

    @handles(RequestCode.CAPABILITIES, limit=Limit.CLIENT, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return what this broker understands beside RocketMQ's protocol."""
        ext = {**self._ext, "groupIdentity": self._group.group_identity}
        return response_to(command, ext=ext)
