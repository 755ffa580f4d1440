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
        at_ms: When.
        name_servers: Address → number of broker groups it knows; None: no answer.
        groups: Broker group → address → status; None: no answer.
        figures: Address → RocketMQ's figures of that broker.
        registered: Addresses that a NameServer knows.
        refused: Addresses of members that answer, and refuse the console's account.
    """

    at_ms: int
    name_servers: dict[str, int | None] = field(default_factory=dict)
    groups: dict[str, dict[str, Status | None]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member on the page.

    Attributes:
        name: Its id in the group; empty where it never answered.
        address: Where clients reach it.
        role: ``leader``, ``follower``, ``candidate``, ``learner``,
            ``observer``; ``no answer``, ``refused``.
        lag: Entries it has to apply until it is where the leader's commit stands; None: not known.
        acked_ms_ago: When it last acknowledged something to its leader.
        disk_used: Share of its disk that is used, 0 to 1; None: not known.
        remarks: What an operator should see.
    """

    name: str
    address: str
    role: str
    term: int | None = None
    last_index: int | None = None
    commit_index: int | None = None
    applied_index: int | None = None
    lag: int | None = None
    acked_ms_ago: int | None = None
    disk_used: float | None = None
    disk_text: str = ""
    elections: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """One broker group on the page.

    Attributes:
        healthy: One member leads and serves in the newest term, and every member answers.
        leader: Address of the leader, if there is one.
        reasons: Why it is not healthy.
    """

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
        named = {
            str(member["client_address"])
            for member in (members[leader] or {}).get("members", ())
            if member.get("client_address")
        }
        if named:
            found = {a: said for a, said in found.items() if said is not None or a in named}
            found = dict.fromkeys(named) | found
    names = names_in(members)
    return {a: found[a] for a in sorted(found, key=lambda a: (names.get(a, ""), a))}


def names_in(members: Mapping[str, Status | None]) -> dict[str, str]:
    """Return address → id in the group, of every member that any of them names. Pure."""
    found: dict[str, str] = {}
    for address, said in members.items():
        if said is not None:
            found |= {
                str(member.get("client_address")): str(member.get("name", ""))
                for member in said.get("members", ())
            }
            found[address] = str(said.get("self", ""))
    return {address: name for address, name in found.items() if name}


def group_views(look: ClusterLook) -> list[GroupView]:
    """Return what the page shows of every group. Pure."""
    return [_group_view(look, name, members) for name, members in look.groups.items()]


def _group_view(look: ClusterLook, name: str, members: Mapping[str, Status | None]) -> GroupView:
    health = judge_group(name, members)
    leading: Status = {} if health.leader is None else members[health.leader] or {}
    names = names_in(members)
    rows = tuple(
        _member_row(look, address, said, leading, names.get(address, ""))
        for address, said in members.items()
    )
    reasons = tuple(
        f"{address} refuses this console's account"
        for address in members
        if address in look.refused
    ) + tuple(reason for reason in health.reasons if reason.partition(" ")[0] not in look.refused)
    return GroupView(name, health.healthy, health.leader, health.term, reasons, rows)


def _member_row(
    look: ClusterLook, address: str, said: Status | None, leading: Status, name: str
) -> MemberRow:
    commit = leading.get("commit_index")
    peer: Status = leading.get("peers", {}).get(name, {})
    acked = peer.get("acked_ms_ago")
    if said is None:
        behind = None
        if commit is not None and peer.get("match_index") is not None:
            behind = max(0, int(commit) - int(peer["match_index"]))
        is_refused = address in look.refused
        return MemberRow(
            name,
            address,
            "refused" if is_refused else "no answer",
            lag=behind,
            acked_ms_ago=acked,
            remarks=(
                "answers, and refuses the account of this console"
                if is_refused
                else "does not answer this console",
            ),
        )
    applied = said.get("applied_index")
    figures = look.figures.get(address, {})
    return MemberRow(
        str(said.get("self", name)),
        address,
        _role(said),
        term=said.get("term"),
        last_index=said.get("last_index"),
        commit_index=said.get("commit_index"),
        applied_index=applied,
        lag=None if commit is None or applied is None else max(0, int(commit) - int(applied)),
        acked_ms_ago=acked,
        disk_used=_ratio(figures.get("commitLogDiskRatio")),
        disk_text=figures.get("commitLogDirCapacity", "").rstrip("."),
        elections=said.get("elections"),
        remarks=tuple(_remarks(look, address, said)),
    )


def _role(said: Status) -> str:
    if said.get("voter") is False:
        names = {m["name"]: m["standing"] for m in said.get("members") or ()}
        return "observer" if names.get(said.get("self")) == "observer" else "learner"
    return str(said.get("role", "unknown"))


def _remarks(look: ClusterLook, address: str, said: Status) -> list[str]:
    found = []
    if said.get("role") == "leader" and not said.get("serving"):
        found.append("leads and does not serve yet")
    if said.get("doubtful"):
        found.append("may have lost entries: has no vote until it is filled again")
    if said.get("damaged"):
        found.append("its log is damaged")
    if said.get("refilling"):
        found.append("is filled again from its leader")
    if (said.get("scrub") or {}).get("damaged_entries"):
        found.append(f"scrub: {said['scrub']['damaged_entries']} damaged entries")
    if look.registered and address not in look.registered:
        found.append("no NameServer knows it")
    return found


def _ratio(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else -1.0
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None
