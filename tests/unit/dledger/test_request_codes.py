"""Each of RocketMQ's request codes has a handler, or a refusal that the documentation gives."""

import re
from pathlib import Path

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.config import NamesrvConfig, NamesrvTable
from dledger.namesrv.name_server import NameServer
from dledger.namesrv.processor import NameServerProcessor
from dledger.remoting.protocol.codes import INSTEAD, OWN_CODES, RequestCode, not_supported
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeGroup
from tests.harness.shipped_files import ROOT

TO_CLIENTS = {
    *(RequestCode.CHECK_TRANSACTION_STATE, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED),
    *(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT),
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
}
"""Brokers send these."""

ROW = re.compile(r"^\| (\d+) \| (\w+) \| (\S.*) \|$", re.MULTILINE)


def refused() -> dict[int, str]:
    page = (ROOT / "docs" / "reference" / "requests.md").read_text()
    part = page.split("<!-- refused")[1].split("<!-- end of refused -->")[0]
    rows = ROW.findall(part)
    assert len({code for code, _, _ in rows}) == len(rows)
    return {int(code): name for code, name, _ in rows}


ELSEWHERE = {
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.GET_BROKER_CONFIG,
    *(code for code in RequestCode if 50 <= code <= 54 or 3001 <= code <= 3010),
}
"""Registered by the daemon itself, with what it has beside its processors."""


def handled(broker: Broker, folder: Path) -> set[RequestCode]:
    name_server = NameServer(
        NamesrvConfig(namesrv=NamesrvTable(kv_config_path=str(folder / "kv.json"))), OsDisk()
    )
    by_name_server = NameServerProcessor(name_server, ManualClock()).handlers()
    return {*broker.processors.handlers, *by_name_server}


def test_every_code_has_a_handler_or_a_reason(group: FakeGroup, tmp_path: Path) -> None:
    codes = handled(Broker(group), tmp_path)
    of_rocketmq = {code for code in RequestCode if code not in OWN_CODES}
    reasons = {RequestCode(code) for code in refused()}
    assert of_rocketmq - codes - reasons - TO_CLIENTS - ELSEWHERE == set()
    assert reasons & (codes | TO_CLIENTS | ELSEWHERE) == set()


def test_the_page_calls_codes_by_their_names() -> None:
    assert {code: RequestCode(code).name for code in refused()} == refused()


def test_the_page_has_the_sentences_that_are_answered() -> None:
    page = (ROOT / "docs" / "reference" / "requests.md").read_text()
    rows = {int(code): words for code, _, words in ROW.findall(page)}
    assert {code: rows[code] for code in refused()} == {int(c): w for c, w in INSTEAD.items()}


@pytest.mark.parametrize("code", sorted(INSTEAD))
def test_remark_names_what_to_use_instead(code: int) -> None:
    remark = not_supported(code)
    assert remark.startswith(f" request type {code} not supported; ")
    assert len(remark) < 200
    assert not_supported(999_999) == " request type 999999 not supported"
