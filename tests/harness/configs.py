"""Broker configurations of a text."""

from typing import Any, Final, get_args

from dledger.settings.config import BrokerConfig, load_config
from dledger.settings.schema import ConfigFile, Setting

THREE_PEERS: Final = "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"


def conf(text: str) -> BrokerConfig:
    """Return what a broker.conf of that text gives."""
    return load_config([ConfigFile("broker.conf", text)])


def toml(text: str) -> BrokerConfig:
    """Return what a TOML file of that text gives."""
    return load_config([ConfigFile("n0.toml", text)])


def another_value(setting: Setting) -> tuple[str, Any]:
    """Return a value that a setting may have and has not by default: its text, and itself."""
    default, choices = setting.default, get_args(get_args(setting.type)[0])
    value: Any
    if isinstance(default, bool):
        value = not default
    elif isinstance(default, int):
        value = default - 20 if default > 20 else default + 1
    elif isinstance(default, tuple):
        value = (*default, 23)
    elif isinstance(choices[0] if choices else None, str):
        value = next(choice for choice in choices if choice not in ("", default))
    else:
        value = "1s" if setting.name == "message_delay_level" else "another"
    return setting.show(value), value
