"""Headers and bodies of requests about accounts: ACL 1.0 (50 to 54) and ACL 2.0 (3001 to 3010).

No `repr` of them shows a secret.

Spec: docs/internals/protocol/remoting.md, section 13.
"""

from __future__ import annotations

import msgspec

from dledger.remoting.protocol.bodies import Body
from dledger.remoting.protocol.headers import Header

USER_PREFIX = "User:"
"""Begins the subject of a policy: the only kind there is."""


class AccessConfigHeader(Header):
    """UPDATE_AND_CREATE_ACL_CONFIG (50); what is absent stays as it is, but `admin`."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    """``name=permission``, with commas between them; all lines of the account."""
    group_perms: str | None = None

    def __repr__(self) -> str:
        return f"AccessConfigHeader({self.access_key!r})"


class AccessKeyHeader(Header):
    """DELETE_ACL_CONFIG (51)."""

    access_key: str


class GlobalWhiteAddrsHeader(Header):
    """UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53)."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclVersionHeader(Header):
    """Answer of GET_BROKER_CLUSTER_ACL_INFO (52)."""

    version: str
    broker_name: str
    broker_addr: str
    cluster_name: str
    all_acl_file_version: str | None = None


class UserHeader(Header):
    """A user: codes 3001 to 3004."""

    username: str


class ListUsersHeader(Header):
    """AUTH_LIST_USER (3005)."""

    filter: str | None = None


class SubjectHeader(Header):
    """The subject of policies: codes 3006, 3007 and 3009."""

    subject: str


class DeleteAclHeader(Header):
    """AUTH_DELETE_ACL (3008); without a resource all policies of the subject."""

    subject: str
    policy_type: str | None = None
    resource: str | None = None


class ListAclsHeader(Header):
    """AUTH_LIST_ACL (3010)."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class PlainAccessConfig(Body):
    """An account of ACL 1.0."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: list[str] = msgspec.field(default_factory=list)
    group_perms: list[str] = msgspec.field(default_factory=list)

    def __repr__(self) -> str:
        return f"PlainAccessConfig({self.access_key!r})"


class AclConfig(Body):
    """Answer of GET_BROKER_CLUSTER_ACL_CONFIG (54)."""

    global_white_addrs: list[str] = msgspec.field(default_factory=list)
    plain_access_configs: list[PlainAccessConfig] = msgspec.field(default_factory=list)


class UserInfo(Body):
    """A user of ACL 2.0; brokers answer without the password."""

    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r}, {self.user_type!r}, {self.user_status!r})"


class PolicyEntryInfo(Body):
    """One entry of a policy."""

    resource: str = ""
    actions: list[str] = msgspec.field(default_factory=list)
    source_ips: list[str] = msgspec.field(default_factory=list)
    decision: str = ""


class PolicyInfo(Body):
    """A policy: ``Custom`` or ``Default``."""

    policy_type: str | None = None
    entries: list[PolicyEntryInfo] = msgspec.field(default_factory=list)


class AclInfo(Body):
    """The policies of a subject."""

    subject: str | None = None
    policies: list[PolicyInfo] = msgspec.field(default_factory=list)
