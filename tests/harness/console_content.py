"""Something to see on every page of the console: messages, groups, dead letters, clients."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeStatus
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction_producer import TransactionProducer
from dledger.testing.embedded_broker import wait_for_lag

HOSTILE: Final = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
"""As a key, a body and a property: what a page must show as text."""
HOSTILE_KEY: Final = "<b>key</b>&amp;\"'"
ORDERS: Final = 40
REFUSED: Final = (7, 23)
"""Orders that the group billing gives up."""
WAIT_S: Final = 60.0
SETTINGS: Final = {"broker.trace_topic_enable": True, "store.mapped_file_size_commit_log": 16 << 20}
"""Of the brokers: a topic for traces, and small files."""


async def _bill(messages: Sequence[MessageExt], _context: object) -> ConsumeStatus:
    for message in messages:
        if message.keys in {f"order-{number}" for number in REFUSED}:
            return ConsumeStatus.RECONSUME_LATER
    return ConsumeStatus.SUCCESS


async def _undecided(_message: object) -> LocalTransactionState:
    return LocalTransactionState.UNKNOWN


@asynccontextmanager
async def filled(namesrv: str) -> AsyncIterator[None]:
    """Fill a cluster, and keep its clients connected while the block runs."""
    async with connect(namesrv) as client:
        admin = Admin(client)
        await admin.create_topic("orders", queue_nums=4)
        await admin.create_topic("payments", queue_nums=2, attributes={"retention.ms": "86400000"})
        await admin.create_topic("audit", queue_nums=1, perm=4)
        async with (
            Producer(client, "shop", ProducerConfig(enable_msg_trace=True)) as producer,
            TransactionProducer(client, "payer", _undecided) as payer,
        ):
            for number in range(ORDERS):
                body = f'{{"order": {number}, "amount": {number * 7 % 90 + 10}}}'
                await producer.send(
                    Message("orders", body.encode(), tags="web", keys=f"order-{number}")
                )
            await producer.send(
                Message("orders", HOSTILE.encode(), keys=HOSTILE_KEY, properties={"note": HOSTILE})
            )
            await producer.send(Message("orders", bytes(range(256)), keys="binary"))
            await producer.send(Message("payments", b"reminder", delay_level=18))
            await payer.send_in_transaction(
                Message("payments", b"half", keys="payment-1"), _undecided
            )
            async with PullConsumer(client, "reports") as reports:
                for queue in await reports.fetch_message_queues("orders"):
                    await reports.commit_offset(queue, 3)
            consuming = PushConfig(
                consume_from=FROM_FIRST, max_reconsume_times=0, enable_msg_trace=True
            )
            async with PushConsumer(client, "billing", _bill, {"orders": "*"}, consuming):
                await wait_for_lag(client, "billing", "orders", timeout_s=WAIT_S)
                with trio.fail_after(WAIT_S):
                    while not await _is_complete(admin):
                        await trio.sleep(0.1)
                yield


async def _is_complete(admin: Admin) -> bool:
    """Return whether the dead letters, and traces of the last order, have come."""
    try:
        letters = await admin.dead_letter_group("billing")
        trace = await admin.message_trace(f"order-{ORDERS - 1}")
    except ClientError:
        return False
    return letters.messages >= len(REFUSED) and len(trace) >= 3
