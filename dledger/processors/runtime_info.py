"""GET_BROKER_RUNTIME_INFO (28): the table that mqadmin and the dashboard read.

RocketMQ's exporter reads every key and ends its round at one that is missing: what is not measured
here is there with the value that RocketMQ has at its start.

Spec: remoting fact sheet, section 10.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from commitlog.entry import parse_header
from commitlog.errors import OffsetOutOfRangeError
from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.services.delay_level import queue_of_level
from dledger.services.throughput import Throughput
from dledger.state.names import SCHEDULE_TOPIC
from remoting.connection import Connection
from remoting.processor import Handled, Limiter
from remoting.protocol.bodies import KVTable
from remoting.protocol.command import OUR_VERSION, RemotingCommand, response_to
from remoting.seams import Clock

EARLIEST_LOOK_ENTRIES = 100
"""Entries looked at for the first message; beyond it the log counts as empty."""

NOT_MEASURED: Final[Mapping[str, str]] = {
    "putMessageDistributeTime": " ".join(
        f"[{span}]:0"
        for span in (
            *("<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s"),
            *("1~2s", "2~3s", "3~4s", "4~5s", "5~10s", "10s~"),
        )
    ),
    "putMessageEntireTimeMax": "0",
    "getMessageEntireTimeMax": "0",
    "dispatchMaxBuffer": "0",
    "startAcceptSendRequestTimeStamp": "0",
    "remainTransientStoreBufferNumbs": "0",
}
"""How long a put takes is not measured by the message, and there are no such buffers."""

VERSION_DESC = "V4_9_7"
"""The RocketMQ version this broker's `response.version` stands for."""


def earliest_message_ms(group: BrokerGroup) -> int:
    """Return the store time of the first message kept, -1 when there is none."""
    log, last = group.log, group.state.applied_index
    first = log.first_index
    # No-ops stand alone between reigns: messages come within a few entries.
    for index in range(first, min(last, first + EARLIEST_LOOK_ENTRIES) + 1):
        header = parse_header(log.frame(index))
        if header.record_count:
            return header.store_time_ms
    return -1


def unflushed_bytes(group: BrokerGroup) -> int:
    """Return how much of the log is written and not yet on disk."""
    log, stable = group.log, int(group.status().get("stable_index", 0))
    try:
        return log.end_position - parse_header(log.frame(stable + 1)).position
    except OffsetOutOfRangeError:
        return 0


class RuntimeInfoProcessor:
    """Answers 28.

    Args:
        disk_ratio: Used part of the file system that holds the log, 0 … 1.
        limiters: Open requests, by RocketMQ's name of the thread pool that would hold them.
        disk_bytes: Size of that file system and what is left of it.
    """

    def __init__(
        self,
        group: BrokerGroup,
        settings: BrokerSettings,
        throughput: Throughput,
        *,
        clock: Clock,
        disk_ratio: Callable[[], float] = lambda: 0.0,
        limiters: Mapping[str, Limiter] | None = None,
        disk_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._group = group
        self._settings = settings
        self._throughput = throughput
        self._clock = clock
        self._disk_ratio = disk_ratio
        self._limiters = limiters or {}
        self._disk_bytes = disk_bytes
        self._boot_ms = clock.wall_ms()
        self._boot_position = group.log.end_position

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the table."""
        return response_to(command, 0, None, None, KVTable(table=self._table()).encode())

    def _table(self) -> dict[str, str]:
        group, state, rates = self._group, self._group.state, self._throughput
        up_ms = max(0, self._clock.wall_ms() - self._boot_ms)
        transferred = rates.rates("got")
        total, free = self._disk_bytes()
        put_bytes = max(0, group.log.end_position - self._boot_position)
        table = {
            "brokerActive": "true" if group.leadership is not None else "false",
            "brokerVersion": str(OUR_VERSION),
            "brokerVersionDesc": VERSION_DESC,
            "bootTimestamp": str(self._boot_ms),
            "runtime": _duration(up_ms),
            "putTps": rates.rates("put"),
            "getFoundTps": rates.rates("found"),
            "getMissTps": rates.rates("missed"),
            "getTotalTps": transferred,
            # Both spellings: 4.x writes one, 5.x the other.
            "getTransferedTps": transferred,
            "getTransferredTps": transferred,
            "putMessageTimesTotal": str(rates.put),
            "msgPutTotalYesterdayMorning": str(rates.day.put_yesterday_morning),
            "msgPutTotalTodayMorning": str(rates.day.put_today_morning),
            "msgPutTotalTodayNow": str(rates.put),
            "msgGetTotalYesterdayMorning": str(rates.day.got_yesterday_morning),
            "msgGetTotalTodayMorning": str(rates.day.got_today_morning),
            "msgGetTotalTodayNow": str(rates.got),
            "commitLogMinOffset": str(state.floor.position),
            "commitLogMaxOffset": str(state.applied_end_position),
            "commitLogDiskRatio": f"{self._disk_ratio():.4f}",
            "consumeQueueDiskRatio": f"{self._disk_ratio():.4f}",
            # Writers wait for no lock; mqadmin's clusterList wants the figure.
            "pageCacheLockTimeMills": "0",
            "remainHowManyDataToFlush": f"{unflushed_bytes(group)} B",
            **_queue_lengths_of(self._limiters),
            "dispatchBehindBytes": str(max(0, group.log.end_position - state.applied_end_position)),
            "earliestMessageTimeStamp": str(earliest_message_ms(group)),
            "commitLogDirCapacity": f"Total : {_size(total)}, Free : {_size(free)}.",
            "putMessageSizeTotal": str(put_bytes),
            "putMessageAverageSize": f"{put_bytes / rates.put if rates.put else 0.0:.2f}",
            **NOT_MEASURED,
            "raftTerm": str(group.term),
            "raftAppliedIndex": str(state.applied_index),
        }
        for level in range(1, len(self._settings.delay_levels_ms) + 1):
            delivered = state.delay_progress.get(level, 0)
            end = state.max_offset(SCHEDULE_TOPIC, queue_of_level(level))
            table[f"scheduleMessageOffset_{level}"] = f"{delivered},{end}"
        return table


def _queue_lengths_of(limiters: Mapping[str, Limiter]) -> dict[str, str]:
    """Return open requests and their limits under the names of RocketMQ's thread pools."""
    lengths: dict[str, str] = {}
    for pool, limiter in limiters.items():
        lengths[f"{pool}ThreadPoolQueueSize"] = str(limiter.in_use)
        lengths[f"{pool}ThreadPoolQueueCapacity"] = str(limiter.max_concurrent)
        # Nothing queues before it is handled.
        lengths[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = "0"
    return lengths


def _size(size_bytes: float) -> str:
    """Return a size as RocketMQ writes it for people."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size_bytes >= 1024 and len(units) > 1:
        size_bytes /= 1024
        units.pop(0)
    return f"{size_bytes:.1f} {units[0]}"


def _duration(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, seconds = divmod(rest, 60)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
