"""What an account is after a request; pure.

Each function takes the account as it stands, None where there is none, and returns the one that is
to stand then; the same one where nothing changes. What no member could read is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import cbor2
from msgspec.structs import replace

from dledger.remoting.access.accounts import (
    KEY_LENGTH_MIN,
    Account,
    Permission,
    WhiteAddresses,
    parse_permission,
)
from dledger.remoting.access.policies import (
    Policies,
    action_text,
    decision_text,
    parse_entry,
    policy_type_text,
    resource_text,
)
from dledger.remoting.protocol.access_bodies import AccessConfigHeader, AclInfo, UserInfo
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.state.accounts import AccountConfig, PolicyConfig
from dledger.state.table import plain

ACCOUNT_BYTES_MAX: Final = 16 * 1024
"""Of an encoded account: some 300 lines or policies. Each is in memory and in every snapshot."""

WHITE_BYTES_MAX: Final = 64 * 1024
"""Of all global white addresses: as many patterns as may be. They are in every snapshot."""

SUPER: Final = "Super"
NORMAL: Final = "Normal"
ENABLE: Final = "enable"
DISABLE: Final = "disable"


class NoSuchAccountError(ValueError):
    """There is none of that name."""


class AccountExistsError(ValueError):
    """There is one of that name, and it is another than was asked for."""


def account_of(config: AccountConfig) -> Account:
    """Return the account that decides.

    Raises ValueError: a text in it means nothing; shows no secret.
    """
    entries = [
        parse_entry(
            policy.policy_type, policy.resource, policy.actions, policy.source_ips, policy.decision
        )
        for policy in config.policies
    ]
    return Account(
        config.access_key,
        config.secret_key,
        is_admin=config.admin,
        white=WhiteAddresses(config.white_address),
        default_topic=parse_permission(config.default_topic_perm),
        default_group=parse_permission(config.default_group_perm),
        topics=_permissions(config.topics),
        groups=_permissions(config.groups),
        is_enabled=config.enabled,
        policies=Policies(entries) if entries else None,
    )


def _permissions(lines: Mapping[str, str]) -> dict[str, Permission]:
    return {name: parse_permission(text) for name, text in lines.items()}


def checked(config: AccountConfig) -> AccountConfig:
    """Return *config* if every member can read it.

    Raises ValueError: it cannot be an account; shows no secret.
    """
    if len(config.secret_key) < KEY_LENGTH_MIN:
        raise ValueError(f"a secret key has at least {KEY_LENGTH_MIN} characters")
    name = config.access_key
    if not name or not name.isprintable() or name != name.strip():
        raise ValueError("an access key has printable characters, and no space at its ends")
    size = len(cbor2.dumps(plain(config)))
    if size > ACCOUNT_BYTES_MAX:
        raise ValueError(f"the account has {size} bytes, at most {ACCOUNT_BYTES_MAX}")
    account_of(config)
    return config


# ------------------------------------------------------------------------------------- ACL 1.0


def with_access_config(current: AccountConfig | None, header: AccessConfigHeader) -> AccountConfig:
    """Return the account as 50 asks for it: what is absent stays, `admin` is always there.

    Raises ValueError: it cannot be; shows no secret.
    """
    if current is None:
        if not header.secret_key:
            raise ValueError("a new account needs a secretKey")
        current = AccountConfig(header.access_key, header.secret_key)
    topics, groups = dict(current.topics), dict(current.groups)
    if header.topic_perms is not None:
        topics = _lines(header.topic_perms)
    if header.group_perms is not None:
        groups = _lines(header.group_perms)
    # A group is its retry topic in RocketMQ: a line about one is a line about the other.
    for topic in [name for name in topics if name.startswith(RETRY_PREFIX)]:
        groups[topic] = topics.pop(topic)
    groups = {name.removeprefix(RETRY_PREFIX): text for name, text in groups.items()}
    white = header.white_remote_address
    return checked(
        replace(
            current,
            secret_key=header.secret_key or current.secret_key,
            admin=header.admin,
            white_address=current.white_address if white is None else white,
            default_topic_perm=_perm(header.default_topic_perm, current.default_topic_perm),
            default_group_perm=_perm(header.default_group_perm, current.default_group_perm),
            topics=topics,
            groups=groups,
        )
    )


def _perm(text: str | None, current: str) -> str:
    return str(parse_permission(text)) if text else current


def _lines(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in filter(None, (part.strip() for part in text.split(","))):
        name, equals, permission = line.rpartition("=")
        if not equals or not name.strip():
            raise ValueError(f"{line[:64]!r} is not name=permission")
        found[name.strip()] = str(parse_permission(permission.strip()))
    return found


def checked_white_addresses(text: str) -> str:
    """Return global white addresses as they are kept.

    Raises ValueError: one of them is no pattern of addresses, or they are too many.
    """
    size = len(text.encode())
    if size > WHITE_BYTES_MAX:
        raise ValueError(f"the addresses have {size} bytes, at most {WHITE_BYTES_MAX}")
    return WhiteAddresses(text).text


# ------------------------------------------------------------------------------------- ACL 2.0


def created(current: AccountConfig | None, name: str, user: UserInfo) -> AccountConfig:
    """Return the account that 3001 makes; one that is there as it is asked for is that.

    Raises:
        AccountExistsError: There is another one of that name.
        ValueError: It cannot be; shows no secret.
    """
    if not user.password:
        raise ValueError("the password is blank")
    made = _with_user(AccountConfig(name, user.password), user)
    if current is not None and (
        (current.secret_key, current.admin, current.enabled)
        != (made.secret_key, made.admin, made.enabled)
    ):
        raise AccountExistsError(f"the user {name} exists already")
    return checked(current or made)


def updated(current: AccountConfig | None, name: str, user: UserInfo) -> AccountConfig:
    """Return the account as 3002 asks for it: what is absent stays.

    Raises:
        NoSuchAccountError: There is none.
        ValueError: It cannot be; shows no secret.
    """
    return checked(_with_user(_there(current, name), user))


def _with_user(account: AccountConfig, user: UserInfo) -> AccountConfig:
    return replace(
        account,
        secret_key=user.password or account.secret_key,
        admin=_either(user.user_type, SUPER, NORMAL, account.admin, "user type"),
        enabled=_either(user.user_status, ENABLE, DISABLE, account.enabled, "user status"),
    )


def _either(text: str | None, yes: str, no: str, current: bool, what: str) -> bool:
    if not text:
        return current
    if text.lower() not in (yes.lower(), no.lower()):
        raise ValueError(f"{what} {text[:32]!r} is not {yes} or {no}")
    return text.lower() == yes.lower()


def _there(current: AccountConfig | None, name: str) -> AccountConfig:
    if current is None:
        raise NoSuchAccountError(f"the user {name} does not exist")
    return current


def with_policies(current: AccountConfig | None, name: str, acl: AclInfo) -> AccountConfig:
    """Return the account with the entries of 3006 and 3007 put in.

    Raises:
        NoSuchAccountError: There is none.
        ValueError: An entry cannot be.
    """
    account = _there(current, name)
    asked = [
        PolicyConfig(
            policy_type_text(policy.policy_type or ""),
            resource_text(entry.resource),
            tuple(action_text(action) for action in entry.actions),
            tuple(entry.source_ips),
            decision_text(entry.decision),
        )
        for policy in acl.policies
        for entry in policy.entries
    ]
    if not asked:
        raise ValueError("the policies are empty")
    entries = {(entry.policy_type, entry.resource): entry for entry in account.policies}
    entries |= {(entry.policy_type, entry.resource): entry for entry in asked}
    return checked(replace(account, policies=tuple(entries.values())))


def without_policies(
    current: AccountConfig | None, name: str, policy_type: str, resource: str
) -> AccountConfig:
    """Return the account without the entry that 3008 names; without a resource, without any.

    Raises:
        NoSuchAccountError: There is none.
        ValueError: It names nothing that could be there.
    """
    account = _there(current, name)
    if not resource:
        return replace(account, policies=())
    gone = (policy_type_text(policy_type), resource_text(resource))
    kept = (entry for entry in account.policies if (entry.policy_type, entry.resource) != gone)
    return replace(account, policies=tuple(kept))


def shown_policies(entries: Iterable[PolicyConfig]) -> dict[str, list[PolicyConfig]]:
    """Return the entries of each type of policy."""
    found: dict[str, list[PolicyConfig]] = {}
    for entry in entries:
        found.setdefault(entry.policy_type, []).append(entry)
    return found
