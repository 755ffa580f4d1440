"""The cluster that the matrix is played on: access control on, links that can be cut, one leader.

Real processes behind the proxy of the chaos runner, and beside their group a second one of a
single broker, which nothing happens to.
"""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import trio

from dledger.cli.acl_command import convert
from dledger.cli.local_cluster import LocalCluster, namesrv_leaders
from dledger.cli.local_cluster import lay_out as lay_out_group
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.chaos.cluster import GROUP, ChaosCluster, lay_out
from dledger.jepsen_like.chaos.proxy import LinkProxy
from dledger.jepsen_like.plans.plan import Plan, Settings, Workload
from dledger.remoting.protocol.signature import Credentials
from tests.harness.eventually import look_until
from tests.harness.operator_cluster import OPERATOR, plain_acl

T = TypeVar("T")

OTHER_GROUP = "other"
ACCOUNTS = plain_acl("guarded", "guards")
PLAN = Plan(
    seed=1,
    duration_ms=1,
    # Brokers ask back about transactions early where a workload has some.
    workload=Workload(transactions_per_mille=1),
    settings=Settings(
        heartbeat_ms=150,
        election_ms=600,
        segment_bytes=4 << 20,
        queue_units=20_000,
        register_ms=2_000,
        delay_levels="1s 1s 1s 2s",
    ),
)
SETTINGS: dict[str, object] = {
    "server.acl_enable": True,
    "server.max_in_flight_bytes": 256 << 10,
    "broker.slave_read_enable": True,
    "store.retention_interval_ms": 500,
}
SWITCH = "transientStorePoolEnable"
"""One that RocketMQ has and that is not built: brokers are to say so."""
SEND_TIMEOUT_S = 40.0
LOOK_S = 0.05
WHOLE_WITHIN_S = 90.0
"""Five brokers and all services share two processors."""


