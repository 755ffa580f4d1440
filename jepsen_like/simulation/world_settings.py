"""What a simulated world is made of: numbers and times, and its accounts.

With access control brokers and NameServers check every request against one file of accounts.
Members, the workload and the work beside it sign as an administrator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dledger.remoting.access.account_file import accounts_document
from dledger.remoting.access.accounts import Account, AccountTable, Permission
from dledger.remoting.protocol.signature import Credentials
from dledger.services.timer import LOAD_UNITS
from dledger.state.producer_sessions import SESSIONS_MAX


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What a world is made of and how fast it runs.

    Attributes:
        brokers, name_servers: How many.
        heartbeat_ms, election_timeout_ms: Slow: a simulated second costs what happens in it.
        options: Settings of the brokers over all others, ``table.name`` to value.
        has_accounts: Brokers and NameServers check signatures, see `accounts`.
        has_ipv6: NameServers, every second member and every second client have IPv6 addresses.
        sessions_max, timer_load_units: Limits of brokers that are no settings, see `serve_broker`.
        compare_state_every: Tables are compared at every such applied index.
    """

    brokers: int = 3
    name_servers: int = 1
    heartbeat_ms: int = 1000
    election_timeout_ms: int = 3000
    segment_bytes: int = 256 * 1024
    checkpoint_interval_ms: int = 10_000
    client_heartbeat_s: float = 30.0
    route_poll_s: float = 30.0
    rpc_timeout_s: float = 3.0
    has_accounts: bool = False
    has_ipv6: bool = False
    sessions_max: int = SESSIONS_MAX
    timer_load_units: int = LOAD_UNITS
    compare_state_every: int = 64
    options: Mapping[str, object] = field(default_factory=dict)


ACCOUNTS_PATH: Final = "/access/accounts.toml"
CREDENTIALS_PATH: Final = "/access/credentials.toml"
SECRET_PATH: Final = "/access/peers.secret"

OWNER: Final = Credentials("owner-of-all", "secret-of-the-owner")
READER: Final = Credentials("reader-of-one", "secret-of-the-reader")
"""It may pull from `READABLE`, and nothing else."""

READABLE: Final = "side"


def account_files() -> dict[str, bytes]:
    """Return the files of a machine whose daemon checks signatures, and signs itself."""
    accounts = {
        each.access_key: Account(
            access_key=each.access_key,
            secret_key=each.secret_key,
            is_admin=each is OWNER,
            topics={} if each is OWNER else {READABLE: Permission.SUB},
        )
        for each in (OWNER, READER)
    }
    own = f'access_key = "{OWNER.access_key}"\nsecret_key = "{OWNER.secret_key}"\n'
    return {
        ACCOUNTS_PATH: accounts_document(AccountTable(accounts)).encode(),
        CREDENTIALS_PATH: own.encode(),
    }
