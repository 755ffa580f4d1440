"""``python -m jepsen_like.chaos.broker_child PARENT CONFIG CLOCK AHEAD``: a broker under test.

The product's own broker process with a clock that the runner steers. AHEAD is how many versions its
peer protocol is newer than the others'. It dies with its parent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trio

from dledger.cli.broker_command import serve_process
from dledger.cli.child import die_with
from dledger.config import load_config
from jepsen_like.chaos.steered_clock import SteeredClock
from remoting.clock import TrioClock
from remoting.settings.reader import ConfigFile


def speak_newer(versions: int) -> None:
    """Introduce this process to its peers as one of a later release, and take theirs for older.

    What it keeps on disk stays what the others write, so it can go back.
    """
    from dledger.raft import identity, wire

    newer = wire.PROTOCOL_VERSION + versions
    for module in (wire, identity):
        vars(module)["PROTOCOL_VERSION"] = newer


def main(config_path: Path, clock_path: Path, versions_ahead: int) -> int:
    """Serve until SIGTERM; return the exit status."""
    if versions_ahead:
        speak_newer(versions_ahead)
    config = load_config([ConfigFile.read(config_path)], environment=os.environ)

    async def serve() -> int:
        return await serve_process(
            config, "info", "json", clock=SteeredClock(TrioClock(), clock_path)
        )

    return trio.run(serve)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.exit(main(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
