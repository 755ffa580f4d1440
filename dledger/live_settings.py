"""Settings that take effect while a broker runs, and what each of them changes.

A change is for this broker alone, until it stops: its files stay what they are. All keys of a
request take effect, or none. A change by which less is kept has to be confirmed. Whatever is not
in the table below needs a restart, and says so; what names a file, an address to listen on or a
member is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from msgspec import structs

from commitlog.errors import ConfigError
from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.broker_id import LEADER_ID, follower_id
from dledger.config import BrokerConfig
from dledger.group import Group
from dledger.processors.broker_processors import BrokerProcessors
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.get_message import ReadLimits
from dledger.registration import Registration
from dledger.retention_settings import retention_settings
from dledger.services.local_hour import HOUR_MS
from dledger.services.retention import RetentionService
from dledger.services.shorter_retention import keeps_less, lost_to_settings
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings_ignored import IGNORED_KEYS
from dledger.settings_refused import IN_SYNC_KEYS, MASTER_AND_SLAVE_KEYS, REFUSED_KEYS
from dledger.settings_tables import ROCKETMQ_KEYS, SETTINGS
from dledger.settings_values import parse_value, show_value
from dledger.state.floor_reason import AGE, FORCED, SIZE
from dledger.state.names import AUTO_CREATE_TOPIC_KEY_TOPIC
from remoting.java_properties import format_properties
from remoting.protocol.bodies import DataVersion
from remoting.protocol.confirmation import GivenUp
from remoting.seams import Clock

SOURCE: Final = "changed while it runs"

READ_BY_TOOLS: Final = {"filterServerNums": "0", "traceOn": "true"}
"""What `mqadmin exportConfigs` cannot be without: there are no filter servers, and clients' traces
are taken."""

NEVER_TAKEN: Final = frozenset({"rocketmqHome", "brokerConfigPath", "filterServerNums"})
"""Keys by which a RocketMQ broker was made to run commands or to write files: refused, not just
ignored, so that whoever tries is seen."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running broker that settings change."""

    group: Group
    settings: BrokerSettings
    processors: BrokerProcessors
    retention: RetentionService
    checks: TransactionCheckService
    registration: Registration


