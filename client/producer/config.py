"""Settings of a producer."""

from __future__ import annotations

from dataclasses import dataclass

from dledger.client.core.hooks import SendMessageHook
from dledger.client.core.message import MAX_BODY_BYTES
from dledger.client.core.message_ext import CompressionType, check_level
from dledger.client.producer.lane import MAX_REQUEST_BYTES, MAX_REQUEST_RECORDS, MAX_WAITING_BYTES
from dledger.remoting.protocol.topic_names import TRACE_TOPIC


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """Settings of a producer.

    Attributes:
        send_timeout_s: Whole budget of one send, retries and a fail-over included. More than
            RocketMQ's 3 s, because a send of ours survives an election instead of failing.
        attempt_timeout_s: One request.
        max_retries: Attempts after one whose outcome is unknown, unless it is idempotent.
        retry_unknown: Send again after an unknown outcome: stored exactly once where the broker
            knows idempotent producers, at least once elsewhere. Off: the caller gets
            UnknownOutcomeError at once.
        idempotent: Number the sends, so that the broker stores a repeated one once and repeating
            goes on until the deadline. No effect with brokers that do not know it.
        compress_over_bytes: Bodies over it are compressed, unless that makes them larger; None:
            never. Batches are sent as they are.
        compress_type: How; clients of RocketMQ before 4.9.4 read zlib only.
        compress_level: Of zlib or Zstandard; see `dledger.client.core.message_ext.CompressionType`.
        max_message_bytes: Largest body, and largest batch.
        latency_fault_enable: Avoid brokers that were slow or failed (RocketMQ's table).
        requests_in_flight: Requests to one broker group at the same time, more than one only when
            much is waiting. 1 keeps the order of concurrent sends, failures included; sends that
            wait for one another keep theirs always.
        max_request_bytes: Most record bytes in one coalesced request.
        max_request_records: Most records in one.
        max_waiting_bytes: Per broker group; beyond it sends wait.
        send_message_hooks: Called for every send; see `dledger.client.core.hooks`.
        enable_msg_trace: Send to *trace_topic* what becomes of messages; see `client.trace`.
        trace_topic: Where to.
    """

    send_timeout_s: float = 10.0
    attempt_timeout_s: float = 3.0
    max_retries: int = 2
    retry_unknown: bool = True
    idempotent: bool = True
    compress_over_bytes: int | None = 4096
    compress_type: CompressionType = CompressionType.ZLIB
    compress_level: int = 5
    max_message_bytes: int = MAX_BODY_BYTES
    latency_fault_enable: bool = False
    requests_in_flight: int = 4
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_request_records: int = MAX_REQUEST_RECORDS
    max_waiting_bytes: int = MAX_WAITING_BYTES
    send_message_hooks: tuple[SendMessageHook, ...] = ()
    enable_msg_trace: bool = False
    trace_topic: str = TRACE_TOPIC

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The compression has no such level.
        """
        check_level(self.compress_type, self.compress_level)
