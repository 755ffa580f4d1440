"""Who a member is, and which members may vote.

A member is its name *and* its incarnation, a random number made with an empty data folder. A
folder that was lost and made anew has another incarnation: it forgot votes and entries it had
promised, so it must not vote under the old name (consensus: 7 of 60 seeds lost acknowledged
entries otherwise).

The voters are agreed on once, at bootstrap: when a member has heard from *all* configured peers
and every one of them is empty too, it writes down everybody's incarnation. A member that comes
late takes over what the others have agreed on. Before that nobody votes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import cbor2

from commitlog.errors import CorruptStoreError, ForeignStoreError, RemoteProtocolError
from commitlog.seams import Disk
from dledger.raft.wire import PROTOCOL_VERSION
from remoting.seams import Rng

FORMAT_VERSION = 1

_SHOWN_CHARACTERS = 64
"""So much of what somebody unknown calls itself is shown."""


@dataclass(frozen=True, slots=True)
class Hello:
    """How two members introduce themselves, first frame of every connection, both ways."""

    cluster: str
    group: str
    name: str
    incarnation: str
    voters: Mapping[str, str]
    """Names and incarnations agreed on; empty while there was no bootstrap."""
    doubtful: bool
    """Stopped uncleanly with an async flush: promises may be lost."""
    client_address: str
    """Where this member's broker listens for clients, ``host:port``."""
    channel: str
    """What the connection is for: ``data`` or ``control``."""
    peer: str = ""
    """Where this member listens for its peers, ``host:port``."""
    last: tuple[int, int] | None = None
    """Term and index of the newest entry it may promise; None from versions that do not say."""

    def encode(self) -> dict[str, Any]:
        """Return the CBOR map that travels."""
        return {
            "v": PROTOCOL_VERSION,
            "cluster": self.cluster,
            "group": self.group,
            "name": self.name,
            "inc": self.incarnation,
            "voters": dict(self.voters),
            "doubtful": self.doubtful,
            "client": self.client_address,
            "channel": self.channel,
            "peer": self.peer,
            "last": None if self.last is None else list(self.last),
        }

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """`peer` in two parts; None when it is not said."""
        host, _, port = self.peer.rpartition(":")
        return (host, int(port)) if host and port.isdecimal() else None

    @classmethod
    def decode(cls, fields: object) -> Hello:
        """Read a peer's introduction.

        Raises:
            RemoteProtocolError: It is of a newer version or not of this shape.
        """
        if not isinstance(fields, dict):
            raise RemoteProtocolError("a hello that is not a map")
        version = fields.get("v")
        if not isinstance(version, int) or version > PROTOCOL_VERSION:
            who = fields.get("name")
            who = who[:_SHOWN_CHARACTERS] if isinstance(who, str) else "a peer"
            raise RemoteProtocolError(
                f"{who} speaks version {version!r}, newest known here is {PROTOCOL_VERSION}"
            )
        try:
            hello = cls(
                cluster=fields["cluster"],
                group=fields["group"],
                name=fields["name"],
                incarnation=fields["inc"],
                voters=fields["voters"],
                doubtful=fields["doubtful"],
                client_address=fields["client"],
                channel=fields["channel"],
                peer=fields.get("peer", ""),
                last=_last_of(fields.get("last")),
            )
        except KeyError as error:
            raise RemoteProtocolError(f"a hello without {error}") from None
        texts = (hello.cluster, hello.group, hello.name, hello.incarnation)
        if not (
            all(
                isinstance(text, str)
                for text in (*texts, hello.client_address, hello.channel, hello.peer)
            )
            and isinstance(hello.voters, dict)
            and all(isinstance(text, str) for pair in hello.voters.items() for text in pair)
            and isinstance(hello.doubtful, bool)
        ):
            raise RemoteProtocolError("a hello with fields of the wrong type")
        return hello


def _last_of(value: object) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(term), int(index)] if term >= 0 and index >= 0:
            return term, index
    raise RemoteProtocolError("a hello with fields of the wrong type")


def check_owner(disk: Disk, path: str, *, cluster: str, group: str, name: str) -> None:
    """Let a data folder pass that is this member's or empty; nothing is written.

    To be asked before anything in the folder is touched.

    Raises:
        ForeignStoreError: The folder belongs to another cluster, group or member.
        CorruptStoreError: The file that says so cannot be read.
    """
    _read(disk, path, (cluster, group, name))


def owner_of(disk: Disk, path: str) -> tuple[str, str, str]:
    """Return cluster, group and name of the member that the identity file at *path* belongs to.

    Raises:
        CorruptStoreError: The file cannot be read.
        ForeignStoreError: A newer version wrote it.
    """
    record = _read(disk, path, None)
    if record is None:
        raise CorruptStoreError(f"{path} is missing")
    return record["cluster"], record["group"], record["name"]


