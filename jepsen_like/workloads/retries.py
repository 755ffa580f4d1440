"""What consumers do that give messages back: each attempt, and at the end what came of them.

A consumer reads the workload's queues and its group's retry topic and gives some messages back,
with one request each. When it is over, retry topic and dead letters are read from end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import (
    BrokerUnreachableError,
    ClientError,
    NoRouteError,
    OffsetIllegalError,
    RequestFailedError,
    UnknownOutcomeError,
)
from client.core.message import MessageExt
from client.core.route import MessageQueue
from jepsen_like.checkers.retries import DEAD_PREFIX, MAX_TRIES, RETRY_PREFIX
from jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from jepsen_like.seeded_rng import SimRng, rng_stream
from remoting.protocol.codes import RequestCode
from remoting.protocol.headers import ConsumerSendMsgBackHeader
from remoting.protocol.outcome import outcome_of

if TYPE_CHECKING:
    from jepsen_like.workloads.clients import WorkloadClients

GROUPS: Final = "retriers-"
PULLED: Final = 8
GIVEN_UP_PER_MILLE: Final = 150
"""Of those that are given back: at once to the dead letters."""
ATTEMPT_S: Final = 8.0


class Retriers:
    """Consumers that give messages back, each a group of its own."""

    def __init__(self, clients: WorkloadClients, seed: int, per_mille: int) -> None:
        self._clients = clients
        self._seed = seed
        self._per_mille = per_mille
        self._groups: dict[str, None] = {}

    async def consume(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        clients, rng = self._clients, rng_stream(self._seed, "retrier", index)
        process = clients.new_process()
        offsets: dict[MessageQueue, int] = {}
        group = f"{GROUPS}{index}"
        self._groups[group] = None
        async with PullConsumer(instance, group) as consumer:
            while await clients.pause(rng):
                with clients.acting():
                    for message in await self._read(consumer, rng, offsets):
                        if rng.randrange(1000) < self._per_mille:
                            op = await self._give_back(instance, group, process, message, rng)
                            if op.outcome == Outcome.INFO:
                                process = clients.new_process()

    async def _read(
        self, consumer: PullConsumer, rng: SimRng, offsets: dict[MessageQueue, int]
    ) -> list[MessageExt]:
        """Return the next messages of a queue; none when there are none, or nobody says."""
        queues = list(self._clients.queues)
        try:
            if rng.random() < 0.5:
                queues = list(await consumer.fetch_message_queues(RETRY_PREFIX + consumer.group))
            queue = queues[rng.randrange(len(queues))]
            offset = offsets.get(queue, 0)
            result = await consumer.pull(queue, offset, max_messages=PULLED, timeout_s=0.0)
        except OffsetIllegalError as error:
            offsets[queue] = error.next_begin_offset
            return []
        except ClientError:
            return []  # the cluster is in trouble: that is the point
        offsets[queue] = result.next_begin_offset
        return list(result.messages)

    async def _give_back(
        self,
        instance: ClientInstance,
        group: str,
        process: int,
        message: MessageExt,
        rng: SimRng,
    ) -> Operation:
        from jepsen_like.workloads.clients import value_of

        clients = self._clients
        asked = -1 if rng.randrange(1000) < GIVEN_UP_PER_MILLE else 0
        op = clients.begin(process, F.SEND_BACK)
        op.group, op.value = group, value_of(message.body)
        op.cnt, op.status = message.reconsume_times, asked
        header = ConsumerSendMsgBackHeader(
            message.phy_offset, group, asked, max_reconsume_times=MAX_TRIES
        )
        try:
            name = clients.queues[0].broker_name
            address = instance.leaders.address(name)
            if address is None:
                await instance.route(clients.topic, fresh=True)
                raise BrokerUnreachableError(f"nobody is known to lead {name}")
            answer = await instance.ask(
                address,
                RequestCode.CONSUMER_SEND_MSG_BACK,
                dict(header.encode()),
                timeout_s=ATTEMPT_S,
            )
            if answer.code != 0:
                instance.leader_search.note_refusal(name, address, answer)
                if outcome_of(answer) == "unknown":
                    raise UnknownOutcomeError(answer.remark or "")
                raise RequestFailedError(answer.remark or "", code=answer.code)
        except ClientError as error:
            clients.failed(op, error)
        else:
            clients.end(op)
        return op

    async def drain(self, consumer: PullConsumer) -> None:
        """Read what came of it all, one row for each copy.

        Raises:
            ClientError: The healed cluster does not serve.
        """
        process = self._clients.new_process()
        prefixes = (RETRY_PREFIX, DEAD_PREFIX)
        for group, prefix in [(group, prefix) for group in self._groups for prefix in prefixes]:
            topic = prefix + group
            try:
                queues = await consumer.fetch_message_queues(topic)
            except NoRouteError:
                continue  # nothing ever went there
            for queue in queues:
                offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
                if offset:
                    self._returned(process, group, queue, NOTHING, 0, offset)
                while offset < end:
                    result = await consumer.pull(queue, offset, max_messages=32, timeout_s=0.0)
                    if result.next_begin_offset <= offset:
                        raise RequestFailedError(f"{queue}: the drain stands at {offset} of {end}")
                    for message in result.messages:
                        value = _value(message)
                        tries = message.reconsume_times
                        self._returned(process, group, queue, value, tries, 0)
                    offset = result.next_begin_offset

    def _returned(
        self,
        process: int,
        group: str,
        queue: MessageQueue,
        value: int,
        tries: int,
        min_off: int,
    ) -> None:
        op = self._clients.begin(process, F.RETURNED, queue)
        op.group, op.value, op.cnt, op.min_off = group, value, tries, min_off
        self._clients.end(op)


def _value(message: MessageExt) -> int:
    from jepsen_like.workloads.clients import value_of

    return value_of(message.body)
