"""Transactions for the groups in memory: half messages, decisions, questions."""

from collections.abc import Callable
from functools import partial

from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import decode_record, encode_record, pack_host
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import (
    CheckTransactionStateHeader,
    EndTransactionHeader,
    SendMessageHeader,
)
from tests.unit.client.fake_cluster import Broker, Group

POSITION = 1_000_000
"""Where half messages stand; each a thousand bytes behind the one before."""


class FakeTransactions:
    """What a group does with half messages.

    Attributes:
        halves: What was sent, in order of the half offsets.
        decisions: Half offset to the first decision.
        ends: Every end that a leader received.
        oneway: How many of them wanted no answer.
        known: Address of a broker to the connections that brought a heartbeat.
        answer_end: Answers an end instead, or None to go on.
        send_code: Of the answer to a half message.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.halves: list[tuple[SendMessageHeader, bytes]] = []
        self.decisions: dict[int, int] = {}
        self.ends: list[EndTransactionHeader] = []
        self.oneway = 0
        self.known: dict[str, list[Connection]] = {}
        self.answer_end: Callable[[RemotingCommand], Handled] | None = None
        self.send_code = 0
        for broker in group.brokers:
            broker.intercept = partial(self._half, broker)
            broker.on(RequestCode.END_TRANSACTION, partial(self._end, broker))
            broker.on_from(RequestCode.HEART_BEAT, partial(self._heartbeat, broker))

    def _half(self, broker: Broker, asked: RemotingCommand) -> Handled:
        if asked.code != RequestCode.SEND_MESSAGE_V2:
            return None
        header = SendMessageHeader.of(asked)
        if "TRAN_MSG\x01true\x02" not in (header.properties or ""):
            return None
        host, port = broker.address.split(":")
        half_offset = len(self.halves)
        self.halves.append((header, bytes(asked.body)))
        position = POSITION + 1000 * half_offset
        ext = {
            "msgId": encode_offset_message_id(pack_host(host, int(port)), position),
            "queueId": str(header.queue_id),
            "queueOffset": str(half_offset),
        }
        return response_to(asked, self.send_code, None, ext)

    def _end(self, broker: Broker, asked: RemotingCommand) -> Handled:
        header = EndTransactionHeader.decode(asked.ext)
        self.oneway += asked.is_oneway
        if not broker.leads:
            return broker._not_leader(asked)
        self.ends.append(header)
        if self.answer_end is not None:
            handled = self.answer_end(asked)
            if handled is not None:
                return handled
        return self.decide(asked)

    def decide(self, asked: RemotingCommand) -> RemotingCommand:
        """Write the decision, or refuse another one."""
        header = EndTransactionHeader.decode(asked.ext)
        assert header.commit_log_offset == POSITION + 1000 * header.tran_state_table_offset
        if header.commit_or_rollback:
            known = self.decisions.setdefault(
                header.tran_state_table_offset, header.commit_or_rollback
            )
            if known != header.commit_or_rollback:
                name = {8: "commit", 12: "rollback"}[known]
                ext = {"outcome": "not_stored", "decision": name}
                return response_to(asked, 1, f"decided as {name}", ext)
        return response_to(asked)

    def _heartbeat(
        self, broker: Broker, connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        connections = self.known.setdefault(broker.address, [])
        if connection not in connections:
            connections.append(connection)
        return broker._heartbeat(connection, asked)

    def ask(self, half_offset: int, *, bname: str | None = "g", address: str | None = None) -> None:
        """Let the leader ask whom it knows about a half message."""
        header, body = self.halves[half_offset]
        position = POSITION + 1000 * half_offset
        properties = dict(
            item.split("\x01") for item in (header.properties or "").split("\x02") if item
        )
        check = CheckTransactionStateHeader(
            half_offset, position, properties["UNIQ_KEY"], properties["UNIQ_KEY"], bname=bname
        )
        record = encode_record(
            topic=header.topic,
            queue_id=header.queue_id,
            body=body,
            properties=encode_properties({**properties, "TRANSACTION_CHECK_TIMES": "1"}),
            queue_offset=half_offset,
            phy_offset=position,
        )
        assert decode_record(record).topic == header.topic
        leader = address or self.group.leader
        assert leader is not None
        for connection in self.known[leader]:
            if not connection.is_closed:
                connection.invoke_oneway(
                    request(RequestCode.CHECK_TRANSACTION_STATE, dict(check.encode()), record)
                )
