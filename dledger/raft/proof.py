"""Proof that a peer knows the secret of its group, exchanged before its word counts.

Both sides put a number of their own choice, used once, into their hello. The one that was called
proves itself with its answer, the one that called with the frame after it. A proof is
HMAC-SHA256 over who proves, both hellos as they travelled, and the connection's epoch; so it fits
no other connection, no other member and no other direction. What follows is not protected: who can
write into a connection between two members needs TLS to keep out.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import cbor2

from commitlog.errors import ConfigError, RemoteProtocolError

SECRET_BYTES_MIN: Final = 16
"""A shorter secret can be guessed from one proof."""

NONCE_BYTES: Final = 16

NONCE: Final = "nonce"
PROOF: Final = "proof"

_UNPROVED: Final = "does not prove that it knows the secret of the group (raft.secret_file)"


class Side(StrEnum):
    """Who proves."""

    DIALLER = "dialler"
    ACCEPTOR = "acceptor"


class GroupSecret:
    """The secret of a group. Neither repr nor errors show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Take a secret.

        Raises:
            ConfigError: It is too short.
        """
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the secret of the group has {len(secret)} bytes, at least {SECRET_BYTES_MIN}"
            )
        self._secret = secret

    def proof(
        self, side: Side, dialler: Mapping[str, Any], acceptor: Mapping[str, Any], epoch: int
    ) -> bytes:
        """Return what *side* proves itself with.

        Args:
            dialler, acceptor: The two hellos with their nonces, without a proof.
        """
        said = cbor2.dumps([str(side), dict(dialler), dict(acceptor), epoch], canonical=True)
        return hmac.digest(self._secret, said, hashlib.sha256)

    def membership_proof(self, group_identity: str) -> str:
        """Return what members of the group alone can say, to NameServers: 64 hexadecimal digits.

        The same for every member. It tells a NameServer nothing that would open the peer port:
        proofs between members are about two hellos with numbers used once.
        """
        said = cbor2.dumps(["registration", group_identity], canonical=True)
        return hmac.digest(self._secret, said, hashlib.sha256).hex()

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
        """Let a proof pass that is one; compared in constant time.

        Raises:
            RemoteProtocolError: It is none.
        """
        expected = self.proof(side, dialler, acceptor, epoch)
        if not isinstance(proof, bytes) or not hmac.compare_digest(proof, expected):
            raise RemoteProtocolError(f"{who} {_UNPROVED}")


def check_nonce(hello: Mapping[str, Any], who: str) -> None:
    """Let a hello pass that a proof can be about.

    Raises:
        RemoteProtocolError: Its sender knows of no secret.
    """
    nonce = hello.get(NONCE)
    if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
        raise RemoteProtocolError(f"{who} {_UNPROVED}")
