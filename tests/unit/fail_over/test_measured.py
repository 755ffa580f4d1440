"""The table and the document of all runs, and what clients need."""

from pathlib import Path

from tests.fail_over.__main__ import phases
from tests.fail_over.figures import Figures
from tests.fail_over.measured import Measured
from tests.fail_over.run import POLL_S
from tests.fail_over.tables import CLIENTS, FAULTS, Client
from tests.harness.shipped_files import ROOT


def gap(send_gap_ms: int, errors: int = 0) -> Figures:
    return Figures(send_gap_ms, 200, 30, 100, 500, errors)


def measured() -> Measured:
    found = Measured(notes=["go is left out"])
    for send_gap_ms in (400, 9_000, 600):
        found.take("kill", {"sdk": {"plain": gap(send_gap_ms, errors=2)}})
    return found


def test_table_has_median_and_longest_and_sums() -> None:
    lines = list(measured().table({**CLIENTS, **FAULTS}))
    assert lines[0].startswith("\nleader killed (SIGKILL):")
    assert lines[-2] == (
        "| own SDK | plain | 0.60 / 9.00 | 0.20 / 0.20 | 0.03 / 0.03 | 0.10 / 0.10"
        " | 1500 | 6 | 0 | 0 | 0 | 0 |"
    )
    assert lines[-1] == "\ngo is left out"
    assert len({line.count("|") for line in lines[1:4]}) == 1


def test_document_has_every_run_and_its_summary() -> None:
    document = measured().document({"seed": 3})
    (row,) = document["rows"]
    assert (document["seed"], document["notes"]) == (3, ["go is left out"])
    assert (row["fault"], row["client"], row["stream"]) == ("kill", "sdk", "plain")
    assert row["summary"]["send_gap_ms"] == {"median": 600, "max": 9_000}
    assert [run["send_gap_ms"] for run in row["runs"]] == [400, 9_000, 600]


def test_phases_cover_the_poll_and_follow_from_the_seed() -> None:
    drawn = phases(7, 5)
    assert [int(phase // (POLL_S / 5)) for phase in sorted(drawn)] == [0, 1, 2, 3, 4]
    assert drawn == phases(7, 5)
    assert drawn != phases(8, 5)


def test_client_lacks_what_is_neither_file_nor_command() -> None:
    needs = ("no-such-command", "tests/no-such-file", "tests/conftest.py")
    client = Client("one", needs, "proxy", ("{root}/run", "{folder}"))
    assert client.missing == "no-such-command, tests/no-such-file"
    assert client.started_in(Path("at")) == (f"{ROOT}/run", "at")
