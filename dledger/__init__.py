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
    "ClientConfig": "dledger.client.core.client_instance",
    "ClientInstance": "dledger.client.core.client_instance",
    "Credentials": "dledger.remoting.protocol.signature",
    "client_tls": "dledger.remoting.tcp",
    "connect": "dledger.client.connect",
    # Messages
    "CompressionType": "dledger.client.core.message_ext",
    "DeliveredMessage": "dledger.client.consumer.listener",
    "Message": "dledger.client.core.message",
    "MessageBlock": "dledger.client.core.message_ext",
    "MessageExt": "dledger.client.core.message_ext",
    "MessageQueue": "dledger.client.core.route",
    "TopicRoute": "dledger.client.core.route",
    # Send
    "BatchSendResult": "dledger.client.producer.results",
    "Producer": "dledger.client.producer.producer",
    "ProducerConfig": "dledger.client.producer.config",
    "SendFuture": "dledger.client.producer.results",
    "SendResult": "dledger.client.core.message_ext",
    "SendStatus": "dledger.client.core.message_ext",
    "reply_message": "dledger.client.producer.request_reply",
    # Send in transactions
    "HalfMessage": "dledger.client.producer.transaction",
    "LocalTransactionState": "dledger.client.core.hooks",
    "TransactionProducer": "dledger.client.producer.transaction_producer",
    "TransactionProducerConfig": "dledger.client.producer.transaction_producer",
    "TransactionSendResult": "dledger.client.producer.transaction",
    # Consume
    "ConsumeContext": "dledger.client.consumer.listener",
    "ConsumeFrom": "dledger.client.consumer.offsets",
    "ConsumeFromWhere": "dledger.remoting.protocol.bodies",
    "ConsumeStatus": "dledger.client.consumer.listener",
    "ConsumeStep": "dledger.client.consumer.steps",
    "FROM_FIRST": "dledger.client.consumer.offsets",
    "FROM_LAST": "dledger.client.consumer.offsets",
    "FlowLimits": "dledger.client.consumer.process_queue",
    "Listener": "dledger.client.consumer.listener",
    "LitePullConsumer": "dledger.client.consumer.lite_pull_consumer",
    "LockClient": "dledger.client.consumer.queue_locks",
    "MessageModel": "dledger.remoting.protocol.bodies",
    "PullConsumer": "dledger.client.consumer.pull_consumer",
    "PullResult": "dledger.client.core.message_ext",
    "PullStatus": "dledger.client.core.message_ext",
    "PushConfig": "dledger.client.consumer.config",
    "PushConsumer": "dledger.client.consumer.push_consumer",
    "ReceivedMessage": "dledger.client.consumer.pop_calls",
    "SimpleConsumer": "dledger.client.consumer.simple_consumer",
    "SubscriptionExpression": "dledger.client.consumer.subscriptions",
    # Share queues out
    "AllocateMessageQueueStrategy": "dledger.client.consumer.rebalance",
    "Averagely": "dledger.client.consumer.rebalance",
    "AveragelyByCircle": "dledger.client.consumer.rebalance",
    "ByConfig": "dledger.client.consumer.rebalance",
    "ByMachineRoom": "dledger.client.consumer.rebalance",
    "ConsistentHash": "dledger.client.consumer.rebalance",
    "NearbyMachineRoom": "dledger.client.consumer.rebalance",
    # Hooks
    "CommunicationMode": "dledger.client.core.hooks",
    "ConsumeMessageContext": "dledger.client.core.hooks",
    "ConsumeMessageHook": "dledger.client.core.hooks",
    "ConsumeReturnType": "dledger.client.core.hooks",
    "EndTransactionContext": "dledger.client.core.hooks",
    "EndTransactionHook": "dledger.client.core.hooks",
    "MessagePropertiesHook": "dledger.client.core.hooks",
    "MessageType": "dledger.client.core.hooks",
    "SendMessageContext": "dledger.client.core.hooks",
    "SendMessageHook": "dledger.client.core.hooks",
    # Read message trace
    "TRACE_TOPIC": "dledger.remoting.protocol.topic_names",
    "TraceBean": "dledger.client.trace",
    "TraceContext": "dledger.client.trace",
    "TraceType": "dledger.client.trace",
    # Administrate
    "AclConfig": "dledger.remoting.protocol.access_bodies",
    "AclInfo": "dledger.remoting.protocol.access_bodies",
    "Admin": "dledger.client.admin.admin",
    "DeadLetterGroup": "dledger.client.admin.messages",
    "GroupHealth": "dledger.client.admin.admin",
    "OffsetMove": "dledger.client.admin.groups",
    "OffsetsReset": "dledger.client.admin.groups",
    "PolicyEntryInfo": "dledger.remoting.protocol.access_bodies",
    "RequestCode": "dledger.remoting.protocol.codes",
    "SubscriptionGroupConfig": "dledger.remoting.protocol.bodies",
    "TopicConfig": "dledger.remoting.protocol.bodies",
    "UserInfo": "dledger.remoting.protocol.access_bodies",
    # Modules
    "aio": "dledger.aio",
    "blocking": "dledger.blocking",
    "errors": "dledger.errors",
    "testing": "dledger.testing",
}
"""Name to the module that has it; the name of a module to itself."""

