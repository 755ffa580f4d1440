"""The settings of a member: its group, its peers, its pace."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from dledger.raft.identity import GroupSecret
from remoting.seams import ServerTls


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