def _read(disk: Disk, path: str, owner: tuple[str, str, str] | None) -> dict[str, Any] | None:
    if not disk.exists(path):
        return None
    try:
        record = cbor2.loads(disk.read(path))
        version, *found = (record[key] for key in ("v", "cluster", "group", "name"))
        whole = (
            isinstance(version, int)
            and isinstance(record["inc"], str)
            and isinstance(record["voters"], dict)
        )
    except (cbor2.CBORDecodeError, KeyError, TypeError) as error:
        raise CorruptStoreError(f"{path}: the identity of this member is damaged") from error
    if not whole:
        raise CorruptStoreError(f"{path}: the identity of this member is damaged")
    if version > FORMAT_VERSION:
        raise ForeignStoreError(f"{path}: format {version} is newer than this program knows")
    if owner is not None and tuple(found) != owner:
        raise ForeignStoreError(
            f"{path}: this folder belongs to member {found[2]} of group {found[1]} in cluster "
            f"{found[0]}, not to {owner[2]} of {owner[1]} in {owner[0]}"
        )
    return dict(record)


class Identity:
    """This member's name and incarnation, and the voters it knows of.

    Invariant: once `voters` is set it never changes (membership changes go through the log).
    """

    def __init__(
        self, disk: Disk, path: str, *, cluster: str, group: str, name: str, rng: Rng
    ) -> None:
        """Read the identity file, or make one in an empty folder.

        Raises:
            ForeignStoreError: The folder belongs to another cluster, group or member.
            CorruptStoreError: The file cannot be read.
        """
        self._disk = disk
        self._path = path
        self.cluster, self.group, self.name = cluster, group, name
        self.voters: dict[str, str] = {}
        record = _read(disk, path, (cluster, group, name))
        if record is None:
            self.incarnation = rng.randbytes(16).hex()
            self._write()
            return
        self.incarnation = record["inc"]
        self.voters = record["voters"]

    def _write(self) -> None:
        record = {
            "v": FORMAT_VERSION,
            "cluster": self.cluster,
            "group": self.group,
            "name": self.name,
            "inc": self.incarnation,
            "voters": self.voters,
        }
        self._disk.replace(self._path, cbor2.dumps(record, canonical=True))

    @staticmethod
    def refound(disk: Disk, path: str, incarnation: str) -> None:
        """Make the member of this file the only founder of its group, under a new incarnation.

        Those that were founded with it before are strangers from now on.
        """
        cluster, group, name = owner_of(disk, path)
        record = {
            "v": FORMAT_VERSION,
            "cluster": cluster,
            "group": group,
            "name": name,
            "inc": incarnation,
            "voters": {name: incarnation},
        }
        disk.replace(path, cbor2.dumps(record, canonical=True))

    @property
    def group_identity(self) -> str:
        """Identity of the whole group, 32 hexadecimal digits; empty before bootstrap.

        Made of the founders: name and incarnation of each. Every member has the same one, members
        that join later too, and it stays over changes of leader, members and data files. A replica
        that goes on alone (`refound`) is another group from then on: the others may still
        acknowledge messages under the old identity.
        """
        if not self.voters:
            return ""
        founders = [self.cluster, self.group, sorted(self.voters.items())]
        return hashlib.sha256(cbor2.dumps(founders, canonical=True)).hexdigest()[:32]

    def is_of_another_group(self, voters: Mapping[str, str]) -> bool:
        """Whether one who was founded with *voters* has nothing to do with this member.

        So it is after this group or that one went on with one replica alone, and with groups that
        merely have the same name. Founders are few and stay what they are, so one in common is
        enough; nobody can tell of one that has none yet.
        """
        return bool(voters and self.voters) and not (voters.items() & self.voters.items())

    def agree(self, configured: Collection[str], heard: Mapping[str, Hello]) -> bool:
        """Settle the voters if that is possible now. Blocking: writes a small file.

        Args:
            configured: Names of all other members, from the configuration.
            heard: The newest hello of each member heard of.
        Returns:
            Whether the voters became known by this call.
        """
        if self.voters:
            return False
        known = next((hello.voters for hello in heard.values() if hello.voters), None)
        if known is not None:
            self.voters = dict(known)
        elif all(name in heard for name in configured):
            # A guest that nobody configured is no founder.
            self.voters = {name: heard[name].incarnation for name in configured}
            self.voters[self.name] = self.incarnation
        else:
            return False
        self._write()
        return True
