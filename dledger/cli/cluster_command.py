"""``dledger cluster``: which brokers there are, their roles, and whether all is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from dledger.cli.commands import Rows, broker_addresses, listing, with_admin
from dledger.output import (
    ExitCode,
    Output,
    no_less_than_0,
    note,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.protocol.bodies import ClusterInfo

app = App(name="cluster", help="Show brokers, their roles and health.", backend="trio")

BROKER_COLUMNS = ("cluster", "broker", "id", "address", "role", "term")
"""What fits into 80 columns."""

WIDE_COLUMNS = (*BROKER_COLUMNS, "leader", "commit_index", "applied_index", "end_position")


async def brokers_of(admin: Admin, info: ClusterInfo) -> list[dict[str, Any]]:
    """Return one row per broker: what the NameServer has and what the broker itself reports."""
    from dledger.client.admin.admin import member_statuses

    statuses = await member_statuses(admin, broker_addresses(info))
    clusters = {
        name: cluster for cluster, names in info.cluster_addr_table.items() for name in names
    }
    return [
        {
            "cluster": clusters.get(name, group.cluster),
            "broker": name,
            "id": broker_id,
            "address": address,
            "reachable": statuses[address] is not None,
            **(statuses[address] or {"role": "unreachable"}),
        }
        for name, group in sorted(info.broker_addr_table.items())
        for broker_id, address in sorted(group.broker_addrs.items())
    ]


def with_absent(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *rows* and one more for each member of a group that no NameServer lists. Pure.

    A member that is listed and does not answer gets the name its group knows it by.
    """
    by_broker: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_broker.setdefault(row["broker"], []).append(dict(row))
    for group in by_broker.values():
        newest = max(group, key=lambda row: int(row.get("term") or 0))
        silent = {row["address"]: row for row in group if "self" not in row}
        here = {row.get("self") for row in group}
        for member in newest.get("members") or ():
            if member["name"] in here:
                continue
            address = member.get("client_address") or member.get("address")
            if address in silent:
                silent[address]["self"] = member["name"]
                continue
            group.append(
                {
                    "cluster": newest.get("cluster"),
                    "broker": newest["broker"],
                    "id": None,
                    "address": address,
                    "reachable": False,
                    "self": member["name"],
                    "role": "absent",
                }
            )
    return [row for group in by_broker.values() for row in group]


@app.command
@listing(BROKER_COLUMNS, WIDE_COLUMNS)
async def ls(admin: Admin) -> Rows:
    """List brokers with role and term; a member that no NameServer knows is absent."""
    views = await _views(admin)
    for sentence in views.refused:
        note(sentence)
    return with_absent(await brokers_of(admin, views.info))


@dataclass(frozen=True, slots=True)
class _Views:
    """What NameServers say.

    Attributes:
        info: The brokers that the first one knows that answers.
        down: Why others do not answer.
        refused: A sentence for each broker that one of them refuses: no group is the worse for it.
    """

    info: ClusterInfo
    down: Sequence[str] = ()
    refused: Sequence[str] = ()


async def _views(admin: Admin) -> _Views:
    """Ask each NameServer. Raises NoNameServerError: none answers."""
    from dledger.client.core.errors import NoNameServerError

    down: list[str] = []
    refused: list[str] = []
    infos: list[ClusterInfo] = []
    for address in admin.name_servers:
        try:
            info, sentences = await admin.name_server_view(address)
        except NoNameServerError as error:
            down.append(str(error))
            continue
        infos.append(info)
        refused += [f"NameServer {address}: {sentence}" for sentence in sentences]
    if not infos:
        raise NoNameServerError("; ".join(down))
    return _Views(infos[0], down, refused)


class GroupHealth(msgspec.Struct, frozen=True):
    """One broker group: healthy, or why not."""

    group: str
    healthy: bool
    leader: str | None
    term: int
    members: int
    reasons: tuple[str, ...]


