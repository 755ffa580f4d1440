"""Producers of transactional messages, and the application that brokers ask about them.

What became of a local part is written once in what stands for the application's database; answers
to questions come from there. Beside plain ends there are ends sent several times, two that
contradict each other at the same moment, ends sent much later, and half messages without an end.

A row is one end sent, with retries after unknown outcomes switched off. Questions leave a row when
they arrive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import trio

from dledger.client.core.broker_requests import Question
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.transaction import HalfMessage, TransactionEnd
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.commitlog.properties import PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS
from dledger.jepsen_like.history.operation import Decision, F, Outcome
from dledger.jepsen_like.plans.plan import Workload
from dledger.jepsen_like.plans.promised import CHECKS_MAX
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.workloads.recorder import Recorder, value_of
from dledger.jepsen_like.workloads.through import Role

GROUP: Final = "transactions"

TIMEOUT_MS: Final = 2_000
INTERVAL_MS: Final = 4_000
PATIENCE_S: Final = (TIMEOUT_MS + CHECKS_MAX * INTERVAL_MS) / 1000
"""How long check-back takes at most while a producer of the group is connected."""

NEVER_KNOWN: Final = 12
"""One value of this many is one whose application never decides."""

IMMUNE_OF: Final = 5
"""One value of this many is one that no producer is to be asked about for `IMMUNE_S`."""
IMMUNE_S: Final = 8
"""Longer than brokers wait otherwise, and below their bound for what is due."""

LOCAL_S: Final = 0.3
"""Mean time that a local part takes."""

COMMIT, ROLLBACK, UNKNOWN = (
    LocalTransactionState.COMMIT,
    LocalTransactionState.ROLLBACK,
    LocalTransactionState.UNKNOWN,
)
_DECISIONS: Final = {COMMIT: Decision.COMMIT, ROLLBACK: Decision.ROLLBACK}


def broker_settings(workload: Workload) -> dict[str, str]:
    """Return the settings of brokers where a workload needs other ones than usual."""
    settings: dict[str, str] = {}
    if workload.timer_roll_s:
        settings["store.timer_roll_window_slot"] = str(workload.timer_roll_s)
    if not workload.transactions_per_mille:
        return settings
    return settings | {
        "broker.transaction_timeout_ms": str(TIMEOUT_MS),
        "broker.transaction_check_interval_ms": str(INTERVAL_MS),
        "broker.transaction_check_max": str(CHECKS_MAX),
    }


class Transactions(Role):
    """The transactions of a run; *halves*: how half messages are sent."""

    field = "transactions_per_mille"

    def __init__(self, clients: Recorder, halves: ProducerConfig) -> None:
        super().__init__(clients)
        self.clients = clients
        self._halves = halves
        self.values: dict[str, int] = {}
        """Transaction id to value."""
        self._said: dict[int, LocalTransactionState] = {}
        """The application's database: value to what became of its local part, written once."""
        self._producer: _Recorded | None = None

    # -- answers ---------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """One producer, which all transactions have."""
        return min(1, super().count)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Keep the machine's producer open, for transactions and for questions."""
        async with self._new_producer(instance) as producer:
            self._producer = producer
            try:
                await trio.sleep_forever()
            finally:
                self._producer = None

    async def answer(self, instance: ClientInstance) -> None:
        """Answer questions on a machine that begins no transactions."""
        async with self._new_producer(instance):
            await trio.sleep_forever()

    def _new_producer(self, instance: ClientInstance) -> _Recorded:
        config = TransactionProducerConfig(
            producer=self._halves,
            end_timeout_s=self._halves.send_timeout_s,
            retry_end=False,
            topics=(self.clients.topic,),
        )
        return _Recorded(self, instance, config)

    async def ask(self, message: MessageExt) -> LocalTransactionState:
        """Be the application that is asked what became of a local part."""
        await trio.lowlevel.checkpoint()
        value = value_of(message.body)
        self.values[message.message_id] = value
        if value % NEVER_KNOWN == 0:
            return UNKNOWN
        # Not done yet: then it never will be.
        return self._said.setdefault(value, ROLLBACK)

    # -- begins ----------------------------------------------------------------------------

    async def transact(
        self, process: int, queue: MessageQueue, message: Message, rng: SimRng
    ) -> bool:
        """Begin a transaction and mostly end it; false when the process saw an unknown outcome."""
        clients, producer = self.clients, self._producer
        if producer is None:
            return True  # the machine has just started
        value = value_of(message.body)
        op = clients.begin(process, F.HALF, queue)
        op.value = value
        # A hostile one: then the half message would be open for three days.
        properties = dict(message.properties or {})
        properties.pop(PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS, None)
        if value % IMMUNE_OF == 0:
            op.due_ns = op.call_ns + IMMUNE_S * 1_000_000_000
            properties[PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS] = str(IMMUNE_S)
        message = replace(message, properties=properties)
        try:
            half = await producer.begin(message, queue=queue)
        except ClientError as error:
            clients.failed(op, error)
            return op.outcome != Outcome.INFO
        clients.end(op)
        op.txn = half.half_offset
        self.values[half.transaction_id] = value
        await self._go_on(producer, half, value, rng)
        return True

    async def _go_on(self, producer: _Recorded, half: HalfMessage, value: int, rng: SimRng) -> None:
        chance = rng.randrange(100)
        wanted = COMMIT if rng.randrange(100) < 70 else ROLLBACK
        local_s = rng.expovariate(1 / LOCAL_S) * (20 if rng.randrange(100) < 10 else 1)
        late_s = rng.uniform(0.5, 8.0)
        other_first = rng.randrange(2) == 0
        await self.clients.sleep(local_s)
        if value % NEVER_KNOWN == 0:
            await producer.leave_open(half)
            return
        state = self._said.setdefault(value, wanted)
        if chance < 15:  # it is killed here: what was done is in the database
            await producer.leave_open(half)
            return
        other = ROLLBACK if state is COMMIT else COMMIT
        states = [state]
        if chance < 30:
            states = [state, state, state]
        elif chance < 45:
            states = [other, state] if other_first else [state, other]
        async with trio.open_nursery() as nursery:
            for each in states:
                nursery.start_soon(self._end, producer, half, each)
        if chance >= 85:
            await self.clients.sleep(late_s)
            await self._end(producer, half, other if other_first else state)
        await producer.leave_open(half)

    async def _end(
        self, producer: _Recorded, half: HalfMessage, state: LocalTransactionState
    ) -> None:
        try:
            await producer.end(half, state)
        except ClientError:
            pass  # its row has it


class _Recorded(TransactionProducer):
    """A producer that leaves a row for every end it sends and every question it gets."""

    def __init__(
        self, run: Transactions, instance: ClientInstance, config: TransactionProducerConfig
    ) -> None:
        super().__init__(instance, GROUP, run.ask, config)
        self._run = run

    async def _send_end(self, end: TransactionEnd) -> bool:
        decision = _DECISIONS.get(end.state)
        if decision is None:
            return await super()._send_end(end)  # it decides nothing
        clients = self._run.clients
        with clients.acting():
            op = clients.begin(clients.new_process(), F.END_TRANSACTION)
            op.value, op.txn = self._run.values[end.transaction_id], end.half_offset
            op.decision = decision
            try:
                is_confirmed = await super()._send_end(end)
            except ClientError as error:
                clients.failed(op, error)
                raise
            if is_confirmed:
                clients.end(op)
            return is_confirmed

    def _on_question(self, question: Question) -> None:
        clients = self._run.clients
        op = clients.begin(clients.new_process(), F.CHECK)
        op.value, op.txn = value_of(question.message.body), question.half_offset
        clients.end(op)
        super()._on_question(question)
