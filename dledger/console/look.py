"""One look at a cluster: what each NameServer knows and what each member reports.

Members that were seen before are asked even when no NameServer answers, and those that have left
their NameServer are still shown, until the group itself names them no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from dledger.client.admin.admin import Admin, judge_group
from dledger.commitlog.errors import MQError
from dledger.console.known import is_access_refusal

Status = Mapping[str, Any]

LOOK_S: Final = 4.0
"""One look takes no longer; what has not answered by then does not answer."""


@dataclass(slots=True)
class ClusterLook:
    """What was seen at one time.

    Attributes:
        name_servers: Address → number of broker groups it knows; None: no answer.
        groups: Broker group → address → status; None: no answer.
        figures: Address → RocketMQ's figures of that broker.
        refused: Addresses of members that answer, and refuse the console's account.
    """

    at_ms: int
    name_servers: dict[str, int | None] = field(default_factory=dict)
    groups: dict[str, dict[str, Status | None]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def leaders(self) -> dict[str, str | None]:
        """Return the address of the leader of each broker group; None: there is none."""
        return {name: judge_group(name, members).leader for name, members in self.groups.items()}


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member on the page.

    Attributes:
        name: Its id in the group; empty where it never answered.
        role: ``leader``, ``follower``, ``candidate``, ``learner``, ``observer``; ``no answer``,
            ``refused``.
        lag: Entries it has to apply until it is where the leader's commit stands; None: not known.
    """

    name: str
    address: str
    role: str
    term: int | None = None
    commit_index: int | None = None
    applied_index: int | None = None
    lag: int | None = None
    disk: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """One broker group on the page."""

    name: str
    healthy: bool
    leader: str | None
    term: int
    reasons: tuple[str, ...]
    members: tuple[MemberRow, ...]


async def look_at(admin: Admin, before: ClusterLook | None, at_ms: int) -> ClusterLook:
    """Ask every NameServer and every member, those of *before* too; never fails.

    Cancellation: The look is given up.
    """
    look = ClusterLook(at_ms)
    if before is not None:
        look.name_servers = dict.fromkeys(before.name_servers)
        look.groups = {name: dict.fromkeys(members) for name, members in before.groups.items()}
    with trio.move_on_after(LOOK_S):
        for address, info in (await admin.name_server_views()).items():
            look.name_servers[address] = None if info is None else len(info.broker_addr_table)
            for name, group in () if info is None else info.broker_addr_table.items():
                members = look.groups.setdefault(name, {})
                for member in group.broker_addrs.values():
                    members.setdefault(member, None)
                    look.registered.add(member)
    with trio.move_on_after(LOOK_S):
        async with trio.open_nursery() as nursery:
            for members in look.groups.values():
                for address in members:
                    nursery.start_soon(_ask, admin, look, members, address)
    look.groups = {name: known_members(members) for name, members in sorted(look.groups.items())}
    return look


async def _ask(
    admin: Admin, look: ClusterLook, members: dict[str, Status | None], address: str
) -> None:
    try:
        members[address] = await admin.raft_status(address)
        look.figures[address] = await admin.runtime_info(address)
    except MQError as error:
        if members[address] is None and is_access_refusal(error):
            look.refused.add(address)


def known_members(members: Mapping[str, Status | None]) -> dict[str, Status | None]:
    """Return *members* as their leader has them, sorted: added, and without those removed. Pure."""
    leader = judge_group("", members).leader
    found = dict(members)
    if leader is not None:
        listed = (members[leader] or {}).get("members", ())
        named = [str(m["client_address"]) for m in listed if m.get("client_address")]
        if named:
            found = {a: said for a, said in found.items() if said is not None or a in named}
            found = dict.fromkeys(named) | found
    names = _names_in(members)
    return {a: found[a] for a in sorted(found, key=lambda a: (names.get(a, ""), a))}


def _names_in(members: Mapping[str, Status | None]) -> dict[str, str]:
    """Return address → id in the group, of every member that any of them names."""
    found: dict[str, str] = {}
    for address, said in members.items():
        for member in () if said is None else said.get("members", ()):
            found[str(member.get("client_address"))] = str(member.get("name", ""))
        if said is not None:
            found[address] = str(said.get("self", ""))
    return found


def group_views(look: ClusterLook) -> list[GroupView]:
    """Return what the page shows of every group. Pure."""
    return [_group_view(look, name, members) for name, members in look.groups.items()]


def _group_view(look: ClusterLook, name: str, members: Mapping[str, Status | None]) -> GroupView:
    health = judge_group(name, members)
    leading: Status = {} if health.leader is None else members[health.leader] or {}
    names = _names_in(members)
    rows = tuple(
        _member_row(look, address, said, leading, names.get(address, ""))
        for address, said in members.items()
    )
    refusing = [f"{a} refuses this console's account" for a in members if a in look.refused]
    reasons = [text for text in health.reasons if text.partition(" ")[0] not in look.refused]
    return GroupView(name, health.healthy, health.leader, health.term, (*refusing, *reasons), rows)


def _member_row(
    look: ClusterLook, address: str, said: Status | None, leading: Status, name: str
) -> MemberRow:
    commit = leading.get("commit_index")
    is_refused = address in look.refused
    peer: Status = leading.get("peers", {}).get(name, {})
    # Of a dead member a leader knows nothing before it has answered: 0 is not its place.
    applied = (peer.get("match_index") or None) if said is None else said.get("applied_index")
    lag = None if commit is None or applied is None else max(0, int(commit) - int(applied))
    if said is None:
        remarks = ("answers, and refuses the account of this console",) if is_refused else ()
        role = "refused" if is_refused else "no answer"
        return MemberRow(name, address, role, lag=lag, remarks=remarks)
    return MemberRow(
        name,
        address,
        _role(said),
        said.get("term"),
        said.get("commit_index"),
        said.get("applied_index"),
        lag,
        look.figures.get(address, {}).get("commitLogDiskRatio", ""),
        tuple(_remarks(look, address, said)),
    )


def _role(said: Status) -> str:
    if said.get("voter") is False:
        names = {m["name"]: m["standing"] for m in said.get("members") or ()}
        return "observer" if names.get(said.get("self")) == "observer" else "learner"
    return str(said.get("role", "unknown"))


def _remarks(look: ClusterLook, address: str, said: Status) -> list[str]:
    damaged = (said.get("scrub") or {}).get("damaged_entries")
    remarks = {
        "leads and does not serve yet": said.get("role") == "leader" and not said.get("serving"),
        "may have lost entries: has no vote until it is filled again": said.get("doubtful"),
        "its log is damaged": said.get("damaged"),
        "is filled again from its leader": said.get("refilling"),
        f"scrub: {damaged} damaged entries": damaged,
        "no NameServer knows it": look.registered and address not in look.registered,
    }
    return [text for text, holds in remarks.items() if holds]
