"""Account files, read again by daemons: TOML of ours, and RocketMQ's ``plain_acl.yml`` as it is.

TOML::

    global_white_addresses = ["10.10.103.*"]

    [accounts.orders]
    secret_key = "..."
    white_address = "192.168.0.7"
    admin = false
    default_topic_perm = "DENY"
    default_group_perm = "SUB"
    topics = { orders = "PUB|SUB" }
    groups = { billing = "SUB" }

An unknown key and a value that cannot be are errors: what was meant to forbid something
must not be passed over. No error shows a secret.

A credentials file has ``access_key``, ``secret_key`` and ``security_token`` in TOML of ours, or
``accessKey``, ``secretKey`` and ``securityToken`` in RocketMQ's ``tools.yml``. They never stand in
a setting or an argument: settings are logged, and every user of the machine sees arguments.

Of YAML every scalar is text: ``12345678`` stays the text it is, for a secret key is no number.
Anchors, aliases, tags, several documents, a key that occurs twice and deep nesting are refused with
their line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn, TypeAlias

import yaml

from dledger.commitlog.errors import ConfigError
from dledger.commitlog.seams import Disk
from dledger.remoting.access.accounts import (
    KEY_LENGTH_MIN,
    Account,
    AccountTable,
    Permission,
    WhiteAddresses,
    parse_permission,
    table_changes,
)
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.remoting.seams import Clock, Executor

Node: TypeAlias = "str | list[Node] | dict[str, Node] | None"

DEPTH_MAX: Final = 8
"""Mappings and lists inside each other; the files have three."""

_NOTHING: Final = ("", "~", "null")
_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_BARE_ADDRESS: Final = re.compile(r"^([ -]*(?:[A-Za-z]+:)? *)(\*[.*:]*)(?= *(?:#|$))", re.MULTILINE)
"""RocketMQ's patterns of addresses may begin with what YAML has for an alias."""


def parse_plain_yaml(text: str) -> Node:
    """Return what *text* holds; an empty document is None.

    Raises ConfigError: it is no YAML, or more of it than is read here; names the line and shows
    nothing of its text, which may be a secret.
    """
    text = _BARE_ADDRESS.sub(r"\1'\2'", text.removeprefix("\ufeff"))
    try:
        return _document(yaml.parse(text, Loader=_LOADER))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"line {line} has characters that are not text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if error.context_mark is not None and (mark is None or mark.index >= len(text)):
            mark = error.context_mark
        raise ConfigError(f"line {1 if mark is None else mark.line + 1} is not YAML") from None


def _document(events: Iterable[yaml.Event]) -> Node:
    root: list[Node] = []
    inner: list[list[Node] | dict[str, Node]] = [root]
    keys: list[str | None] = [None]
    documents = 0
    for event in events:
        node: Node
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _error(event, "begins a second document")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            inner.pop()
            keys.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent) or event.anchor or event.tag:
            raise _error(event, "has an anchor, an alias or a tag")
        if isinstance(event, yaml.ScalarEvent):
            node = None if event.implicit[0] and event.value in _NOTHING else event.value
        else:
            node = {} if isinstance(event, yaml.MappingStartEvent) else []
        if isinstance(node, str) and len(inner) == 1:
            raise _error(event, "is not 'key: value'")
        parent, key = inner[-1], keys[-1]
        if isinstance(parent, list):
            parent.append(node)
        elif key is not None:
            parent[key], keys[-1] = node, None
        elif not isinstance(node, str):
            raise _error(event, "has a key that is no text")
        elif node in parent:
            raise _error(event, f"has the key {node} a second time")
        else:
            keys[-1] = node
        if isinstance(node, list | dict):
            if len(inner) > DEPTH_MAX:
                raise _error(event, f"stands deeper than {DEPTH_MAX} levels")
            inner.append(node)
            keys.append(None)
    return root[0] if root else None


