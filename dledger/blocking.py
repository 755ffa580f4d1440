"""The client in plain calls that block, for programs without trio. Guide: docs/how-to/push.md."""

from dledger.client.blocking import (
    BlockingAdmin,
    BlockingClient,
    BlockingFuture,
    BlockingProducer,
    BlockingPullConsumer,
    BlockingPushConsumer,
    BlockingTransactionProducer,
)

__all__ = [
    "BlockingAdmin",
    "BlockingClient",
    "BlockingFuture",
    "BlockingProducer",
    "BlockingPullConsumer",
    "BlockingPushConsumer",
    "BlockingTransactionProducer",
]
