"""Fencing tokens of queue locks on the wire: ext fields of ours that RocketMQ does not know.

A lock request that carries `TOKENS_FIELD` gets one token per granted queue back, in the order of
the body's list; an unlock request may carry the tokens of what it gives back. Pulls and offset
commits show theirs in `TOKEN_FIELD`.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from remoting.errors import BadRequestError
from remoting.protocol.command import ExtFields

TOKENS_FIELD: Final = "lockTokens"
TOKEN_FIELD: Final = "lockToken"
WANTED: Final = "wanted"
"""What a lock request has in `TOKENS_FIELD`."""


def encode_tokens(tokens: Iterable[int]) -> str:
    """Return tokens as one ext field."""
    return ",".join(map(str, tokens))


def decode_tokens(text: object) -> tuple[int, ...]:
    """Return the tokens in an ext field.

    Raises:
        BadRequestError: Not a list of whole numbers.
    """
    try:
        return tuple(int(part) for part in str(text).split(",") if part)
    except ValueError as error:
        raise BadRequestError(f"{TOKENS_FIELD} is no list of tokens: {text!r}") from error


def shown_token(ext: ExtFields) -> int | None:
    """Return the token a request shows, None when it shows none.

    Raises:
        BadRequestError: It is no number.
    """
    value = ext.get(TOKEN_FIELD)
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"{TOKEN_FIELD} is no token: {value!r}") from error
