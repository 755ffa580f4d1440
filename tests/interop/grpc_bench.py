"""``python -m tests.interop.grpc_bench``: sends by gRPC through a proxy beside sends by remoting.

One process sends with 64 outstanding messages of 256 bytes, in turn by gRPC through one proxy and
through `dledger.aio` without it, to three brokers. What counts is the ratio of neighbours.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import trio

import dledger
from dledger import aio
from dledger.cli.local_cluster import local_cluster
from dledger.cli.ports import free_ports
from dledger.proxy import messaging_pb2 as pb
from tests.harness.cluster_questions import create_topic
from tests.harness.local_settings import SMALL_FILES

OUTSTANDING = 64
BODY = b"x" * 256
TOPIC = "Bench"
METHOD = "/apache.rocketmq.v2.MessagingService/SendMessage"
WARM_S = 1.0

Send = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Rate:
    """Sends a second, and the processor time of one in this process, in microseconds."""

    per_s: float
    cpu_us: float


async def rate(send: Send, seconds: float) -> Rate:
    """Measure *send* while `OUTSTANDING` calls of it run at a time."""
    sent = 0
    until = time.monotonic() + WARM_S
    counting = False

    async def keep_sending() -> None:
        nonlocal sent
        while time.monotonic() < until:
            await send()
            sent += counting

    await asyncio.gather(*(keep_sending() for _ in range(OUTSTANDING)))
    until, counting = time.monotonic() + seconds, True
    begin, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(keep_sending() for _ in range(OUTSTANDING)))
    took_s, cpu_s = time.monotonic() - begin, time.process_time() - cpu
    return Rate(sent / took_s, cpu_s / sent * 1e6)


def cpu_s_of(pid: int) -> float:
    """Return the processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def by_grpc(proxy: str, seconds: float) -> Rate:
    """Measure sends through the proxy."""
    number = 0
    async with grpc.aio.insecure_channel(proxy) as channel:
        call = channel.unary_unary(
            METHOD,
            request_serializer=pb.SendMessageRequest.SerializeToString,
            response_deserializer=pb.SendMessageResponse.FromString,
        )

        async def send() -> None:
            nonlocal number
            number += 1
            message = pb.Message(
                topic=pb.Resource(name=TOPIC),
                system_properties=pb.SystemProperties(
                    message_id=f"{number:034X}", message_type=pb.NORMAL, body_encoding=pb.IDENTITY
                ),
                body=BODY,
            )
            answer = await call(
                pb.SendMessageRequest(messages=[message]),
                metadata=(("x-mq-client-id", "bench"),),
                timeout=10,
            )
            assert answer.status.code == pb.OK, answer

        return await rate(send, seconds)


async def by_remoting(namesrv: str, seconds: float) -> Rate:
    """Measure sends of the SDK."""
    async with aio.connect(namesrv) as client, aio.Producer(client, "bench") as producer:

        async def send() -> None:
            await producer.send(dledger.Message(TOPIC, BODY))

        return await rate(send, seconds)


async def measure(rounds: int, seconds: float) -> None:
    """Print the rates of each round, and the median ratio."""
    with tempfile.TemporaryDirectory() as folder:
        async with local_cluster(
            Path(folder), settings=SMALL_FILES, proxies=free_ports(1)
        ) as cluster:
            await create_topic([cluster.namesrv_address], TOPIC, queues=4)
            proxy = cluster.proxies["proxy0"].address
            ratios = []
            for _ in range(rounds):
                pid = cluster.proxies["proxy0"].pid
                assert pid is not None
                before_s = cpu_s_of(pid)
                through = await trio.to_thread.run_sync(asyncio.run, by_grpc(proxy, seconds))
                direct = await trio.to_thread.run_sync(
                    asyncio.run, by_remoting(cluster.namesrv_address, seconds)
                )
                proxy_s = cpu_s_of(pid) - before_s
                ratios.append(through.per_s / direct.per_s)
                # The seconds before the measurement count in the proxy, too.
                proxy_us = proxy_s / (through.per_s * (seconds + WARM_S)) * 1e6
                sys.stdout.write(
                    f"gRPC {through.per_s:.0f}/s, remoting {direct.per_s:.0f}/s,"
                    f" ratio {ratios[-1]:.2f}; processor time of a send: client"
                    f" {through.cpu_us:.0f} and {direct.cpu_us:.0f} µs, proxy {proxy_us:.0f} µs\n"
                )
    sys.stdout.write(f"median ratio {statistics.median(ratios):.2f}\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=5)
    given = options.parse_args()
    trio.run(measure, given.rounds, given.seconds)
