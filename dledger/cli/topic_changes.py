"""What a command may change of a topic, and how that is written: permissions, times, attributes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from dledger.output import CliError, ExitCode

_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

PERMISSIONS: Final = {"r": 4, "w": 2, "rw": 6, "none": 0}


def permission_text(perm: int) -> str:
    """Return the permission bits as people read them."""
    return ("R" if perm & 4 else "-") + ("W" if perm & 2 else "-") + ("X" if perm & 1 else "-")


def duration_ms(text: str) -> int:
    """Return milliseconds of a time such as ``7d``.

    Raises:
        CliError: It is none; a usage error.
    """
    match = re.fullmatch(r"(\d{1,12})(ms|s|m|h|d)", text)
    if match is None or not int(match[1]):
        raise CliError(
            f"{text!r} is no time such as 7d, 6h, 30m, 90s or 1500ms", exit_code=ExitCode.USAGE
        )
    return int(match[1]) * _UNIT_MS[match[2]]


def topic_changes(
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    permission: str | None,
    attributes: Sequence[str],
) -> dict[str, str]:
    """Return the fields of a request that differ from what a topic has. Pure.

    Raises:
        CliError: Nothing was given, or something that a topic cannot have; a usage error.
    """
    if permission is not None and permission not in PERMISSIONS:
        raise CliError("--permission is r, w, rw or none", exit_code=ExitCode.USAGE)
    counts = {
        "readQueueNums": queues if read_queues is None else read_queues,
        "writeQueueNums": queues if write_queues is None else write_queues,
    }
    changes = {name: str(count) for name, count in counts.items() if count is not None}
    if any(int(count) < 1 for count in changes.values()):
        raise CliError("a topic has at least 1 queue", exit_code=ExitCode.USAGE)
    if permission is not None:
        changes["perm"] = str(PERMISSIONS[permission])
    parts = []
    for pair in attributes:
        name, equals, value = pair.partition("=")
        if not (name and equals) or "," in pair:
            raise CliError(f"--attribute {pair}: expected name=value", exit_code=ExitCode.USAGE)
        if value:
            _check_attribute(name)
        parts.append(f"+{name}={value}" if value else f"-{name}")
    if parts:
        changes["attributes"] = ",".join(parts)
    if not changes:
        raise CliError(
            "nothing to change",
            next_step="give --queues, --permission or --attribute",
            exit_code=ExitCode.USAGE,
        )
    return changes


def _check_attribute(name: str) -> None:
    """Refuse a name that brokers would store and never read; one that is stored may be removed.

    Raises:
        CliError: A usage error.
    """
    from dledger.processors.topics import TYPE_ATTRIBUTE
    from dledger.services.retention import RETENTION_ATTRIBUTE

    known = (TYPE_ATTRIBUTE, RETENTION_ATTRIBUTE)
    if name in known:
        return
    near = get_close_matches(name, known, n=1)
    raise CliError(
        f"--attribute {name}: topics have the attributes {', '.join(known)}; nothing was changed",
        next_step=f"did you mean {near[0]}?" if near else "",
        exit_code=ExitCode.USAGE,
    )
