"""AUTH_* (3001 to 3010): users and policies of RocketMQ's ACL 2.0, which are not built."""

from __future__ import annotations

from typing import Final

from remoting.connection import Connection
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.outcome import Condition, answer

AUTH_CODES: Final = (
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
    RequestCode.AUTH_GET_ACL,
    RequestCode.AUTH_LIST_ACL,
)

REMARK: Final = (
    "users and policies of ACL 2.0 are not built here: accounts stand in the file that"
    " server.acl_file names, see dledger acl; nothing was changed"
)


def refuse_auth(_connection: Connection, command: RemotingCommand) -> RemotingCommand:
    """Say where accounts are kept instead."""
    return answer(command, Condition.NOT_SUPPORTED, REMARK)
