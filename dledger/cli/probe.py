"""One question to one daemon, on a connection of its own: for tools and for watching a start.

Unlike the SDK it wants no route and no NameServer, so it can ask a node that is not well.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from client.connect import credentials_from, tls_from
from dledger.output import CliError, ExitCode
from remoting.protocol.bodies import ClusterInfo
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request
from remoting.protocol.frame import FrameDecoder, encode_command
from remoting.protocol.fresh_signature import RequestSigner
from remoting.protocol.headers import REFUSED_BROKERS_FIELD

if TYPE_CHECKING:
    from remoting.protocol.signature import Credentials

RECEIVE_BYTES = 64 * 1024

PLAIN_HINT = "; it may talk TLS: dledger --tls-ca-file FILE"


class NoAnswerError(CliError):
    """The daemon could not be reached or did not answer in time."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"{address} does not answer: {why}",
            next_step="check that it runs and that the address is right",
            exit_code=ExitCode.UNREACHABLE,
        )


async def ask(
    address: str,
    code: int,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    timeout_s: float = 3.0,
) -> RemotingCommand:
    """Send one request and return the answer, whatever its code is.

    Raises:
        NoAnswerError: No connection, or no whole answer in time. What was asked for may have been
            done.
    """
    command = request(code, dict(ext or {}), body)
    credentials, tls = _access()
    try:
        with trio.fail_after(timeout_s):
            stream = await _connected(address, tls)
            async with stream:
                if credentials is not None:
                    signer = RequestSigner(credentials, trio.current_time)
                    question = request(RequestCode.SIGNATURE_CHALLENGE)
                    signer.take_challenge((await _asked(stream, address, question)).ext)
                    command.opaque = question.opaque + 1
                    signer.sign(command)
                return await _asked(stream, address, command)
    except trio.TooSlowError:
        raise NoAnswerError(address, f"nothing within {timeout_s:g} s") from None
    except (OSError, trio.BrokenResourceError) as error:
        raise NoAnswerError(address, _reason(error) + _tls_hint(error, tls)) from None


async def _connected(address: str, tls: ssl.SSLContext | None) -> trio.abc.Stream:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if tls is None:
        return await trio.open_tcp_stream(host, int(port))
    stream = await trio.open_ssl_over_tcp_stream(
        host, int(port), https_compatible=True, ssl_context=tls
    )
    await stream.do_handshake()
    return stream


@functools.cache
def _access() -> tuple[Credentials | None, ssl.SSLContext | None]:
    """Return the credentials of this process, and its TLS settings.

    Raises:
        ConfigError: The environment names what cannot be read.
    """
    return credentials_from(os.environ), tls_from(os.environ)


async def _asked(
    stream: trio.abc.Stream, address: str, command: RemotingCommand
) -> RemotingCommand:
    await stream.send_all(encode_command(command))
    decoder = FrameDecoder()
    while True:
        data = await stream.receive_some(RECEIVE_BYTES)
        if not data:
            hint = "" if _access()[1] else PLAIN_HINT
            raise NoAnswerError(address, "it closed the connection" + hint)
        for answer in decoder.feed(data):
            if answer.is_response and answer.opaque == command.opaque:
                return answer


def _tls_hint(error: BaseException, tls: ssl.SSLContext | None) -> str:
    """Return what to try when one side talks TLS and the other does not; empty otherwise."""
    if tls is not None and isinstance(error.__cause__ or error, ssl.SSLError):
        return "; it may talk no TLS, or with another authority's certificate: see --tls-ca-file"
    if tls is None and isinstance(error, trio.BrokenResourceError):
        return PLAIN_HINT
    return ""


def _reason(error: BaseException) -> str:
    causes = getattr(error.__cause__, "exceptions", ()) or ()
    inner = causes[0] if causes else error
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


async def raft_status(address: str, *, timeout_s: float = 3.0) -> dict[str, Any] | None:
    """Return what a broker reports of its part in the group; None when it does not answer."""
    try:
        answer = await ask(address, RequestCode.RAFT_STATUS, timeout_s=timeout_s)
    except NoAnswerError:
        return None
    if answer.code != ResponseCode.SUCCESS:
        return None
    status: dict[str, Any] = msgspec.json.decode(answer.body)
    return status


async def cluster_info(namesrv: str, *, timeout_s: float = 3.0) -> ClusterInfo:
    """Return every broker group that a NameServer knows.

    Raises:
        NoAnswerError: It does not answer.
        CliError: It refuses.
    """
    info, _ = await cluster_and_refused(namesrv, timeout_s=timeout_s)
    return info


async def cluster_and_refused(
    namesrv: str, *, timeout_s: float = 3.0
) -> tuple[ClusterInfo, list[str]]:
    """Return every broker group that a NameServer knows, and a sentence for each it refuses.

    Raises:
        NoAnswerError: It does not answer.
        CliError: It refuses.
    """
    answer = await ask(namesrv, RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s=timeout_s)
    refuse_a_broker(namesrv, answer)
    if answer.code != ResponseCode.SUCCESS:
        raise CliError(f"{namesrv} refuses with code {answer.code}: {answer.remark}")
    try:
        refused = msgspec.json.decode(answer.ext.get(REFUSED_BROKERS_FIELD, "[]"), type=list[str])
    except (msgspec.DecodeError, TypeError):
        refused = []
    return ClusterInfo.decode(answer.body), refused


def refuse_a_broker(namesrv: str, answer: RemotingCommand) -> RemotingCommand:
    """Return *answer* unless it is a broker's answer to a request for NameServers.

    Raises:
        CliError: It is; a usage error.
    """
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise CliError(
            f"{namesrv} is no NameServer: what answers there does not know the question",
            next_step="--namesrv takes NameServers, port 9876 by default, not brokers",
            exit_code=ExitCode.USAGE,
        )
    return answer


async def any_cluster_info(namesrvs: list[str]) -> tuple[str, ClusterInfo]:
    """Return the answer of the first NameServer that gives one, and its address.

    Raises:
        NoAnswerError: None does; the last one's reason.
    """
    for place, address in enumerate(namesrvs):
        try:
            return address, await cluster_info(address)
        except NoAnswerError:
            if place == len(namesrvs) - 1:
                raise
    raise CliError("no NameServer is named", exit_code=ExitCode.USAGE)


async def namesrv_leaders(namesrv: str, *, timeout_s: float = 3.0) -> dict[str, str]:
    """Return the address a NameServer has as id 0 of each broker group that has one."""
    try:
        info = await cluster_info(namesrv, timeout_s=timeout_s)
    except CliError:
        return {}
    return {
        name: group.broker_addrs[0]
        for name, group in info.broker_addr_table.items()
        if 0 in group.broker_addrs
    }
