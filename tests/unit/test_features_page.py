"""The page of features claims a feature only where a test proves it."""

import re

import pytest

from tests.harness.shipped_files import ROOT

PAGE = ROOT / "docs" / "reference" / "features.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| feature |", "| part |"))
]
NAMED = [
    "topicQueueTable", "brokerAddrTable", "clusterAddrTable", "brokerLiveTable",
    "filterServerTable", "KV configuration", "Processor table", "Response table",
    "Client instance", "HA service: accept", "HA service: group transfer",
    "HA service: HA client", "Reput service", "Transient store pool", "Filter server manager",
    "Broker roles", "deleteWhen", "Clean task", "Address server",
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_yes_has_a_test_and_a_no_a_reason(row: list[str]) -> None:
    feature, here, how, tests = row
    assert here in {"yes", "part", "no"}, feature
    linked = [link for link in re.findall(r"\]\(([^)]+)\)", tests) if "/tests/" in link]
    if here == "no":
        assert how, f"{feature}: why not?"
    else:
        assert linked, f"{feature}: which test proves it?"
    for link in linked:
        assert "def test_" in (PAGE.parent / link).read_text(), link


@pytest.mark.parametrize("part", NAMED)
def test_every_part_operators_know_has_its_row(part: str) -> None:
    assert [row for row in ROWS if row[0].strip("`") == part], part
