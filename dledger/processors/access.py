"""Accounts in the log: ACL 1.0 (50 to 54), users and policies of ACL 2.0 (3001 to 3010).

A member answers what it has applied, and passes a change on to the leader, unchanged: tools send it
to every member of a cluster. The leader checks it again, its signature too. A request signed in our
own form, which covers the connection, is not passed on. No answer has a secret.

The accounts that count on a member are those of its file, and those of the log behind them.

Spec: docs/internals/protocol/remoting.md, section 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeAlias

import structlog

from dledger.broker_errors import TableFullError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    asked_by,
    bad_request,
    not_leader,
    nothing_to_change,
    propose_change,
)
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.account_file import ACCOUNTS_MAX, AccountStore
from dledger.remoting.access.accounts import ADMIN, Account, WhiteAddresses
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.access_bodies import (
    USER_PREFIX,
    AccessConfigHeader,
    AccessKeyHeader,
    AclConfig,
    AclInfo,
    AclVersionHeader,
    DeleteAclHeader,
    GlobalWhiteAddrsHeader,
    ListAclsHeader,
    ListUsersHeader,
    PlainAccessConfig,
    PolicyEntryInfo,
    PolicyInfo,
    SubjectHeader,
    UserHeader,
    UserInfo,
)
from dledger.remoting.protocol.bodies import DataVersion
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.signature import is_fresh_form
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.services.account_changes import (
    DISABLE,
    ENABLE,
    NORMAL,
    SUPER,
    AccountExistsError,
    NoSuchAccountError,
    account_of,
    checked_white_addresses,
    created,
    shown_policies,
    updated,
    with_access_config,
    with_policies,
    without_policies,
)
from dledger.services.pending_configs import PendingConfigs
from dledger.settings.parts import BrokerSettings
from dledger.state.accounts import AccessChange, AccountConfig
from dledger.state.tables import StateTables

PASSED_ON: Final = "passed on by a follower"
"""Remark of a request that a follower passes on: it is not passed on again. No signature covers
the remark."""

Invoke: TypeAlias = Callable[[str, RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request to an address and returns the answer."""

Decide: TypeAlias = Callable[[AccountConfig | None], AccountConfig]
"""The account as it stands → as it is to be."""

SPARE_ROWS: Final = 1_000
"""Rows of accounts that are not there any more and may be kept, before all are made again."""

_log = structlog.get_logger(__name__)


class BrokerAccounts:
    """Finds accounts: in the file first, then in what this member has applied."""

    def __init__(self, file: AccountStore, state: Callable[[], StateTables]) -> None:
        """Look up in *file* and in *state*, each time as they are then."""
        self._file = file
        self._state = state
        self._made: dict[str, tuple[AccountConfig, Account | None]] = {}
        self._white = ("", WhiteAddresses())

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""
        account = self._file.get(access_key)
        return account if account is not None else self._of_log(access_key)

    def is_white(self, host: str) -> bool:
        """Whether requests from *host* need no signature."""
        return self._file.is_white(host) or self._white_of_log().fits(host)

    def _of_log(self, access_key: str) -> Account | None:
        rows = self._state().accounts
        row = rows.get(access_key)
        if row is None:
            return None
        made = self._made.get(access_key)
        if made is not None and made[0] is row:
            return made[1]
        if len(self._made) > len(rows) + SPARE_ROWS:
            self._made.clear()
        try:
            account: Account | None = account_of(row)
        except ValueError as error:
            # Written by another version: refused, since what it forbids is not known.
            account = None
            _log.error("account_not_read", account=access_key, error=str(error))
        self._made[access_key] = (row, account)
        return account

    def _white_of_log(self) -> WhiteAddresses:
        text = self._state().white_addresses
        if text != self._white[0]:
            try:
                self._white = (text, WhiteAddresses(text))
            except ValueError as error:
                self._white = (text, WhiteAddresses())
                _log.error("white_addresses_not_read", error=str(error))
        return self._white[1]


