"""What a peer may send at most: numbers, names and addresses that a member of a group can have.

Checked where frames and hellos are decoded, so that nothing behind it meets a number that no file
can hold or a name that cannot be looked up.
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import TypeIs

TERM_MAX: Final = (1 << 40) - 1
"""Largest term. One election a second for 34,000 years; an entry has 63 bits for it."""

TERM_JUMP_MAX: Final = 1 << 30
"""How far a term may be ahead of one's own. One election a second for 34 years: no member was away
for longer. So no single frame uses up the terms there are."""

INDEX_MAX: Final = (1 << 48) - 1
"""Largest index of an entry. Ten thousand entries a second for 890 years; a position in the file of
indexes still has 63 bits."""

NUMBER_MAX: Final = (1 << 62) - 1
"""Largest of all other numbers: epochs, sequences, heartbeats, sizes."""

NAME_CHARACTERS_MAX: Final = 255
"""Of a cluster, a group or a member."""

INCARNATION_CHARACTERS_MAX: Final = 64
"""Ours have 32."""

HOST_CHARACTERS_MAX: Final = 253
"""As in the DNS."""

PORT_MAX: Final = 65_535

_INCARNATION: Final = re.compile(rf"[0-9A-Za-z_.-]{{1,{INCARNATION_CHARACTERS_MAX}}}", re.ASCII)
_HOST_NAME: Final = re.compile(r"(?:[0-9A-Za-z_-]{1,63}\.)*[0-9A-Za-z_-]{1,63}", re.ASCII)
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z_.-]{1,32})?", re.ASCII)
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


def is_name(text: object) -> TypeIs[str]:
    """Whether a cluster, a group or a member may have this name."""
    return isinstance(text, str) and 0 < len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


def is_incarnation(text: object) -> bool:
    """Whether a member may have this incarnation."""
    return isinstance(text, str) and _INCARNATION.fullmatch(text) is not None


def is_host(text: object) -> bool:
    """Whether a host may be called so: a name of the DNS or an address, without brackets."""
    if not isinstance(text, str) or len(text) > HOST_CHARACTERS_MAX:
        return False
    pattern = _IPV6 if ":" in text else _HOST_NAME
    return pattern.fullmatch(text) is not None


def is_port(number: object) -> bool:
    """Whether a listener may have this port."""
    return type(number) is int and 0 < number <= PORT_MAX


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``; None when it is none that could be looked up."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not is_host(host) or _PORT.fullmatch(port) is None or int(port) > PORT_MAX:
        return None
    return host, int(port)
