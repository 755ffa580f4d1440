"""Broker configurations of a text."""

from __future__ import annotations

from typing import Final

from dledger.config import BrokerConfig, load_config
from dledger.remoting.settings import ConfigFile

THREE_PEERS: Final = "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"


def conf(text: str) -> BrokerConfig:
    """Return what a broker.conf of that text gives."""
    return load_config([ConfigFile("broker.conf", text)])


def toml(text: str) -> BrokerConfig:
    """Return what a TOML file of that text gives."""
    return load_config([ConfigFile("n0.toml", text)])
