"""The audit line: one for each administrative act, with account, request and outcome.

Which requests are administrative follows from what their handlers declare; here is what
stands in a line: names only. Bodies, values of settings and texts of answers are never in it, so no
secret can be.

Spec: docs/operate/access.md, "Audit log".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeAlias

import trio

from dledger.commitlog.errors import MQError
from dledger.remoting.access.gate import admitted_account
from dledger.remoting.addresses import join_address
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Answered, Handled
from dledger.remoting.log import get_logger
from dledger.remoting.processor_table import Handler
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.outcome import outcome_of

ANONYMOUS: Final = "anonymous"
"""Stands for the account where there is no access control, or the request named none."""

DONE: Final = "done"

SUBJECT_FIELDS: Final = (
    "topic", "group", "groupName", "consumerGroup", "srcGroup", "destGroup", "clientId", "msgId",
    "op", "name", "address", "username", "accessKey", "subject", "resource", "globalWhiteAddrs",
)  # fmt: skip
"""Fields of a request that may stand in a line: names of what it is about, nothing else."""

MAX_SUBJECT_CHARACTERS: Final = 500
"""A list of a thousand topics is cut, so that a line stays one that can be read."""

Subject: TypeAlias = Mapping[str, str]
"""What a request is about: names by their kind."""

SubjectOf: TypeAlias = Callable[[RemotingCommand], Subject]

IsAct: TypeAlias = Callable[[Connection, RemotingCommand], bool]
"""Whether a request is an administrative act, where others of its code are none."""

_log = get_logger(__name__)


def fields_of(command: RemotingCommand, names: Iterable[str] = SUBJECT_FIELDS) -> Subject:
    """Return the names that stand in some fields of a request. Pure."""
    found = {name: command.ext.get(name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def subject_text(subject: Subject) -> str:
    """Return *subject* on one line, not longer than `MAX_SUBJECT_CHARACTERS`. Pure."""
    text = " ".join(f"{kind}={name}" for kind, name in subject.items())
    if len(text) <= MAX_SUBJECT_CHARACTERS:
        return text
    return text[: MAX_SUBJECT_CHARACTERS - 1] + "…"


def audited(
    code: RequestCode,
    handler: Handler,
    subject_of: SubjectOf = fields_of,
    is_act: IsAct | None = None,
) -> Handler:
    """Return *handler* with an audit line written when its request is answered.

    Args:
        subject_of: Names what the request is about; may raise `MQError` where it cannot be read.
        is_act: Requests for which it does not hold get no line; None: each gets one.
    """

    def handle(connection: Connection, command: RemotingCommand) -> Handled:
        if is_act is not None and not is_act(connection, command):
            return handler(connection, command)
        line = {
            "account": admitted_account(connection) or ANONYMOUS,
            "address": join_address(*connection.peer_address),
            "request": code.name,
            "subject": _subject(command, subject_of),
        }

        def write(response: RemotingCommand) -> None:
            _log.info("audit", **line, outcome=_outcome(response), code=response.code)

        connection.when_answered(command, write)
        handled = handler(connection, command)
        if isinstance(handled, Awaitable):
            return _unless_cancelled(handled, line)
        return handled

    return handle


async def _unless_cancelled(handling: Awaitable[Answered], line: Mapping[str, str]) -> Answered:
    """Wait for the answer; without one, because the connection ended, the outcome is unknown."""
    try:
        return await handling
    except trio.Cancelled:
        _log.info("audit", **line, outcome="unknown", code=None)
        raise


def _subject(command: RemotingCommand, subject_of: SubjectOf) -> str:
    try:
        return subject_text(subject_of(command))
    except MQError:
        return ""  # the handler refuses it, with the reason


def _outcome(response: RemotingCommand) -> str:
    return DONE if response.code == 0 else outcome_of(response)
