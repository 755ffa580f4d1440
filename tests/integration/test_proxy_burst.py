"""Calls that come to a proxy at once are all answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import grpc
import pytest

from dledger.proxy.server import OPTIONS

pytestmark = pytest.mark.slow

BURST: Final = 1_200
"""More than gRPC takes by default before the program has begun them."""


async def answer(request: bytes, _context: Any) -> bytes:
    return request


def test_no_call_of_a_burst_is_dropped() -> None:
    """Consumers of a whole site call at once when another proxy has ended."""
    codes: Counter[str] = Counter()

    async def serve() -> None:
        # gRPC cancels what has waited for 30 s: a busy machine may take that long.
        waits = ("grpc.server_max_unrequested_time_in_server", 600)
        server = grpc.aio.server(options=[*OPTIONS, waits])
        handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/s/Call")
            # Nothing of the server runs meanwhile but gRPC's own threads.
            calls = [call.future(b"x", timeout=60, wait_for_ready=True) for _ in range(BURST)]
            for each in calls:
                error = await asyncio.to_thread(each.exception)
                codes["OK" if error is None else error.code().name] += 1
        await server.stop(None)

    asyncio.run(serve())
    assert codes == {"OK": BURST}
