"""docs/reference/errors.md states what the code does."""

from dledger.remoting.protocol.outcome import ANSWERS, Condition
from tests.harness.errors_page import PAGE, WHEN, client_errors, daemon_errors, with_tables


def test_the_page_has_the_present_tables() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: .venv/bin/python -m tests.harness.errors_page"


def test_each_condition_has_an_answer_and_an_explanation() -> None:
    assert set(ANSWERS) == set(Condition) == set(WHEN)


def test_errors_of_every_package_are_there() -> None:
    assert "| `UnknownOutcomeError` | unknown | yes |" in client_errors()
    table = daemon_errors()
    for row in (
        "| `dledger.broker_errors.NotLeaderError` | `not_leader` | not_stored |",
        "| `dledger.remoting.errors.BusyError` | `busy` | not_stored |",
        "| `dledger.namesrv.errors.SettingLockedError` | `no_permission` | not_stored |",
        "| `dledger.commitlog.errors.FlushFailedError` | `internal_error` | unknown |",
    ):
        assert row in table
