"""The identity of a member, the founders of its group, and how peers prove that they belong to it.

A member is its name *and* its incarnation, a random number made with an empty data folder. A folder
that is lost and made again has another incarnation: it has lost its votes and acknowledged entries,
so it must not vote under the old name.

The voters are agreed on once, at bootstrap: when a member has a hello from *all* configured peers
and every one of them is empty too, it writes down all incarnations. A member that starts later
adopts what the others have agreed on. Before that no member votes.

With a group secret, both sides put a random number, used once, into their hello. A proof is
HMAC-SHA256 over the side, both hellos as they travelled, and the connection's epoch; so it fits no
other connection, member or direction. Later frames are not protected: TLS keeps out a process that
can write into a connection between two members.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import cbor2

from dledger.commitlog.errors import (
    ConfigError,
    CorruptStoreError,
    ForeignStoreError,
    RemoteProtocolError,
)
from dledger.commitlog.seams import Disk
from dledger.raft.membership import MEMBERS_MAX
from dledger.raft.wire import (
    INDEX_MAX,
    NUMBER_MAX,
    PROTOCOL_VERSION,
    TERM_MAX,
    is_incarnation,
    is_name,
    parse_address,
)
from dledger.remoting.seams import Rng

FORMAT_VERSION = 1

REFUSED: Final = "refused"
"""The only field, beside the version, of the answer to a dialler that this member does not know."""

Vouched = tuple[str, str]
"""Name and incarnation of a member."""

_SHOWN_CHARACTERS = 64
"""How much of the name of an unknown peer is shown."""


@dataclass(frozen=True, slots=True)
class Hello:
    """How two members introduce themselves, first frame of every connection, both ways."""

    cluster: str
    group: str
    name: str
    incarnation: str
    voters: Mapping[str, str]
    """Names and incarnations agreed on; empty before bootstrap."""
    doubtful: bool
    """Stopped uncleanly with an async flush: votes or acknowledgements may be lost."""
    client_address: str
    """Where this member's broker listens for clients, ``host:port``."""
    channel: str
    """What the connection is for: ``data`` or ``control``."""
    peer: str = ""
    """Where this member listens for its peers, ``host:port``."""
    last: tuple[int, int] = (0, 0)
    """Term and index of its newest entry."""
    members: tuple[Vouched, ...] = ()
    """The members of the group, as the acceptor knows them; sent to members alone."""
    members_index: int = 0
    """Index of the entry with this list; 0: in none."""
    started_ms: int = 0
    """When its process started; 0: it flushes before it acknowledges, so no start matters."""

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
            "last": list(self.last),
            "started": self.started_ms,
            "members": [self.members_index, [list(member) for member in self.members]],
        }

    @property
    def key(self) -> tuple[str, str]:
        """Name and incarnation."""
        return self.name, self.incarnation

    @property
    def is_uncertain(self) -> bool:
        """Whether a power cut may have taken what it acknowledged, and no leader made that good."""
        return self.doubtful and self.started_ms > 0

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """`peer` in two parts; None when it is not known."""
        return parse_address(self.peer)

    @classmethod
    def decode(cls, fields: object) -> Hello:
        """Read a peer's introduction.

        Raises RemoteProtocolError: it is of another version, not of this shape, or names what no
        member could be called.
        """
        if not isinstance(fields, dict):
            raise RemoteProtocolError("a hello that is not a map")
        check_version(fields)
        if REFUSED in fields:
            raise RemoteProtocolError("the other side does not know this member")
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
                peer=fields["peer"],
                last=_last_of(fields["last"]),
                started_ms=fields["started"],
                **_members_of(fields["members"]),
            )
        except KeyError as error:
            raise RemoteProtocolError(f"a hello without {error}") from None
        hello._check()
        return hello

    def _check(self) -> None:
        texts = (self.client_address, self.channel, self.peer)
        if not (
            all(map(is_name, (self.cluster, self.group, self.name)))
            and is_incarnation(self.incarnation)
            and isinstance(self.voters, dict)
            and len(self.voters) <= MEMBERS_MAX
            and all(map(is_name, self.voters))
            and all(map(is_incarnation, self.voters.values()))
            and isinstance(self.doubtful, bool)
            and type(self.started_ms) is int
            and 0 <= self.started_ms <= NUMBER_MAX
            and all(isinstance(text, str) for text in texts)
        ):
            raise RemoteProtocolError("a hello with fields of the wrong type")
        for address in (self.client_address, self.peer):
            if address and parse_address(address) is None:
                raise RemoteProtocolError("a hello with an address that cannot be called")


