"""RocketMQ keys that ask for something this broker does not do, where silence would be a danger.

Accepted with one warning where their value asks for nothing; otherwise the broker does not start.
An operator who asks for protection, or for another kind of group, must not believe to have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NOTHING: Final = frozenset({"", "false"})
"""Values that ask for nothing."""

ON: Final = frozenset({"true"})


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """A key that is refused.

    Attributes:
        reason: What to do instead.
        harmless: Values in small letters that ask for nothing.
    """

    reason: str
    harmless: frozenset[str] = NOTHING

    def refuses(self, raw: str) -> bool:
        """Whether *raw* asks for what is not there."""
        return raw.strip().lower() not in self.harmless


REFUSED: Final[Mapping[str, RefusedKey]] = {
    "authenticationEnabled": RefusedKey(
        "users of ACL 2.0 are not built; use aclEnable and server.acl_file"
    ),
    "authorizationEnabled": RefusedKey(
        "policies of ACL 2.0 are not built; use aclEnable and server.acl_file"
    ),
    "migrateAuthFromV1Enabled": RefusedKey(
        "ACL 2.0 is not built; plain_acl.yml works as server.acl_file"
    ),
    "innerClientAuthenticationCredentials": RefusedKey(
        "a secret does not stand in a setting; use client.credentials_file"
    ),
    "initAuthenticationUser": RefusedKey(
        "a secret does not stand in a setting; use server.acl_file"
    ),
    "configBlackList": RefusedKey(
        "no list keeps clients from a setting; aclEnable says who may change settings",
        NOTHING | {"configblacklist", "configblacklist;brokerconfigpath"},
    ),
    "tls.ciphers": RefusedKey("OpenSSL's own choice of ciphers is used; take the line out"),
    "tls.protocols": RefusedKey(
        "TLS 1.2 and 1.3 are spoken, whatever is listed; take the line out"
    ),
    "tls.config.file": RefusedKey(
        "no second file is read; put its lines into this one",
        NOTHING | {"/etc/rocketmq/tls.properties"},
    ),
    "rejectPullConsumerEnable": RefusedKey(
        "pull consumers are not told from others; aclEnable says who may read"
    ),
    "disableConsumeIfConsumerReadSlowly": RefusedKey(
        "a group that is far behind is not stopped; take the line out and watch its lag"
    ),
    "notifyConsumerIdsChangedEnable": RefusedKey(
        "consumers always hear at once that their group has changed; take the line out", ON | {""}
    ),
    "brokerFastFailureEnable": RefusedKey(
        "a broker that cannot keep up always says so, and stores nothing of what it refuses;"
        " take the line out",
        ON | {""},
    ),
    "maxTopicLength": RefusedKey(
        "names of topics have 127 characters at most; take the line out", frozenset({"", "127"})
    ),
    "allAckInSyncStateSet": RefusedKey(
        "an acknowledgement means a majority, and no setting makes it mean all; take the line out"
    ),
    "asyncLearner": RefusedKey(
        "a member that has no vote is added while the group runs: dledger raft add"
    ),
    "readOnlyCommitLogStorePaths": RefusedKey(
        "the whole log lies below store.path_root_dir; nothing in those folders would be found"
    ),
    "messageStorePlugIn": RefusedKey("no plug-in is loaded; take the line out", frozenset({""})),
    "socksProxyConfig": RefusedKey(
        "connections are made directly; take the line out", NOTHING | {"{}"}
    ),
}

REFUSED_KEYS: Final[Mapping[str, str]] = {key: entry.reason for key, entry in REFUSED.items()}
"""RocketMQ key to what to do instead."""

IN_SYNC_KEYS: Final = frozenset({"inSyncReplicas", "minInSyncReplicas"})
"""How many replicas have a message when it is acknowledged. More than a majority is refused."""

MASTER_AND_SLAVE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "brokerId": frozenset({"", "0"}),
    "haMasterAddress": NOTHING,
    "haMasterAddressList": NOTHING,
    "enableControllerMode": NOTHING,
}
"""Keys of a broker that copies another one, or may, and the values that do not say so. Two such
brokers would be two groups under one name, so they are refused without the list of members."""


def members_wanted(source: str, key: str, raw: str, *, group: str, peer_port: int) -> str:
    """Return why a broker that calls itself a slave does not start alone, and what to write."""
    return (
        f"{source}: {key} = {raw}: this broker would be a group of its own, beside its master's and"
        " under the same name: messages acknowledged here would never be there. Roles are elected"
        " among the members of one group: write, the same for each of them,"
        f" enableDLegerCommitLog=true, dLegerGroup={group},"
        f" dLegerPeers=n0-HOST0:{peer_port};n1-HOST1:{peer_port};n2-HOST2:{peer_port}, and for each"
        " its own dLegerSelfId (n0, n1, n2); see docs/from-master-slave.md"
    )
