"""Requests of tools about one broker: settings, statistics, runtime figures, tables, clean-ups.

GET_BROKER_RUNTIME_INFO (28): RocketMQ's exporter reads every key and ends its round at one that is
missing, so a figure that is not measured here has the value that RocketMQ has at its start.
GET_BROKER_CONFIG (26) and UPDATE_BROKER_CONFIG (25): properties as text, both ways. A change is for
this broker alone, until it stops: its files stay what they are. All keys of a request take effect,
or none. The parts of the broker have their tables from its configuration and read them at each use,
so a change is made there and nowhere else. One by which less is kept has to be confirmed; the
refusal gives what would go now. A setting without `live` needs a restart, and the refusal names it;
what names a file, an address to listen on or a member is none of them.
GET_ALL_CONSUMER_OFFSET (43) and GET_ALL_DELAY_OFFSET (45): tables that RocketMQ's slaves copy.
Members of a group need neither: both tables are in their log. Tools and exporters read them.
CLEAN_EXPIRED_CONSUMEQUEUE (306), CLEAN_UNUSED_TOPIC (316): consume queues are cut with the log, and
those of a topic are removed with it, so there is nothing to clean. DELETE_EXPIRED_COMMITLOG (329)
lets expired segments go now instead of at `deleteWhen`.

Spec: docs/internals/protocol/remoting.md, sections 10, 10.1 and 10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from msgspec import json, structs

from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.commitlog.entry import parse_header
from dledger.commitlog.errors import ConfigError, OffsetOutOfRangeError
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.group_api import BrokerGroup
from dledger.processors.answers import asked_by, bad_request, is_confirmed
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import Answered, Handled, Limiter
from dledger.remoting.properties import format_properties, read_properties
from dledger.remoting.protocol.bodies import (
    BrokerStatsData,
    BrokerStatsItem,
    ConsumerOffsetSerializeWrapper,
    DataVersion,
    DelayOffsetSerializeWrapper,
    KVTable,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import OUR_VERSION, RemotingCommand, response_to
from dledger.remoting.protocol.headers import ViewBrokerStatsDataHeader
from dledger.remoting.protocol.own_fields import GivenUp
from dledger.remoting.protocol.signature import ACCESS_KEY
from dledger.remoting.protocol.topic_names import AUTO_CREATE_TOPIC_KEY_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import queue_of_level
from dledger.services.retention import RetentionService, keeps_less, lost_to_settings
from dledger.services.throughput import BrokerStats, Span, Throughput
from dledger.settings.config import ROCKETMQ_KEYS, SETTINGS, BrokerConfig
from dledger.settings.parts import BrokerSettings
from dledger.settings.text import (
    IGNORED_KEYS,
    IN_SYNC_KEYS,
    LEADER_ID,
    MASTER_AND_SLAVE_KEYS,
    REFUSED,
)
from dledger.state.state_record import AGE, FORCED, SIZE
from dledger.waiting import joined_in_turns

SOURCE: Final = "changed while it runs"

READ_BY_TOOLS: Final = {"filterServerNums": "0", "traceOn": "true"}
"""What `mqadmin exportConfigs` cannot be without: there are no filter servers, and clients' traces
are taken."""

NEVER_TAKEN: Final = frozenset({"rocketmqHome", "brokerConfigPath", "filterServerNums"})
"""Keys by which a RocketMQ broker was made to run commands or to write files: refused, not just
ignored, so that an attempt is seen."""

CHANGE_BYTES_MAX: Final = 64 * 1024
"""Largest body of a change: all settings there are fit well."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class LiveSettings:
    """The settings of a running broker; *config*: the one whose tables its parts have."""

    config: BrokerConfig
    _group: BrokerGroup
    _retention: RetentionService
    _clock: Clock

    def __post_init__(self) -> None:
        self.version = DataVersion(timestamp=self._clock.wall_ms())

    def text(self) -> str:
        """Return every setting as properties, under RocketMQ's name where it has one.

        With what RocketMQ's tools read besides and is no setting here.
        """
        found = {
            setting.keys[0] if setting.keys else path: self.config.shown(path)
            for path, setting in SETTINGS.items()
        }
        leads = self._group.leadership is not None
        broker_id = LEADER_ID if leads else self.config.self_number + 1
        return format_properties(
            {
                **found,
                **READ_BY_TOOLS,
                "brokerId": str(broker_id),
                "useTLS": "false" if self.config.server.tls_mode == "disabled" else "true",
            }
        )

    def update(
        self, changes: Mapping[str, str], *, asked_by: str = "", is_confirmed: bool = False
    ) -> list[str]:
        """Let settings have other values from now on; all of them or none.

        Returns a sentence for each key that is accepted and changes nothing, as in a file.

        Args:
            changes: RocketMQ's key, or ``table.name``, to text.
            is_confirmed: Messages that are kept now may go because of it.
        Raises:
            SettingRefusedError: Names the key that cannot be changed, or not to that value.
            ConfirmationNeededError: Less would be kept, and that is not confirmed.
        """
        try:
            values, notes = self.config.changes(
                changes, path_of=path_of, daemon="broker", never=NEVER_TAKEN
            )
            after = self.config.with_values(values, SOURCE)
        except ConfigError as error:
            raise SettingRefusedError(str(error)) from None
        self._refuse_what_needs_a_start(values)
        lost = self._given_up(after, values)
        if lost is not None:
            if not is_confirmed:
                raise ConfirmationNeededError(lost, _command_for(values))
            _log.warning("retention_shortened", asked_by=asked_by, **structs.asdict(lost))
        for path in values:
            if path in CAUSED_BY:
                self._retention.asked_by[CAUSED_BY[path]] = asked_by
            _log.info(
                "setting_changed",
                setting=path,
                value=after.shown(path),
                before=self.config.shown(path),
                asked_by=asked_by,
            )
        self.config.change(values, SOURCE)
        if values:
            self.version = DataVersion(
                timestamp=self._clock.wall_ms(), counter=self.version.counter + 1
            )
        for note in notes:
            _log.warning("setting_changes_nothing", text=note, asked_by=asked_by)
        return notes

    def _given_up(self, after: BrokerConfig, values: Mapping[str, Any]) -> GivenUp | None:
        """Return what goes because of the change; None when no less is kept after it."""
        if not keeps_less(self.config.store, after.store):
            return None
        change = ", ".join(
            f"{path} = {after.shown(path)} (now {self.config.shown(path)})"
            for path in values
            if path in CAUSED_BY
        )
        look = self._retention.look(0)
        return lost_to_settings(self._group, self._retention.entry_log(), after.store, look, change)

    def _refuse_what_needs_a_start(self, values: Mapping[str, Any]) -> None:
        if (
            values.get("broker.auto_create_topic_enable")
            and AUTO_CREATE_TOPIC_KEY_TOPIC not in self._group.state.builtin_topics
        ):
            raise SettingRefusedError(
                f"autoCreateTopicEnable: this broker was started without"
                f" {AUTO_CREATE_TOPIC_KEY_TOPIC}, which clients ask for; it needs a restart"
            )