def _error(event: yaml.Event, why: str) -> ConfigError:
    return ConfigError(f"line {event.start_mark.line + 1} {why}")


# ---------------------------------------------------------------- files of accounts and credentials


FILE_BYTES_MAX: Final = 4 << 20
"""Largest account file: it is read again and again, and lies in memory."""

ACCOUNTS_MAX: Final = 10_000
"""Accounts in one file."""

# Name in TOML → name in plain_acl.yml.
_YAML_NAMES: Final = {
    "access_key": "accessKey",
    "secret_key": "secretKey",
    "white_address": "whiteRemoteAddress",
    "admin": "admin",
    "default_topic_perm": "defaultTopicPerm",
    "default_group_perm": "defaultGroupPerm",
    "topics": "topicPerms",
    "groups": "groupPerms",
}
_TOML_KEYS: Final = frozenset(_YAML_NAMES) - {"access_key"}
_GLOBAL_TOML: Final = "global_white_addresses"
_GLOBAL_YAML: Final = "globalWhiteRemoteAddresses"


def is_toml(path: str) -> bool:
    """Whether a file of that name is read as TOML; anything else is read as YAML."""
    return path.lower().endswith(".toml")


def parse_accounts(path: str, content: bytes) -> AccountTable:
    """Return the accounts of a file.

    Args:
        path: Its name: ``.toml`` is ours, anything else RocketMQ's ``plain_acl.yml``.
    Raises:
        ConfigError: One line that names the file and what is wrong in it; shows no secret.
    """
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: {len(content)} bytes, at most {FILE_BYTES_MAX}")
    try:
        text = content.decode()
        return _from_toml(text) if is_toml(path) else _from_yaml(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {_without_text(error)}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _without_text(error: tomllib.TOMLDecodeError) -> str:
    """Return where it went wrong; the parser's own words may quote the line."""
    place = str(error).rpartition("(")[2].rstrip(")")
    return place if place.startswith(("at line", "at end")) else "cannot be read"


def _from_toml(text: str) -> AccountTable:
    document = tomllib.loads(text)
    accounts: dict[str, Account] = {}
    for key in document.keys() - {_GLOBAL_TOML, "accounts"}:
        raise ConfigError(f"unknown key {key!r}")
    entries = document.get("accounts", {})
    if not isinstance(entries, dict):
        raise ConfigError("accounts: expected tables [accounts.NAME]")
    _check_number(len(entries))
    for name, fields in entries.items():
        if not isinstance(fields, dict):
            raise ConfigError(f"account {name}: expected a table [accounts.{name}]")
        for key in fields.keys() - _TOML_KEYS:
            raise ConfigError(f"account {name}: unknown key {key!r}")
        accounts[name] = _account(
            name,
            fields,
            topics=_toml_permissions(name, "topics", fields.get("topics", {})),
            groups=_toml_permissions(name, "groups", fields.get("groups", {})),
        )
    return AccountTable(accounts, _white("global_white_addresses", document.get(_GLOBAL_TOML)))


def _from_yaml(text: str) -> AccountTable:
    document = parse_plain_yaml(text) or {}
    if not isinstance(document, dict):
        raise ConfigError("expected keys accounts and globalWhiteRemoteAddresses")
    # What RocketMQ itself writes into the file when it changes it.
    for key in document.keys() - {_GLOBAL_YAML, "accounts", "dataVersion"}:
        raise ConfigError(f"unknown key {key!r}")
    entries = document.get("accounts") or []
    if not isinstance(entries, list):
        raise ConfigError("accounts: expected a list")
    _check_number(len(entries))
    accounts: dict[str, Account] = {}
    known = frozenset(_YAML_NAMES.values())
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ConfigError(f"account {number}: expected keys and values")
        name = entry.get("accessKey")
        if not isinstance(name, str):
            raise ConfigError(f"account {number}: accessKey is missing")
        for key in entry.keys() - known:
            raise ConfigError(f"account {name}: unknown key {key!r}")
        if name in accounts:
            raise ConfigError(f"account {name} stands there twice")
        fields = {ours: entry.get(theirs) for ours, theirs in _YAML_NAMES.items()}
        accounts[name] = _account(
            name,
            fields,
            topics=_yaml_permissions(name, "topicPerms", fields["topics"]),
            groups=_yaml_permissions(name, "groupPerms", fields["groups"]),
        )
    return AccountTable(accounts, _white(_GLOBAL_YAML, document.get(_GLOBAL_YAML)))


def _account(
    name: str,
    fields: Mapping[str, object],
    *,
    topics: dict[str, Permission],
    groups: dict[str, Permission],
) -> Account:
    secret = fields.get("secret_key")
    if not name or not isinstance(secret, str) or len(secret) < KEY_LENGTH_MIN:
        raise ConfigError(
            f"account {name}: it has a name, and a secret key of at least {KEY_LENGTH_MIN}"
            " characters"
        )
    # A group is its retry topic in RocketMQ: a line about one is a line about the other.
    for topic in [topic for topic in topics if topic.startswith(RETRY_PREFIX)]:
        groups[topic.removeprefix(RETRY_PREFIX)] = topics.pop(topic)
    return Account(
        access_key=name,
        secret_key=secret,
        is_admin=_truth(name, fields.get("admin")),
        white=_white(f"account {name}: white_address", fields.get("white_address")),
        default_topic=_default(name, "default_topic_perm", fields),
        default_group=_default(name, "default_group_perm", fields),
        topics=topics,
        groups=groups,
    )


def _truth(name: str, value: object) -> bool:
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"account {name}: admin is true or false")


