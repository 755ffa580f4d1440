"""Programs of others as child processes: started, watched, read and ended by their process id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from dledger.output import CliError
from tests.harness.shipped_files import ROOT
from tools.bench.loads import Lines

STOP_TIMEOUT_S: Final = 10.0
"""After SIGTERM; then SIGKILL."""

RECEIVE_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class Program:
    """One child process; it is killed by the kernel when this process ends.

    It can be started again after it has ended, with the same arguments and folder.
    """

    name: str
    argv: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    ended_here: bool = False
    """True after `stop` or `kill`: its exit status is then no failure."""

    def start(self, *, piped: bool = False) -> None:
        """Start it; with *piped* its standard output can be read, else it goes to the log."""
        self.ended_here = False
        with self.log_path.open("ab") as log:
            # From this thread: the kernel ends the child with the thread that made it.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.tied", str(os.getpid()), *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id; the program must have been started."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self.process is not None and self.process.poll() is None

    async def kill(self) -> None:
        """Send SIGKILL and wait until it has ended."""
        if self.process is not None and self.running:
            self.ended_here = True
            self.process.kill()
            await self._ended()

    async def stop(self) -> None:
        """End it, cleanly when it does that in time. Runs even when cancelled."""
        with trio.CancelScope(shield=True):
            if self.process is not None and self.running:
                self.ended_here = True
                self.process.terminate()
                with trio.move_on_after(STOP_TIMEOUT_S):
                    await self._ended()
                await self.kill()

    async def _ended(self) -> None:
        assert self.process is not None
        while self.process.poll() is None:
            await trio.sleep(0.01)

    def last_line(self) -> str:
        """Return the end of its log, for an error message."""
        if not self.log_path.exists():
            return "no log"
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line]
        return lines[-1][:200] if lines else "nothing logged"

    async def read_lines(self, lines: Lines) -> None:
        """Give its output line by line to *lines*, until it ends.

        Raises:
            CliError: It ended with another status than 0, and was not ended from here.
        """
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            async with trio.lowlevel.FdStream(os.dup(pipe.fileno())) as stream:
                rest = b""
                async for data in stream:
                    *whole, rest = (rest + data).split(b"\n")
                    for line in whole:
                        lines.take(line.decode(errors="replace"))
        await self._ended()
        if self.process.returncode and not self.ended_here:
            raise CliError(
                f"{self.name} ended with status {self.process.returncode}: {self.last_line()}"
            )


async def run_program(
    name: str, argv: Sequence[str], log_path: Path, timeout_s: float, **environment: str
) -> list[str]:
    """Run a program to its end and return its lines on standard output.

    Raises:
        CliError: It ended with another status than 0, or took longer; it is ended then.
    """
    kept: list[str] = []

    class Kept(Lines):
        def take(self, line: str) -> None:
            kept.append(line)

    program = Program(name, argv, log_path, environment)
    program.start(piped=True)
    try:
        with trio.fail_after(timeout_s):
            await program.read_lines(Kept())
    except trio.TooSlowError:
        raise CliError(
            f"{name} did not end within {timeout_s:g} s: {program.last_line()}"
        ) from None
    finally:
        await program.stop()
    return kept