@dataclass(eq=False, repr=False)
class AccessProcessor:
    """Answers requests about accounts; changes go through the log."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _is_in_file: Callable[[str], bool]
    _invoke: Invoke

    def __post_init__(self) -> None:
        self._pending: PendingConfigs[AccountConfig] = PendingConfigs(
            self._group, self._applied, attrgetter("access_key")
        )

    def _applied(self, name: str) -> AccountConfig | None:
        return self._group.state.accounts.get(name)

    # ----------------------------------------------------------------------------- ACL 1.0

    @handles(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def update_config(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 50 when the account is as asked for."""
        header = AccessConfigHeader.decode(command.ext)
        return self._put(
            connection,
            command,
            header.access_key,
            lambda current: with_access_config(current, header),
        )

    @handles(RequestCode.DELETE_ACL_CONFIG, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def delete_config(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51 when the account is removed."""
        return self._delete(connection, command, AccessKeyHeader.decode(command.ext).access_key)

    @handles(
        RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, limit=Limit.SETTINGS, rule=ADMIN, local=True
    )
    def update_white_addresses(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 53 when the log's global white addresses are these; the file keeps its own."""
        text = GlobalWhiteAddrsHeader.decode(command.ext).global_white_addrs
        if self._group.leadership is None:
            return self._pass_on(command)
        try:
            white = checked_white_addresses(text)
        except ValueError as error:
            raise bad_request(f"{error}; nothing was changed") from None
        change = AccessChange(white_addresses=white, asked_by=asked_by(connection))
        propose_change(connection, command, self._group, change, self._pending)
        return DEFERRED

    @handles(RequestCode.GET_BROKER_CLUSTER_ACL_INFO, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def version(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 52: how new the accounts are."""
        state = self._group.state
        version = DataVersion(
            timestamp=state.access_changed_ms, counter=state.access_counter, state_version=0
        ).encode()
        header = AclVersionHeader(
            version=version.decode(),
            broker_name=self._settings.broker.broker_name,
            broker_addr=self._settings.address,
            cluster_name=self._settings.broker.cluster_name,
            all_acl_file_version=f'{{"{STATE_TOPIC}":{version.decode()}}}',
        )
        return response_to(command, ext=header.encode())

    @handles(
        RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG, limit=Limit.SETTINGS, rule=ADMIN, shows=True
    )
    def config(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 54: the accounts of the log, without their secrets."""
        state = self._group.state
        body = AclConfig(
            global_white_addrs=[part for part in state.white_addresses.split(",") if part],
            plain_access_configs=[_plain(row) for _, row in sorted(state.accounts.items())],
        )
        return response_to(command, body=body.encode())

    # ------------------------------------------------------------------------------- users

    @handles(RequestCode.AUTH_CREATE_USER, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def create_user(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3001 when there is the user."""
        name, user = _named(command), UserInfo.decode(command.body)
        return self._put(connection, command, name, lambda current: created(current, name, user))

    @handles(RequestCode.AUTH_UPDATE_USER, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def update_user(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3002 when the user is as asked for; what the request leaves out stays."""
        name, user = _named(command), UserInfo.decode(command.body)
        return self._put(connection, command, name, lambda current: updated(current, name, user))

    @handles(RequestCode.AUTH_DELETE_USER, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def delete_user(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3003 when the user is removed, with all policies."""
        return self._delete(connection, command, _named(command))

    @handles(RequestCode.AUTH_GET_USER, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def get_user(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3004; without a body where there is no such user, as RocketMQ does."""
        row = self._applied(_named(command))
        return response_to(command, body=b"" if row is None else _user(row).encode())

    @handles(RequestCode.AUTH_LIST_USER, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def list_users(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3005: users whose name contains the filter."""
        wanted = ListUsersHeader.decode(command.ext).filter or ""
        return _listed(
            command,
            [
                _user(row)
                for name, row in sorted(self._group.state.accounts.items())
                if wanted in name
            ],
        )

    # ---------------------------------------------------------------------------- policies

    @handles(
        RequestCode.AUTH_CREATE_ACL,
        RequestCode.AUTH_UPDATE_ACL,
        limit=Limit.SETTINGS,
        rule=ADMIN,
        local=True,
    )
    def put_acl(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3006 and 3007, which RocketMQ does not distinguish, when the entries stand."""
        header = SubjectHeader.decode(command.ext)
        acl = AclInfo.decode(command.body)
        name = _subject(header.subject)
        if acl.subject and acl.subject != header.subject:
            raise bad_request("header and body name different subjects; nothing was done")
        return self._put(connection, command, name, lambda row: with_policies(row, name, acl))

    @handles(RequestCode.AUTH_DELETE_ACL, limit=Limit.SETTINGS, rule=ADMIN, local=True)
    def delete_acl(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3008 when the entry does not stand, or, where no resource is named, none does."""
        header = DeleteAclHeader.decode(command.ext)
        name = _subject(header.subject)
        kind, resource = header.policy_type or "", header.resource or ""
        return self._put(
            connection, command, name, lambda row: without_policies(row, name, kind, resource)
        )

    @handles(RequestCode.AUTH_GET_ACL, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def get_acl(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3009; without a body where the user has no policies, as RocketMQ does."""
        name = _subject(SubjectHeader.decode(command.ext).subject)
        row = self._applied(name)
        if row is None:
            raise RefusedError(Condition.NO_PERMISSION, f"the user {name} does not exist")
        body = _acl(row).encode() if row.policies else b""
        return response_to(command, body=body)

    @handles(RequestCode.AUTH_LIST_ACL, limit=Limit.SETTINGS, rule=ADMIN, shows=True)
    def list_acls(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 3010: entries whose subject and resource contain the filters."""
        header = ListAclsHeader.decode(command.ext)
        subject, resource = header.subject_filter or "", header.resource_filter or ""
        found = [
            _acl(row, resource)
            for name, row in sorted(self._group.state.accounts.items())
            if subject in USER_PREFIX + name
        ]
        return _listed(command, [acl for acl in found if acl.policies])

    # ----------------------------------------------------------------------------- changes

    def _put(
        self, connection: Connection, command: RemotingCommand, name: str, decide: Decide
    ) -> Handled:
        if self._group.leadership is None:
            return self._pass_on(command)
        if self._is_in_file(name):
            raise _is_of_the_file(name)
        current = self._pending.resolve(name)
        try:
            wanted = decide(current)
        except (NoSuchAccountError, AccountExistsError) as error:
            raise RefusedError(Condition.NO_PERMISSION, f"{error}; nothing was changed") from None
        except ValueError as error:
            raise bad_request(f"{error}; nothing was changed") from None
        if wanted == current and not len(self._pending):
            return nothing_to_change(self._group, connection, command)
        if current is None:
            self._check_room()
        change = AccessChange(put=(wanted,), asked_by=asked_by(connection))
        propose_change(connection, command, self._group, change, self._pending)
        return DEFERRED

    def _delete(self, connection: Connection, command: RemotingCommand, name: str) -> Handled:
        if self._group.leadership is None:
            return self._pass_on(command)
        if self._pending.resolve(name) is None and not len(self._pending):
            if self._is_in_file(name):
                raise _is_of_the_file(name)
            return nothing_to_change(self._group, connection, command)
        change = AccessChange(delete=(name,), asked_by=asked_by(connection))
        propose_change(connection, command, self._group, change, self._pending)
        return DEFERRED

    def _check_room(self) -> None:
        there = len(self._group.state.accounts) + len(self._pending)
        if there >= ACCOUNTS_MAX:
            raise TableFullError(
                f"{there} accounts are there, at most {ACCOUNTS_MAX}; nothing was stored; delete"
                " accounts that are not used"
            )

    def _pass_on(self, command: RemotingCommand) -> Handled:
        """Let the leader answer.

        Raises NotLeaderError: there is none to pass it on to, or it cannot be passed on.
        """
        leader = self._group.leader_address
        if leader is None or command.remark == PASSED_ON or is_fresh_form(command):
            raise not_leader(self._group)
        return self._asked_leader(leader, command)

    async def _asked_leader(self, leader: str, command: RemotingCommand) -> RemotingCommand:
        copy = request(command.code, dict(command.ext), bytes(command.body))
        copy.remark = PASSED_ON
        try:
            found = await self._invoke(leader, copy)
        except RemotingError as error:
            if error.outcome == "not_stored":
                raise not_leader(self._group) from None
            return answer(
                command,
                Condition.LEADERSHIP_LOST,
                f"the leader gave no answer ({error}); the change may or may not be stored",
            )
        return response_to(command, found.code, found.remark, dict(found.ext), bytes(found.body))


def _is_of_the_file(name: str) -> RefusedError:
    return RefusedError(
        Condition.NO_PERMISSION,
        f"account {name} stands in the file of server.acl_file, which counts before the log:"
        " change it there, see dledger acl; nothing was changed",
    )


# ------------------------------------------------------------------------ requests and answers


def _named(command: RemotingCommand) -> str:
    name = UserHeader.decode(command.ext).username
    if not name.strip():
        raise bad_request("The username is blank")
    return name


def _subject(subject: str) -> str:
    name = subject.removeprefix(USER_PREFIX)
    if name == subject or not name:
        raise bad_request(f"subject {subject[:64]!r} is not {USER_PREFIX}NAME")
    return name


def _listed(command: RemotingCommand, items: Sequence[Any]) -> RemotingCommand:
    """Return a list as a body; none where it is empty, as RocketMQ does."""
    body = b"[" + b",".join(item.encode() for item in items) + b"]" if items else b""
    return response_to(command, body=body)


def _plain(row: AccountConfig) -> PlainAccessConfig:
    return PlainAccessConfig(
        access_key=row.access_key,
        white_remote_address=row.white_address or None,
        admin=row.admin,
        default_topic_perm=row.default_topic_perm,
        default_group_perm=row.default_group_perm,
        topic_perms=_lines(row.topics.items()),
        group_perms=_lines(row.groups.items()),
    )


def _lines(lines: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name}={permission}" for name, permission in sorted(lines)]


def _user(row: AccountConfig) -> UserInfo:
    return UserInfo(
        username=row.access_key,
        user_type=SUPER if row.admin else NORMAL,
        user_status=ENABLE if row.enabled else DISABLE,
    )


def _acl(row: AccountConfig, resource: str = "") -> AclInfo:
    policies = shown_policies(entry for entry in row.policies if resource in entry.resource)
    return AclInfo(
        subject=USER_PREFIX + row.access_key,
        policies=[
            PolicyInfo(
                policy_type=kind,
                entries=[
                    PolicyEntryInfo(
                        resource=entry.resource,
                        actions=list(entry.actions),
                        source_ips=list(entry.source_ips),
                        decision=entry.decision,
                    )
                    for entry in entries
                ],
            )
            for kind, entries in policies.items()
        ],
    )
