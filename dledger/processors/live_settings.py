"""Settings of a broker that change while it runs.

A change is for this broker alone, until it stops: its files stay what they are. All keys of a
request take effect, or none. The parts of the broker have their tables from its configuration and
read them at each use, so a change is made there and nowhere else. One by which less is kept has to
be confirmed; the refusal gives what would go now. A setting without `live` needs a restart, and the
refusal names it; what names a file, an address to listen on or a member is none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import structlog
from msgspec import structs

from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.commitlog.errors import ConfigError
from dledger.group_api import BrokerGroup
from dledger.remoting.properties import format_properties
from dledger.remoting.protocol.bodies import DataVersion
from dledger.remoting.protocol.own_fields import GivenUp
from dledger.remoting.seams import Clock
from dledger.services.retention import RetentionService, keeps_less, lost_to_settings
from dledger.settings.config import ROCKETMQ_KEYS, SCHEMA, SETTINGS, BrokerConfig
from dledger.settings.text import (
    IGNORED_KEYS,
    IN_SYNC_KEYS,
    LEADER_ID,
    MASTER_AND_SLAVE_KEYS,
    REFUSED_KEYS,
)
from dledger.state.state_record import AGE, FORCED, SIZE
from dledger.state.topics import AUTO_CREATE_TOPIC_KEY_TOPIC

SOURCE: Final = "changed while it runs"

READ_BY_TOOLS: Final = {"filterServerNums": "0", "traceOn": "true"}
"""What `mqadmin exportConfigs` cannot be without: there are no filter servers, and clients' traces
are taken."""

NEVER_TAKEN: Final = frozenset({"rocketmqHome", "brokerConfigPath", "filterServerNums"})
"""Keys by which a RocketMQ broker was made to run commands or to write files: refused, not just
ignored, so that an attempt is seen."""

_log = structlog.get_logger(__name__)


class LiveSettings:
    """The settings of a running broker; *config*: the one whose tables its parts have."""

    def __init__(
        self, config: BrokerConfig, group: BrokerGroup, retention: RetentionService, clock: Clock
    ) -> None:
        self.config = config
        self.version = DataVersion(timestamp=clock.wall_ms())
        self._group = group
        self._retention = retention
        self._clock = clock

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
    if key in REFUSED_KEYS:
        raise SettingRefusedError(f"{key}: {REFUSED_KEYS[key]}")
    if key in IN_SYNC_KEYS or key in MASTER_AND_SLAVE_KEYS:
        raise SettingRefusedError(f"{key}: the members of the group decide; see dledger raft")
    raise SettingRefusedError(f"there is no setting {key}")


def _command_for(values: Mapping[str, Any]) -> str:
    """Return the sentence that explains how to do it all the same."""
    assignments = " ".join(f"{path}={SCHEMA.show(path, value)}" for path, value in values.items())
    return f"`dledger config set {assignments}` shows what would go, and does it with --yes"


CAUSED_BY: Final[Mapping[str, str]] = {
    "store.keep_bytes": SIZE,
    "store.file_reserved_time": AGE,
    "store.clean_file_forcibly_enable": FORCED,
    "store.disk_space_clean_forcibly_ratio": FORCED,
}
"""Path of a setting that decides what is kept → the cause of moves of the floor that follow."""
