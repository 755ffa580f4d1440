"""Registrations of brokers as a NameServer reads them, and what stands in its tables then."""

import struct
import zlib
from collections.abc import Mapping

import msgspec

from dledger.namesrv.registration import Registration
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import DataVersion, RegisterBrokerBody, TopicConfig

CLUSTER = "DefaultCluster"


A, B, C = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"


def topics(*names: str, queues: int = 4, perm: int = 6, flags: int = 0) -> dict[str, TopicConfig]:
    return {
        name: TopicConfig(
            topic_name=name,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=perm,
            topic_sys_flag=flags,
        )
        for name in names
    }


def version(counter: int = 1, state: int = 0) -> DataVersion:
    return DataVersion(state_version=state, timestamp=1_000, counter=counter)


def registration(
    addr: str = A,
    broker_id: int = 0,
    name: str = "broker-a",
    *,
    cluster: str = CLUSTER,
    table: Mapping[str, TopicConfig] | None = None,
    data_version: DataVersion | None = None,
    timeout_ms: int | None = None,
    filters: tuple[str, ...] = (),
    connection: int | None = 1,
    acting: bool | None = None,
    identity: str = "",
    proof: str = "",
) -> Registration:
    return Registration(
        cluster_name=cluster,
        broker_name=name,
        broker_addr=addr,
        broker_id=broker_id,
        topics=topics("T1", "T2") if table is None else table,
        data_version=data_version or version(),
        ha_server_addr=addr.replace("10911", "10912"),
        heartbeat_timeout_ms=timeout_ms,
        enable_acting_master=acting,
        filter_servers=filters,
        connection=connection,
        identity=identity,
        proof=proof,
    )


def addrs_of(table: RouteInfoManager, topic: str, name: str = "broker-a") -> dict[int, str]:
    route = table.route(topic)
    assert route is not None
    return next(dict(b.broker_addrs) for b in route.broker_datas if b.broker_name == name)


def is_empty(table: RouteInfoManager) -> bool:
    return not (
        table.topic_queue_table
        or table.broker_addr_table
        or table.cluster_addr_table
        or table.broker_live_table
        or table.filter_server_table
    )


_INT = struct.Struct(">i")


def encode_compressed(body: RegisterBrokerBody) -> bytes:
    """Return *body* in the compressed form, as a broker of 4.x sends it."""
    wrapper = body.topic_config_serialize_wrapper
    texts = [_topic_text(config).encode() for config in wrapper.topic_config_table.values()]
    servers = msgspec.json.encode(body.filter_server_list)
    parts = [_sized(wrapper.data_version.encode()), _INT.pack(len(texts)), *map(_sized, texts)]
    return zlib.compress(b"".join([*parts, _sized(servers)]))


def _topic_text(config: TopicConfig) -> str:
    return (
        f"{config.topic_name} {config.read_queue_nums} {config.write_queue_nums} "
        f"{config.perm} {config.topic_filter_type}"
    )


def _sized(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data
