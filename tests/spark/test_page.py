"""The commands of the page about Spark do what it states."""

import re
from pathlib import Path

from tests.harness.java import need_java
from tests.harness.page_runs import run_page


def test_page_about_spark_runs(tmp_path: Path) -> None:
    need_java()
    start, topics, stop, folder = run_page("docs/how-to/spark.md", tmp_path)
    assert "yes" in start
    assert "1000 orders" in topics
    assert re.search(r"^\[400, 400, 200\]\n\[0?\]$", topics, re.MULTILINE)
    assert "1000 rows in the table" in topics
    assert re.search(r"verdict +│ equal", stop)
    assert re.search(r"\|large-orders\| +10\|", folder)
    assert re.search(r"\| +orders\| +1000\|", folder)
