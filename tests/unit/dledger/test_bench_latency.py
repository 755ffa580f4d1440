"""Latencies of an open load count from the intended times, and none of them is left out."""

import pytest
import trio

from dledger.cli.bench_topic import LatencyLoad, ScheduleTally, latencies, send_on_schedule, summary
from dledger.cli.main import main
from dledger.client.core.errors import UnknownOutcomeError
from dledger.commitlog.errors import MQError
from dledger.output import CliError

ANSWER_S = 0.001
LOAD = LatencyLoad(rate=10.0, duration=1.0)


async def test_sends_leave_on_time_while_no_answer_comes() -> None:
    begun_s: list[float] = []

    async def send() -> None:
        begun_s.append(trio.current_time())
        await trio.sleep(5.0)

    tally = await send_on_schedule(send, 10.0, 1.0)
    assert begun_s == pytest.approx([tally.begin_s + number / 10.0 for number in range(10)])
    assert tally.latencies_s == pytest.approx([5.0] * 10)


async def test_a_stall_is_in_the_latency_of_all_it_delayed() -> None:
    """A cluster that answers nothing from second 1 to 2 delays a hundred sends, not one."""
    stalled_from_s, stalled_until_s = trio.current_time() + 1.0, trio.current_time() + 2.0

    async def send() -> None:
        if stalled_from_s <= trio.current_time() < stalled_until_s:
            await trio.sleep_until(stalled_until_s)
        await trio.sleep(ANSWER_S)

    tally = await send_on_schedule(send, 100.0, 10.0)
    result = summary(LatencyLoad(rate=100.0, duration=10.0), tally)
    assert len([s for s in tally.latencies_s if s > 0.1 + ANSWER_S]) == pytest.approx(90, abs=1)
    assert result["p50_ms"] == pytest.approx(1.0)
    assert result["p99_ms"] > 850.0
    assert result["max_ms"] == pytest.approx(1_001.0, abs=11.0)


async def test_waiting_for_a_place_is_part_of_the_latency() -> None:
    async def send() -> None:
        await trio.sleep(1.0)

    tally = await send_on_schedule(send, 10.0, 1.0, outstanding=1)
    assert tally.latencies_s == pytest.approx([1.0 + 0.9 * number for number in range(10)])
    result = summary(LOAD, tally)
    assert (result["achieved_per_s"], result["rate_per_s"]) == (1.0, 10.0)
    assert result["late_max_ms"] == pytest.approx(8_100.0)


async def test_failed_sends_are_counted_by_their_outcome() -> None:
    failures = iter([MQError("refused"), UnknownOutcomeError("no answer"), MQError("refused")])

    async def send() -> None:
        for error in failures:
            raise error
        await trio.sleep(ANSWER_S)

    result = summary(LOAD, await send_on_schedule(send, LOAD.rate, LOAD.duration))
    assert (result["intended"], result["acknowledged"]) == (10, 7)
    assert (result["not_stored"], result["unknown"]) == (2, 1)
    assert result["achieved_per_s"] == 7.0
    assert result["max_ms"] == pytest.approx(1.0)


async def test_sends_of_the_warm_up_are_not_counted() -> None:
    sent = 0

    async def send() -> None:
        nonlocal sent
        sent += 1
        if sent <= 10:
            await trio.sleep(0.5)

    result = await latencies(send, LOAD)
    assert (sent, result["intended"], result["acknowledged"]) == (20, 10, 10)
    assert result["max_ms"] == pytest.approx(0.0, abs=0.001)


def test_a_latency_bench_without_a_success_is_an_error() -> None:
    with pytest.raises(CliError, match=r"no send succeeded; failed: \{'unknown': 3\}"):
        summary(LatencyLoad(), ScheduleTally(0.0, failures={"unknown": 3}))


@pytest.mark.parametrize("option", ["--rate", "--duration", "--size", "--queues"])
def test_a_latency_bench_of_nothing_is_a_usage_error(option: str) -> None:
    assert main(["bench", "latency", option, "0"]) == 2