def judge_group(name: str, rows: list[Mapping[str, Any]]) -> GroupHealth:
    """Return how a broker group is, from what its members say of themselves. Pure.

    Healthy: one member leads and serves in the newest term, the NameServer has it as id 0, every
    member of the Raft group is registered and answers, and no member is behind what is committed.
    """
    from dledger.client.admin import admin

    up = [row for row in rows if row.get("reachable")]
    asked = {row["address"]: row if row.get("reachable") else None for row in rows}
    seen = admin.judge_group(name, asked)
    reasons = [*seen.reasons]
    leader = next((row for row in up if row["address"] == seen.leader), None)
    if leader is not None and leader["id"] != 0:
        reasons.append(f"the NameServer does not know yet that {leader['address']} leads")
    members = {str(row.get("self")) for row in up}
    listed = {str(member["name"]) for member in (leader or {}).get("members") or ()}
    expected = listed or members.union(*(map(str, row.get("peers", {})) for row in up))
    absent = sorted(expected - members)
    if absent:
        reasons.append(f"{', '.join(absent)} of the group not registered")
    if leader is not None:
        committed = int(leader.get("commit_index", 0))
        reasons += [
            f"{row['address']} is {committed - int(row.get('applied_index', 0))} entries behind"
            for row in up
            if int(row.get("applied_index", 0)) < committed
        ]
    reasons += [f"{row['address']} must not vote" for row in up if row.get("voter") is False]
    identities = {row["group_identity"] for row in up if row.get("group_identity")}
    if len(identities) > 1:
        reasons.append(f"{len(identities)} groups have this name: {', '.join(sorted(identities))}")
    reasons += [
        f"NameServer {name_server} refuses {row['address']}: {why}"
        for row in up
        for name_server, why in (row.get("registration_refused") or {}).items()
    ]
    return GroupHealth(
        group=name,
        healthy=not reasons,
        leader=seen.leader,
        term=max(seen.term, 0),
        members=len(expected),
        reasons=tuple(reasons),
    )


async def _look(admin: Admin) -> tuple[list[GroupHealth], _Views]:
    """Return the health of every group, and what NameServers say."""
    views = await _views(admin)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in await brokers_of(admin, views.info):
        groups.setdefault(row["broker"], []).append(row)
    return [judge_group(name, rows) for name, rows in sorted(groups.items())], views


def missing_groups(registered: int, wanted: int) -> list[str]:
    """Return what is wrong with the number of groups that NameServers know. Pure."""
    if registered >= max(wanted, 1):
        return []
    if registered == 0:
        return ["no broker is registered"]
    return [f"{registered} of {wanted} groups registered"]


@app.command
@with_admin
async def health(
    admin: Admin,
    *,
    wait: Annotated[bool, Parameter(help="Wait until the cluster is healthy.")] = False,
    groups: Annotated[int, Parameter(help="Number of groups that must be registered.")] = 1,
    timeout_s: Annotated[
        float, Parameter(help="Seconds to wait at most.", validator=no_less_than_0)
    ] = 60.0,
    output: Output = "table",
) -> int:
    """Check that every group has a leader, a quorum and no lagging member; exit 1 if not."""
    import trio

    from dledger.client.core.errors import ClientError

    found: list[GroupHealth] = []
    down: Sequence[str] = ()
    refused: Sequence[str] = ()
    reasons = missing_groups(0, groups)
    healthy = False
    unreachable: ClientError | None = None
    with trio.move_on_after(timeout_s if wait else float("inf")):
        while True:
            try:
                found, views = await _look(admin)
                down, refused = views.down, views.refused
                unreachable = None
            except ClientError as error:
                unreachable = error
            reasons = [*down, *missing_groups(len(found), groups)]
            healthy = not reasons and all(group.healthy for group in found)
            if not wait or (healthy and unreachable is None):
                break
            await trio.sleep(0.2)
    if unreachable is not None:
        raise unreachable
    if output == "json":
        print_json({"healthy": healthy, "reasons": reasons, "groups": found, "refused": refused})
    else:
        print_table(
            "",
            ["group", "healthy", "leader", "term", "members", "reasons"],
            [
                [g.group, g.healthy, g.leader, g.term, g.members, "; ".join(g.reasons)]
                for g in found
            ],
        )
        for reason in [*reasons, *refused]:
            note(reason)
    return ExitCode.OK if healthy else ExitCode.FAILED
