"""What the benchmarks report."""

import json
from pathlib import Path

import pytest

from dledger.cli.bench_load import Tally, percentiles_ms
from dledger.cli.bench_topic import PopLoad, ProduceLoad, produced, rates
from dledger.cli.main import main
from dledger.output import CliError


def test_percentiles_are_milliseconds_of_the_sorted_latencies() -> None:
    latencies_s = [n / 1000 for n in range(1001)]
    assert percentiles_ms(latencies_s[::-1], 50, 99, 99.9, 100) == [500.0, 990.0, 999.0, 1000.0]


def test_failures_are_counted_apart_and_in_no_rate() -> None:
    tally = Tally(10.0, 20.0)
    tally.stored(9.0, 9.5, 100)  # warming up
    tally.stored(12.0, 12.5, 100)
    tally.stored(19.0, 20.5, 100)  # ended after the window
    tally.failed("unknown", 13.0, 100)
    tally.failed("not_stored", 9.0, 100)  # warming up
    tally.failed("not_stored", 20.5, 100)
    result = produced(ProduceLoad(size=1_000, batch=100), tally, 0.0, 0.0)
    assert (result["messages"], result["failed"], result["unknown"], result["not_stored"]) == (
        100,
        200,
        100,
        100,
    )
    assert (result["messages_per_s"], result["mb_per_s"]) == (10.0, 0.01)
    assert (result["p50_ms"], result["max_ms"]) == (500.0, 500.0)


def test_processor_time_is_that_of_a_message() -> None:
    tally = Tally(10.0, 20.0)
    tally.stored(12.0, 12.5, 1_000)
    result = produced(ProduceLoad(batch=1_000), tally, 0.5, 0.01)
    assert (result["brokers_cpu_us"], result["client_cpu_us"]) == (500.0, 10.0)


def test_a_bench_without_one_success_is_an_error() -> None:
    tally = Tally(0.0, 1.0)
    tally.failed("unknown", 0.5, 1)
    with pytest.raises(CliError, match=r"no send succeeded; failed: \{'unknown': 1\}"):
        produced(ProduceLoad(), tally, 0.0, 0.0)


def test_rates_of_pop_are_those_of_messages_beside_push() -> None:
    result = rates(PopLoad(messages=1_000), push_s=0.5, single_s=4.0, batch_s=0.625)
    assert (result["push_per_s"], result["single_per_s"], result["batch_per_s"]) == (
        2_000,
        250,
        1_600,
    )
    assert (result["single_of_push"], result["batch_of_push"]) == (0.125, 0.8)


@pytest.mark.parametrize(
    "tokens",
    [
        ["produce", "--inflight", "0"],
        ["produce", "--duration", "-1"],
        ["consume", "--messages", "0"],
        ["pop", "--receivers", "0"],
        ["pop", "--batch", "-1"],
        ["store", "--size", "0"],
        ["store", "--entry", "10"],
    ],
)
def test_numbers_that_make_no_sense_are_usage_errors(tokens: list[str]) -> None:
    assert main(["bench", *tokens]) == 2


def test_bench_store_reports_both_sides_and_their_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["bench", "store", "--total-mib", "4", "--entry", "65536", "--size", "200"]
    assert main([*tokens, "--dir", str(tmp_path), "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["records"] == result["entries"] * (result["records"] // result["entries"])
    assert result["bytes"] >= 200 * result["records"]
    assert result["ratio"] == pytest.approx(result["mb_per_s"] / result["raw_mb_per_s"])
    assert list(tmp_path.iterdir()) == []
