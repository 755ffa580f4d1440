"""What a broker registers, which registration may enter, and which were refused.

While one address with an identity is registered under a broker name, the name belongs to that
identity: another one is refused, and so is an address without any. Brokers of RocketMQ send no
identity, and names without one follow RocketMQ's rules. Members that share a secret send a proof
too: an address that comes with a copied identity and without that proof is refused.

Pure: `dledger.namesrv.route_table` asks before it changes anything. The body is JSON, or RocketMQ's
compressed form::

    compressed = zlib of
        i32 length · DataVersion as JSON
        i32 count  · per topic: i32 length · "name read write perm filterType[ attributes]"
        i32 length · filter servers as a JSON list
        …            static-topic mappings of 5.x senders, not read

Spec: docs/internals/protocol/remoting.md, section 12.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, NamedTuple

from typing_extensions import Buffer

from dledger.namesrv.errors import BadRegisterBodyError, RegistrationRefusedError
from dledger.remoting.addresses import is_loopback
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    decode_body,
)
from dledger.remoting.protocol.header_codec import whole_number

# ---------------------------------------------------------------------------------- what may enter


PROOF_CHARS_MAX: Final = 64
"""Longer than that is no proof of ours."""

IDENTITY: Final = re.compile(r"[0-9a-f]{32}")
"""The form of a broker group's identity."""

HOLDER_SILENCE_MS: Final = 45_000
"""An address that registered within this time keeps its id against another of the same state
version: brokers register every 30 s, so a living one is never silent for longer."""

HEARTBEAT_TIMEOUT_MS_MAX: Final = 600_000
"""Longest silence that a broker may ask for: longer, and a broker that is dead would hold its
place in the routes for as long as it likes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What speaks for one address that wants or holds a place."""

    identity: str
    """Of its group; empty: it named none."""
    state_version: int
    """Term of the leader that it knows of."""
    proof: str = ""
    """What members of the group alone can prove; empty: no proof."""

    @property
    def weight(self) -> int:
        """A heavier claim wins, whatever the state versions: those can be made up."""
        return bool(self.identity) + bool(self.identity and self.proof)


def refuses_identity(claim: Claim, *, owner: str, proof: str) -> str:
    """Return why *claim* may not enter a broker name, or an empty text when it may."""
    if claim.identity and not IDENTITY.fullmatch(claim.identity):
        return "the group identity is not 32 hexadecimal digits"
    if not owner:
        return ""
    if claim.identity == owner:
        if proof and not compare_digest(proof.encode(), claim.proof.encode()):
            return (
                f"it belongs to the group {owner}, and this broker does not prove that it knows"
                " the secret of that group (raft.secret_file)"
            )
        return ""
    if claim.identity:
        return (
            f"it belongs to the group {owner}, and this broker is of the group {claim.identity}:"
            " two groups cannot have one name. Give one of them another brokerName, or stop it"
        )
    return (
        f"it belongs to the group {owner}, and this broker names no group: give it another"
        " brokerName"
    )


def is_here(broker_addr: str) -> bool:
    """Return whether an address is of the machine of its reader, where no stranger is."""
    return is_loopback(broker_addr.rpartition(":")[0].strip("[]"))


def may_take(claim: Claim, holder: Claim, *, silent_ms: int) -> bool:
    """Whether *claim* takes an id that another address holds under the same broker name."""
    if claim.weight != holder.weight:
        return claim.weight > holder.weight
    if claim.state_version != holder.state_version:
        return claim.state_version > holder.state_version
    # One term has one leader. Two brokers that both claim it must not take turns.
    return silent_ms > HOLDER_SILENCE_MS


# --------------------------------------------------------------------------------- what was refused


REFUSED_MAX: Final = 64
"""Addresses that are remembered; a stranger with more of them pushes out the oldest."""

REMEMBERED_MS: Final = 120_000
"""A broker that goes on trying asks again sooner than this."""

SHOWN_CHARACTERS: Final = 120
"""Length up to which a name that a stranger chose is shown."""


@dataclass(frozen=True, slots=True)
class _Refused:
    reason: str
    last_ms: int