def _default(name: str, key: str, fields: Mapping[str, object]) -> Permission:
    value = fields.get(key)
    if value is None:
        return Permission.DENY
    return _permission(name, key, value)


def _permission(name: str, where: str, value: object) -> Permission:
    try:
        if isinstance(value, str):
            return parse_permission(value)
    except ValueError:
        pass  # reported below, with its place
    raise ConfigError(f"account {name}: {where} = {value!r} is not DENY, PUB, SUB or PUB|SUB")


def _toml_permissions(name: str, where: str, value: object) -> dict[str, Permission]:
    if not isinstance(value, dict):
        raise ConfigError(f"account {name}: {where}: expected a table of name and permission")
    return {
        str(key): _permission(name, f"{where}.{key}", permission)
        for key, permission in value.items()
    }


def _yaml_permissions(name: str, where: str, value: object) -> dict[str, Permission]:
    found: dict[str, Permission] = {}
    if value is None:
        return found
    if not isinstance(value, list):
        raise ConfigError(f"account {name}: {where}: expected a list of name=permission")
    for line in value:
        resource, equals, permission = str(line).partition("=")
        if not equals or not resource.strip():
            raise ConfigError(f"account {name}: {where}: {line!r} is not name=permission")
        found[resource.strip()] = _permission(name, f"{where} {resource}", permission.strip())
    return found


