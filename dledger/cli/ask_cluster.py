"""Questions of the tools to a cluster: by topic, by group, to the leader wherever it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from dledger.cli.probe import NoAnswerError, any_cluster_info, ask, refuse_a_broker
from dledger.output import CliError, ExitCode
from remoting.protocol.bodies import BrokerData, ClusterInfo, TopicRouteData
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand

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
