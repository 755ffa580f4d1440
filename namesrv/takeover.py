"""Which registration may enter a broker name, and which may take an id that another address holds.

A group of ours carries its identity in every registration. While one address with an identity is
registered under a broker name, the name belongs to that identity: another one is refused, and so
is an address without any, unless a member with the identity names it as another member. Those are
members of an older release in the middle of an upgrade; they may take an id that is free.
Brokers of RocketMQ send no identity, and names without one follow RocketMQ's rules.

An identity is no secret. Members that share one send a proof too, which is the same for all of
them: an address that comes with a copied identity and without that proof is refused.

Pure: `namesrv.route_table` asks before it changes anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

MEMBERS_MAX: Final = 64
"""Addresses of members that one registration may name."""

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


def refuses_identity(claim: Claim, *, owner: str, proof: str, is_member: bool) -> str:
    """Return why *claim* may not enter a broker name, or an empty text when it may.

    Args:
        owner: The identity that the broker name belongs to; empty: to none.
        proof: Proof of registered members of it; empty: none.
        is_member: Whether a registered address with that identity names this one as a member.
    """
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
    if is_member:
        return ""
    return (
        f"it belongs to the group {owner}, and this broker names no group. Give it another"
        " brokerName; upgrade it if it is a member of that group"
    )


def may_take(claim: Claim, holder: Claim, *, silent_ms: int) -> bool:
    """Whether *claim* takes an id that another address holds under the same broker name.

    Args:
        silent_ms: Time since the holder registered.
    """
    if claim.weight != holder.weight:
        return claim.weight > holder.weight
    if claim.state_version != holder.state_version:
        return claim.state_version > holder.state_version
    # One term has one leader. Two brokers that both claim it must not take turns.
    return silent_ms > HOLDER_SILENCE_MS
