"""The notebook runs from its first cell to its last, and shows what its text states."""

from pathlib import Path
from typing import Any

import pytest

from dledger.spark_jobs.notebooks.build import SOURCE, execute, notebook_of

pytestmark = [
    pytest.mark.slow,
    # The kernel's client warns of a loopback socket without encryption; its events loop is asyncio.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def printed(notebook: Any) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return "".join(out["text"] for out in outputs if out["output_type"] == "stream")


def test_all_cells_run_and_show_their_pictures(tmp_path: Path) -> None:
    done = execute(notebook_of(SOURCE.read_text()), tmp_path)
    outputs = [out for cell in done.cells for out in cell.get("outputs", ())]
    assert "error" not in {out["output_type"] for out in outputs}
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == len(list(tmp_path.rglob("*.png"))) == 17
    text = printed(done)
    assert "inconsistent offsets in orders/" in text
    assert "message handed out again before its time" in text
    assert "two stored steps have messages in common" in text
    assert "spark invalid" in text or "Java" in text
    assert text.count(" True") == 1 or "Java" in text
