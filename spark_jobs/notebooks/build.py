"""``python -m dledger.spark_jobs.notebooks.build``: the notebook from its source, with its outputs.

The source is `check_a_history.py`; the `.ipynb` beside it has the same cells, run from the first to
the last. Pictures in it have a palette of few colours, so that the file stays small; what
libraries warn of is left out.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

SOURCE: Final = Path(__file__).with_name("check_a_history.py")
NOTEBOOK: Final = SOURCE.with_suffix(".ipynb")
TIMEOUT_S: Final = 300
"""For one cell: Spark on a busy machine."""
COLOURS: Final = 48
"""Of a picture in the stored notebook."""


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

    Raises nbclient.exceptions.CellExecutionError: a cell failed.
    """
    environment = {**os.environ, "DLEDGER_PICTURES": str(pictures.resolve())}
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False)
    return client.execute(env=environment)


def to_store(notebook: Any) -> Any:
    """Return the notebook with its PNG outputs in `COLOURS` colours and without warnings."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        if outputs:
            cell.outputs = [output for output in outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if png:
                small = BytesIO()
                picture = Image.open(BytesIO(b64decode(png))).convert("RGB")
                picture.quantize(COLOURS).save(small, "PNG", optimize=True)
                output.data["image/png"] = b64encode(small.getvalue()).decode() + "\n"
                output.data["text/plain"] = "a picture"
    return notebook


def main(arguments: list[str]) -> int:
    """Run the notebook and write it; with a folder as argument, leave its pictures there."""
    with TemporaryDirectory() as folder:
        done = execute(notebook_of(SOURCE.read_text()), Path(arguments[0] if arguments else folder))
    NOTEBOOK.write_text(text_of(to_store(done)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
