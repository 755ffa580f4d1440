"""POP_MESSAGE (200050), ACK_MESSAGE (200051), BATCH_ACK_MESSAGE (200151),
CHANGE_MESSAGE_INVISIBLETIME (200053), NOTIFICATION (200054) and POLLING_INFO (200055).

Spec: docs/internals/protocol/remoting.md, section 14; docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import Outcome, RefusedError, bad_request, refusal, require_leader
from dledger.processors.get_message import FLAG_SUBSCRIPTION, PullChecks
from dledger.processors.handles import CONSUMES, Limit, handles
from dledger.processors.pop_messages import PopMessages
from dledger.processors.pull import MAX_SUSPEND_MS
from dledger.remoting.access.accounts import Permission, Right, Rule, group_right, topic_right
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import PullMessageHeader
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.own_fields import (
    FROM_NOW_FIELD,
    STALE_FIELD,
    UNSEEN_FIELD,
    encode_stale,
)
from dledger.remoting.protocol.pop_requests import (
    INIT_MAX,
    MAX_REQUEST_BITS,
    AckMessageHeader,
    BatchAck,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationHeader,
    PollingInfoHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    ReceiptHandle,
    encode_offsets,
    revive_queue_of,
)
from dledger.remoting.protocol.topic_names import INNER_TOPICS
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.pop_decision import MAX_MESSAGES_PER_ENTRY, Receipt, Receive
from dledger.services.pop_grants import PopGrants
from dledger.services.pop_lines import PopAsk
from dledger.services.throughput import Throughput
from dledger.settings.parts import BrokerSettings
from dledger.state.pop import attempt_of

MAX_MESSAGES_PER_POP: Final = 1_024
"""A request for more gets this number; RocketMQ's clients ask for 32."""

MAX_INVISIBLE_MS: Final = 12 * 3_600_000
"""Longest time that a message is out; RocketMQ's proxy has the same limit."""

MAX_RECEIPTS: Final = MAX_MESSAGES_PER_ENTRY
"""Messages of one batch of acknowledgements: they go into one entry."""

Respond = Callable[[PopAsk], RemotingCommand]


def _items(command: RemotingCommand) -> list[BatchAck]:
    items = BatchAckMessageRequestBody.decode(command.body).acks
    if len(items) > MAX_RECEIPTS:
        raise bad_request(f"more than {MAX_RECEIPTS} items in one request")
    if sum(item.bits for item in items) > MAX_REQUEST_BITS:
        raise bad_request(f"more than {MAX_REQUEST_BITS} bits in one request")
    return items


def _batch(command: RemotingCommand) -> Iterator[Right]:
    for item in _items(command):
        yield topic_right(item.t, Permission.SUB)
        yield group_right(item.c)


BATCH: Final = Rule(rights=_batch)
"""The rights to the topics and groups in the body."""