def check_version(fields: Mapping[Any, Any]) -> None:
    """Check that this version can read a hello.

    Raises RemoteProtocolError: it is of another version, or of none.
    """
    version, who = fields.get("v"), fields.get("name")
    if type(version) is not int or version != PROTOCOL_VERSION:
        who = who[:_SHOWN_CHARACTERS] if is_name(who) else "a peer"
        shown = repr(version)[:_SHOWN_CHARACTERS] if _is_short(version) else "of no sense"
        raise RemoteProtocolError(f"{who} speaks version {shown}, known here is {PROTOCOL_VERSION}")


def _is_short(version: object) -> bool:
    return is_name(version) or (type(version) is int and abs(version) <= NUMBER_MAX)


def _last_of(value: object) -> tuple[int, int]:
    match value:
        case [int(term), int(index)] if 0 <= term <= TERM_MAX and 0 <= index <= INDEX_MAX:
            return term, index
    raise RemoteProtocolError("a hello with fields of the wrong type")


def _members_of(value: object) -> dict[str, Any]:
    match value:
        case [int(index), list(rows)] if 0 <= index <= INDEX_MAX and len(rows) <= 2 * MEMBERS_MAX:
            if all(map(_is_vouched, rows)):
                return {"members": tuple((row[0], row[1]) for row in rows), "members_index": index}
    raise RemoteProtocolError("a hello with fields of the wrong type")


