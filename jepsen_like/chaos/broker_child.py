"""``python -m dledger.jepsen_like.chaos.broker_child CONFIG CLOCK AHEAD``: a broker under test.

The product's own broker process with a clock that the runner steers. AHEAD is how many versions its
peer protocol is newer than the others'. Deadlines inside trio are not steered.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import trio

from dledger.cli.broker_command import serve_process
from dledger.remoting.machine import TrioClock
from dledger.remoting.seams import Clock
from dledger.settings.config import load_config
from dledger.settings.schema import ConfigFile

# ---------------------------------------------------------------------------------- its clock


_FIELDS: Final = struct.Struct("<qd")
"""Milliseconds that the date is ahead, and millionths that the clocks run faster."""


class ClockFile:
    """The shared memory, from the side of the runner."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_FIELDS.pack(0, 0.0))
        self.path = path
        self._offset_ms = 0
        self._ppm = 0.0

    def jump(self, by_ms: int) -> None:
        """Move the date."""
        self._offset_ms += by_ms
        self._write()

    def set_right(self) -> None:
        """Take all jumps back; what drift has gathered stays."""
        self._offset_ms = 0
        self._write()

    def drift(self, ppm: float) -> None:
        """Let the clocks run faster from now on; 0 heals, what has gathered stays."""
        self._ppm = ppm
        self._write()

    def _write(self) -> None:
        with self.path.open("r+b") as file:
            file.write(_FIELDS.pack(self._offset_ms, self._ppm))


class SteeredClock:
    """A `dledger.remoting.seams.Clock` over another one, steered by a `ClockFile`."""

    def __init__(self, clock: Clock, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _FIELDS.size, access=mmap.ACCESS_READ)
        self._clock = clock
        self._ppm = 0.0
        self._real_s = self._own_s = clock.monotonic()
        self._gathered_s = 0.0

    def monotonic(self) -> float:
        """Return seconds of this clock."""
        _, ppm = _FIELDS.unpack_from(self._memory)
        real_s = self._clock.monotonic()
        self._own_s += (real_s - self._real_s) * (1.0 + self._ppm / 1e6)
        self._gathered_s += (real_s - self._real_s) * self._ppm / 1e6
        self._real_s, self._ppm = real_s, ppm
        return self._own_s

    def wall_ms(self) -> int:
        """Return the date as this machine has it."""
        self.monotonic()
        offset_ms, _ = _FIELDS.unpack_from(self._memory)
        return self._clock.wall_ms() + int(offset_ms) + round(self._gathered_s * 1000)

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of this clock."""
        await self._clock.sleep(self._real(seconds))

    def time_out(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Cancel the block after *seconds* of this clock."""
        return self._clock.time_out(self._real(seconds))

    def _real(self, seconds: float) -> float:
        _, ppm = _FIELDS.unpack_from(self._memory)
        real_s: float = seconds / (1.0 + ppm / 1e6)
        return real_s


# ---------------------------------------------------------------------------------- the process


def speak_newer(versions: int) -> None:
    """Introduce this process to its peers as one of a later release, and take theirs for older."""
    from dledger.raft import identity, wire

    newer = wire.PROTOCOL_VERSION + versions
    for module in (wire, identity):
        vars(module)["PROTOCOL_VERSION"] = newer


def main(config_path: Path, clock_path: Path, versions_ahead: int) -> None:
    """Serve until SIGTERM."""
    if versions_ahead:
        speak_newer(versions_ahead)
    config = load_config([ConfigFile.read(config_path)], environment=os.environ)

    async def serve() -> None:
        clock = SteeredClock(TrioClock(), clock_path)
        await serve_process(config, "info", "json", clock=clock)

    trio.run(serve)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
