"""Settings of one member, and the registry of guards: what we correct in the consensus library.

Every field of `Guards` is one row of the table in docs/internals/consensus.md. A guard is on unless
a test builds a node with it off; no setting, flag or environment variable reaches these switches.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from dledger.raft.identity import GroupSecret
from dledger.remoting.seams import ServerTls


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """Group, peers and pace of one member."""

    cluster: str
    group: str
    self_id: str
    peers: Mapping[str, tuple[str, int]]
    """Host and port of every member's peer listener, this member included."""
    listen_port: int = 0
    """What this member binds, when the others have another port for it; 0: the same."""
    client_address: str = ""
    election_timeout_s: float = 0.8
    heartbeat_interval_s: float = 0.1
    window_bytes: int = 8 << 20
    """Bytes on their way to one follower."""
    append_bytes: int = 1 << 20
    """Bytes in one append; at least one entry is sent."""
    entry_bytes_max: int = 16 << 20
    """Largest entry; the frame that carries it must stay below `wire.FRAME_BYTES_MAX`."""
    sync_flush: bool = True
    flush_interval_s: float = 0.5
    """Pause between flushes when `sync_flush` is off."""
    secret: GroupSecret | None = None
    """What peers must prove to know; None: nothing."""
    listen_tls: ServerTls | None = None
    dial_tls: ssl.SSLContext | None = None
    """TLS between the members; both or none."""

    @property
    def is_guarded(self) -> bool:
        """Whether a peer must prove that it belongs to the group."""
        return self.secret is not None or self.listen_tls is not None

    @property
    def others(self) -> tuple[str, ...]:
        """The other members' names, sorted."""
        return tuple(sorted(set(self.peers) - {self.self_id}))


def _guard(closes: str) -> bool:
    on: bool = field(default=True, metadata={"closes": closes})
    return on


@dataclass(frozen=True, slots=True)
class Guards:
    """Which corrections are in force. Product code always uses the default: all of them."""

    durable_before_promise: bool = _guard("ack or vote lost by power failure")
    envelope: bool = _guard("stale ack raises match index in a later term")
    idempotent_append: bool = _guard("duplicate or late append cuts acknowledged entries")
    next_index_never_back: bool = _guard("pipelined entries are sent again and again")
    one_vote_per_voter: bool = _guard(
        "double count; a returning node deposes a healthy leader, or never comes back"
    )
    commit_restored_clamped: bool = _guard(
        "commits its own entries while alone; replays everything at start"
    )
    leader_gives_up: bool = _guard("two leaders for 30 s")
    never_forwarded: bool = _guard("remote code execution, double append")
    no_pickle: bool = _guard("code execution, hang on a corrupt length")
    lazy_ranges: bool = _guard("a lagging follower costs O(n²)")
    entry_size_capped: bool = _guard("corrupt multi-part transmission")
    no_library_dump: bool = _guard("corrupt dump = empty leader; fork with threads")


ALL_ON = Guards()


def names() -> tuple[str, ...]:
    """Return the guards' names in the order of the table."""
    return tuple(guard.name for guard in fields(Guards))


def closes(name: str) -> str:
    """Return the defect that the guard *name* closes."""
    return next(str(guard.metadata["closes"]) for guard in fields(Guards) if guard.name == name)
