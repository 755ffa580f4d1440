"""What one NameServer knows, put together: routes, their encoded answers, settings, key-values.

No I/O but the key-value file; time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from commitlog.errors import ConfigError
from commitlog.seams import Disk
from namesrv.config import (
    BY_ROCKETMQ_KEY,
    IGNORED_ROCKETMQ_KEYS,
    SETTINGS,
    NamesrvConfig,
)
from namesrv.errors import SettingLockedError
from namesrv.kv_config import ORDER_TOPIC_CONFIG, KvConfigManager
from namesrv.route_cache import RouteCache
from namesrv.route_table import RouteInfoManager
from remoting.java_properties import format_properties
from remoting.protocol.bodies import TopicRouteData

LOCKED_KEYS: Final = frozenset(
    {"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"}
)
"""Keys that a client may not even try to change: they name files of this machine."""

PROTECTING_KEYS: Final = frozenset({"useTLS"})
"""Keys without meaning here that nobody may believe in."""


class NameServer:
    """The tables of a NameServer and what holds between them.

    Raises:
        ConfigError: The key-value file is damaged.
    """

    def __init__(self, config: NamesrvConfig, disk: Disk) -> None:
        self.config = config
        self.kv_config = KvConfigManager.load(disk, config.kv_config_path)
        self.route_cache = RouteCache(self._build_route)
        self.routes = RouteInfoManager(
            broker_expiry_ms=config.broker_expiry_ms,
            support_acting_master=config.support_acting_master,
            delete_topic_with_broker_registration=config.delete_topic_with_broker_registration,
            on_route_change=self.route_cache.invalidate,
        )

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Set a value, durably, and forget the route answer it stands in.

        Raises:
            KvConfigFullError: The table is full; the old value stays.
            DiskFullError: No space; the old value stays.
        """
        self.kv_config.put(namespace, key, value)
        self._kv_changed(namespace, key)

    def delete_kv(self, namespace: str, key: str) -> None:
        """Remove a value, durably, and forget the route answer it stood in.

        Raises:
            DiskFullError: No space; the value stays.
        """
        self.kv_config.delete(namespace, key)
        self._kv_changed(namespace, key)

    def settings_text(self) -> str:
        """Return all settings under RocketMQ's names, as properties."""
        return format_properties(
            {key: getattr(self.config, item.name) for key, item in BY_ROCKETMQ_KEY.items()}
        )

    def update_settings(self, changes: Mapping[str, str]) -> list[str]:
        """Change settings until the next start; all of them or none.

        Args:
            changes: RocketMQ's key → value.
        Returns:
            A sentence for each key that is accepted and changes nothing, as in a file.
        Raises:
            SettingLockedError: A key that no client may change.
            ConfigError: An unknown key, one that would have to protect something and cannot here,
                a bad value, or a setting that needs a restart.
        """
        notes: list[str] = []
        values: dict[str, object] = {}
        for key, text in changes.items():
            if key in LOCKED_KEYS:
                raise SettingLockedError(f"Can not update config in black list: {key}")
            setting = BY_ROCKETMQ_KEY.get(key)
            if setting is None:
                if key in PROTECTING_KEYS:
                    raise ConfigError(f"{key} has no meaning here")
                if key in IGNORED_ROCKETMQ_KEYS:
                    notes.append(f"{key} is accepted and changes nothing here")
                    continue
                raise ConfigError(f"unknown setting '{key}'")
            value = setting.parse(text, key)
            if value != getattr(self.config, setting.name) and not setting.live:
                raise ConfigError(f"{key} cannot change while the NameServer runs")
            values[setting.name] = value
        assert values.keys() <= SETTINGS.keys()
        self.config = replace(self.config, **values)  # type: ignore[arg-type]
        self.routes.support_acting_master = self.config.support_acting_master
        self.routes.delete_topic_with_broker_registration = (
            self.config.delete_topic_with_broker_registration
        )
        self.route_cache.clear()
        return notes

    def _build_route(self, topic: str) -> TopicRouteData | None:
        route = self.routes.route(topic)
        if route is not None and self.config.order_message_enable:
            route.order_topic_conf = self.kv_config.get(ORDER_TOPIC_CONFIG, topic)
        return route

    def _kv_changed(self, namespace: str, key: str) -> None:
        if namespace == ORDER_TOPIC_CONFIG:
            self.route_cache.invalidate((key,))