def _white(where: str, value: object) -> WhiteAddresses:
    if value is None:
        return WhiteAddresses()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(part, str) for part in value):
            _not_addresses(where)
        value = ",".join(value)
    if not isinstance(value, str):
        _not_addresses(where)
    try:
        return WhiteAddresses(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _not_addresses(where: str) -> NoReturn:
    raise ConfigError(f"{where}: expected addresses or patterns of addresses")


def _check_number(accounts: int) -> None:
    if accounts > ACCOUNTS_MAX:
        raise ConfigError(f"{accounts} accounts, at most {ACCOUNTS_MAX}")


def accounts_document(table: AccountTable) -> str:
    """Return *table* as a TOML file. It holds the secrets."""
    lines: list[str] = []
    if table.white:
        lines += [f"{_GLOBAL_TOML} = {_quoted(table.white.text)}", ""]
    for account in table:
        lines.append(f"[accounts.{_quoted(account.access_key)}]")
        lines.append(f"secret_key = {_quoted(account.secret_key)}")
        if account.white:
            lines.append(f"white_address = {_quoted(account.white.text)}")
        lines.append(f"admin = {'true' if account.is_admin else 'false'}")
        lines.append(f'default_topic_perm = "{account.default_topic}"')
        lines.append(f'default_group_perm = "{account.default_group}"')
        for key, permissions in (("topics", account.topics), ("groups", account.groups)):
            if permissions:
                pairs = (f'{_quoted(name)} = "{perm}"' for name, perm in permissions.items())
                lines.append(f"{key} = {{ {', '.join(pairs)} }}")
        lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if not escaped.isprintable():
        raise ConfigError(f"{text!r} does not fit an account file")
    return f'"{escaped}"'


_CREDENTIAL_KEYS = ("access_key", "secret_key", "security_token")
_ROCKETMQ_CREDENTIAL_KEYS = ("accessKey", "secretKey", "securityToken")


def parse_credentials(path: str, content: bytes) -> Credentials:
    """Return what a credentials file holds.

    Args:
        path: Its name: ``.toml`` is ours, anything else RocketMQ's ``tools.yml``.
    Raises:
        ConfigError: One line that names the file; shows no secret.
    """
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: {len(content)} bytes, at most {FILE_BYTES_MAX}")
    names = _CREDENTIAL_KEYS if is_toml(path) else _ROCKETMQ_CREDENTIAL_KEYS
    try:
        text = content.decode()
        found: object = tomllib.loads(text) if is_toml(path) else parse_plain_yaml(text)
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


# ------------------------------------------------------------------------------ the accounts in use


RELOAD_INTERVAL_S: Final = 1.0
"""How soon a change of the file counts. Its content is compared: times of files have gaps."""

_log = get_logger(__name__)


class AccountStore:
    """Accounts from one file; *table*: what counts now; replaced as a whole."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Read the file for the first time.

        Raises ConfigError: it cannot be read, or not as accounts: nothing should be started.
        """
        self._disk = disk
        self._path = path
        self._content = self._read()
        self._complaint = ""
        self.table: AccountTable = parse_accounts(path, self._content)
        _log.info("accounts_read", path=path, accounts=len(self.table))

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""
        return self.table.get(access_key)

    def is_white(self, host: str) -> bool:
        """Whether requests from *host* need no signature."""
        return self.table.is_white(host)

    def _read(self) -> bytes:
        try:
            return self._disk.read(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _changed(self) -> tuple[bytes, AccountTable] | None:
        """Read the file; return its new content, None when it is as before. Blocking."""
        content = self._read()
        if content == self._content:
            return None
        return content, parse_accounts(self._path, content)

    def take(self, changed: tuple[bytes, AccountTable] | None) -> None:
        """Let the accounts just read count from now on."""
        if changed is not None:
            before = self.table
            self._content, self.table = changed
            _log.info(
                "accounts_read",
                path=self._path,
                accounts=len(self.table),
                **table_changes(before, self.table),
            )
        elif self._complaint:
            _log.info("accounts_as_before", path=self._path, accounts=len(self.table))
        self._complaint = ""

    def keep(self, error: ConfigError) -> None:
        """Keep the accounts, and say once why the file does not count."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.error(
                "accounts_kept",
                error=self._complaint,
                accounts=len(self.table),
                next_step="correct the file; until then its former content counts",
            )

    async def keep_reading(self, clock: Clock, executor: Executor) -> None:
        """Check the file until cancelled; a broken or missing one keeps the accounts there were."""
        while True:
            await clock.sleep(RELOAD_INTERVAL_S)
            try:
                changed = await executor.run(self._changed, kind="accounts")
            except ConfigError as error:
                self.keep(error)
            else:
                self.take(changed)
