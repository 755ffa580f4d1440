"""``dledger raft``: terms, indexes and lag; members; what a stopped replica can be repaired to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dledger.cli.commands import Watch, repeated, with_admin
from dledger.cli.topic_command import groups_of
from dledger.output import (
    CliError,
    ExitCode,
    Output,
    Wide,
    note,
    show,
    show_facts,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.raft.recover import Survivor

app = App(name="raft", help="Show and change the members of a Raft group.", backend="trio")
app.command(
    "dledger.log_command:history",
    name="history",
    help="List the terms of a stopped broker's log.",
)

LOOK_S = 0.2

COLUMNS = ("member", "address", "role", "term", "commit", "applied", "lag")
"""What fits into 80 columns; the group is the title."""

WIDE_COLUMNS = (
    "group",
    "member",
    "address",
    "role",
    "standing",
    "term",
    "last_index",
    "durable_index",
    "commit_index",
    "applied_index",
    "chain",
    "lag_entries",
    "elections",
    "truncations",
    "damaged_entries",
    "scrub_progress",
    "store_time_ahead_ms",
)


@app.command
@with_admin
async def status(
    admin: Admin,
    group: Annotated[str | None, Parameter(help="Broker group; all otherwise.")] = None,
    *,
    wide: Wide = False,
    watch: Watch = None,
    output: Output = "table",
) -> int:
    """Show each member of a group, or of all: role, term, committed and applied index.

    --wide adds the other indexes, the chain, counts of elections and the scrub; JSON has all.
    """

    async def look() -> int:
        from dledger.cli.cluster_command import brokers_of, with_absent

        found = await brokers_of(admin, await admin.cluster_info())
        rows = [row for row in found if group in (None, row["broker"])]
        if not rows:
            raise CliError(
                f"no broker group {group or ''} is registered".replace("  ", " "),
                next_step="see dledger cluster ls",
            )
        members = raft_rows(with_absent(rows))
        if output == "json" or wide:
            show(output, "", members, WIDE_COLUMNS)
        else:
            for name in dict.fromkeys(row["group"] for row in members):
                narrow = [narrow_row(row) for row in members if row["group"] == name]
                show(output, group_title(name, narrow), narrow, COLUMNS)
        for sentence in refused_members(members):
            note(sentence)
        return ExitCode.OK if any(row.get("serving") for row in rows) else ExitCode.FAILED

    return await repeated(look, watch)


MemberName = Annotated[str, Parameter(help="Name of the member: its self_id.")]
PeerAddress = Annotated[str, Parameter(help="Its peer address, host:port.")]
Folder = Annotated[Path, Parameter(help="Data folder of the stopped broker.")]
Group = Annotated[
    str | None, Parameter(name=["--group", "-g"], help="Broker group; needed if there are several.")
]
Wait = Annotated[bool, Parameter(name="--wait", help="Wait until the change is complete.")]
MEMBER_WAIT_S = 300.0
"""A new member copies the whole log before it votes."""


@app.command
@with_admin
async def add(
    admin: Admin,
    name: MemberName,
    address: PeerAddress,
    /,
    *,
    group: Group = None,
    observer: Annotated[
        bool,
        Parameter(
            help="It copies the log and never votes, until dledger raft promote.", negative=""
        ),
    ] = False,
    wait: Wait = False,
) -> None:
    """Add the broker NAME at the peer address HOST:PORT: as a learner, then as a voter."""
    if observer:
        copies = f"{name} is an observer: it copies the log, and nothing waits for it"
        await _change(admin, group, "observe", name, address, copies)
        return
    learns = f"{name} is a learner; it votes when it has caught up"
    await _change(admin, group, "add", name, address, learns, wait)


@app.command
@with_admin
async def promote(
    admin: Admin,
    name: MemberName,
    /,
    *,
    group: Group = None,
    wait: Wait = False,
) -> None:
    """Let the observer NAME become a voter, as soon as it has caught up."""
    learns = f"{name} is a learner; it votes when it has caught up"
    await _change(admin, group, "promote", name, "", learns, wait)


@app.command
@with_admin
async def replace(
    admin: Admin,
    name: MemberName,
    address: PeerAddress,
    /,
    *,
    group: Group = None,
    wait: Wait = False,
) -> None:
    """Replace the member NAME by the broker at the peer address HOST:PORT.

    That broker has the id of NAME, and an empty folder or the folder of NAME.
    """
    learns = f"the one at {address} learns; it takes the place of {name} when it has caught up"
    await _change(admin, group, "replace", name, address, learns, wait)


@app.command
@with_admin
async def remove(admin: Admin, name: MemberName, /, *, group: Group = None) -> None:
    """Remove the member NAME, running or not; the leader cannot be removed."""
    ended = f"{name} is no longer a member; stop it if it still runs"
    await _change(admin, group, "remove", name, "", ended)


@app.command
@with_admin
async def transfer_leader(admin: Admin, name: MemberName = "", /, *, group: Group = None) -> None:
    """Transfer leadership to the member NAME, or to the most advanced one."""
    done = f"leadership was transferred{f' to {name}' if name else ''}"
    await _change(admin, group, "transfer", name, "", done)


@app.command
def recover(
    folder: Folder,
    /,
    *,
    force: Annotated[bool, Parameter(help="Do it: this cannot be undone.")] = False,
    yes: Annotated[bool, Parameter(help="Do not ask for confirmation.")] = False,
    output: Output = "table",
) -> int:
    """Make the replica in FOLDER the only member, when a majority is lost for good.

    The broker must be stopped. Without --force the command only prints what would be lost.
    """
    from dledger.commitlog.disk import OsDisk
    from dledger.raft.recover import Recovery
    from dledger.remoting.machine import SystemRng

    recovery = Recovery(OsDisk(), str(folder.resolve()))
    try:
        survivor = recovery.survivor
        facts = survivor.rows()
        show_facts(output, "", {**facts, "lost": what_may_be_lost(survivor)}, facts)
        for line in what_may_be_lost(survivor):
            note(line)
        if not force:
            note("nothing was changed; --force goes on")
            return ExitCode.FAILED
        if not yes:
            note(f"type the name of the group, {survivor.group}, to go on with this replica alone:")
            if sys.stdin.readline().strip() != survivor.group:
                note("nothing was changed")
                return ExitCode.FAILED
        index = recovery.go_on_alone(SystemRng())
    finally:
        recovery.close()
    note(f"entry {index} makes {survivor.name} the only member of {survivor.group}")
    note("start it; empty the folders of the others before they are added: dledger raft add")
    return ExitCode.OK


@app.command
def repair_term(folder: Folder, /) -> None:
    """Repair a stored term that is out of range or missing, in FOLDER of a stopped broker.

    Log and members stay as they are. A term that is in range is not changed.
    """
    from dledger.commitlog.disk import OsDisk
    from dledger.raft.recover import Recovery

    recovery = Recovery(OsDisk(), str(folder.resolve()))
    try:
        repaired = recovery.repair_term()
    finally:
        recovery.close()
    if repaired is None:
        note("term and vote are in range; nothing was changed")
    else:
        note(f"{repaired[0]}; the term is {repaired[1]} now. Start the broker again")


@app.command
def secret(file: Annotated[Path, Parameter(help="New file for the secret.")], /) -> None:
    """Generate the secret that all members of a group share.

    It goes into a new file that only its owner can read; one that is there is left as it is. Copy
    it to every member, and name it there as raft.secret_file (raftSecretFile in .conf files).
    """
    from dledger.cli.secret_file import make_secret

    make_secret(file)
    note(f"{file.resolve()}: copy it to all members and set raft.secret_file in each one's file")


def what_may_be_lost(survivor: Survivor) -> list[str]:
    """Return what a person must know before. Pure."""
    last, commit = survivor.last_index, survivor.commit_index
    lines = [f"lost: every entry after {last} that the other members acknowledged: not known"]
    if commit < last:
        lines.append(
            f"entries {commit + 1} to {last} are not known to be committed; they will count as such"
        )
    return lines


async def _the_group(admin: Admin, group: str | None) -> str:
    """Return the name of the broker group to change: *group*, or the only one."""
    groups = [name for name in await groups_of(admin, None) if group in (None, name)]
    if len(groups) != 1:
        raise CliError(
            f"broker groups to choose from: {', '.join(groups) or 'none'}",
            next_step="name one with --group",
            exit_code=ExitCode.USAGE,
        )
    return groups[0]


async def _change(
    admin: Admin,
    group: str | None,
    op: str,
    name: str,
    address: str,
    result: str,
    wait: bool = False,
) -> None:
    """Change the members of a group and print *result*; with *wait* until the member NAME votes."""
    import trio

    broker_name = await _the_group(admin, group)
    await admin.change_members(broker_name, op, name, address)
    note(result)
    if not wait:
        return
    with trio.move_on_after(MEMBER_WAIT_S):
        while True:
            health = (await admin.cluster_health()).get(broker_name)
            leader = health.members[health.leader] if health and health.leader else None
            standings = {
                member["standing"]
                for member in (leader or {}).get("members", ())
                if member["name"] == name
            }
            if standings == {"voter"}:
                note(f"{name} votes")
                return
            await trio.sleep(LOOK_S)
    raise CliError(
        f"the change is not complete after {MEMBER_WAIT_S:.0f} s",
        next_step="see dledger raft status",
    )


def raft_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is shown of each member, from what it reports of itself. Pure."""
    last = max((int(row.get("last_index", 0)) for row in rows), default=0)
    groups = {row["broker"]: row["group"] for row in rows if "group" in row}
    return [
        {
            "group": groups.get(row["broker"], row["broker"]),
            "member": row.get("self"),
            "address": row["address"],
            "role": row.get("role"),
            "standing": _standing(row),
            "leader": row.get("leader"),
            "serving": row.get("serving"),
            "term": row.get("term"),
            "last_index": row.get("last_index"),
            "durable_index": row.get("stable_index"),
            "commit_index": row.get("commit_index"),
            "applied_index": row.get("applied_index"),
            "chain": row.get("applied_chain"),
            "lag_entries": last - int(row["last_index"]) if "last_index" in row else None,
            "elections": row.get("elections"),
            "truncations": row.get("truncations"),
            "damaged_entries": (row.get("scrub") or {}).get("damaged_entries"),
            "scrub_progress": (row.get("scrub") or {}).get("progress"),
            "store_time_ahead_ms": row.get("store_time_ahead_ms"),
            "clock_off_ms": row.get("clock_off_ms"),
            "scrub": row.get("scrub"),
            "group_identity": row.get("group_identity"),
            "registration_refused": row.get("registration_refused"),
            "peers": row.get("peers"),
            "members": row.get("members"),
        }
        for row in rows
    ]


def group_title(name: str, rows: list[dict[str, Any]]) -> str:
    """Return a group's name and its identity, as far as its members say one. Pure."""
    identities = sorted({row["group_identity"] for row in rows if row["group_identity"]})
    return f"Group {name} {' and '.join(identities)}".rstrip()


def refused_members(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each NameServer that refuses a member. Pure."""
    return [
        f"NameServer {name_server} refuses {row['member']}: {why}"
        for row in rows
        for name_server, why in (row["registration_refused"] or {}).items()
    ]


def narrow_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the narrow table: what a member may do stands in its role. Pure."""
    standing = row["standing"]
    return {
        **row,
        "role": row["role"] if standing in (None, "voter") else standing,
        "commit": row["commit_index"],
        "applied": row["applied_index"],
        "lag": row["lag_entries"],
    }


def _standing(row: dict[str, Any]) -> str | None:
    if "voter" not in row:
        return None
    if row["voter"]:
        return "voter"
    name = row.get("self")
    listed = [m["standing"] for m in row.get("members") or () if m["name"] == name]
    # As a voter of another incarnation: its place is kept until this one learns.
    return next((s for s in listed if s != "voter"), "learner") if listed else "no member"
