"""``dledger broker wipe-write-perm`` and ``add-write-perm``: drain a broker group, take it back."""

from __future__ import annotations

from dledger.cli.ask_cluster import ask_namesrvs, refused
from dledger.cli.probe import cluster_info
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    addresses,
    note,
    print_json,
)
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.headers import AddWritePermResponseHeader, WipeWritePermResponseHeader


async def wipe_write_perm(
    broker: str, /, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Let producers leave a broker group; consumers go on reading what it has.

    Every NameServer gets it. Producers follow when they read the route again, within 30 seconds.
    """
    counts = await _change(addresses(namesrv), broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER)
    return _tell(output, broker, counts, "take no messages any more")


async def add_write_perm(
    broker: str, /, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Let producers come back to a broker group."""
    counts = await _change(addresses(namesrv), broker, RequestCode.ADD_WRITE_PERM_OF_BROKER)
    return _tell(output, broker, counts, "take messages")


async def _change(namesrvs: list[str], broker: str, code: RequestCode) -> dict[str, int]:
    counts: dict[str, int] = {}
    for address in namesrvs:
        info = await cluster_info(address)
        if broker not in info.broker_addr_table:
            raise CliError(
                f"{address} knows no broker {broker}", next_step="see dledger cluster ls"
            )
        answer = await ask_namesrvs([address], code, {"brokerName": broker})
        if answer.code != ResponseCode.SUCCESS:
            raise refused(f"{code.name} of {broker} at {address}", answer)
        if code is RequestCode.WIPE_WRITE_PERM_OF_BROKER:
            counts[address] = WipeWritePermResponseHeader.decode(answer.ext).wipe_topic_count
        else:
            counts[address] = AddWritePermResponseHeader.decode(answer.ext).add_topic_count
    return counts


def _tell(output: Output, broker: str, counts: dict[str, int], what: str) -> int:
    if output == "json":
        print_json({"broker": broker, "topics": counts})
    else:
        for address, count in counts.items():
            note(f"{address}: {count} topics of {broker} {what}")
    return ExitCode.OK