class RefusedRegistrations:
    """Broker name and address to why it was refused last; *total*: refusals so far."""

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], _Refused] = {}
        self.total = 0

    def note(self, broker_name: str, broker_addr: str, reason: str, now_ms: int) -> bool:
        """Remember a refusal; tell whether it is news for the log."""
        self.total += 1
        key = (broker_name[:SHOWN_CHARACTERS], broker_addr[:SHOWN_CHARACTERS])
        before = self._refused.pop(key, None)
        self._refused[key] = _Refused(reason[: 4 * SHOWN_CHARACTERS], now_ms)
        while len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        return before is None or before.reason != self._refused[key].reason

    def forget(self, broker_name: str, broker_addr: str) -> None:
        """A registration was taken: nothing is refused any more."""
        self._refused.pop((broker_name, broker_addr), None)

    def expire(self, now_ms: int) -> None:
        """Forget those that have stopped trying."""
        for key, refused in list(self._refused.items()):
            if now_ms - refused.last_ms > REMEMBERED_MS:
                del self._refused[key]

    def __len__(self) -> int:
        return len(self._refused)

    def reasons(self) -> list[str]:
        """Return one sentence for each address that is refused."""
        return [
            f"{address} is refused as {name}: {refused.reason}"
            for (name, address), refused in self._refused.items()
        ]


# -------------------------------------------------------------------------- what a broker registers


MAX_I64: Final = 2**63 - 1
MAX_BROKERS_PER_CONNECTION: Final = 64
"""Addresses that one connection may register: a process has few brokers, and a stranger must not
fill the table alone."""
MAX_BROKERS: Final = 10_000
"""Most broker addresses. Each scan goes through all of them."""


class BrokerKey(NamedTuple):
    """Identity of one broker process: two clusters may reuse a private address."""

    cluster_name: str
    broker_addr: str


@dataclass(frozen=True, slots=True)
class BrokerLiveInfo:
    """What is known about one registered address."""

    key: BrokerKey
    broker_name: str
    last_update_ms: int
    heartbeat_timeout_ms: int
    data_version: DataVersion
    ha_server_addr: str
    connection: int | None
    identity: str = ""
    proof: str = ""

    @property
    def claim(self) -> Claim:
        """What speaks for it when another address wants its place."""
        return Claim(self.identity, self.data_version.state_version, self.proof)

    def may_be_changed_by(self, identity: str, connection: int | None) -> bool:
        """Whether a request from a broker with *identity* over *connection* is its own.

        An address without an identity is anybody's, as in RocketMQ. One with a proof is its own
        connection's: the identity alone may be copied.
        """
        if not self.identity or (self.identity == identity and not self.proof):
            return True
        return self.connection is not None and self.connection == connection


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker registers about itself.

    Args:
        heartbeat_timeout_ms: Silence after which it is removed, ten minutes at most; None takes the
            NameServer's.
        identity: Of the broker group; empty: it is a broker of RocketMQ.
        proof: What members of that group alone can say; empty: they share no secret.
        since: *topics* are only those that changed since this version; None: they are all.
        removed_topics: With *since*, topics that were removed.
    """

    cluster_name: str
    broker_name: str
    broker_addr: str
    broker_id: int
    topics: Mapping[str, TopicConfig]
    data_version: DataVersion
    ha_server_addr: str = ""
    heartbeat_timeout_ms: int | None = None
    enable_acting_master: bool | None = None
    filter_servers: Sequence[str] = ()
    connection: int | None = None
    identity: str = ""
    proof: str = ""
    since: DataVersion | None = None
    removed_topics: Sequence[str] = ()

    @property
    def claim(self) -> Claim:
        """What speaks for it when another address is in its place."""
        return Claim(self.identity, self.data_version.state_version, self.proof)

    @property
    def key(self) -> BrokerKey:
        """Identity of the registering process."""
        return BrokerKey(self.cluster_name, self.broker_addr)


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """The answer to a registration; both addresses are empty for a leader and when none is known.

    ``moved`` means that the address was not there before, or under another id. ``superseded``
    means that another address keeps the id, ``kept_by``: nothing changed. ``left_out`` has the
    topics that are not in the route, with the reason. ``needs_all`` means that differences do not
    follow what is known here: nothing changed.
    """

    ha_server_addr: str = ""
    master_addr: str = ""
    moved: bool = False
    superseded: bool = False
    kept_by: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    needs_all: bool = False


def check_version(version: DataVersion) -> None:
    """Check that *version* is made of numbers that Java has.

    Raises RegistrationRefusedError: it is not.
    """
    numbers = (version.state_version, version.timestamp, version.counter)
    if not all(-MAX_I64 <= number <= MAX_I64 for number in numbers):
        raise RegistrationRefusedError("the data version is out of range")


def check_limits(registration: Registration, live: Mapping[BrokerKey, BrokerLiveInfo]) -> None:
    """Check that the limits allow a broker beside those that are registered.

    Raises RegistrationRefusedError: the table, or its connection, has too many already.
    """
    key = registration.key
    if key not in live and len(live) >= MAX_BROKERS:
        raise RegistrationRefusedError(f"there are {MAX_BROKERS} brokers already")
    if key in live or registration.connection is None:
        return
    connection = registration.connection
    beside = sum(other.connection == connection for other in live.values())
    if beside >= MAX_BROKERS_PER_CONNECTION:
        raise RegistrationRefusedError(
            f"{MAX_BROKERS_PER_CONNECTION} brokers are registered over this connection already"
        )


# ---------------------------------------------------------------------------------- its body


MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Largest body after inflating: a frame of 16 MiB could otherwise become 16 GiB of memory."""

