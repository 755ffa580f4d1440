"""Requests that a daemon accepts also when it has no capacity for others: administration,
registration.

They are few and small, and an operator that cannot reach a daemon under pressure cannot help it.
"""

from __future__ import annotations

from typing import Final

from remoting.protocol.codes import RequestCode

BROKER_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES,
        RequestCode.SIGNATURE_CHALLENGE,
        RequestCode.RAFT_STATUS,
        RequestCode.RAFT_CHANGE,
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.GET_BROKER_RUNTIME_INFO,
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.GET_CONSUME_STATS,
    }
)
"""What the tools ask a broker."""

NAMESRV_RESERVED: Final = frozenset(
    {
        RequestCode.CAPABILITIES,
        RequestCode.SIGNATURE_CHALLENGE,
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_NAMESRV_CONFIG,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
    }
)
"""What brokers and tools ask a NameServer."""
