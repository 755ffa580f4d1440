"""What each request of a NameServer must be allowed to do.

RocketMQ's NameServers check nothing. With access control here, clients that ask for routes sign,
and those that change what all clients get are administrators: brokers register with such an
account.
"""

from __future__ import annotations

from typing import Final

from remoting.access.rules import ADMIN, SIGNED, Rule
from remoting.protocol.codes import RequestCode

NAMESRV_RULES: Final[dict[int, Rule]] = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC: SIGNED,
    RequestCode.GET_BROKER_CLUSTER_INFO: SIGNED,
    RequestCode.GET_BROKER_MEMBER_GROUP: SIGNED,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: SIGNED,
    RequestCode.GET_TOPICS_BY_CLUSTER: SIGNED,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: SIGNED,
    RequestCode.GET_UNIT_TOPIC_LIST: SIGNED,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: SIGNED,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: SIGNED,
    RequestCode.GET_KV_CONFIG: SIGNED,
    RequestCode.GET_KVLIST_BY_NAMESPACE: SIGNED,
    # A broker registers for a group: with that right it may send clients anywhere.
    RequestCode.REGISTER_BROKER: ADMIN,
    RequestCode.UNREGISTER_BROKER: ADMIN,
    RequestCode.BROKER_HEARTBEAT: ADMIN,
    RequestCode.QUERY_DATA_VERSION: ADMIN,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: ADMIN,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: ADMIN,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: ADMIN,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: ADMIN,
    RequestCode.PUT_KV_CONFIG: ADMIN,
    RequestCode.DELETE_KV_CONFIG: ADMIN,
    RequestCode.UPDATE_NAMESRV_CONFIG: ADMIN,
    RequestCode.GET_NAMESRV_CONFIG: ADMIN,
}

LOCAL_ADMIN: Final = frozenset(
    {
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.UPDATE_NAMESRV_CONFIG,
    }
)
"""They change the routes of everybody: without access control they come from the NameServer's own
machine, unless `server.open_admin` is on. Registrations are decided about by the route table."""