_INT: Final = struct.Struct(">i")
_CRC_MASK: Final = 0x7FFFFFFF


def decode_register_body(body: Buffer, *, compressed: bool, crc: int) -> RegisterBrokerBody:
    """Return what a registration has.

    Args:
        body: As it came; empty means a broker without topics.
        crc: CRC-32 without its top bit, as the header gives it; 0 is not checked.
    Raises:
        BadRegisterBodyError: Another checksum, or not the form it claims to have.
    """
    if crc and zlib.crc32(body) & _CRC_MASK != crc:
        raise BadRegisterBodyError("crc32 not match")
    if not memoryview(body).nbytes:
        return RegisterBrokerBody()
    try:
        return _decode_compressed(body) if compressed else RegisterBrokerBody.decode(body)
    except (BadRequestError, struct.error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise BadRegisterBodyError(f"registration cannot be read: {error}") from error


def _decode_compressed(body: Buffer) -> RegisterBrokerBody:
    reader = _Reader(_inflate(body))
    version = DataVersion.decode(reader.sized())
    topics: dict[str, TopicConfig] = {}
    for _ in range(reader.count()):
        config = _topic_config(reader.sized().decode())
        topics[config.topic_name] = config
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            topic_config_table=topics, data_version=version
        ),
        filter_server_list=decode_body(reader.sized() or b"[]", list[str]),
    )


def _inflate(body: Buffer) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(body, MAX_INFLATED_BYTES)
    if inflater.unconsumed_tail:
        raise ValueError(f"more than {MAX_INFLATED_BYTES} bytes when inflated")
    if not inflater.eof:
        raise ValueError("compressed data ends early")
    return data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def count(self) -> int:
        (value,) = _INT.unpack_from(self._data, self._position)
        self._position += _INT.size
        if not 0 <= value <= len(self._data):
            raise ValueError(f"length {value} of {len(self._data)} bytes")
        return int(value)

    def sized(self) -> bytes:
        size = self.count()
        part = self._data[self._position : self._position + size]
        if len(part) != size:
            raise ValueError(f"{size} bytes announced, {len(part)} left")
        self._position += size
        return part


def _topic_config(text: str) -> TopicConfig:
    name, read, write, perm, filter_type, *rest = text.split(" ", 5)
    return TopicConfig(
        topic_name=name,
        read_queue_nums=whole_number(read),
        write_queue_nums=whole_number(write),
        perm=whole_number(perm),
        topic_filter_type=filter_type,
        attributes=decode_body(rest[0].encode(), dict[str, str]) if rest and rest[0] else {},
    )
