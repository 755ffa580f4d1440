"""Questions of the tools to a cluster: by topic, by group, to the leader wherever it is now.

What a change would give up is shown before it is confirmed with --yes.

One question to one daemon goes over a connection of its own, also while a start is watched. Unlike
the SDK that wants no route and no NameServer, so it can ask a node that is not well.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import trio

from dledger.client.connect import connect, credentials_from, tls_from
from dledger.client.core.client_instance import ClientInstance
from dledger.output import CliError, ExitCode, Output, note, print_json, show
from dledger.remoting.log import configure_logs
from dledger.remoting.protocol.bodies import BrokerData, ClusterInfo, TopicRouteData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.headers import REFUSED_BROKERS_FIELD
from dledger.remoting.protocol.own_fields import (
    CONFIRMED_FIELD,
    GIVES_UP_FIELD,
    GivenUp,
    decode_given_up,
)
from dledger.remoting.protocol.signature import RequestSigner

if TYPE_CHECKING:
    from dledger.remoting.protocol.signature import Credentials


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
    except (OSError, UnicodeError, trio.BrokenResourceError) as error:
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
            f"{namesrv} is no NameServer: the server there does not support the request",
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


# ---------------------------------------------------------------------------------- the SDK


def open_client(namesrvs: Sequence[str]) -> ClientInstance:
    """Return a client instance of this process; enter it with ``async with``.

    Standard output is the command's: what the SDK logs goes to standard error, from warnings on.
    """
    if not structlog.is_configured():
        configure_logs(form="text", level="warning")
    return connect(namesrvs)


# ---------------------------------------------------------------------------------- questions


LEADER_TRIES = 10
"""An election takes a second or two; a tool waits for it once, then reports it."""

LEADER_PAUSE_S = 0.3

CONNECTIONS_MAX = 16
"""Each question has a connection of its own; a topic may have a thousand queues."""


def refused(what: str, answer: RemotingCommand) -> CliError:
    """Return the error for an answer that is no success."""
    try:
        name = ResponseCode(answer.code).name
    except ValueError:
        name = "unknown code"
    return CliError(f"{what}: {answer.remark or 'no reason given'} (code {answer.code} {name})")


async def ask_namesrvs(
    namesrvs: Sequence[str], code: int, ext: Mapping[str, str] | None = None
) -> RemotingCommand:
    """Return the first NameServer's answer that comes at all.

    Raises:
        NoAnswerError: None of them answers.
    """
    failure: NoAnswerError | None = None
    for address in namesrvs:
        try:
            return refuse_a_broker(address, await ask(address, code, ext))
        except NoAnswerError as error:
            failure = error
    raise failure or CliError("no NameServer is named", exit_code=ExitCode.USAGE)


async def topic_route(
    namesrvs: Sequence[str], topic: str, *, next_step: str | None = None
) -> TopicRouteData:
    """Return where the queues of *topic* are.

    Raises:
        CliError: The NameServers do not know it, or none answers.
    """
    answer = await ask_namesrvs(namesrvs, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        if next_step is None:
            next_step = f"make it: dledger topic create {topic}"
        raise CliError(f"no route to topic {topic}", next_step=next_step)
    if answer.code != ResponseCode.SUCCESS:
        raise refused(f"route of {topic}", answer)
    return TopicRouteData.decode(answer.body)


async def groups_of(namesrvs: Sequence[str], cluster: str | None) -> list[BrokerData]:
    """Return the broker groups of a cluster, or of all of them.

    Raises:
        CliError: There is none.
    """
    _, info = await any_cluster_info(list(namesrvs))
    names = _names(info, cluster)
    groups = [group for name, group in sorted(info.broker_addr_table.items()) if name in names]
    if not groups:
        raise CliError(
            f"no broker of cluster {cluster} is registered" if cluster else "no broker registered",
            next_step="see dledger cluster ls",
        )
    return groups


def _names(info: ClusterInfo, cluster: str | None) -> set[str]:
    if cluster is None:
        return set(info.broker_addr_table)
    return set(info.cluster_addr_table.get(cluster, ()))


async def ask_leader(
    group: BrokerData,
    code: int,
    ext: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout_s: float = 3.0,
) -> RemotingCommand:
    """Return the answer of the group's leader, followed by its hints and through an election.

    Args:
        timeout_s: For one answer.

    Raises:
        CliError: No leader within three seconds; unreachable.
    """
    addresses = [group.broker_addrs[number] for number in sorted(group.broker_addrs)]
    failure: Exception | None = None
    for number in range(LEADER_TRIES):
        address = addresses[number % len(addresses)]
        try:
            answer = await ask(address, code, ext, body, timeout_s=timeout_s)
        except NoAnswerError as error:
            failure = error
            continue
        if answer.code not in (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY):
            return answer
        failure = refused(address, answer)
        hint = (answer.ext or {}).get("leaderAddr")
        if hint and hint not in addresses[:1]:
            addresses = [str(hint), *[other for other in addresses if other != hint]]
        await trio.sleep(LEADER_PAUSE_S)
    raise CliError(
        f"no leader of {group.broker_name} answers: {failure}",
        next_step="see dledger cluster health",
        exit_code=ExitCode.UNREACHABLE,
    )


async def all_of(jobs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Run jobs at the same time and return their results by name."""
    results: dict[Any, Any] = {}
    limiter = trio.CapacityLimiter(CONNECTIONS_MAX)

    async def run(name: Any, job: Callable[[], Any]) -> None:
        async with limiter:
            results[name] = await job()

    async with trio.open_nursery() as nursery:
        for name, job in jobs.items():
            nursery.start_soon(run, name, job)
    return results


# --------------------------------------------------------------------------- what a change gives up


def confirmed() -> dict[str, str]:
    """Return the field of a request that confirms what it gives up."""
    return {CONFIRMED_FIELD: "true"}


def given_up_in(answer: RemotingCommand) -> GivenUp | None:
    """Return what a broker wants confirmed; None: it refuses for another reason."""
    text = answer.ext.get(GIVES_UP_FIELD)
    if text is None:
        return None
    try:
        return decode_given_up(text)
    except msgspec.MsgspecError:
        return None


def rows_of(found: Mapping[str, GivenUp]) -> list[dict[str, Any]]:
    """Return broker, topic and messages that would go, one row for each topic. Pure."""
    rows: list[dict[str, Any]] = []
    for broker, lost in found.items():
        rows += [
            {"broker": broker, "topic": topic, "messages": count}
            for topic, count in lost.messages.items()
        ]
        if lost.other_topics:
            others = f"({lost.other_topics} more)"
            rows.append({"broker": broker, "topic": others, "messages": lost.other_messages})
    return rows


def show_given_up(found: Mapping[str, GivenUp], output: Output) -> None:
    """Print what would go, by broker."""
    if not found:
        return
    if output == "json":
        print_json({broker: msgspec.to_builtins(lost) for broker, lost in found.items()})
        return
    show(output, "Would be given up", rows_of(found), ("broker", "topic", "messages"))
    for broker, lost in found.items():
        newest = ""
        if lost.newest_ms:
            moment = datetime.fromtimestamp(lost.newest_ms / 1000, UTC)
            newest = f"; stored up to {moment.isoformat(timespec='seconds')}"
        uncounted = ""
        if lost.uncounted_queues:
            uncounted = f"; {lost.uncounted_queues} queues are not counted"
        note(f"{broker}: {lost}{newest}{uncounted}")
