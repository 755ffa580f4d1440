"""A browser that sees nothing but this machine, and a store with a run of each verdict."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from dledger.jepsen_like.report.run_report import report
from tests.harness.run_folders import BEGIN_NS, make_run, write_run

VERDICTS = {"valid": "valid", "invalid": "invalid", "unknown": "unknown", "crowded": "invalid"}
"""Runs by name, the oldest first."""

DURATION_S = 40
OPERATIONS = 1_500
CHROMIUM_ARGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of `VERDICTS`, reports drawn.

    The run ``crowded`` is invalid with more, and longer, anomalies than fit.
    """
    store = tmp_path_factory.mktemp("browser") / "runs"
    for number, (name, verdict) in enumerate(VERDICTS.items(), 1):
        made = make_run(
            operations=OPERATIONS, duration_s=DURATION_S, faults=5, stale_read=verdict == "invalid"
        )
        folder = write_run(store / name, made, duration_s=DURATION_S)
        _set_result(folder, begin=f"2031-05-04 1{number}:00:00", asked=f"asked {name}")
    _set_result(store / "unknown", verdict="unknown", reason="a checker broke", command="")
    _crowd(store / "crowded" / "result.json")
    shutil.rmtree(store / "unknown" / "nodes")
    (store / "unknown" / "samples.cbor").unlink()
    for folder in store.iterdir():
        report(folder)
    return store


def _crowd(path: Path) -> None:
    reported = json.loads(path.read_text())
    for checker in ("consumer_offsets", "total_queue"):
        violations = [
            {
                "name": "acknowledged message was lost for good",
                "subject": f"group-{number} of orders/{number}",
                "detail": "x" * 200,
                "at_ns": BEGIN_NS + number,
            }
            for number in range(30)
        ]
        reported["verdicts"].append(
            {"checker": checker, "validity": "invalid", "violations": violations}
        )
    path.write_text(json.dumps(reported))


def _set_result(folder: Path, **changes: str) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Return a headless Chromium; tests are skipped where the system has none."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=list(CHROMIUM_ARGS))
        yield browser
        browser.close()


@dataclass
class Look:
    """A page that is open, and what it did that it should not have.

    Attributes:
        page: The page.
        complaints: Messages of the console, errors, and requests that failed.
        asked_for: Every address it asked for.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)


Looker = Callable[[str, int], Look]


@pytest.fixture
def look(browser: Browser) -> Iterator[Looker]:
    """Return what opens an address in a window of a given width in pixels."""
    contexts = []

    def opened(address: str, width_px: int = 1280) -> Look:
        context = browser.new_context(viewport={"width": width_px, "height": 900})
        contexts.append(context)
        look = Look(context.new_page())
        look.page.on("console", lambda message: look.complaints.append(message.text))
        look.page.on("pageerror", lambda error: look.complaints.append(str(error)))
        look.page.on("requestfailed", lambda request: look.complaints.append(request.url))
        look.page.on("request", lambda request: look.asked_for.append(request.url))
        look.page.goto(address)
        return look

    yield opened
    for context in contexts:
        context.close()
