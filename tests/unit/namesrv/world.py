"""A running NameServer on a network in memory, and the requests brokers and clients send."""

import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.config import SCHEMA, NamesrvConfig
from dledger.namesrv.server import serve_namesrv
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.machine import SystemRng, TrioClock
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.seams import Executor
from dledger.testing.doubles import MemoryNetwork

PATIENT = ConnectionLimits(idle_timeout_s=3600)


@dataclass
class World:
    """A NameServer and a way to reach it."""

    nursery: trio.Nursery
    network: MemoryNetwork
    address: tuple[str, int]

    async def connect(self, credentials: Credentials | None = None) -> Connection:
        stream = await self.network.connect(*self.address, timeout_s=1)
        sign = None if credentials is None else credentials.sign
        connection = Connection(stream, ProcessorTable(), limits=PATIENT, sign=sign)
        self.nursery.start_soon(connection.run)
        return connection


def config_in(folder: Path, **named: object) -> NamesrvConfig:
    """Return settings by their names, with the file of key-values in *folder*."""
    paths = {setting.name: path for path, setting in SCHEMA.settings.items()}
    values = {"kv_config_path": str(folder / "kvConfig.json"), **named}
    return NamesrvConfig.load(options={paths[name]: value for name, value in values.items()})


@asynccontextmanager
async def running_namesrv(
    config: NamesrvConfig, executor: Executor | None = None
) -> AsyncIterator[World]:
    """Run a NameServer on a network in memory; stopped at the end of the block."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(
            partial(
                serve_namesrv,
                config,
                clock=TrioClock(),
                rng=SystemRng(),
                network=network,
                disk=OsDisk(),
                executor=executor,
            )
        )
        yield World(nursery, network, address)
        nursery.cancel_scope.cancel()


async def ask(
    connection: Connection,
    code: RequestCode,
    ext: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    version: int | None = None,
) -> RemotingCommand:
    """Send one request and return its answer."""
    command = request(code, ext, body)
    if version is not None:
        command.version = version
    return await connection.invoke(command, 5.0)


def register_body(
    topics: Iterable[str] = ("T1", "T2"),
    *,
    counter: int = 1,
    state: int = 0,
    filters: Iterable[str] = (),
    perm: int = 6,
) -> RegisterBrokerBody:
    """Return the registration of a broker with these topics."""
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            topic_config_table={
                topic: TopicConfig(
                    topic_name=topic, read_queue_nums=4, write_queue_nums=4, perm=perm
                )
                for topic in topics
            },
            data_version=DataVersion(state_version=state, timestamp=1, counter=counter),
        ),
        filter_server_list=list(filters),
    )


def broker_ext(addr: str = "10.0.0.1:10911", broker_id: int = 0, **more: str) -> dict[str, str]:
    """Return the ext fields that name a broker."""
    return {
        "brokerName": "broker-a",
        "brokerAddr": addr,
        "clusterName": "DefaultCluster",
        "brokerId": str(broker_id),
        **more,
    }


async def register(
    connection: Connection,
    addr: str = "10.0.0.1:10911",
    broker_id: int = 0,
    body: RegisterBrokerBody | None = None,
    **more: str,
) -> RemotingCommand:
    """Register a broker, with a checksum as real brokers send it."""
    data = (body or register_body()).encode()
    ext = broker_ext(
        addr,
        broker_id,
        haServerAddr=addr.replace("10911", "10912"),
        bodyCrc32=str(zlib.crc32(data) & 0x7FFFFFFF),
        **more,
    )
    return await ask(connection, RequestCode.REGISTER_BROKER, ext, data)


async def route(connection: Connection, topic: str = "T1") -> TopicRouteData | None:
    """Return the route of a topic, None for code 17."""
    answer = await ask(connection, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    if answer.code == 17:
        return None
    assert answer.code == 0, answer.remark
    return TopicRouteData.decode(answer.body)
