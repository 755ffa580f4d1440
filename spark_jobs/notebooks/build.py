"""``python -m spark_jobs.notebooks.build``: the notebook from its source; with a folder, pictures.

The source is `check_a_history.py`; the `.ipynb` beside it has the same cells and no outputs, so
equal sources give equal files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import jupytext
import nbformat
from nbclient import NotebookClient

SOURCE: Final = Path(__file__).with_name("check_a_history.py")
NOTEBOOK: Final = SOURCE.with_suffix(".ipynb")
TIMEOUT_S: Final = 300
"""For one cell: Spark on a busy machine."""


def notebook_of(source: str) -> Any:
    """Return the notebook with the cells of *source*; ids are their places."""
    notebook = jupytext.reads(source, fmt="py:percent")
    for place, cell in enumerate(notebook.cells):
        cell.id = f"cell-{place}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    return notebook


def text_of(notebook: Any) -> str:
    """Return a notebook as it is written to a file."""
    return str(nbformat.writes(notebook)).rstrip() + "\n"


def execute(notebook: Any, pictures: Path) -> Any:
    """Run all cells, pictures into *pictures*, and return the notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    environment = {**os.environ, "DLEDGER_PICTURES": str(pictures.resolve())}
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3")
    return client.execute(env=environment)


def main(arguments: list[str]) -> int:
    """Write the notebook; with a folder as argument, run it and leave its pictures there."""
    notebook = notebook_of(SOURCE.read_text())
    NOTEBOOK.write_text(text_of(notebook))
    for folder in arguments:
        execute(notebook, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
