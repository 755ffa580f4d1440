"""The SDK for asyncio: the classes of `dledger` that wait, under the same names.

::

    import dledger
    from dledger import aio

    async with aio.connect("127.0.0.1:9876") as client, aio.Producer(client, "orders") as producer:
        await producer.send(dledger.Message("Orders", b"one"))

Messages, settings, results and errors are those of `dledger`. The SDK itself runs under trio, as a
guest of the asyncio loop and in its thread; nothing of it is written twice.

Guide: docs/how-to/asyncio.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dledger.aio.clients import (
        Admin,
        ClientInstance,
        LitePullConsumer,
        LockClient,
        Producer,
        PullConsumer,
        PushConsumer,
        SendFuture,
        SimpleConsumer,
        TransactionProducer,
        connect,
    )

__all__ = [
    "Admin",
    "ClientInstance",
    "LitePullConsumer",
    "LockClient",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "SendFuture",
    "SimpleConsumer",
    "TransactionProducer",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Load the module of a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.clients"), name)
