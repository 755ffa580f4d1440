"""Questions of brokers about transactions (code 39), handed to the producer group they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from client.core.message import MessageExt
from commitlog.errors import ConfigError, MQError
from commitlog.properties import PROPERTY_PRODUCER_GROUP
from remoting.connection import Connection
from remoting.log import get_logger
from remoting.processor import Limiter, ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.headers import CheckTransactionStateHeader

CHECKS_MAX: Final = 1024
"""Questions looked at at a time; they are handed on at once."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A broker asks what became of a transaction.

    Attributes:
        message: The half message, in its real topic and queue; its `message_id` names the
            transaction.
        half_offset: Its place in the half topic.
        position: Its place in the log.
        broker_name: The broker group that asks; empty: an old RocketMQ, which does not say.
        connection: Where it came from.
    """

    message: MessageExt
    half_offset: int
    position: int
    broker_name: str
    connection: Connection


OnQuestion = Callable[[Question], None]


class CheckBacks:
    """Who in this client answers for which producer group."""

    def __init__(self, server_requests: ProcessorTable) -> None:
        self._groups: dict[str, OnQuestion] = {}
        server_requests.register(
            RequestCode.CHECK_TRANSACTION_STATE,
            self._asked,
            Limiter("check transaction state", CHECKS_MAX),
        )

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: str, on_question: OnQuestion) -> None:
        """Let *on_question* have the questions for *group*; it must neither block nor raise.

        Raises:
            ConfigError: Somebody in this client answers for the group already.
        """
        if group in self._groups:
            raise ConfigError(f"this client instance has a transaction producer of {group} already")
        self._groups[group] = on_question

    def remove(self, group: str) -> None:
        """Answer for *group* no more."""
        del self._groups[group]

    def _asked(self, connection: Connection, command: RemotingCommand) -> None:
        """Take code 39; it wants no answer, but an END_TRANSACTION."""
        header = CheckTransactionStateHeader.decode(command.ext)
        message = MessageExt(memoryview(bytes(command.body)), 0, header.bname or "")
        try:
            group = message.properties.get(PROPERTY_PRODUCER_GROUP, "")
        except MQError as error:
            _log.warning("check_back_unreadable", error=str(error))
            return
        on_question = self._groups.get(group)
        if on_question is None:
            _log.debug("check_back_for_nobody", group=group)
            return
        on_question(
            Question(
                message,
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.bname or "",
                connection,
            )
        )
