"""What a broker registers, and what is known of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from namesrv.errors import RegistrationRefusedError
from namesrv.takeover import Claim
from remoting.protocol.bodies import DataVersion, TopicConfig

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
    members: frozenset[str] = frozenset()

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
        heartbeat_timeout_ms: Silence after which it is removed, ten minutes at most; None takes
            the NameServer's.
        connection: Number of the connection it came over; None when there is none to lose.
        identity: Of the broker group; empty: it is a broker of RocketMQ, or of an older release.
        proof: What members of that group alone can say; empty: they share no secret.
        members: Addresses of all members of that group.
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
    members: frozenset[str] = frozenset()
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

    Raises:
        RegistrationRefusedError: It is not.
    """
    numbers = (version.state_version, version.timestamp, version.counter)
    if not all(-MAX_I64 <= number <= MAX_I64 for number in numbers):
        raise RegistrationRefusedError("the data version is out of range")


def check_limits(registration: Registration, live: Mapping[BrokerKey, BrokerLiveInfo]) -> None:
    """Check that the limits allow a broker beside those that are registered.

    Raises:
        RegistrationRefusedError: The table, or its connection, has too many already.
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
