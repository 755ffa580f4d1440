"""`dledger-chaos serve` in a browser: the list, the reports behind it, and nothing from outside."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import VERDICTS, Looker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def address(store: Path) -> Iterator[str]:
    """Return where the real command serves the store."""
    command = [
        *(sys.executable, "-m", "dledger.cli.main", "chaos", "serve"),
        *("--port", "0", "--store", str(store)),
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        said = server.stderr.readline()
        try:
            assert said.startswith("see http://127.0.0.1:"), said
            yield said.removeprefix("see ").strip()
        finally:
            server.terminate()


@pytest.mark.parametrize("width_px", [1280, 390])
def test_the_list_leads_to_every_report_and_back(
    store: Path, look: Looker, address: str, width_px: int
) -> None:
    seen = look(address, width_px)
    page = seen.page
    names = page.locator("tbody td:first-child").all_inner_texts()
    assert names == list(VERDICTS)[::-1], "the newest first"
    for name in names:
        row = page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True))
        assert row.locator("td").nth(1).inner_text() == VERDICTS[name]
        row.get_by_role("link").click()
        page.wait_for_url(f"**/{name}/report.html")
        assert page.locator("main p").first.inner_text().lower().startswith(f"{VERDICTS[name]}: ")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.go_back()
        assert page.title() == "Runs"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.complaints == []
    assert [url for url in seen.asked_for if not url.startswith(address)] == []
    assert len(seen.asked_for) >= 1 + len(names)
