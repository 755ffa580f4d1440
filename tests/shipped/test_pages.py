"""Every command and piece of code in the README and the docs is run, as it stands there.

The blocks of one page are run in order in one shell. Ports and data folders are replaced where
they are taken (`tests.harness.shipped_files`); ``make`` only prints what it would do, for it would
run these tests again; measurements are cut short.
"""

import re
from pathlib import Path

import pytest

from tests.harness.page_runs import blocks, run_page
from tests.harness.shipped_files import ROOT, Shipped

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md")),
]
TUTORIAL = "docs/start/tutorial.md"
SPARK = "docs/how-to/spark.md"
APART = ("README.md", TUTORIAL, SPARK)
"""Pages with a test of their own."""


def test_readme_prints_what_it_stores(tmp_path: Path) -> None:
    make, start, python, _, settings = run_page("README.md", tmp_path)
    assert make == ""
    assert "yes" in start
    assert "stored in queue" in python
    assert "from Python" in python
    assert re.search(r"server\.listen_port += \d+ +# .*broker-n0\.conf", settings)


def test_tutorial_prints_what_it_explains(tmp_path: Path) -> None:
    start, shell, blocking, group, with_trio, kill, stop = run_page(TUTORIAL, tmp_path)
    assert "yes" in start
    assert "[greeting]  first message" in shell
    assert shell.count("follower") == 2
    assert "stored in queue" in blocking
    assert "first message" in blocking
    assert "giving back: from Python" in group
    assert "consumed: from Python after 1 retries" in group
    # A queue may come in several parts.
    counts = re.findall(r"(\d+) messages of queue (\d+)", with_trio)
    assert {queue for _, queue in counts} == set("0123")
    assert sum(int(count) for count, _ in counts) >= 1002
    assert "SEND_OK" in kill
    assert re.search(r"verdict +│ good", stop)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in APART])
def test_pages_run_as_they_stand(page: str, tmp_path: Path) -> None:
    if any(language in ("sh", "python") for language, _ in blocks(page)):
        run_page(page, tmp_path)


def test_a_port_is_replaced_once(tmp_path: Path) -> None:
    shipped = Shipped(tmp_path, {9876: 20912, 20912: 20928})
    adapted = shipped.adapt("--port 9876 :20912;9877 98760 09876")
    assert adapted == "--port 20912 :20928;9877 98760 09876"


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_is_no_code(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= {"sh", "python", "", "text", "toml"}
    # A port that the page does not name may be taken by another page.
    assert not re.search("^dledger-broker(?!.*(-port|examples/))", (ROOT / page).read_text(), re.M)
