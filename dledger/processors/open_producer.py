"""OPEN_PRODUCER (51110): an idempotent producer begins an epoch in this group.

Fields: ``producerId``, 16 bytes in hexadecimal, and ``producerEpoch``, the epoch the producer had
here before, 0 for none. Answer: ``producerEpoch``, when the opening is applied. Asked again it
opens nothing: the producer gets the epoch it has, unless that is the one it wants to leave.

Spec: docs/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed, QueueTouched
from dledger.processors.refusal import failed_proposal, not_leader, refusal
from dledger.state.state_record import ProducerOpenedChange, state_batch
from remoting.connection import Connection
from remoting.errors import BadRequestError
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.producer_stamp import EPOCH_FIELD, ID_FIELD, producer_id_of

_Told = Callable[[Proposed], None]


class OpenProducerProcessor:
    """Opens sessions; several requests for one producer share one proposal."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._opening: dict[bytes, list[_Told]] = {}
        self._unapplied: list[tuple[int, _Told, Proposed]] = []

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51110."""
        try:
            return self._open(connection, command)
        except MQError as error:
            return refusal(command, error)

    def on_applied(self, _touched: Sequence[QueueTouched]) -> None:
        """Answer those whose session is applied by now."""
        if not self._unapplied:
            return
        applied = self._group.state.applied_index
        ready = [item for item in self._unapplied if item[0] <= applied]
        self._unapplied = [item for item in self._unapplied if item[0] > applied]
        for _, tell, proposed in ready:
            tell(proposed)

    def _open(self, connection: Connection, command: RemotingCommand) -> Handled:
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        producer_id = producer_id_of(command.ext.get(ID_FIELD))
        try:
            left = int(command.ext.get(EPOCH_FIELD, 0))
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"{EPOCH_FIELD} is not a number") from error
        session = group.state.producers.get(producer_id)
        if session is not None and session.epoch > left:
            return response_to(command, 0, None, {EPOCH_FIELD: str(session.epoch)})

        def tell(proposed: Proposed) -> None:
            if proposed.outcome == "stored":
                answer = response_to(command, 0, None, {EPOCH_FIELD: str(proposed.index)})
            else:
                answer = failed_proposal(command, proposed, group)
            connection.reply(command, answer)

        waiting = self._opening.get(producer_id)
        if waiting is not None:
            waiting.append(tell)
            return DEFERRED
        waiting = [tell]

        def done(proposed: Proposed) -> None:
            del self._opening[producer_id]
            for told in waiting:
                if proposed.outcome == "stored" and proposed.index > group.state.applied_index:
                    # Answered before it is applied: a send that came now would find no session.
                    self._unapplied.append((proposed.index, told, proposed))
                else:
                    told(proposed)

        group.propose(state_batch(ProducerOpenedChange(producer_id)), done)
        self._opening[producer_id] = waiting
        return DEFERRED
