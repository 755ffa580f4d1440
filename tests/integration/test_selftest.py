"""`dledger selftest` and paced sends against a real broker."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.cli import selftest_command
from dledger.cli.main import main
from dledger.testing.embedded_broker import EmbeddedBroker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_logs")]


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(topics={"orders": 1}) as running:
        yield running


def test_a_cluster_that_gives_back_what_it_took_is_good(
    broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["selftest", "--namesrv", broker.name_server_addr, "--output", "json"]
    for _ in range(2):
        capsys.readouterr()
        assert main(tokens) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["good"]
        assert [row["step"] for row in found["steps"]] == ["topic", "send", "read", "find by key"]


def test_a_message_that_does_not_come_back_is_bad(
    broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = selftest_command._read

    async def all_but_one(*of: object) -> list[bytes]:
        return (await read(*of))[1:]  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(selftest_command, "_read", all_but_one)
    assert main(["selftest", "--namesrv", broker.name_server_addr]) == 1
    out, err = capsys.readouterr()
    assert "9 of 10 came back, or others" in out
    assert "BAD" in err


def test_lines_of_a_file_are_sent_at_a_rate(
    broker: EmbeddedBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\n\nthree\n")
    tokens = ["send", "--topic", "orders", "--file", str(lines), "--rate", "1000"]
    assert main([*tokens, "--namesrv", broker.name_server_addr, "--output", "json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert [row["offset"] for row in sent] == [0, 1, 2]
