"""The command of the measurement beside the rivals: what it refuses, and the page it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.cli.main import run as run_app
from dledger.output import ExitCode
from tests.peers import __main__ as command
from tests.peers.table import BEGIN, END


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--docs --only nats", "--docs wants the whole table"),
        ("--only kafka", "--only kafka: nothing is measured under this name"),
        ("--rounds 0", "numbers must be more than 0"),
        ("--seconds -1", "numbers must be more than 0"),
        ("--backlog 1500", "a multiple of 1,000"),
        ("--warm -1", "numbers must be more than 0"),
    ],
)
def test_command_refuses_before_anything_is_fetched(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(command, "fetch")
    assert run_app(command.app, arguments.split()) == ExitCode.USAGE
    assert reason in capsys.readouterr().err


def test_page_gets_table_picture_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, work, beside = tmp_path / "page.md", tmp_path / "work", tmp_path / "peers"
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "WORK", work)
    monkeypatch.setattr(command, "BESIDE_PAGE", beside)
    work.mkdir()
    (work / "peers.json").write_text("{}")
    (work / "peers.png").write_bytes(b"picture")
    page.write_text(f"# Performance\n{BEGIN}\nold\n{END}\nrest\n")
    command.into_page("| table |\n")
    assert page.read_text() == (
        f"# Performance\n{BEGIN}\n| table |\n\n![The table as bars](peers/peers.png)\n{END}\nrest\n"
    )
    assert (beside / "peers.json").read_text() == "{}"
    assert (beside / "peers.png").read_bytes() == b"picture"
    assert beside.name == command.BESIDE_PAGE.name == "peers"