async def retried(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the cluster is in trouble."""
    while True:
        try:
            return await ask()
        except MQError as error:
            if not error.retriable:
                raise
        await trio.sleep(LOOK_S)


class Tail:
    """What a topic holds, read on from where the last round ended."""

    def __init__(
        self,
        consumer: PullConsumer,
        queues: Iterable[MessageQueue],
        wanted: SubscriptionExpression | str = "*",
    ) -> None:
        self._consumer = consumer
        self._wanted = wanted
        self._next = dict.fromkeys(queues, 0)

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return tuple(self._next)

    async def until(self, bodies: Iterable[bytes]) -> list[MessageExt]:
        """Return the next messages: exactly these, each as often as it is given, and no other."""
        wanted = Counter(bytes(body) for body in bodies)
        found: list[MessageExt] = []
        while True:
            for queue in self._next:
                found += await self._read(queue)
            there = Counter(message.body_bytes for message in found)
            assert not there - wanted, f"not sent, or doubled: {there - wanted}"
            if there == wanted:
                return found
            await trio.sleep(LOOK_S)

    async def more(self) -> list[MessageExt]:
        """Return what there is now."""
        return [message for queue in self._next for message in await self._read(queue)]

    async def _read(self, queue: MessageQueue) -> list[MessageExt]:
        try:
            result = await self._consumer.pull(
                queue, self._next[queue], tags=self._wanted, timeout_s=0
            )
        except MQError as error:
            if not error.retriable:
                raise
            return []
        self._next[queue] = result.next_begin_offset
        return list(result.messages)


@dataclass
class Ground:
    """What a row of the matrix works with.

    Attributes:
        client: The operator's.
        starts: How often each broker was started.
    """

    cluster: ChaosCluster
    links: LinkProxy
    client: ClientInstance
    producer: Producer
    consumer: PullConsumer
    folder: Path
    rng: Random
    starts: Counter[str] = field(default_factory=Counter)

    @property
    def admin(self) -> Admin:
        return Admin(self.client)

    async def leader(self) -> str:
        """Return the name of the broker that leads and serves, as soon as there is one."""
        while True:
            name = await self.cluster.leader(GROUP)
            if name is not None:
                return name
            await trio.sleep(LOOK_S)

    def address(self, name: str) -> str:
        """Return where clients find a broker."""
        return self.cluster.ports[name].client_address("clients")

    async def topic(
        self, name: str, queue_nums: int = 2, attributes: dict[str, str] | None = None
    ) -> tuple[MessageQueue, ...]:
        """Make a topic in the group that things happen to; return its queues."""
        await self.admin.create_topic(
            name, queue_nums=queue_nums, broker_names=(GROUP,), attributes=attributes
        )
        return tuple((await self.client.route(name, fresh=True)).publish_queues)

    async def tail(self, topic: str, wanted: SubscriptionExpression | str = "*") -> Tail:
        """Return a tail of all queues of a topic."""
        return Tail(self.consumer, await self.consumer.fetch_message_queues(topic), wanted)

    def connect(self, credentials: Credentials = OPERATOR) -> ClientInstance:
        """Return another client, not yet open."""
        return connect(self.cluster.namesrv_addresses, ClientConfig(credentials=credentials))

    async def start(self, name: str) -> None:
        self.starts[name] += 1
        await self.cluster.start(name)

    # -- what happens to it ----------------------------------------------------------------

    async def kill_leader(self, number: int) -> None:
        """Kill the leader's process; another one leads before it is started again."""
        name = await self.leader()
        await self.cluster.kill(name)
        await self.cluster.wait_leader(other_than=name, group=GROUP, timeout_s=WHOLE_WITHIN_S)
        await trio.sleep(self.rng.random())
        await self.start(name)
        await self._whole()

    async def pause_leader(self, number: int) -> None:
        """Stop the leader's process for longer than an election takes; it wakes up unknowing."""
        name = await self.leader()
        process = self.cluster.brokers[name].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            await trio.sleep(1.0 + 2.0 * self.rng.random())
        finally:
            process.send_signal(signal.SIGCONT)
        await self._whole()

    async def cut_one_way(self, number: int) -> None:
        """Cut one direction of the leader's links, or the other, in turn."""
        name = await self.leader()
        others = [other for other in self.cluster.brokers if other != name]
        cuts = [(other, name) if number % 2 else (name, other) for other in others]
        for source, target in cuts:
            self.links.cut(source, target)
        try:
            await trio.sleep(1.0 + 2.0 * self.rng.random())
        finally:
            for source, target in cuts:
                self.links.mend(source, target)
        await self._whole()

    async def _whole(self) -> None:
        """Wait until one member leads and all others follow again."""
        await self.cluster.wait_leader(group=GROUP, timeout_s=WHOLE_WITHIN_S)
        for name in self.cluster.brokers:
            await self.cluster.wait_caught_up(name, WHOLE_WITHIN_S)


def _other_group(folder: Path, cluster: ChaosCluster, settings: dict[str, object]) -> LocalCluster:
    (namesrv,) = cluster.namesrv_addresses
    own = {
        **settings,
        "broker.cluster_name": "Chaos",
        "broker.namesrv_addr": namesrv,
        "store.mapped_file_size_commit_log": 4 << 20,
    }
    return lay_out_group(folder / "other", brokers=1, group=OTHER_GROUP, settings=own)


@contextmanager
def _operating(folder: Path) -> Iterator[None]:
    """Let the status requests of the harness be the operator's."""
    (folder / "tools.yml").write_text(f"accessKey: operator\nsecretKey: {OPERATOR.secret_key}\n")
    os.environ["DLEDGER_CREDENTIALS"] = str(folder / "tools.yml")
    try:
        yield
    finally:
        del os.environ["DLEDGER_CREDENTIALS"]


@asynccontextmanager
async def ground(folder: Path, seed: int) -> AsyncIterator[Ground]:
    """Run everything while the block runs."""
    (folder / "plain_acl.yml").write_text(ACCOUNTS)
    accounts = folder / "accounts.toml"
    convert(folder / "plain_acl.yml", accounts)
    settings = {**SETTINGS, "server.acl_file": str(accounts)}
    cluster = lay_out(folder / "nodes", PLAN, settings=settings)
    switches = folder / "switches.conf"
    switches.write_text(f"{SWITCH}=true\n")
    for node in cluster.brokers.values():
        node.module = "dledger"
        files = ("-c", str(node.config_path), "-c", str(switches))
        node.arguments = ("broker", *files, "--log-form", "json")
    other = _other_group(folder, cluster, settings)
    links = LinkProxy(Random(seed), cluster.targets())
    with _operating(folder):
        async with trio.open_nursery() as nursery:
            await nursery.start(links.serve)
            try:
                for name in (*cluster.name_servers, *cluster.brokers):
                    await cluster.start(name)
                await other.start("n0")
                await cluster.wait_leader(group=GROUP)
                await look_until(
                    lambda: namesrv_leaders(cluster.namesrv.address),
                    lambda leaders: leaders.keys() == {GROUP, OTHER_GROUP},
                )
                async with (
                    connect(
                        cluster.namesrv_addresses, ClientConfig(credentials=OPERATOR)
                    ) as client,
                    Producer(
                        client, "matrix", ProducerConfig(send_timeout_s=SEND_TIMEOUT_S)
                    ) as producer,
                    PullConsumer(client, "readers") as consumer,
                ):
                    yield Ground(
                        cluster,
                        links,
                        client,
                        producer,
                        consumer,
                        folder,
                        Random(seed),
                        Counter(list(cluster.brokers)),
                    )
            finally:
                with trio.CancelScope(shield=True):
                    await other.stop("n0")
                    await cluster.stop_all()
            nursery.cancel_scope.cancel()