if TYPE_CHECKING:
    from dledger import aio, blocking, errors, testing
    from dledger.client.admin.admin import Admin, GroupHealth
    from dledger.client.admin.groups import OffsetMove, OffsetsReset
    from dledger.client.admin.messages import DeadLetterGroup
    from dledger.client.connect import connect
    from dledger.client.consumer.config import PushConfig
    from dledger.client.consumer.listener import (
        ConsumeContext,
        ConsumeStatus,
        DeliveredMessage,
        Listener,
    )
    from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
    from dledger.client.consumer.offsets import FROM_FIRST, FROM_LAST, ConsumeFrom
    from dledger.client.consumer.pop_calls import ReceivedMessage
    from dledger.client.consumer.process_queue import FlowLimits
    from dledger.client.consumer.pull_consumer import PullConsumer
    from dledger.client.consumer.push_consumer import PushConsumer
    from dledger.client.consumer.queue_locks import LockClient
    from dledger.client.consumer.rebalance import (
        AllocateMessageQueueStrategy,
        Averagely,
        AveragelyByCircle,
        ByConfig,
        ByMachineRoom,
        ConsistentHash,
        NearbyMachineRoom,
    )
    from dledger.client.consumer.simple_consumer import SimpleConsumer
    from dledger.client.consumer.steps import ConsumeStep
    from dledger.client.consumer.subscriptions import SubscriptionExpression
    from dledger.client.core.client_instance import ClientConfig, ClientInstance
    from dledger.client.core.hooks import (
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
    from dledger.client.core.message import Message
    from dledger.client.core.message_ext import (
        CompressionType,
        MessageBlock,
        MessageExt,
        PullResult,
        PullStatus,
        SendResult,
        SendStatus,
    )
    from dledger.client.core.route import MessageQueue, TopicRoute
    from dledger.client.producer.config import ProducerConfig
    from dledger.client.producer.producer import Producer
    from dledger.client.producer.request_reply import reply_message
    from dledger.client.producer.results import BatchSendResult, SendFuture
    from dledger.client.producer.transaction import HalfMessage, TransactionSendResult
    from dledger.client.producer.transaction_producer import (
        TransactionProducer,
        TransactionProducerConfig,
    )
    from dledger.client.trace import TraceBean, TraceContext, TraceType
    from dledger.remoting.protocol.access_bodies import (
        AclConfig,
        AclInfo,
        PolicyEntryInfo,
        UserInfo,
    )
    from dledger.remoting.protocol.bodies import (
        ConsumeFromWhere,
        MessageModel,
        SubscriptionGroupConfig,
        TopicConfig,
    )
    from dledger.remoting.protocol.codes import RequestCode
    from dledger.remoting.protocol.signature import Credentials
    from dledger.remoting.protocol.topic_names import TRACE_TOPIC
    from dledger.remoting.tcp import client_tls
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
    "ClientConfig", "ClientInstance", "Credentials", "client_tls", "connect", "CompressionType",
    "DeliveredMessage", "Message", "MessageBlock", "MessageExt", "MessageQueue", "TopicRoute",
    "BatchSendResult", "Producer", "ProducerConfig", "SendFuture", "SendResult", "SendStatus",
    "reply_message", "HalfMessage", "LocalTransactionState", "TransactionProducer",
    "TransactionProducerConfig", "TransactionSendResult", "ConsumeContext", "ConsumeFrom",
    "ConsumeFromWhere", "ConsumeStatus", "ConsumeStep", "FROM_FIRST", "FROM_LAST", "FlowLimits",
    "Listener", "LitePullConsumer", "LockClient", "MessageModel", "PullConsumer", "PullResult",
    "PullStatus", "PushConfig", "PushConsumer", "ReceivedMessage", "SimpleConsumer",
    "SubscriptionExpression", "AllocateMessageQueueStrategy", "Averagely", "AveragelyByCircle",
    "ByConfig", "ByMachineRoom", "ConsistentHash", "NearbyMachineRoom", "CommunicationMode",
    "ConsumeMessageContext", "ConsumeMessageHook", "ConsumeReturnType", "EndTransactionContext",
    "EndTransactionHook", "MessagePropertiesHook", "MessageType", "SendMessageContext",
    "SendMessageHook", "TRACE_TOPIC", "TraceBean", "TraceContext", "TraceType", "AclConfig",
    "AclInfo", "Admin", "DeadLetterGroup", "GroupHealth", "OffsetMove", "OffsetsReset",
    "PolicyEntryInfo", "RequestCode", "SubscriptionGroupConfig", "TopicConfig", "UserInfo", "aio",
    "blocking", "errors", "testing",
]  # fmt: skip
