"""``python -m tests.harness.console_pictures``: makes the pictures of docs/operate/console.md.

A small cluster with something on every page, and the system's chromium. Pictures have few colours,
so that they are small.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.harness.console_cluster import console_cluster
from tests.harness.shipped_files import ROOT

FOLDER: Final = ROOT / "docs" / "pictures" / "console"
COLOURS: Final = 64
TOTAL_BYTES_MAX: Final = 1_500_000
HEIGHT_MAX: Final = 900
VIEWS: Final = (("light", 1100, "light"), ("dark", 1100, "dark"), ("phone", 360, "dark"))
PAGES: Final = {
    "cluster": "/cluster",
    "topics": "/topics",
    "topic": "/topic?name=orders",
    "groups": "/groups",
    "group": "/group?name=reports",
    "reset": "/group/plan?name=reports&topic=orders&to=first",
    "messages": "/messages?by=key&topic=orders&wanted=order-7",
    "message": "",
    "dead-letters": "/dead-letters/group?name=billing",
    "delayed": "/waiting",
    "clients": "/clients",
    "settings": "/settings?q=fileReserved",
    "accounts": "/accounts",
    "runs": "/runs",
    "changes": "/changes",
}
RUNS: Final = {
    "2031-05-04-valid": {
        "verdict": "valid",
        "lost": 0,
        "duplicated": 0,
        "counts": {"send": {"ok": 48_210, "unknown": 3}},
        "faults": {"kill leader": 4, "partition": 2},
        "failover_ms": [912.0, 1180.0],
    },
    "2031-05-03-invalid": {
        "verdict": "invalid",
        "lost": 1,
        "verdicts": [
            {"violations": [{"name": "acknowledged message was lost", "subject": "orders/2"}]}
        ],
        "counts": {"send": {"ok": 12_004}},
        "faults": {"power cut": 1},
    },
}


def main() -> int:
    """Make every picture again."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        print("no chromium here: make chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="console-pictures-") as scratch:
        runs = Path(scratch) / "runs"
        for name, result in RUNS.items():
            (runs / name).mkdir(parents=True)
            (runs / name / "result.json").write_text(json.dumps(result))
        with (
            console_cluster(Path(scratch) / "cluster", runs) as served,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(
                executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
            )
            _make_changes(browser, served.address)
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
            for view, width_px, scheme in VIEWS:
                _view(browser, served.address, view, width_px, scheme)
            browser.close()
    total = sum(picture.stat().st_size for picture in FOLDER.iterdir())
    print(f"{len(list(FOLDER.iterdir()))} pictures, {total:,} bytes")
    return 0 if total < TOTAL_BYTES_MAX else 1


def _make_changes(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/topics")
    for name in ("refunds", "orders"):
        page.locator("[name=name]").fill(name)
        page.get_by_role("button", name="Create").click()
        page.goto(f"{address}/topics")
    page.close()


def _view(browser: Browser, address: str, view: str, width_px: int, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": width_px, "height": 600},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = context.new_page()
    for name, path in PAGES.items():
        if path:
            page.goto(address + path)
        else:  # the message that the search before has found
            page.locator("#found tbody a").first.click()
        height = page.evaluate("document.documentElement.scrollHeight")
        picture = page.screenshot(
            full_page=True,
            clip={"x": 0, "y": 0, "width": width_px, "height": min(height, HEIGHT_MAX)},
        )
        small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS)
        small.save(FOLDER / f"{name}-{view}.png", optimize=True)
    context.close()


if __name__ == "__main__":
    sys.exit(main())
