"""The API of the client: every name that a program which sends and consumes messages writes.

`import dledger` starts nothing and loads nothing: a name is loaded at its first use. The names
below, those of `dledger.errors` and `dledger.blocking`, and the test kit `dledger.testing` are the
API; names of other modules change without notice. The client needs nothing that Windows or macOS
do not have; the daemons are for Linux.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    # Connect
    "ClientConfig": "client.client_instance",
    "ClientInstance": "client.client_instance",
    "Credentials": "remoting.protocol.signature",
    "client_tls": "remoting.edge",
    "connect": "client.connect",
    # Messages
    "CompressionType": "client.compression",
    "DeliveredMessage": "client.delivered_message",
    "Message": "client.message",
    "MessageBlock": "client.message",
    "MessageExt": "client.message",
    "MessageQueue": "client.route",
    "TopicRoute": "client.route",
    # Send
    "BatchSendResult": "client.send_results",
    "Producer": "client.producer",
    "ProducerConfig": "client.producer_config",
    "SendFuture": "client.send_results",
    "SendResult": "client.message",
    "SendStatus": "client.message",
    "reply_message": "client.request_reply",
    # Send in transactions
    "HalfMessage": "client.half_message",
    "LocalTransactionState": "client.half_message",
    "TransactionProducer": "client.transaction_producer",
    "TransactionProducerConfig": "client.transaction_producer",
    "TransactionSendResult": "client.half_message",
    # Consume
    "ConsumeContext": "client.listener",
    "ConsumeFrom": "client.consume_from",
    "ConsumeFromWhere": "remoting.protocol.bodies",
    "ConsumeStatus": "client.listener",
    "FROM_FIRST": "client.consume_from",
    "FROM_LAST": "client.consume_from",
    "FlowLimits": "client.process_queue",
    "Listener": "client.listener",
    "LitePullConsumer": "client.lite_pull_consumer",
    "LockClient": "client.lock_client",
    "MessageModel": "remoting.protocol.bodies",
    "PullConsumer": "client.pull_consumer",
    "PullResult": "client.message",
    "PullStatus": "client.message",
    "PushConfig": "client.push_config",
    "PushConsumer": "client.push_consumer",
    "SubscriptionExpression": "client.subscription_expression",
    # Share queues out
    "AllocateMessageQueueStrategy": "client.allocation",
    "Averagely": "client.allocation",
    "AveragelyByCircle": "client.allocation",
    "ByConfig": "client.allocation",
    "ByMachineRoom": "client.allocation",
    "ConsistentHash": "client.allocation",
    "NearbyMachineRoom": "client.allocation",
    # Hooks
    "CommunicationMode": "client.hooks",
    "ConsumeMessageContext": "client.hooks",
    "ConsumeMessageHook": "client.hooks",
    "ConsumeReturnType": "client.hooks",
    "EndTransactionContext": "client.hooks",
    "EndTransactionHook": "client.hooks",
    "MessageType": "client.hooks",
    "SendMessageContext": "client.hooks",
    "SendMessageHook": "client.hooks",
    # Read message trace
    "TRACE_TOPIC": "client.trace_dispatcher",
    "TraceBean": "client.trace_data",
    "TraceContext": "client.trace_data",
    "TraceType": "client.trace_data",
    # Administrate
    "Admin": "client.admin",
    "DeadLetterGroup": "client.dead_letters",
    "GroupHealth": "client.admin",
    "OffsetMove": "client.group_admin",
    "OffsetsReset": "client.group_admin",
    "RequestCode": "remoting.protocol.codes",
    "SubscriptionGroupConfig": "remoting.protocol.bodies",
    "TopicConfig": "remoting.protocol.bodies",
    # Modules
    "blocking": "dledger.blocking",
    "errors": "dledger.errors",
    "testing": "dledger.testing",
}
"""Name to the module that has it; the name of a module to itself."""

if TYPE_CHECKING:
    from client.admin import Admin, GroupHealth
    from client.allocation import (
        AllocateMessageQueueStrategy,
        Averagely,
        AveragelyByCircle,
        ByConfig,
        ByMachineRoom,
        ConsistentHash,
        NearbyMachineRoom,
    )
    from client.client_instance import ClientConfig, ClientInstance
    from client.compression import CompressionType
    from client.connect import connect
    from client.consume_from import FROM_FIRST, FROM_LAST, ConsumeFrom
    from client.dead_letters import DeadLetterGroup
    from client.delivered_message import DeliveredMessage
    from client.group_admin import OffsetMove, OffsetsReset
    from client.half_message import HalfMessage, LocalTransactionState, TransactionSendResult
    from client.hooks import (
        CommunicationMode,
        ConsumeMessageContext,
        ConsumeMessageHook,
        ConsumeReturnType,
        EndTransactionContext,
        EndTransactionHook,
        MessageType,
        SendMessageContext,
        SendMessageHook,
    )
    from client.listener import ConsumeContext, ConsumeStatus, Listener
    from client.lite_pull_consumer import LitePullConsumer
    from client.lock_client import LockClient
    from client.message import (
        Message,
        MessageBlock,
        MessageExt,
        PullResult,
        PullStatus,
        SendResult,
        SendStatus,
    )
    from client.process_queue import FlowLimits
    from client.producer import Producer
    from client.producer_config import ProducerConfig
    from client.pull_consumer import PullConsumer
    from client.push_config import PushConfig
    from client.push_consumer import PushConsumer
    from client.request_reply import reply_message
    from client.route import MessageQueue, TopicRoute
    from client.send_results import BatchSendResult, SendFuture
    from client.subscription_expression import SubscriptionExpression
    from client.trace_data import TraceBean, TraceContext, TraceType
    from client.trace_dispatcher import TRACE_TOPIC
    from client.transaction_producer import TransactionProducer, TransactionProducerConfig
    from dledger import blocking, errors, testing
    from remoting.edge import client_tls
    from remoting.protocol.bodies import (
        ConsumeFromWhere,
        MessageModel,
        SubscriptionGroupConfig,
        TopicConfig,
    )
    from remoting.protocol.codes import RequestCode
    from remoting.protocol.signature import Credentials
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
    "MessageType",
    "SendMessageContext",
    "SendMessageHook",
    "TRACE_TOPIC",
    "TraceBean",
    "TraceContext",
    "TraceType",
    "Admin",
    "DeadLetterGroup",
    "GroupHealth",
    "OffsetMove",
    "OffsetsReset",
    "RequestCode",
    "SubscriptionGroupConfig",
    "TopicConfig",
    "blocking",
    "errors",
    "testing",
]