@dataclass(eq=False, repr=False)
class PopProcessor:
    """Decodes requests of POP consumers, and answers them when their outcome is in the log."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _topics: TopicView
    _checks: PullChecks
    _offsets: OffsetCommits
    _messages: PopMessages
    _pops: PopGrants
    _throughput: Throughput

    def __post_init__(self) -> None:
        self._first_queue = 0
        self._watched: set[Connection] = set()

    # ------------------------------------------------------------------------------ messages

    @handles(RequestCode.POP_MESSAGE, limit=Limit.POP, rule=CONSUMES, reads=True)
    def pop(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200050 when the grant is applied, or when the time to wait is over."""
        header = PopMessageHeader.decode(command.ext)
        _check_time(header.invisible_time)
        receive = self._receive(
            connection,
            header.consumer_group,
            header.topic,
            header.queue_id,
            (header.exp_type, header.exp),
            wanted=max(1, min(header.max_msg_nums, MAX_MESSAGES_PER_POP)),
            invisible_ms=header.invisible_time,
            is_fifo=bool(header.order),
            from_end=header.init_mode == INIT_MAX,
            young_from_begin=FROM_NOW_FIELD not in command.ext,
            attempt=attempt_of(header.attempt_id),
        )
        hold_s = max(0, min(header.poll_time, MAX_SUSPEND_MS)) / 1000

        def respond(ask: PopAsk) -> RemotingCommand:
            return self._popped(command, header, receive, ask)

        return self._ask(
            connection, command, respond, receive=receive, queue_id=header.queue_id, hold_s=hold_s
        )

    def _popped(
        self, command: RemotingCommand, header: PopMessageHeader, receive: Receive, ask: PopAsk
    ) -> RemotingCommand:
        rest = self._rest(receive)
        if not ask.messages:
            code = ResponseCode.POLLING_TIMEOUT
            if ask.is_full:
                code = ResponseCode.POLLING_FULL
            elif header.poll_time <= 0:
                code = ResponseCode.PULL_NOT_FOUND
            empty = PopMessageResponseHeader(rest_num=rest)
            return response_to(command, int(code), "no new message", empty.encode())
        by_queue: dict[int, list[int]] = {}
        messages, body = self._messages.read(
            sorted(ask.messages, key=lambda each: (each.key[2], each.offset)),
            in_order=receive.is_fifo,
        )
        for (_, _, queue_id), offset, _ in messages:
            by_queue.setdefault(queue_id, []).append(offset)
        starts, offsets = encode_offsets(by_queue)
        self._throughput.count_pull(len(messages), len(body), header.topic, header.consumer_group)
        fields = PopMessageResponseHeader(
            ask.store_time_ms,
            header.invisible_time,
            revive_queue_of(ask.index),
            rest,
            starts,
            offsets,
        )
        return response_to(command, 0, "FOUND", fields.encode(), body)

    def _rest(self, receive: Receive) -> int:
        state, rest = self._group.state, 0
        for queue_id in receive.queue_ids:
            key = (receive.group, receive.topic, queue_id)
            row = state.pops.get(key)
            after = row.next_offset if row is not None else state.consumer_offset(*key)
            rest += max(0, state.max_offset(receive.topic, queue_id) - (after or 0))
        return rest

    @handles(RequestCode.NOTIFICATION, limit=Limit.POP, rule=CONSUMES, reads=True)
    def notification(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200054: whether there are messages, at the latest when the time is over."""
        header = NotificationHeader.decode(command.ext)
        receive = self._receive(
            connection,
            header.consumer_group,
            header.topic,
            header.queue_id,
            (header.exp_type, header.exp),
            is_fifo=bool(header.order),
        )

        def respond(ask: PopAsk) -> RemotingCommand:
            found = {
                "hasMsg": "true" if ask.has_messages else "false",
                "pollingFull": "true" if ask.is_full else "false",
            }
            return response_to(command, ext=found)

        return self._ask(
            connection,
            command,
            respond,
            receive=receive,
            queue_id=header.queue_id,
            hold_s=max(0, min(header.poll_time, MAX_SUSPEND_MS)) / 1000,
            is_notice=True,
        )

    @handles(RequestCode.POLLING_INFO, limit=Limit.CLIENT, rule=CONSUMES)
    def polling_info(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200055: how many requests of the group wait for messages of the queue."""
        header = PollingInfoHeader.decode(command.ext)
        require_leader(self._group)
        count = self._pops.polling_count(header.consumer_group, header.topic, header.queue_id)
        return response_to(command, ext={"pollingNum": str(count)})

    # ------------------------------------------------------------------------------ receipts

    @handles(RequestCode.ACK_MESSAGE, limit=Limit.CLIENT, rule=CONSUMES)
    def acknowledge(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200051: success when the message never comes again."""
        header = AckMessageHeader.decode(command.ext)
        require_leader(self._group)
        receipt = _receipt(header)

        def respond(ask: PopAsk) -> RemotingCommand:
            return response_to(command) if all(ask.accepted) else _stale(command, header.topic, ask)

        return self._ask(connection, command, respond, receipts=(receipt,))

    @handles(RequestCode.BATCH_ACK_MESSAGE, limit=Limit.CLIENT, rule=BATCH)
    def acknowledge_batch(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200151: success when all of them never come again.

        Those whose handle is right are acknowledged beside others that are not, which are named.
        """
        require_leader(self._group)
        receipts: list[Receipt] = []
        for item in _items(command):
            receipts += [
                Receipt((item.c, item.t, item.q), offset, item.pt, item.rq)
                for offset in item.offsets
            ]
            if len(receipts) > MAX_RECEIPTS:
                raise bad_request(f"more than {MAX_RECEIPTS} messages in one request")
        if not receipts:
            return response_to(command)

        def respond(ask: PopAsk) -> RemotingCommand:
            if all(ask.accepted):
                return response_to(command)
            response = _stale(command, "the batch", ask)
            response.ext[STALE_FIELD] = encode_stale(ask.accepted)
            return response

        return self._ask(connection, command, respond, receipts=tuple(receipts))

    @handles(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, limit=Limit.CLIENT, rule=CONSUMES)
    def change_invisible_time(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200053: the message is out for another time, counted from now; a new handle."""
        header = ChangeInvisibleTimeHeader.decode(command.ext)
        require_leader(self._group)
        _check_time(header.invisible_time)
        receipt = _receipt(header)

        def respond(ask: PopAsk) -> RemotingCommand:
            if not all(ask.accepted):
                return _stale(command, header.topic, ask)
            fields = ChangeInvisibleTimeResponseHeader(
                ask.store_time_ms, header.invisible_time, revive_queue_of(ask.index)
            )
            return response_to(command, ext=fields.encode())

        return self._ask(
            connection,
            command,
            respond,
            receipts=(receipt,),
            invisible_ms=header.invisible_time,
            is_unseen=UNSEEN_FIELD in command.ext,
        )

    # ------------------------------------------------------------------------------ asking

    def _receive(
        self,
        connection: Connection,
        group_name: str,
        topic: str,
        queue_id: int,
        expression: tuple[str | None, str | None],
        *,
        wanted: int = 1,
        invisible_ms: int = 0,
        is_fifo: bool = False,
        from_end: bool = False,
        young_from_begin: bool = False,
        attempt: int = 0,
    ) -> Receive:
        require_leader(self._group)
        config = self._checks.check_group(group_name)
        if topic in INNER_TOPICS:
            # A grant is itself a message of one of them: it would wake its own line without end.
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{topic}] pop message is forbidden"
            )
        self._checks.check_queue(topic, max(0, queue_id), leading=True)
        self._offsets.check_room(group_name, topic, limited_account(connection))
        kind, text = expression
        codes, wants = self._checks.wanted(
            PullMessageHeader(
                group_name, topic, 0, 0, 1, FLAG_SUBSCRIPTION, 0, 0, 0, text or "*", kind
            )
        )
        self._checks.make_known(connection, group_name)
        return Receive(
            group=group_name,
            topic=topic,
            queue_ids=self._queues(topic, queue_id),
            wanted=wanted,
            max_bytes=self._settings.store.max_transfer_bytes_in_memory,
            invisible_ms=invisible_ms,
            is_fifo=is_fifo,
            from_end=from_end,
            young_from_begin=young_from_begin,
            retries=config.retry_max_times,
            attempt=attempt,
            wants=(codes, wants),
        )

    def _queues(self, topic: str, queue_id: int) -> tuple[int, ...]:
        """Return where to look: all queues, each request beginning with the next one."""
        if queue_id >= 0:
            return (queue_id,)
        config = self._topics.config(topic)
        count = max(1, config.read_queue_nums if config is not None else 1)
        self._first_queue = (self._first_queue + 1) % (1 << 30)
        first = self._first_queue % count
        return (*range(first, count), *range(first))

    def _ask(
        self,
        connection: Connection,
        command: RemotingCommand,
        respond: Respond,
        *,
        receive: Receive | None = None,
        receipts: tuple[Receipt, ...] = (),
        invisible_ms: int | None = None,
        is_unseen: bool = False,
        queue_id: int = -1,
        hold_s: float = 0.0,
        is_notice: bool = False,
    ) -> Handled:
        outcome = Outcome(connection, command)

        def done(ask: PopAsk, error: MQError | None) -> None:
            try:
                response = respond(ask) if error is None else refusal(command, error)
            except MQError as failure:
                response = refusal(command, failure)
            outcome.answer(response)

        if receive is not None and connection not in self._watched:
            self._watched.add(connection)
            connection.on_close.append(self._closed)
        self._pops.ask(
            PopAsk(
                on_done=done,
                receive=receive,
                receipts=receipts,
                invisible_ms=invisible_ms,
                is_unseen=is_unseen,
                queue_id=max(-1, queue_id),
                hold_s=hold_s,
                is_notice=is_notice,
                owner=connection,
            )
        )
        return outcome.handled()

    def _closed(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._pops.closed(connection)


def _receipt(header: AckMessageHeader | ChangeInvisibleTimeHeader) -> Receipt:
    handle = ReceiptHandle.decode(header.extra_info)
    return Receipt(
        (header.consumer_group, header.topic, header.queue_id),
        header.offset,
        handle.pop_time_ms,
        handle.revive_queue_id,
    )


def _check_time(invisible_ms: int) -> None:
    if not 0 < invisible_ms <= MAX_INVISIBLE_MS:
        raise bad_request(f"an invisible time of {invisible_ms} ms; it is 1 to {MAX_INVISIBLE_MS}")


def _stale(command: RemotingCommand, topic: str, ask: PopAsk) -> RemotingCommand:
    count = len(ask.accepted) - sum(ask.accepted)
    return answer(
        command,
        Condition.STALE_RECEIPT,
        f"{count} of {len(ask.accepted)} handles of {topic} name no message that is out: it was"
        " acknowledged, handed out again, or its handle was changed",
    )
