"""Pages of the documentation run as they stand: their commands and code in one shell.

Ports and data folders are replaced where they are taken (`tests.harness.shipped_files`); ``make``
only prints what it would do; measurements are cut short.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.shipped_files import NAMESRV_PORT as DEFAULT_PORT
from tests.harness.shipped_files import ROOT, Shipped, lay_out_examples, link_repository

RUN_S = 1_200
PROLOGUE = """\
set -euo pipefail
make() { command make --dry-run "$@" > /dev/null; }
"""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page, each with its language."""
    return _BLOCK.findall((ROOT / page).read_text())


def script(page: str, shipped: Shipped) -> str:
    """Return the page's commands and code as one script."""
    parts = [PROLOGUE]
    for number, (language, text) in enumerate(blocks(page)):
        adapted = re.sub(r"--duration \d+", "--duration 1", shipped.adapt(text))
        if shipped.namesrv_port != DEFAULT_PORT:
            adapted = adapted.replace(
                "dledger-namesrv ", f"dledger-namesrv --listen-port {shipped.namesrv_port} "
            )
        parts.append(f"echo '--- block {number}'\n")
        if language == "sh":
            parts.append(adapted)
        elif language == "python":
            parts.append(f"python -W error - <<'END_OF_BLOCK'\n{adapted}END_OF_BLOCK\n")
    return "".join(parts)


def run_page(page: str, folder: Path) -> list[str]:
    """Run a page and return what each block printed."""
    shipped = lay_out_examples(folder)
    link_repository(folder, Path(sys.prefix))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "COLUMNS": "200",
    }
    environment.pop("NAMESRV_ADDR", None)
    if shipped.namesrv_port != DEFAULT_PORT:
        environment["NAMESRV_ADDR"] = f"127.0.0.1:{shipped.namesrv_port}"
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", script(page, shipped)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    assert status == 0, f"{page} ended with {status}:\n{text}"
    return re.split(r"^--- block \d+\n", text, flags=re.MULTILINE)[1:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a failed page left running: everything in the session of its shell."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
