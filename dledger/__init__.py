"""The API of the client: every name that a program which sends and consumes messages writes.

`import dledger` starts nothing and loads nothing: a name is loaded at its first use. The names
below, those of `dledger.errors`, `dledger.aio` and `dledger.blocking`, and the test kit
`dledger.testing` are the API; names of other modules change without notice. The client needs
nothing that Windows or macOS do not have; the daemons are for Linux.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    # Connect
    "ClientConfig": "client.core.client_instance",
    "ClientInstance": "client.core.client_instance",
    "Credentials": "remoting.protocol.signature",
    "client_tls": "remoting.tcp",
    "connect": "client.connect",
    # Messages
    "CompressionType": "client.core.message_ext",
    "DeliveredMessage": "client.consumer.listener",
    "Message": "client.core.message",
    "MessageBlock": "client.core.message_ext",
    "MessageExt": "client.core.message_ext",
    "MessageQueue": "client.core.route",
    "TopicRoute": "client.core.route",
    # Send
    "BatchSendResult": "client.producer.results",
    "Producer": "client.producer.producer",
    "ProducerConfig": "client.producer.config",
    "SendFuture": "client.producer.results",
    "SendResult": "client.core.message_ext",
    "SendStatus": "client.core.message_ext",
    "reply_message": "client.producer.request_reply",
    # Send in transactions
    "HalfMessage": "client.producer.transaction",
    "LocalTransactionState": "client.core.hooks",
    "TransactionProducer": "client.producer.transaction_producer",
    "TransactionProducerConfig": "client.producer.transaction_producer",
    "TransactionSendResult": "client.producer.transaction",
    # Consume
    "ConsumeContext": "client.consumer.listener",
    "ConsumeFrom": "client.consumer.offsets",
    "ConsumeFromWhere": "remoting.protocol.bodies",
    "ConsumeStatus": "client.consumer.listener",
    "ConsumeStep": "client.consumer.steps",
    "FROM_FIRST": "client.consumer.offsets",
    "FROM_LAST": "client.consumer.offsets",
    "FlowLimits": "client.consumer.process_queue",
    "Listener": "client.consumer.listener",
    "LitePullConsumer": "client.consumer.lite_pull_consumer",
    "LockClient": "client.consumer.queue_locks",
    "MessageModel": "remoting.protocol.bodies",
    "PullConsumer": "client.consumer.pull_consumer",
    "PullResult": "client.core.message_ext",
    "PullStatus": "client.core.message_ext",
    "PushConfig": "client.consumer.config",
    "PushConsumer": "client.consumer.push_consumer",
    "ReceivedMessage": "client.consumer.pop_calls",
    "SimpleConsumer": "client.consumer.simple_consumer",
    "SubscriptionExpression": "client.consumer.subscriptions",
    # Share queues out
    "AllocateMessageQueueStrategy": "client.consumer.rebalance",
    "Averagely": "client.consumer.rebalance",
    "AveragelyByCircle": "client.consumer.rebalance",
    "ByConfig": "client.consumer.rebalance",
    "ByMachineRoom": "client.consumer.rebalance",
    "ConsistentHash": "client.consumer.rebalance",
    "NearbyMachineRoom": "client.consumer.rebalance",
    # Hooks
    "CommunicationMode": "client.core.hooks",
    "ConsumeMessageContext": "client.core.hooks",
    "ConsumeMessageHook": "client.core.hooks",
    "ConsumeReturnType": "client.core.hooks",
    "EndTransactionContext": "client.core.hooks",
    "EndTransactionHook": "client.core.hooks",
    "MessagePropertiesHook": "client.core.hooks",
    "MessageType": "client.core.hooks",
    "SendMessageContext": "client.core.hooks",
    "SendMessageHook": "client.core.hooks",
    # Read message trace
    "TRACE_TOPIC": "client.trace",
    "TraceBean": "client.trace",
    "TraceContext": "client.trace",
    "TraceType": "client.trace",
    # Administrate
    "AclConfig": "remoting.protocol.access_bodies",
    "AclInfo": "remoting.protocol.access_bodies",
    "Admin": "client.admin.admin",
    "DeadLetterGroup": "client.admin.messages",
    "GroupHealth": "client.admin.admin",
    "OffsetMove": "client.admin.groups",
    "OffsetsReset": "client.admin.groups",
    "PolicyEntryInfo": "remoting.protocol.access_bodies",
    "RequestCode": "remoting.protocol.codes",
    "SubscriptionGroupConfig": "remoting.protocol.bodies",
    "TopicConfig": "remoting.protocol.bodies",
    "UserInfo": "remoting.protocol.access_bodies",
    # Modules
    "aio": "dledger.aio",
    "blocking": "dledger.blocking",
    "errors": "dledger.errors",
    "testing": "dledger.testing",
}
"""Name to the module that has it; the name of a module to itself."""

if TYPE_CHECKING:
    from client.admin.admin import Admin, GroupHealth
    from client.admin.groups import OffsetMove, OffsetsReset
    from client.admin.messages import DeadLetterGroup
    from client.connect import connect
    from client.consumer.config import PushConfig
    from client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage, Listener
    from client.consumer.lite_pull_consumer import LitePullConsumer
    from client.consumer.offsets import FROM_FIRST, FROM_LAST, ConsumeFrom
    from client.consumer.pop_calls import ReceivedMessage
    from client.consumer.process_queue import FlowLimits
    from client.consumer.pull_consumer import PullConsumer
    from client.consumer.push_consumer import PushConsumer
    from client.consumer.queue_locks import LockClient
    from client.consumer.rebalance import (
        AllocateMessageQueueStrategy,
        Averagely,
        AveragelyByCircle,
        ByConfig,
        ByMachineRoom,
        ConsistentHash,
        NearbyMachineRoom,
    )
    from client.consumer.simple_consumer import SimpleConsumer
    from client.consumer.steps import ConsumeStep
    from client.consumer.subscriptions import SubscriptionExpression
    from client.core.client_instance import ClientConfig, ClientInstance
    from client.core.hooks import (
        CommunicationMode,
        ConsumeMessageContext,
        ConsumeMessageHook,
        ConsumeReturnType,
        EndTransactionContext,
        EndTransactionHook,
        LocalTransactionState,
        MessagePropertiesHook,
        MessageType,
        SendMessageContext,
        SendMessageHook,
    )
    from client.core.message import Message
    from client.core.message_ext import (
        CompressionType,
        MessageBlock,
        MessageExt,
        PullResult,
        PullStatus,
        SendResult,
        SendStatus,
    )
    from client.core.route import MessageQueue, TopicRoute
    from client.producer.config import ProducerConfig
    from client.producer.producer import Producer
    from client.producer.request_reply import reply_message
    from client.producer.results import BatchSendResult, SendFuture
    from client.producer.transaction import HalfMessage, TransactionSendResult
    from client.producer.transaction_producer import TransactionProducer, TransactionProducerConfig
    from client.trace import TRACE_TOPIC, TraceBean, TraceContext, TraceType
    from dledger import aio, blocking, errors, testing
    from remoting.protocol.access_bodies import AclConfig, AclInfo, PolicyEntryInfo, UserInfo
    from remoting.protocol.bodies import (
        ConsumeFromWhere,
        MessageModel,
        SubscriptionGroupConfig,
        TopicConfig,
    )
    from remoting.protocol.codes import RequestCode
    from remoting.protocol.signature import Credentials
    from remoting.tcp import client_tls
else:

    def __getattr__(name: str) -> Any:
        """Load the module of a public name."""
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = import_module(module)
        if module != f"{__name__}.{name}":
            found = globals()[name] = getattr(found, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})


__all__ = [
    "ClientConfig",
    "ClientInstance",
    "Credentials",
    "client_tls",
    "connect",
    "CompressionType",
    "DeliveredMessage",
    "Message",
    "MessageBlock",
    "MessageExt",
    "MessageQueue",
    "TopicRoute",
    "BatchSendResult",
    "Producer",
    "ProducerConfig",
    "SendFuture",
    "SendResult",
    "SendStatus",
    "reply_message",
    "HalfMessage",
    "LocalTransactionState",
    "TransactionProducer",
    "TransactionProducerConfig",
    "TransactionSendResult",
    "ConsumeContext",
    "ConsumeFrom",
    "ConsumeFromWhere",
    "ConsumeStatus",
    "ConsumeStep",
    "FROM_FIRST",
    "FROM_LAST",
    "FlowLimits",
    "Listener",
    "LitePullConsumer",
    "LockClient",
    "MessageModel",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PushConfig",
    "PushConsumer",
    "ReceivedMessage",
    "SimpleConsumer",
    "SubscriptionExpression",
    "AllocateMessageQueueStrategy",
    "Averagely",
    "AveragelyByCircle",
    "ByConfig",
    "ByMachineRoom",
    "ConsistentHash",
    "NearbyMachineRoom",
    "CommunicationMode",
    "ConsumeMessageContext",
    "ConsumeMessageHook",
    "ConsumeReturnType",
    "EndTransactionContext",
    "EndTransactionHook",
    "MessagePropertiesHook",
    "MessageType",
    "SendMessageContext",
    "SendMessageHook",
    "TRACE_TOPIC",
    "TraceBean",
    "TraceContext",
    "TraceType",
    "AclConfig",
    "AclInfo",
    "Admin",
    "DeadLetterGroup",
    "GroupHealth",
    "OffsetMove",
    "OffsetsReset",
    "PolicyEntryInfo",
    "RequestCode",
    "SubscriptionGroupConfig",
    "TopicConfig",
    "UserInfo",
    "aio",
    "blocking",
    "errors",
    "testing",
]
