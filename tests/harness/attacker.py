"""``python -m tests.harness.attacker KIND ADDRESS…``: clients that mean harm, in their own process.

It prints one line when it holds what it wants to hold, keeps it until its input ends, and then
prints what it did. Everything is bounded in number and time.
"""

import json
import math
import os
import random
import resource
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import SerializeType, request
from dledger.remoting.protocol.frame import encode_command

HALF_FRAMES = 150
IDLE = 4_096
MUTATED = 20_000
MUTATED_AT_A_TIME = 50
HELD_S = 3.0
"""What could be sent has been sent after so long; idle connections are counted instead."""

Done = dict[str, int]


async def connect(address: str) -> trio.SocketStream:
    host, _, port = address.partition(":")
    return await trio.open_tcp_stream(host, int(port))


async def frames(address: str, done: Done, claimed_bytes: int = 0) -> None:
    """Send a large frame over each of many connections: one of *claimed_bytes*, never whole."""
    frame = bytearray(encode_command(request(RequestCode.HEART_BEAT, {}, bytes(15 << 20))))
    if claimed_bytes:
        frame[:4] = (claimed_bytes - 4).to_bytes(4, "big")

    async def one() -> None:
        try:
            async with await connect(address) as stream:
                for at in range(0, len(frame), 1 << 20):
                    await stream.send_all(frame[at : at + (1 << 20)])
                    done["mib"] += 1
                await trio.sleep_forever()
        except (OSError, trio.BrokenResourceError):
            done["closed"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(HALF_FRAMES):
            nursery.start_soon(one)


async def idle(address: str, done: Done) -> None:
    """Open many connections and send nothing."""
    streams = []
    for _ in range(IDLE):
        try:
            streams.append(await connect(address))
            done["opened"] += 1
        except OSError:
            done["closed"] += 1
    await trio.sleep_forever()


def mutated(rng: random.Random) -> bytes:
    """Return a frame that is nearly right: odd codes, fields, bodies, and sometimes odd bytes."""
    names = ["topic", "consumerGroup", "queueId", "a", "b", "e", "i", "producerGroup", "offset"]
    values: list[Any] = ["", "zz", "%RETRY%x", "-1", str(2**63), "\x1b[31m", "x" * 300, "true"]
    codes = [int(code) for code in RequestCode]
    command = request(
        rng.choice(codes) if rng.random() < 0.9 else rng.randrange(-5, 1 << 20),
        {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(6))},
        rng.choice([b"", b"{}", b"[]", b'{"clientID":"x"}', rng.randbytes(rng.randrange(200))]),
    )
    if command.code < 1 << 15:
        command.serialize = rng.choice(list(SerializeType))
    frame = bytearray(encode_command(command))
    if rng.random() < 0.15:
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame)


async def mutate(address: str, done: Done) -> None:
    """Send many mutated frames over many short connections, and read what is answered."""

    async def one(seed: int) -> None:
        rng = random.Random(seed)
        left = MUTATED // MUTATED_AT_A_TIME
        while left > 0:
            count = min(left, rng.randrange(1, 60))
            left -= count
            done["frames"] += count
            try:
                async with await connect(address) as stream:
                    await stream.send_all(b"".join(mutated(rng) for _ in range(count)))
                    with trio.move_on_after(0.2):
                        while await stream.receive_some(65_536):
                            done["answers"] += 1
            except (OSError, trio.BrokenResourceError):
                done["closed"] += 1

    async with trio.open_nursery() as nursery:
        for seed in range(MUTATED_AT_A_TIME):
            nursery.start_soon(one, seed)


KINDS: dict[str, Callable[[str, Done], Awaitable[None]]] = {
    "half-frames": partial(frames, claimed_bytes=16 << 20),
    "whole-frames": frames,
    "idle": idle,
    "mutate": mutate,
}


async def main(kind: str, addresses: list[str]) -> None:
    """Attack each address until standard input ends."""
    done: Done = dict.fromkeys(("mib", "opened", "closed", "frames", "answers"), 0)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as attacks:
            for address in addresses:
                attacks.start_soon(KINDS[kind], address, done)
            with trio.move_on_after(math.inf if kind == "idle" else HELD_S):
                while kind != "idle" or done["opened"] + done["closed"] < IDLE * len(addresses):
                    await trio.sleep(0.05)
            print(json.dumps(done), flush=True)
            await trio.lowlevel.wait_readable(sys.stdin.fileno())
            if kind != "mutate":  # that ends by its count
                attacks.cancel_scope.cancel()
        print(json.dumps(done), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.nice(5)
    trio.run(main, sys.argv[1], sys.argv[2:])
