"""Accounts are read again; a broken file keeps those there were, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing
import trio

from commitlog.disk import OsDisk
from commitlog.errors import ConfigError
from dledger.testing.inline_executor import InlineExecutor
from remoting.access.account_store import RELOAD_INTERVAL_S, AccountStore
from remoting.clock import TrioClock

pytestmark = pytest.mark.usefixtures("autojump_clock")

ONE = '[accounts.account-1]\nsecret_key = "0123456789"\n'
TWO = ONE + '[accounts.account-2]\nsecret_key = "0123456789"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "accounts.toml"
    path.write_text(ONE)
    return path


async def test_a_change_counts_after_the_interval(path: Path, nursery: trio.Nursery) -> None:
    store = AccountStore(OsDisk(), str(path))
    nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
    assert store.table.get("account-2") is None
    path.write_text(TWO)
    await trio.sleep(RELOAD_INTERVAL_S * 1.5)
    assert store.table.get("account-2") is not None
    path.write_text("")
    await trio.sleep(RELOAD_INTERVAL_S)
    assert len(store.table) == 0


@pytest.mark.parametrize("broken", ["[accounts.account-1]\nsecret_key = 1\n", "[[[", None])
async def test_account_store_keeps_accounts_of_a_broken_file(
    path: Path, nursery: trio.Nursery, broken: str | None
) -> None:
    store = AccountStore(OsDisk(), str(path))
    with structlog.testing.capture_logs() as lines:
        nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        await trio.sleep(RELOAD_INTERVAL_S * 5.5)
        assert store.table.get("account-1") is not None
        kept = [line for line in lines if line["event"] == "accounts_kept"]
        assert len(kept) == 1
        assert kept[0]["log_level"] == "error"
        assert str(path) in kept[0]["error"]
        path.write_text(TWO)
        await trio.sleep(RELOAD_INTERVAL_S)
    assert store.table.get("account-2") is not None
    assert lines[-1]["event"] == "accounts_read"


async def test_account_store_reports_a_file_that_is_whole_again(
    path: Path, nursery: trio.Nursery
) -> None:
    store = AccountStore(OsDisk(), str(path))
    with structlog.testing.capture_logs() as lines:
        nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
        path.write_text("[[[")
        await trio.sleep(RELOAD_INTERVAL_S * 1.5)
        path.write_text(ONE)
        await trio.sleep(RELOAD_INTERVAL_S * 3)
    assert [line["event"] for line in lines] == ["accounts_kept", "accounts_as_before"]


@pytest.mark.parametrize("content", [None, "[[["])
def test_nothing_starts_without_accounts(path: Path, content: str | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"accounts\.toml"):
        AccountStore(OsDisk(), str(path))
