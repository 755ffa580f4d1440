"""``dledger backup``: copy a broker group while it runs, check the copy, start a group from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.cli.commands import open_admin
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    note,
    print_json,
    show_facts,
    utc,
)

if TYPE_CHECKING:
    from dledger.backup.source import Source
    from dledger.client.admin.admin import Admin

app = App(name="backup", help="Back a broker group up, and restore it.", backend="trio")

DAMAGED: Final = ExitCode.USAGE
"""Exit status of a backup that is damaged: 2."""

LOOK_S: Final = 0.2
CAUGHT_UP_S: Final = 60.0
"""A member writes its commit mark every few seconds; one that is behind needs longer."""
LEADER_S: Final = 20.0
"""An election, and one more."""

TargetFolder = Annotated[
    str, Parameter(help="Folder of the backup, or its address: what fsspec opens (s3:// …).")
]


@app.command
async def create(
    target: TargetFolder,
    /,
    *,
    data: Annotated[Path, Parameter(help="Data folder of a member, on this machine.")],
    as_of_checkpoint: Annotated[
        bool, Parameter(help="Ask no leader: what the member's newest checkpoint covers is enough.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> None:
    """Back up the broker group of a data folder, while its broker runs; again: only what is new.

    Everything is in the backup that was acknowledged before the command began: the leader is asked
    how far the group has come, and the copy waits until the member in --data has that. The folder
    of a stopped broker is copied as far as that member knew of commits.
    """
    import time

    import msgspec

    from dledger.backup.create import create as make
    from dledger.backup.folder import BackupFolder
    from dledger.backup.source import Source
    from dledger.cli.progress import progress
    from dledger.commitlog.disk import OsDisk

    folder = BackupFolder.open(target)
    source = Source(OsDisk(), str(data.resolve()))
    if not as_of_checkpoint and source.is_running:
        await _wait_for(source, await _committed(source, namesrv))
    with progress(0, "bytes") as line:
        done = make(folder, source, made_at_ms=time.time_ns() // 1_000_000, copied_to=line.to)
    manifest = done.manifest
    rows: dict[str, Any] = {
        "group": manifest.group,
        "member": manifest.member,
        "first_index": manifest.begin.first_index,
        "last_index": manifest.end.index,
        "newest_store_time": when(manifest.end_time_ms),
        "copied_entries": done.copied_entries,
        "copied_bytes": done.copied_bytes,
        "size_bytes": manifest.size_bytes,
    }
    show_facts(output, "", {**rows, "manifest": msgspec.to_builtins(manifest)}, rows)
    if done.began_over:
        note(
            "the group no longer keeps the entry after the one that this backup ended with: "
            "all of it was copied again"
        )


@app.command
def verify(target: TargetFolder, /, *, output: Output = "table") -> None:
    """Check every file and every entry of a backup, and show what it holds; exit 2 if damaged."""
    from dledger.backup.folder import BackupFolder
    from dledger.backup.manifest import BackupDamagedError
    from dledger.backup.verify import verify as check
    from dledger.cli.progress import progress

    try:
        with progress(0, "bytes") as line:
            contents = check(BackupFolder.open(target), checked_to=line.to)
    except BackupDamagedError as error:
        raise CliError(
            str(error), next_step="make a new backup in another folder", exit_code=DAMAGED
        ) from None
    rows = contents.rows()
    rows["first_message"] = when(rows.pop("first_ms"))
    rows["last_message"] = when(rows.pop("last_ms"))
    if output == "json":
        print_json(rows)
    else:
        topics = rows.pop("topics")
        show_facts(
            output, "", {**rows, **{f"topic {name}": count for name, count in topics.items()}}
        )
        note("the backup is whole")


@app.command
def restore(
    target: TargetFolder,
    /,
    *,
    data: Annotated[Path, Parameter(help="Data folder to make; empty, or not there yet.")],
    member: Annotated[str, Parameter(help="Name of the member: the broker's self_id.")],
    group: Annotated[
        str, Parameter(name=["--group", "-g"], help="Broker group; default: as in the backup.")
    ] = "",
    cluster: Annotated[str, Parameter(help="Cluster; default: as in the backup.")] = "",
) -> None:
    """Make the data folder of the first member of a new group out of a backup.

    Start its broker: it leads alone, with all that the backup holds. Then start the others with
    empty folders, and add each with dledger raft add. Members of the old group are refused.
    """
    from dledger.backup.folder import BackupFolder
    from dledger.backup.manifest import BackupDamagedError
    from dledger.backup.restore import Owner
    from dledger.backup.restore import restore as make
    from dledger.cli.progress import progress
    from dledger.commitlog.disk import OsDisk
    from dledger.remoting.machine import SystemRng

    backup = BackupFolder.open(target)
    try:
        manifest = backup.need_manifest()
        owner = Owner(cluster or manifest.cluster, group or manifest.group, member)
        with progress(manifest.end.end_position, "bytes") as line:
            index = make(
                backup,
                OsDisk(),
                str(data.resolve()),
                owner=owner,
                rng=SystemRng(),
                written_to=line.to,
            )
    except BackupDamagedError as error:
        raise CliError(
            str(error), next_step="nothing was restored; take another backup", exit_code=DAMAGED
        ) from None
    note(f"entry {index} makes {owner.name} the only member of {owner.group} in {owner.cluster}")
    note("start its broker; start the others with empty folders, then dledger raft add each")


def when(at_ms: int) -> str | None:
    """Return a store time as text; None when there is none. Pure."""
    if not at_ms:
        return None
    try:
        return utc(at_ms)
    except (OverflowError, ValueError):  # no year that calendars have
        return f"{at_ms} ms"


async def _committed(source: Source, namesrv: str) -> int:
    """Return up to where the group has come, as its leader knows after a read barrier.

    Raises CliError: there is no leader, or the group of that name is another one.
    """
    import trio

    from dledger.client.core.errors import ClientError

    identity = source.identity
    why = f"no leader of {identity.group} in {identity.cluster} answers"
    try:
        async with open_admin(namesrv) as admin:
            info = await admin.cluster_info()
            found = info.broker_addr_table.get(identity.group)
            with trio.move_on_after(LEADER_S):
                while found is not None and found.cluster == identity.cluster:
                    for address in found.broker_addrs.values():
                        index = await _asked(admin, address, source)
                        if index is not None:
                            return index
                    await trio.sleep(LOOK_S)
    except ClientError as error:
        why = str(error)
    raise CliError(
        f"{why}: what was acknowledged just now is not known, nothing was copied",
        next_step="give --namesrv, or --as-of-checkpoint for what the folder itself knows",
        exit_code=ExitCode.UNREACHABLE,
    )


async def _asked(admin: Admin, address: str, source: Source) -> int | None:
    """Return the commit index of the leader at *address*; None when it does not lead."""
    from dledger.client.core.errors import ClientError
    from dledger.client.core.route import MessageQueue
    from dledger.remoting.protocol.topic_names import STATE_TOPIC

    try:
        status = await admin.raft_status(address)
    except ClientError:
        return None
    if status.get("role") != "leader" or not status.get("serving"):
        return None
    mine = source.identity.group_identity
    if status.get("group_identity") != mine:
        raise CliError(
            f"the group {source.identity.group} at {address} is another one than that of "
            f"{source.root}: its identity is {status.get('group_identity') or 'unknown'}, not "
            f"{mine or 'unknown'}; nothing was copied",
            next_step="give the --namesrv of the group that the folder belongs to",
        )
    try:
        await admin.max_offset_at(address, MessageQueue(STATE_TOPIC, source.identity.group, 0))
        status = await admin.raft_status(address)
    except ClientError:
        return None
    return int(status["commit_index"])


async def _wait_for(source: Source, index: int) -> None:
    """Wait until the member's commit mark covers entry *index*.

    Raises CliError: it does not get there.
    """
    import trio

    with trio.move_on_after(CAUGHT_UP_S):
        while True:
            mark = source.mark()
            if mark is not None and mark.index >= index:
                return
            await trio.sleep(LOOK_S)
    raise CliError(
        f"{source.root} does not have entry {index} after {CAUGHT_UP_S:.0f} s: that member is "
        "behind; nothing was copied",
        next_step="see dledger raft status; give the folder of another member",
    )
