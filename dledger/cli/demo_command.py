"""``dledger demo``: kills a leader under load and shows that nothing acknowledged is lost."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from dledger.cli.demo_check import Verdict
from dledger.cli.demo_record import RecordedRun, check_run
from dledger.cli.output import CliError, ExitCode, Output, note, print_json


async def demo(
    *,
    brokers: Annotated[int, Parameter(help="Members of the group.")] = 3,
    messages: Annotated[int, Parameter(help="Acknowledged messages, at least.")] = 10_000,
    seconds: Annotated[float, Parameter(help="Load before and after the kill, each.")] = 3.0,
    producers: Annotated[int, Parameter(help="Sends outstanding at any time.")] = 32,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    keep: Annotated[
        Path | None, Parameter(help="Keep data, logs and what clients recorded in this folder.")
    ] = None,
    check: Annotated[
        Path | None, Parameter(help="Run nothing: check a folder that --keep has made.")
    ] = None,
    output: Output = "table",
) -> int:
    """Start a cluster, kill its leader under load, restart it, and check what clients recorded.

    Exit 0: everything acknowledged is there, in order, and the logs are equal. Exit 1: not so.
    """
    if check is not None:
        return report(*check_run(RecordedRun.load(check), check), output, str(check))
    if brokers not in (3, 5):
        raise CliError("--brokers: 3 or 5, fewer do not survive a kill", exit_code=ExitCode.USAGE)
    from dledger.cli.demo_run import DemoPlan, run_demo

    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise CliError(f"{keep} is not empty", exit_code=ExitCode.USAGE)
    folder = keep or Path(tempfile.mkdtemp(prefix="dledger-demo-"))
    plan = DemoPlan(
        brokers=brokers,
        messages_min=messages,
        load_s=seconds,
        senders=producers,
        body_bytes=size,
    )
    remove = keep is None
    try:
        run = await run_demo(folder, plan, note)
        run.save(folder)
        note("comparing what clients recorded with the three logs")
        verdict, problems = check_run(run, folder)
        remove = remove and verdict.kept
    except Exception:
        # Ctrl-C is no Exception: who breaks off does not want the data.
        remove = False
        note(f"data and logs are kept in {folder}")
        raise
    finally:
        if remove:
            shutil.rmtree(folder, ignore_errors=True)
    if not remove:
        note(f"kept in {folder}; check again: dledger demo --check {folder}")
    return report(verdict, problems, output, str(folder))


MEANINGS = {
    "acknowledged": "messages whose send was answered with success",
    "lost": "acknowledged, and missing for consumers or in a log; must be 0",
    "misplaced": "acknowledged at one offset, found at another; must be 0",
    "duplicated": "stored twice by a retry whose first try had no answer",
    "reordered": "stored behind a message that was sent later; must be 0",
    "resurrected": "refused, and stored all the same; must be 0",
    "changed": "read differently the second time; must be 0",
    "gaps": "offsets missing in a queue; must be 0",
    "not_stored": "sends that ended with: not stored",
    "unknown": "sends that ended with: unknown",
    "delivered": "messages read back",
    "failover_ms": "from SIGKILL to the next acknowledgement",
    "replicas_equal": "chain checksum and bytes of all logs up to the commit",
}


def report(verdict: Verdict, problems: list[str], output: str, folder: str) -> int:
    """Print the verdict and return the exit status."""
    values: dict[str, Any] = msgspec.to_builtins(verdict)
    if output == "json":
        print_json({**values, "kept": verdict.kept, "problems": problems})
        return ExitCode.OK if verdict.kept else ExitCode.FAILED
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=True, header_style="bold")
    table.add_column("")
    table.add_column("result", justify="right")
    table.add_column("meaning")
    for name, meaning in MEANINGS.items():
        value = values[name]
        table.add_row(name.replace("_", " "), _shown(value), meaning, style=_style(name, value))
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    if verdict.lost_keys:
        console.print(f"[red]lost: {', '.join(verdict.lost_keys)}[/red]")
    if verdict.kept:
        console.print("[bold green]Every acknowledged message is there.[/bold green]")
    else:
        console.print(f"[bold red]A promise was broken.[/bold red] See {folder}")
    return ExitCode.OK if verdict.kept else ExitCode.FAILED


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "-"


def _style(name: str, value: object) -> str:
    if "must be 0" in MEANINGS[name]:
        return "green" if value == 0 else "bold red"
    if name == "replicas_equal":
        return "green" if value else "bold red"
    return ""
