"""Credentials in a file: TOML of ours, or RocketMQ's ``tools.yml`` as it stands.

The names are ``access_key``, ``secret_key`` and ``security_token``, or ``accessKey``,
``secretKey`` and ``securityToken``. They never stand in a setting or an argument: settings are
logged, and arguments are seen by everybody on the machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from commitlog.errors import ConfigError
from remoting.access.account_file import FILE_BYTES_MAX, is_toml
from remoting.protocol.signature import Credentials

_TOML_NAMES = ("access_key", "secret_key", "security_token")
_YAML_NAMES = ("accessKey", "secretKey", "securityToken")


def parse_credentials(path: str, content: bytes) -> Credentials:
    """Return what a credentials file holds.

    Args:
        path: Its name: ``.toml`` is ours, anything else RocketMQ's ``tools.yml``.
    Raises:
        ConfigError: One line that names the file; shows no secret.
    """
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: {len(content)} bytes, at most {FILE_BYTES_MAX}")
    names = _TOML_NAMES if is_toml(path) else _YAML_NAMES
    try:
        text = content.decode()
        found: object = tomllib.loads(text) if is_toml(path) else _yaml(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"{path}: not TOML") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected {', '.join(names)}")
    for key in found.keys() - set(names):
        raise ConfigError(f"{path}: unknown key {key!r}")
    access_key, secret_key, token = (found.get(name) for name in names)
    if not isinstance(access_key, str) or not isinstance(secret_key, str):
        raise ConfigError(f"{path}: needs {names[0]} and {names[1]}, as text")
    if not access_key or not secret_key:
        raise ConfigError(f"{path}: {names[0]} and {names[1]} must not be empty")
    if token is not None and not isinstance(token, str):
        raise ConfigError(f"{path}: {names[2]} is text")
    return Credentials(access_key, secret_key, token or None)


def _yaml(text: str) -> object:
    # Here, so that a program without such a file starts without the library.
    from remoting.access.plain_yaml import parse_plain_yaml

    return parse_plain_yaml(text)