class LiveSettings:
    """The settings of a running broker.

    Attributes:
        config: As they are now.
        version: Grows with each change; the time is that of the last one, or of the start.
    """

    def __init__(self, config: BrokerConfig, parts: Parts, clock: Clock) -> None:
        self.config = config
        self.version = DataVersion(timestamp=clock.wall_ms())
        self._parts = parts
        self._clock = clock

    def text(self) -> str:
        """Return every setting as properties, under RocketMQ's name where it has one.

        With what RocketMQ's tools read besides and is no setting here.
        """
        found = {
            setting.keys[0] if setting.keys else path: show_value(path, self.config.get(path))
            for path, setting in SETTINGS.items()
        }
        leads = self._parts.group.leadership is not None
        broker_id = LEADER_ID if leads else follower_id(self._parts.registration.settings.self_id)
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

        Args:
            changes: RocketMQ's key, or ``table.name``, to text.
            asked_by: Account and host, for the log.
            is_confirmed: Messages that are kept now may go because of it.
        Returns:
            A sentence for each key that is accepted and changes nothing, as in a file.
        Raises:
            SettingRefusedError: Names the key that cannot be changed, or not to that value.
            ConfirmationNeededError: Less would be kept, and that is not confirmed.
        """
        values: dict[str, Any] = {}
        notes: list[str] = []
        for key, text in changes.items():
            if key in IGNORED_KEYS and key not in NEVER_TAKEN:
                notes.append(f"{key} is accepted and changes nothing: {IGNORED_KEYS[key]}")
                continue
            path = path_of(key)
            try:
                value = parse_value(SETTINGS[path], text)
            except ValueError as error:
                raise SettingRefusedError(f"{key} = {text!r}: {error}") from None
            if value == self.config.get(path):
                continue
            if path not in LIVE:
                raise SettingRefusedError(
                    f"{key} cannot change while the broker runs: set it in the configuration and"
                    " restart"
                )
            values[path] = value
        try:
            config = self.config.with_values(values, SOURCE)
        except ConfigError as error:
            raise SettingRefusedError(str(error)) from None
        self._refuse_what_needs_a_start(values)
        lost = self._given_up(config, values)
        if lost is not None:
            if not is_confirmed:
                raise ConfirmationNeededError(lost, _command_for(values))
            _log.warning("retention_shortened", asked_by=asked_by, **structs.asdict(lost))
        before, self.config = self.config, config
        for path, value in values.items():
            LIVE[path](self._parts, config)
            if path in CAUSED_BY:
                self._parts.retention.asked_by[CAUSED_BY[path]] = asked_by
            _log.info(
                "setting_changed",
                setting=path,
                value=show_value(path, value),
                before=show_value(path, before.get(path)),
                asked_by=asked_by,
            )
        if values:
            self.version = DataVersion(
                timestamp=self._clock.wall_ms(), counter=self.version.counter + 1
            )
        for note in notes:
            _log.warning("setting_changes_nothing", text=note, asked_by=asked_by)
        return notes

    def _given_up(self, config: BrokerConfig, values: Mapping[str, Any]) -> GivenUp | None:
        """Return what goes because of the change; None when no less is kept after it."""
        retention, after = self._parts.retention, retention_settings(config)
        if not keeps_less(retention.settings, after):
            return None
        change = ", ".join(
            f"{path} = {show_value(path, value)} (now {show_value(path, self.config.get(path))})"
            for path, value in values.items()
            if path in CAUSED_BY
        )
        group = self._parts.group
        return lost_to_settings(group, group.log, after, retention.look(0), change)

    def _refuse_what_needs_a_start(self, values: Mapping[str, Any]) -> None:
        if (
            values.get("broker.auto_create_topic_enable")
            and AUTO_CREATE_TOPIC_KEY_TOPIC not in self._parts.group.state.builtin_topics
        ):
            raise SettingRefusedError(
                f"autoCreateTopicEnable: this broker was started without"
                f" {AUTO_CREATE_TOPIC_KEY_TOPIC}, which clients ask for; it needs a restart"
            )


def path_of(key: str) -> str:
    """Return the path of a setting from RocketMQ's key or from itself.

    Raises:
        SettingRefusedError: There is no such setting, or it changes nothing here.
    """
    path = ROCKETMQ_KEYS.get(key, key)
    if path in SETTINGS:
        return path
    if key in IGNORED_KEYS:
        raise SettingRefusedError(f"{key} changes nothing here: {IGNORED_KEYS[key]}")
    if key in REFUSED_KEYS:
        raise SettingRefusedError(f"{key}: {REFUSED_KEYS[key]}")
    if key in IN_SYNC_KEYS or key in MASTER_AND_SLAVE_KEYS:
        raise SettingRefusedError(f"{key}: the members of the group decide; see dledger raft")
    raise SettingRefusedError(f"there is no setting {key}")


def _command_for(values: Mapping[str, Any]) -> str:
    """Return the sentence that says how to do it all the same."""
    assignments = " ".join(f"{path}={show_value(path, value)}" for path, value in values.items())
    return f"`dledger config set {assignments}` shows what would go, and does it with --yes"


def _broker_setting(name: str, path: str) -> Callable[[Parts, BrokerConfig], None]:
    def apply(parts: Parts, config: BrokerConfig) -> None:
        setattr(parts.settings, name, config.get(path))

    return apply


def _pull_limits(parts: Parts, config: BrokerConfig) -> None:
    store = config.store
    parts.settings.pull_limits = ReadLimits(
        store.max_transfer_count_in_memory, store.max_transfer_bytes_in_memory
    )
    parts.settings.cold_pull_limits = ReadLimits(
        store.max_transfer_count_in_disk, store.max_transfer_bytes_in_disk
    )


def _auto_create_topic(parts: Parts, config: BrokerConfig) -> None:
    parts.processors.topics.auto_create_topic_enable = config.broker.auto_create_topic_enable


def _auto_create_group(parts: Parts, config: BrokerConfig) -> None:
    enable = config.broker.auto_create_subscription_group
    parts.processors.topics.auto_create_group_enable = enable


def _offset_interval(parts: Parts, config: BrokerConfig) -> None:
    parts.processors.offsets.interval_s = config.broker.flush_consumer_offset_interval_ms / 1000


def _retention(parts: Parts, config: BrokerConfig) -> None:
    parts.retention.settings = retention_settings(config)
    _transaction_checks(parts, config)


def _transaction_checks(parts: Parts, config: BrokerConfig) -> None:
    broker = config.broker
    parts.checks.settings = replace(
        parts.checks.settings,
        timeout_ms=broker.transaction_timeout_ms,
        interval_ms=broker.transaction_check_interval_ms,
        checks_max=broker.transaction_check_max,
        reserved_ms=config.store.file_reserved_time * HOUR_MS,
    )


def _disk_warning(parts: Parts, config: BrokerConfig) -> None:
    parts.processors.space.warning_ratio = config.store.disk_space_warning_level_ratio / 100


def _registration(parts: Parts, config: BrokerConfig) -> None:
    parts.registration.settings = replace(
        parts.registration.settings,
        interval_s=config.client.register_interval_ms / 1000,
        timeout_s=config.client.register_timeout_ms / 1000,
    )


def _group(parts: Parts, config: BrokerConfig) -> None:
    raft = config.raft
    parts.group.settings = replace(
        parts.group.settings,
        pending_bytes_max=raft.max_pending_bytes,
        quorum_timeout_s=raft.propose_timeout_ms / 1000,
        checkpoint_interval_s=raft.checkpoint_interval_ms / 1000,
        drain_timeout_s=config.server.shutdown_timeout_ms / 1000,
    )


CAUSED_BY: Final[Mapping[str, str]] = {
    "store.keep_bytes": SIZE,
    "store.file_reserved_time": AGE,
    "store.clean_file_forcibly_enable": FORCED,
    "store.disk_space_clean_forcibly_ratio": FORCED,
}
"""Path of a setting that says what is kept → the cause of moves of the floor that it leads to."""

LIVE: Final[Mapping[str, Callable[[Parts, BrokerConfig], None]]] = {
    "broker.broker_permission": _broker_setting("broker_permission", "broker.broker_permission"),
    "broker.auto_create_topic_enable": _auto_create_topic,
    "broker.auto_create_subscription_group": _auto_create_group,
    "broker.slave_read_enable": _broker_setting("slave_read_enable", "broker.slave_read_enable"),
    "broker.long_polling_enable": _broker_setting(
        "long_polling_enable", "broker.long_polling_enable"
    ),
    "broker.short_polling_time_ms": _broker_setting(
        "short_polling_time_ms", "broker.short_polling_time_ms"
    ),
    "broker.flush_consumer_offset_interval_ms": _offset_interval,
    "broker.enable_property_filter": _broker_setting(
        "enable_property_filter", "broker.enable_property_filter"
    ),
    "broker.filter_support_retry": _broker_setting(
        "filter_support_retry", "broker.filter_support_retry"
    ),
    "broker.reject_transaction_message": _broker_setting(
        "reject_transaction_message", "broker.reject_transaction_message"
    ),
    "broker.store_reply_message_enable": _broker_setting(
        "store_reply_message_enable", "broker.store_reply_message_enable"
    ),
    "broker.transaction_timeout_ms": _transaction_checks,
    "broker.transaction_check_interval_ms": _transaction_checks,
    "broker.transaction_check_max": _transaction_checks,
    "server.shutdown_timeout_ms": _group,
    "client.register_interval_ms": _registration,
    "client.register_timeout_ms": _registration,
    "store.max_message_size": _broker_setting("max_message_bytes", "store.max_message_size"),
    "store.max_transfer_bytes_in_memory": _pull_limits,
    "store.max_transfer_count_in_memory": _pull_limits,
    "store.max_transfer_bytes_in_disk": _pull_limits,
    "store.max_transfer_count_in_disk": _pull_limits,
    "store.keep_bytes": _retention,
    "store.retention_interval_ms": _retention,
    "store.delete_when": _retention,
    "store.file_reserved_time": _retention,
    "store.disk_max_used_space_ratio": _retention,
    "store.disk_space_clean_forcibly_ratio": _retention,
    "store.clean_file_forcibly_enable": _retention,
    "store.disk_space_warning_level_ratio": _disk_warning,
    "raft.max_pending_bytes": _group,
    "raft.checkpoint_interval_ms": _group,
    "raft.propose_timeout_ms": _group,
}
"""Path of a setting → what it changes in a running broker."""
