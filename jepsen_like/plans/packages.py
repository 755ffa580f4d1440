"""Faults by name: single kinds, and packages of kinds that belong together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.plans.plan import ASKED_FOR, CUTS, FRAME_KINDS, PROXY_KINDS, Kind

NETWORK: Final = "network"
"""The package whose kinds `proxy` has, too; it names what carries them out."""

NO_LINK: Final = CUTS | {Kind.SWIZZLE}
"""Links that carry nothing, whatever cuts them."""

PACKAGES: Final[dict[str, tuple[str, frozenset[Kind]]]] = {
    "none": ("nothing at all", frozenset()),
    "process": (
        "SIGKILL, SIGSTOP, clean and rolling restarts, kills inside a flush",
        frozenset(
            {Kind.KILL, Kind.PAUSE, Kind.CLEAN_RESTART, Kind.ROLLING_RESTART, Kind.BUGGIFY_KILL}
        ),
    ),
    "power": (
        "power loss of one or all brokers, with what was not flushed (root)",
        frozenset({Kind.POWER_CUT, Kind.POWER_CUT_ALL}),
    ),
    "disk": (
        "full, slow and failing disks, flipped bits, torn logs, lost disks (some need root)",
        frozenset(
            {
                Kind.DISK_FULL,
                Kind.DISK_SLOW,
                Kind.FSYNC_ERROR,
                Kind.BIT_ROT,
                Kind.TORN_TAIL,
                Kind.WIPE,
            }
        ),
    ),
    "proxy": (
        "cut, one-way, slow and broken links between brokers, and between clients and a broker",
        NO_LINK | {Kind.RESET, Kind.DELAY, Kind.SLOW_LINK},
    ),
    "frames": ("frames between brokers lost, doubled, overtaken, held and changed", FRAME_KINDS),
    NETWORK: (
        "cut links again, by the kernel: packets vanish, connections stay half open (root)",
        NO_LINK,
    ),
    "clock": ("dates that jump, clocks that drift", frozenset({Kind.CLOCK_JUMP, Kind.CLOCK_DRIFT})),
    "members": (
        "leadership handed over, members added, removed and replaced under load",
        frozenset({Kind.TRANSFER, Kind.MEMBER_ADD, Kind.MEMBER_REMOVE, Kind.MEMBER_REPLACE}),
    ),
    "years": ("the date of one broker is years off", frozenset({Kind.CLOCK_YEARS})),
    "minority": (
        "members added and removed while a minority is away, which stays away at the end",
        frozenset({Kind.CHANGE_WITHOUT_MINORITY}),
    ),
    "versions": (
        "a broker starts as one of a later release, and later as itself again",
        frozenset({Kind.VERSION_SKEW}),
    ),
    "clients": (
        "clients killed in the middle of what they do, consumers with a double",
        frozenset({Kind.CLIENT_KILL, Kind.MID_SEND_KILL, Kind.MID_BATCH_KILL, Kind.ZOMBIE_CLIENT}),
    ),
    "limits": (
        "too few descriptors, thousands of idle connections",
        frozenset({Kind.FD_LIMIT, Kind.CONNECTIONS}),
    ),
    "names": ("NameServers killed, one or all", frozenset({Kind.NAMESRV_KILL})),
    "grpc-proxies": (
        "a dledger-proxy killed or standing still, or all of them (workload grpc)",
        PROXY_KINDS,
    ),
    "strangers": (
        "a process that is no member takes a broker name at the NameServers",
        frozenset({Kind.NAME_THIEF}),
    ),
    "peer-strangers": (
        "a process that is no member at the ports where members talk",
        frozenset({Kind.PEER_STRANGER}),
    ),
    "bad-sectors": (
        "sectors of the log and of files made from it that cannot be read",
        frozenset({Kind.BAD_SECTOR}),
    ),
    "file-rot": (
        "flipped bits and bad sectors in queues, key index, snapshot, identity and entry index",
        frozenset({Kind.FILE_ROT}),
    ),
    "stalls": (
        "a process that stands still again and again, or whose blocking work begins late",
        frozenset({Kind.STALL}),
    ),
    "lying-flushes": (
        "flushes of the log that return and make nothing durable, before power fails",
        frozenset({Kind.LYING_FLUSH}),
    ),
    "name-losses": (
        "frames between NameServers and all others are lost",
        frozenset({Kind.NAMESRV_LOSS}),
    ),
    "role-orders": (
        "members changed within 50 ms of a change of role",
        frozenset({Kind.ROLE_ORDER}),
    ),
    "read-bursts": (
        "many reads at a leader that was deposed and does not know it",
        frozenset({Kind.READ_BURST}),
    ),
    "all": (
        "everything above but what only the simulator does, years, minority and grpc-proxies",
        frozenset(Kind) - ASKED_FOR - FRAME_KINDS,
    ),
}
"""What it is, and its kinds."""


def kinds_named(names: Iterable[str]) -> frozenset[Kind]:
    """Return the kinds that *names*, of packages and kinds, mean together.

    Raises ConfigError: one of them is neither.
    """
    found: set[Kind] = set()
    for name in names:
        if name in PACKAGES:
            found |= PACKAGES[name][1]
        elif name in {kind.value for kind in Kind}:
            found.add(Kind(name))
        else:
            raise ConfigError(f"there is no fault {name!r}; see dledger-chaos list-faults")
    return frozenset(found)