def _is_vouched(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and is_name(row[0]) and is_incarnation(row[1])


def check_owner(disk: Disk, path: str, *, cluster: str, group: str, name: str) -> None:
    """Check that a data folder is this member's or empty; nothing is written.

    To be called before anything in the folder is changed.

    Raises:
        ForeignStoreError: The folder belongs to another cluster, group or member.
        CorruptStoreError: The identity file cannot be read.
    """
    _read(disk, path, (cluster, group, name))


def owner_of(disk: Disk, path: str) -> tuple[str, str, str]:
    """Return cluster, group and name of the member that the identity file at *path* belongs to.

    Raises:
        CorruptStoreError: The file cannot be read.
        ForeignStoreError: It is of another format.
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
            and (version != FORMAT_VERSION or record["crc"] == _checksum(record))
        )
    except (cbor2.CBORDecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{path}: the identity of this member is damaged") from error
    if not whole:
        raise CorruptStoreError(f"{path}: the identity of this member is damaged")
    if version != FORMAT_VERSION:
        raise ForeignStoreError(f"{path}: format {version}; this program knows {FORMAT_VERSION}")
    if owner is not None and tuple(found) != owner:
        raise ForeignStoreError(
            f"{path}: this folder belongs to member {found[2]} of group {found[1]} in cluster "
            f"{found[0]}, not to {owner[2]} of {owner[1]} in {owner[0]}"
        )
    return dict(record)


_FIELDS: Final = frozenset(("v", "cluster", "group", "name", "inc", "voters"))


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(cbor2.dumps({key: record[key] for key in _FIELDS}, canonical=True))


def _write(
    disk: Disk, path: str, owner: tuple[str, str, str], incarnation: str, voters: Mapping[str, str]
) -> None:
    record: dict[str, Any] = dict(zip(("cluster", "group", "name"), owner, strict=True))
    record |= {"v": FORMAT_VERSION, "inc": incarnation, "voters": dict(voters)}
    record["crc"] = _checksum(record)
    disk.replace(path, cbor2.dumps(record, canonical=True))


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
        owner = (self.cluster, self.group, self.name)
        _write(self._disk, self._path, owner, self.incarnation, self.voters)

    @classmethod
    def load(cls, disk: Disk, path: str) -> Identity:
        """Read the identity file of a member, whichever it is. Nothing is written.

        Raises:
            CorruptStoreError: The file is missing or cannot be read.
            ForeignStoreError: It is of another format.
        """
        record = _read(disk, path, None)
        if record is None:
            raise CorruptStoreError(f"{path} is missing")
        identity = cls.__new__(cls)
        identity._disk, identity._path = disk, path
        identity.cluster, identity.group = record["cluster"], record["group"]
        identity.name, identity.incarnation = record["name"], record["inc"]
        identity.voters = record["voters"]
        return identity

    @staticmethod
    def refound(disk: Disk, path: str, incarnation: str) -> None:
        """Make the member of this file the only founder of its group, under a new incarnation."""
        cluster, group, name = owner_of(disk, path)
        Identity.found(disk, path, cluster=cluster, group=group, name=name, incarnation=incarnation)

    @staticmethod
    def found(
        disk: Disk, path: str, *, cluster: str, group: str, name: str, incarnation: str
    ) -> None:
        """Write the identity file of the only founder of a group, whatever stood there."""
        _write(disk, path, (cluster, group, name), incarnation, {name: incarnation})

    @property
    def group_identity(self) -> str:
        """Identity of the whole group, 32 hexadecimal digits; empty before bootstrap.

        Made of the founders, name and incarnation of each: every member has the same one, whatever
        changes. A replica that goes on alone (`refound`) is another group from then on.
        """
        if not self.voters:
            return ""
        founders = [self.cluster, self.group, sorted(self.voters.items())]
        return hashlib.sha256(cbor2.dumps(founders, canonical=True)).hexdigest()[:32]

    def is_of_another_group(self, voters: Mapping[str, str]) -> bool:
        """Whether a member with the founders *voters* is of another group than this one.

        So it is after this group or that one continued with one replica alone, and with groups that
        merely have the same name. Founders are few and never change, so one in common is
        enough; of a member without founders it is not known.
        """
        return bool(voters and self.voters) and not (voters.items() & self.voters.items())

    def agree(self, configured: Collection[str], hellos: Mapping[str, Hello]) -> bool:
        """Settle the voters if that is possible now. Blocking: writes a small file.

        Args:
            hellos: The newest hello of each member, by name.
        Returns:
            Whether the voters became known by this call.
        """
        if self.voters:
            return False
        founders = (hellos[name].voters for name in configured if name in hellos)
        known = next((voters for voters in founders if voters), None)
        if known is not None:
            self.voters = dict(known)
        elif all(name in hellos for name in configured):
            self.voters = {name: hellos[name].incarnation for name in configured}
            self.voters[self.name] = self.incarnation
        else:
            return False
        self._write()
        return True


SECRET_BYTES_MIN: Final = 16
"""A shorter secret can be guessed from one proof."""

NONCE_BYTES: Final = 16

NONCE: Final = "nonce"
PROOF: Final = "proof"

_UNPROVED: Final = "does not prove that it knows the secret of the group (raft.secret_file)"


class Side(StrEnum):
    """The side that proves itself."""

    DIALLER = "dialler"
    ACCEPTOR = "acceptor"


class GroupSecret:
    """The secret of a group. Neither repr nor errors show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Take a secret. Raises ConfigError: it is too short."""
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the secret of the group has {len(secret)} bytes, at least {SECRET_BYTES_MIN}"
            )
        self._secret = secret

    def proof(
        self, side: Side, dialler: Mapping[str, Any], acceptor: Mapping[str, Any], epoch: int
    ) -> bytes:
        """Return the proof of *side*."""
        proven = cbor2.dumps([str(side), dict(dialler), dict(acceptor), epoch], canonical=True)
        return hmac.digest(self._secret, proven, hashlib.sha256)

    def membership_proof(self, group_identity: str) -> str:
        """Return a proof of membership for NameServers: 64 hexadecimal digits.

        The same for every member. It does not open the peer port to a NameServer:
        proofs between members are about two hellos with numbers used once.
        """
        proven = cbor2.dumps(["registration", group_identity], canonical=True)
        return hmac.digest(self._secret, proven, hashlib.sha256).hex()

    def check(
        self,
        proof: object,
        side: Side,
        dialler: Mapping[str, Any],
        acceptor: Mapping[str, Any],
        epoch: int,
        *,
        who: str,
    ) -> None:
        """Check a proof, in constant time. Raises RemoteProtocolError: it is wrong."""
        expected = self.proof(side, dialler, acceptor, epoch)
        if not isinstance(proof, bytes) or not hmac.compare_digest(proof, expected):
            raise RemoteProtocolError(f"{who} {_UNPROVED}")


def check_nonce(hello: Mapping[str, Any], who: str) -> None:
    """Check that a hello has the nonce of a proof.

    Raises RemoteProtocolError: its sender has no secret.
    """
    nonce = hello.get(NONCE)
    if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
        raise RemoteProtocolError(f"{who} {_UNPROVED}")
