"""Access keys of the clients of a proxy: each call is signed, and has the rights it needs.

The signature of this protocol covers the time that the client states, and nothing of the call; any
program that reads one can use it again. So it is worth what the TLS around it is worth.

Accounts are those of brokers and NameServers, read from the same kind of file.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import full_name
from dledger.proxy.status import RefusedError
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import Account, Permission, Right, group_right, topic_right

_SIGNED_HEADER: Final = "x-mq-date-time"
_NO_SECRET: Final = "\0" * 16

Rights = Callable[[Any], Iterable[Right]]


def _publishes(request: Any) -> list[Right]:
    return [topic_right(full_name(request.topic), Permission.PUB)]


def _sends(request: pb.SendMessageRequest) -> list[Right]:
    topics = {full_name(message.topic): None for message in request.messages}
    return [topic_right(topic, Permission.PUB) for topic in topics]


def _consumes(request: Any) -> list[Right]:
    return [
        topic_right(full_name(request.topic), Permission.SUB),
        group_right(full_name(request.group)),
    ]


def _consumes_queue(request: Any) -> list[Right]:
    return [
        topic_right(full_name(request.message_queue.topic), Permission.SUB),
        group_right(full_name(request.group)),
    ]


def _reads_queue(request: Any) -> list[Right]:
    return [topic_right(full_name(request.message_queue.topic), Permission.SUB)]


def _belongs(request: Any) -> list[Right]:
    return [group_right(full_name(request.group))] if request.HasField("group") else []


def _settles(command: pb.TelemetryCommand) -> list[Right]:
    settings = command.settings
    rights = [topic_right(full_name(each), Permission.PUB) for each in settings.publishing.topics]
    if settings.HasField("subscription"):
        rights.append(group_right(full_name(settings.subscription.group)))
    return rights


def _nothing(_request: Any) -> list[Right]:
    return []


RIGHTS: Final[Mapping[str, Rights]] = {
    "QueryRoute": _nothing,
    "Heartbeat": _belongs,
    "SendMessage": _sends,
    "QueryAssignment": _consumes,
    "ReceiveMessage": _consumes_queue,
    "AckMessage": _consumes,
    "ForwardMessageToDeadLetterQueue": _consumes,
    "PullMessage": _consumes_queue,
    "UpdateOffset": _consumes_queue,
    "GetOffset": _consumes_queue,
    "QueryOffset": _reads_queue,
    "EndTransaction": _publishes,
    "Telemetry": _settles,
    "NotifyClientTermination": _belongs,
    "ChangeInvisibleDuration": _consumes,
    "RecallMessage": _publishes,
    "SyncLiteSubscription": _consumes,
}
"""What the account needs for what stands in the request, by call."""


def host_of(peer: str) -> str:
    """Return the numeric address in what gRPC names a peer by: ``ipv4:10.0.0.1:4711``."""
    _, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]")


def signature(secret_key: str, date_time: str) -> str:
    """Return the signature of a client that has *secret_key*, in hexadecimal."""
    return hmac.new(secret_key.encode(), date_time.encode(), "sha1").hexdigest()


class Access:
    """Lets a call through, or refuses it before anything has happened."""

    def __init__(self, accounts: AccountStore) -> None:
        """Look clients up in *accounts*."""
        self._accounts = accounts

    def admit(self, name: str, request: Any, caller: Caller) -> None:
        """Let a call pass.

        Raises RefusedError: UNAUTHORIZED without a right signature, FORBIDDEN without a right.
        """
        account = self._account(caller)
        if account is None:
            return
        for right in RIGHTS[name](request):
            if not account.allows(right):
                kind = "group" if right.is_group else "topic"
                raise RefusedError(pb.FORBIDDEN, f"no permission for {kind} {right.name}")

    def _account(self, caller: Caller) -> Account | None:
        """Return the account whose rights count; None: all do, from a white address."""
        host = host_of(caller.peer)
        table = self._accounts.table
        found = caller.signed
        account = table.get(found["key"]) if found is not None else None
        if table.white.fits(host) or (account is not None and account.white.fits(host)):
            return account
        if found is None:
            raise RefusedError(pb.UNAUTHORIZED, "the call is not signed with an access key")
        # An account that is not there takes as long as one whose signature is wrong.
        expected = signature(account.secret_key if account else _NO_SECRET, caller.date_time)
        is_right = hmac.compare_digest(expected, found["signature"].lower())
        signed = found["signed"].lower().split(";")
        if account is None or not is_right or _SIGNED_HEADER not in signed or not caller.date_time:
            raise RefusedError(pb.UNAUTHORIZED, f"the signature of {found['key'][:64]} is wrong")
        return account