def path_of(key: str) -> str:
    """Return the path of a setting from RocketMQ's key or from itself.

    Raises SettingRefusedError: there is no such setting, or it changes nothing here.
    """
    path = ROCKETMQ_KEYS.get(key, key)
    if path in SETTINGS:
        return path
    if key in IGNORED_KEYS:
        raise SettingRefusedError(f"{key} changes nothing here: {IGNORED_KEYS[key]}")
    if key in REFUSED:
        raise SettingRefusedError(f"{key}: {REFUSED[key].reason}")
    if key in IN_SYNC_KEYS or key in MASTER_AND_SLAVE_KEYS:
        raise SettingRefusedError(f"{key}: the members of the group decide; see dledger raft")
    raise SettingRefusedError(f"there is no setting {key}")


def _command_for(values: Mapping[str, Any]) -> str:
    """Return the sentence that explains how to do it all the same."""
    assignments = " ".join(f"{path}={SETTINGS[path].show(value)}" for path, value in values.items())
    return f"`dledger config set {assignments}` shows what would go, and does it with --yes"


CAUSED_BY: Final[Mapping[str, str]] = {
    "store.keep_bytes": SIZE,
    "store.file_reserved_time": AGE,
    "store.clean_file_forcibly_enable": FORCED,
    "store.disk_space_clean_forcibly_ratio": FORCED,
}
"""Path of a setting that decides what is kept → the cause of moves of the floor that follow."""


