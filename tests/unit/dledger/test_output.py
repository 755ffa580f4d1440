"""Tables as the command line prints them."""

from __future__ import annotations

import pytest

from dledger.output import print_table


@pytest.mark.parametrize(
    ("values", "right"),
    [([1, 20], True), ([1.5, None], True), ([None, None], False), ([True, False], False)],
)
def test_print_table_aligns_numbers_and_gaps(
    capsys: pytest.CaptureFixture[str], values: list[object], right: bool
) -> None:
    print_table("", ["number", "name"], [[value, "n0"] for value in values])
    rows = [line for line in capsys.readouterr().out.splitlines() if "n0" in line]
    cells = [line.split("│")[1] for line in rows]
    assert len(cells) == 2
    assert all(cell.startswith("  ") == right for cell in cells)
