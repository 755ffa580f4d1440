"""Settings of a push consumer, with RocketMQ's defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dledger.client.consumer.offsets import FROM_LAST, ConsumeFrom
from dledger.client.consumer.process_queue import FlowLimits
from dledger.client.consumer.rebalance import AllocateMessageQueueStrategy, Averagely
from dledger.client.core.hooks import ConsumeMessageHook
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.bodies import MessageModel
from dledger.remoting.protocol.topic_names import TRACE_TOPIC

CONSUME_TASKS: Final = 20
"""RocketMQ's consumeThreadMin: listeners of one consumer that run at the same time."""
PULL_BATCH_SIZE: Final = 32
CONSUME_TIMEOUT_S: Final = 15 * 60.0
"""RocketMQ's: a message that a listener has had for so long is sent back."""
PERSIST_PERIOD_S: Final = 5.0
"""RocketMQ's: how often offsets are committed."""
SUSPEND_CURRENT_QUEUE_MS: Final = 1000
"""RocketMQ's: how long an ordered queue rests before it is tried again."""
STOP_TIMEOUT_S: Final = 5.0
"""How long a consumer that stops waits for its listeners; what they have not finished by then is
delivered again."""
LAST_OFFSETS_S: Final = 3.0
"""For storing the last offsets of a consumer that stops; without it messages are repeated."""
DEFAULT_MAX_RECONSUME_TIMES: Final = 16
NO_LIMIT: Final = (1 << 31) - 1
MAX_CONSUME_TASKS: Final = 1000
MAX_BATCH: Final = 1024
"""RocketMQ's largest consumeMessageBatchMaxSize and pullBatchSize."""


@dataclass(frozen=True, slots=True)
class PushConfig:
    """How a push consumer consumes.

    Attributes:
        message_model: CLUSTERING: the consumers of a group share the queues. BROADCASTING: each
            sees every message, keeps its offsets in a file, and drops what it cannot cope with.
        consume_from: Where a group begins in a queue it knows nothing of.
        allocate_message_queue_strategy: How queues are dealt out; the same for the whole group.
        consume_tasks: Listeners that run at the same time; ordered ones: one per queue at most.
        consume_message_batch_max_size: Messages a listener gets at a time.
        pull_batch_size: Messages asked for at a time; brokers give 32 at most.
        flow_limits: Of each queue; ordered consumption has no span.
        consume_timeout_s: See `CONSUME_TIMEOUT_S`.
        max_reconsume_times: Tries after which a message goes to the dead letters; -1: 16, and
            without end for ordered ones.
        suspend_current_queue_ms: See `SUSPEND_CURRENT_QUEUE_MS`.
        persist_period_s: See `PERSIST_PERIOD_S`.
        stop_timeout_s: See `STOP_TIMEOUT_S`.
        follower_reads: See `dledger.client.consumer.pull_consumer.PullConsumer`.
        offset_folder: For the offset files of broadcasting consumers; empty: they keep none and
            begin at `consume_from` each time.
        consume_message_hooks: Called around every call of the listener; see `client.core.hooks`.
        enable_msg_trace: Send to *trace_topic* what becomes of messages; see `client.trace`.
        trace_topic: Where to.
    """

    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from: ConsumeFrom = FROM_LAST
    allocate_message_queue_strategy: AllocateMessageQueueStrategy = field(default_factory=Averagely)
    consume_tasks: int = CONSUME_TASKS
    consume_message_batch_max_size: int = 1
    pull_batch_size: int = PULL_BATCH_SIZE
    flow_limits: FlowLimits = field(default_factory=FlowLimits)
    consume_timeout_s: float = CONSUME_TIMEOUT_S
    max_reconsume_times: int = -1
    suspend_current_queue_ms: int = SUSPEND_CURRENT_QUEUE_MS
    persist_period_s: float = PERSIST_PERIOD_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    follower_reads: bool = False
    offset_folder: str = ""
    consume_message_hooks: tuple[ConsumeMessageHook, ...] = ()
    enable_msg_trace: bool = False
    trace_topic: str = TRACE_TOPIC

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: A number is outside its range.
        """
        for name, value, most in (
            ("consume_tasks", self.consume_tasks, MAX_CONSUME_TASKS),
            ("consume_message_batch_max_size", self.consume_message_batch_max_size, MAX_BATCH),
            ("pull_batch_size", self.pull_batch_size, MAX_BATCH),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from 1 to {most}")
        for name, seconds in (
            ("consume_timeout_s", self.consume_timeout_s),
            ("persist_period_s", self.persist_period_s),
        ):
            if seconds <= 0:
                raise ConfigError(f"{name} is {seconds}; it must be above 0")
        if self.max_reconsume_times < -1:
            raise ConfigError(f"max_reconsume_times is {self.max_reconsume_times}; -1: the default")

    @property
    def is_broadcasting(self) -> bool:
        """Whether each consumer sees every message."""
        return self.message_model is MessageModel.BROADCASTING

    def tries(self, *, orderly: bool) -> int:
        """Return after how many tries a message is given up."""
        if self.max_reconsume_times >= 0:
            return self.max_reconsume_times
        return NO_LIMIT if orderly else DEFAULT_MAX_RECONSUME_TIMES
