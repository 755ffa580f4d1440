"""A FastAPI application that sends a message with each request, and consumes them.

::

    pip install dledger-mq fastapi uvicorn
    NAMESRV_ADDR=127.0.0.1:9876 uvicorn orders:app

    curl -X POST localhost:8000/orders/7 -d item=tea
    curl localhost:8000/orders

The client, its producer and its consumer are open as long as the application: FastAPI's lifespan
opens and closes them in the loop that serves the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request

import dledger
from dledger import aio

TOPIC = "orders"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep the client open while the application runs."""
    app.state.booked = {}

    async def book(messages: Sequence[dledger.DeliveredMessage], _: dledger.ConsumeContext) -> None:
        for message in messages:
            app.state.booked[message.keys] = message.body_bytes.decode()

    config = dledger.PushConfig(consume_from=dledger.FROM_FIRST)
    async with (
        aio.connect() as client,
        aio.Producer(client, "order-service") as app.state.producer,
        aio.PushConsumer(client, "bookkeeping", book, {TOPIC: "*"}, config),
    ):
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}")
async def order(number: str, request: Request) -> dict[str, Any]:
    """Store an order; the answer comes when a majority of the brokers has it on disk."""
    message = dledger.Message(TOPIC, await request.body(), keys=number)
    try:
        sent = await app.state.producer.send(message, timeout_s=5)
    except dledger.errors.ClientError as error:
        # not_stored: may be ordered again at once. unknown: ask before ordering again.
        raise HTTPException(503, {"outcome": error.outcome, "error": str(error)}) from error
    return {"queue": sent.message_queue.queue_id, "offset": sent.queue_offset}


@app.get("/orders")
async def orders() -> dict[str, str]:
    """Return what the consumer has booked."""
    booked: dict[str, str] = app.state.booked
    return booked