class BrokerConfigProcessor:
    """Answers 25 and 26."""

    def __init__(self, live: LiveSettings) -> None:
        self._live = live

    @handles(RequestCode.GET_BROKER_CONFIG, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def get(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Return all settings, and in ``version`` how new they are."""
        version = self._live.version.encode().decode()
        return response_to(command, ext={"version": version}, body=self._live.text().encode())

    @handles(
        RequestCode.UPDATE_BROKER_CONFIG,
        limit=Limit.SETTINGS,
        rule=ADMIN,
        local=True,
        subject=lambda command: {"settings": ",".join(_changes(command))},
    )
    def update(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Change settings until this broker stops; all of them or none.

        Raises:
            SettingRefusedError, ConfirmationNeededError, BadRequestError: Nothing was changed.
        """
        try:
            notes = self._live.update(
                _changes(command), asked_by=asked_by(connection), is_confirmed=is_confirmed(command)
            )
        except (SettingRefusedError, ConfirmationNeededError) as error:
            _log.warning(
                "setting_refused",
                error=str(error),
                peer=connection.peer_address[0],
                access_key=command.ext.get(ACCESS_KEY),
            )
            raise
        version = self._live.version.encode().decode()
        return response_to(command, 0, "; ".join(notes) or None, {"version": version})


def _changes(command: RemotingCommand) -> dict[str, str]:
    body = bytes(command.body)
    if len(body) > CHANGE_BYTES_MAX:
        raise BadRequestError(f"{len(body)} bytes of settings, at most {CHANGE_BYTES_MAX}")
    try:
        changes = read_properties(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequestError(f"body is not UTF-8: {error}") from error
    except ConfigError as error:
        raise BadRequestError(str(error)) from error
    if not changes:
        raise BadRequestError("no setting is named: key=value, one a line")
    return changes


class BrokerStatsProcessor:
    """Answers 315; an unknown pair is code 1, as in RocketMQ."""

    def __init__(self, stats: BrokerStats, *, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock

    @handles(RequestCode.VIEW_BROKER_STATS_DATA, limit=Limit.ADMIN, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return what was counted here since this node started."""
        header = ViewBrokerStatsDataHeader.decode(command.ext)
        name, key = header.stats_name, header.stats_key
        spans = self._stats.spans(name, key, self._clock.monotonic())
        if spans is None:
            raise bad_request(f"The stats <{name}> <{key}> not exist")
        minute, hour, day = map(_item, spans)
        body = BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)
        return response_to(command, body=body.encode())


def _item(span: Span) -> BrokerStatsItem:
    return BrokerStatsItem(sum=span.count, tps=round(span.per_second, 4))


class CleanUpProcessor:
    """Answers all three with success, on any member: tools ask them all.

    *expire_soon*: lets expired segments go at the next check, whatever the hour; its argument names
    the account and host of the request.
    """

    def __init__(self, group: BrokerGroup, expire_soon: Callable[[str], None]) -> None:
        self._group = group
        self._expire_soon = expire_soon

    @handles(
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        limit=Limit.ADMIN,
        rule=ADMIN,
        local=True,
    )
    def nothing_to_clean(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 306 and 316."""
        return response_to(command)

    @handles(RequestCode.DELETE_EXPIRED_COMMITLOG, limit=Limit.ADMIN, rule=ADMIN, local=True)
    def delete_expired(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 329; the leader decides for all members. What has not expired stays."""
        if self._group.leadership is not None:
            requester = asked_by(connection)
            _log.info("expired_segments_asked_for", asked_by=requester)
            self._expire_soon(requester)
        return response_to(command)


class SlaveSyncProcessor:
    """Answers from what is applied, on any member."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group

    @handles(RequestCode.GET_ALL_CONSUMER_OFFSET, limit=Limit.ADMIN, rule=ADMIN, shows=True)
    async def consumer_offsets(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 43."""
        version = self._version()
        rows = (
            json.encode({f"{topic}@{group}": dict(sorted(offsets.items()))})[1:-1]
            for (group, topic), offsets in list(self._group.state.consumer_offsets.items())
        )
        body = ConsumerOffsetSerializeWrapper(await joined_in_turns(rows, b"{}"), version)
        return response_to(command, body=body.encode())

    @handles(RequestCode.GET_ALL_DELAY_OFFSET, limit=Limit.ADMIN, rule=ADMIN, shows=True)
    def delay_offsets(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 45."""
        body = DelayOffsetSerializeWrapper(
            offset_table=dict(sorted(self._group.state.delay_progress.items())),
            data_version=self._version(),
        )
        return response_to(command, body=body.encode())

    def _version(self) -> DataVersion:
        state = self._group.state
        return DataVersion(
            timestamp=state.last_store_time_ms,
            counter=state.applied_index,
            state_version=state.applied_term,
        )


EARLIEST_LOOK_ENTRIES = 100
"""Entries read for the first message; beyond it the log counts as empty."""

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
"""How long the put of a message takes is not measured, and there are no such buffers."""

VERSION_DESC = "V4_9_7"
"""The RocketMQ version this broker's `response.version` stands for."""


def earliest_message_ms(group: BrokerGroup) -> int:
    """Return the store time of the first message kept, -1 when there is none."""
    log, last = group.log, group.state.applied_index
    first = log.first_index
    # No-ops stand alone between terms: messages come within a few entries.
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


@dataclass(eq=False, repr=False)
class RuntimeInfoProcessor:
    """Answers 28.

    Args:
        disk_ratio: Used part of the file system that holds the log, 0 … 1.
        limiters: Open requests, by RocketMQ's name of the thread pool that would hold them.
    """

    _group: BrokerGroup
    _settings: BrokerSettings
    _throughput: Throughput
    _clock: Clock
    _disk_ratio: Callable[[], float]
    _limiters: Mapping[str, Limiter]
    _disk_bytes: Callable[[], tuple[int, int]]

    def __post_init__(self) -> None:
        self._boot_ms = self._clock.wall_ms()
        self._boot_position = self._group.log.end_position

    @handles(RequestCode.GET_BROKER_RUNTIME_INFO, limit=Limit.ADMIN, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the table."""
        return response_to(command, body=KVTable(table=self._table()).encode())

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
        for level in range(1, len(self._settings.store.delay_levels_ms) + 1):
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
