"""Settings that take effect while a broker runs, and what each of them changes.

A change is for this broker alone, until it stops: its files stay what they are. All keys of a
request take effect, or none. A change by which less is kept has to be confirmed. A setting that is
not declared `is_live` needs a restart, and the refusal names it; what names a file, an address to
listen on or a member is none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from msgspec import structs

from commitlog.errors import ConfigError
from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.broker_id import LEADER_ID, follower_id
from dledger.broker_settings import BrokerSettings
from dledger.config import BrokerConfig
from dledger.group import Group
from dledger.part_settings import group_settings
from dledger.registration import Registration
from dledger.services.disk_space import DiskSpace
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.retention import RetentionService
from dledger.services.shorter_retention import keeps_less, lost_to_settings
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings_keys import IGNORED_KEYS, IN_SYNC_KEYS, MASTER_AND_SLAVE_KEYS, REFUSED_KEYS
from dledger.settings_tables import ROCKETMQ_KEYS, SCHEMA, SETTINGS
from dledger.state.names import AUTO_CREATE_TOPIC_KEY_TOPIC
from dledger.state.state_record import AGE, FORCED, SIZE
from remoting.protocol.bodies import DataVersion
from remoting.protocol.confirmation import GivenUp
from remoting.seams import Clock
from remoting.settings.properties import format_properties

SOURCE: Final = "changed while it runs"

READ_BY_TOOLS: Final = {"filterServerNums": "0", "traceOn": "true"}
"""What `mqadmin exportConfigs` cannot be without: there are no filter servers, and clients' traces
are taken."""

NEVER_TAKEN: Final = frozenset({"rocketmqHome", "brokerConfigPath", "filterServerNums"})
"""Keys by which a RocketMQ broker was made to run commands or to write files: refused, not just
ignored, so that an attempt is seen."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running broker that settings change."""

    group: Group
    settings: BrokerSettings
    topics: TopicView
    offsets: OffsetCommits
    space: DiskSpace
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
            setting.keys[0] if setting.keys else path: self.config.shown(path)
            for path, setting in SETTINGS.items()
        }
        leads = self._parts.group.leadership is not None
        broker_id = LEADER_ID if leads else follower_id(self._parts.registration.broker.self_id)
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
        ignored = IGNORED_KEYS.keys() - NEVER_TAKEN
        notes = [
            f"{key} is accepted and changes nothing: {IGNORED_KEYS[key]}"
            for key in changes
            if key in ignored
        ]
        rest = {key: text for key, text in changes.items() if key not in ignored}
        try:
            values = self.config.changes(rest, path_of=path_of, daemon="broker")
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
        _apply(config, self._parts)
        for path in values:
            if path in CAUSED_BY:
                self._parts.retention.asked_by[CAUSED_BY[path]] = asked_by
            _log.info(
                "setting_changed",
                setting=path,
                value=config.shown(path),
                before=before.shown(path),
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
        retention, after = self._parts.retention, config.store
        if not keeps_less(retention.settings, after):
            return None
        change = ", ".join(
            f"{path} = {config.shown(path)} (now {self.config.shown(path)})"
            for path in values
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
    """Return the sentence that explains how to do it all the same."""
    assignments = " ".join(f"{path}={SCHEMA.show(path, value)}" for path, value in values.items())
    return f"`dledger config set {assignments}` shows what would go, and does it with --yes"


def _apply(config: BrokerConfig, parts: Parts) -> None:
    """Give each part its settings; those that did not change stay as they are."""
    broker, store = config.broker, config.store
    parts.settings.broker, parts.settings.store = broker, store
    parts.topics.auto_create_topic_enable = broker.auto_create_topic_enable
    parts.topics.auto_create_group_enable = broker.auto_create_subscription_group
    parts.offsets.interval_s = broker.flush_consumer_offset_interval_ms / 1000
    parts.space.warning_ratio = store.disk_space_warning_level_ratio / 100
    parts.retention.settings = store
    parts.checks.settings, parts.checks.store = broker, store
    parts.registration.settings = config.client
    entry_bytes_max = parts.group.settings.entry_bytes_max  # what the log can hold at most
    parts.group.settings = replace(group_settings(config), entry_bytes_max=entry_bytes_max)


CAUSED_BY: Final[Mapping[str, str]] = {
    "store.keep_bytes": SIZE,
    "store.file_reserved_time": AGE,
    "store.clean_file_forcibly_enable": FORCED,
    "store.disk_space_clean_forcibly_ratio": FORCED,
}
"""Path of a setting that decides what is kept → the cause of moves of the floor that follow."""
