"""Administration of accounts that stand in the log of broker groups.

`client.admin.admin.Admin` has these as its own methods. Each broker group has accounts of its own,
so a change goes to each; no answer has a secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from dledger.client.admin.daemons import LeaderAsks
from dledger.remoting.protocol.access_bodies import (
    USER_PREFIX,
    AccessConfigHeader,
    AccessKeyHeader,
    AclConfig,
    AclInfo,
    DeleteAclHeader,
    GlobalWhiteAddrsHeader,
    ListAclsHeader,
    ListUsersHeader,
    PolicyEntryInfo,
    PolicyInfo,
    SubjectHeader,
    UserHeader,
    UserInfo,
)
from dledger.remoting.protocol.bodies import decode_body
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand

ItemT = TypeVar("ItemT", bound=msgspec.Struct)


class AccessAdmin(LeaderAsks):
    """Reads and changes accounts."""

    # ------------------------------------------------------------------------------ ACL 1.0

    async def put_account(
        self,
        access_key: str,
        *,
        secret_key: str | None = None,
        admin: bool = False,
        white_address: str | None = None,
        default_topic: str | None = None,
        default_group: str | None = None,
        topics: Mapping[str, str] | None = None,
        groups: Mapping[str, str] | None = None,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Make an account, or change it where it exists; what is None stays as it is.

        Args:
            access_key: Its name.
            secret_key: Wanted for a new account.
            admin: Always set, as in RocketMQ.
            white_address: Patterns of addresses from which the name is enough.
            default_topic: ``PUB``, ``SUB``, ``PUB|SUB`` or ``DENY``, for topics without a line.
            default_group: The same for consumer groups.
            topics: Permission of each topic; all lines there are.
            groups: The same of consumer groups.
            broker_names: Which groups; None: all the NameServer knows.
        Returns:
            The names of the groups that have it now.
        Raises:
            RequestFailedError: A group refused; those before it in order have the change.
            BrokerUnreachableError: A leader does not answer.
        """
        header = AccessConfigHeader(
            access_key=access_key,
            secret_key=secret_key,
            white_remote_address=white_address,
            admin=admin,
            default_topic_perm=default_topic,
            default_group_perm=default_group,
            topic_perms=_joined(topics),
            group_perms=_joined(groups),
        )
        code = RequestCode.UPDATE_AND_CREATE_ACL_CONFIG
        return await self._change_on_every_leader(
            code, header.encode(), broker_names, f"put account {access_key}"
        )

    async def delete_account(
        self, access_key: str, *, broker_names: tuple[str, ...] | None = None
    ) -> list[str]:
        """Delete an account, policies included; as `put_account`."""
        return await self._change_on_every_leader(
            RequestCode.DELETE_ACL_CONFIG,
            AccessKeyHeader(access_key).encode(),
            broker_names,
            f"delete account {access_key}",
        )

    async def set_global_white_addresses(
        self, addresses: Sequence[str], *, broker_names: tuple[str, ...] | None = None
    ) -> list[str]:
        """Set the addresses from which no request needs a signature; as `put_account`.

        Those of an account file count as well.
        """
        return await self._change_on_every_leader(
            RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
            GlobalWhiteAddrsHeader(",".join(addresses)).encode(),
            broker_names,
            "set global white addresses",
        )

    async def accounts(self) -> dict[str, AclConfig]:
        """Return the accounts of each broker group, by its name; without secrets and policies.

        Raises:
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        answers = await self._answers(RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG)
        return {name: AclConfig.decode(answer.body) for name, answer in answers.items()}

    # ------------------------------------------------------------------------------ ACL 2.0

    async def create_user(
        self,
        username: str,
        password: str,
        *,
        is_super: bool = False,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Make a user; one that is there with another password or type is refused.

        Args:
            is_super: May do everything, administration included.
            broker_names: Which groups; None: all the NameServer knows.
        Returns, Raises: As `put_account`.
        """
        user = UserInfo(
            username=username, password=password, user_type="Super" if is_super else "Normal"
        )
        return await self._change_on_every_leader(
            RequestCode.AUTH_CREATE_USER,
            UserHeader(username).encode(),
            broker_names,
            f"create user {username}",
            user.encode(),
        )

    async def update_user(
        self,
        username: str,
        *,
        password: str | None = None,
        is_super: bool | None = None,
        is_enabled: bool | None = None,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Change a user; what is None stays as it is; as `put_account`."""
        user = UserInfo(username=username, password=password)
        if is_super is not None:
            user.user_type = "Super" if is_super else "Normal"
        if is_enabled is not None:
            user.user_status = "enable" if is_enabled else "disable"
        return await self._change_on_every_leader(
            RequestCode.AUTH_UPDATE_USER,
            UserHeader(username).encode(),
            broker_names,
            f"update user {username}",
            user.encode(),
        )

    async def users(self, name_part: str = "") -> dict[str, list[UserInfo]]:
        """Return the users of each broker group whose name contains *name_part*."""
        ext = ListUsersHeader(name_part or None).encode()
        answers = await self._answers(RequestCode.AUTH_LIST_USER, ext)
        return {name: _items(answer, list[UserInfo]) for name, answer in answers.items()}

    async def put_policies(
        self,
        username: str,
        entries: Sequence[PolicyEntryInfo],
        *,
        policy_type: str = "Custom",
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Put entries into a policy of a user; each replaces one about the same resource.

        Args:
            username: Without ``User:``.
            entries: ``PolicyEntryInfo("Topic:orders", ["Pub", "Sub"], [], "Allow")`` and so on.
            policy_type: ``Custom``, or ``Default``: it decides where no custom entry fits.
            broker_names: Which groups; None: all the NameServer knows.
        Returns, Raises: As `put_account`.
        """
        subject = USER_PREFIX + username
        acl = AclInfo(
            subject=subject, policies=[PolicyInfo(policy_type=policy_type, entries=list(entries))]
        )
        return await self._change_on_every_leader(
            RequestCode.AUTH_CREATE_ACL,
            SubjectHeader(subject).encode(),
            broker_names,
            f"put policies of {username}",
            acl.encode(),
        )

    async def delete_policies(
        self,
        username: str,
        *,
        resource: str | None = None,
        policy_type: str | None = None,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Delete the entry about *resource*, or all entries of a user; as `put_account`."""
        return await self._change_on_every_leader(
            RequestCode.AUTH_DELETE_ACL,
            DeleteAclHeader(USER_PREFIX + username, policy_type, resource).encode(),
            broker_names,
            f"delete policies of {username}",
        )

    async def policies(
        self, name_part: str = "", resource_part: str = ""
    ) -> dict[str, list[AclInfo]]:
        """Return the policies of each broker group whose subject and resource contain the parts."""
        ext = ListAclsHeader(name_part or None, resource_part or None).encode()
        answers = await self._answers(RequestCode.AUTH_LIST_ACL, ext)
        return {name: _items(answer, list[AclInfo]) for name, answer in answers.items()}


def _joined(lines: Mapping[str, str] | None) -> str | None:
    if lines is None:
        return None
    return ",".join(f"{name}={permission}" for name, permission in lines.items())


def _items(answer: RemotingCommand, kind: type[list[ItemT]]) -> list[ItemT]:
    if not memoryview(answer.body).nbytes:
        return []
    return decode_body(answer.body, kind)
