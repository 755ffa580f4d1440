"""Plays a compose file without an engine for containers: what it asks of one is made by hand.

Each service has a network namespace with the address that its name stands for, and a mount
namespace: a file system that cannot be written, its volumes, a `/tmp` of its own. Its programs are
those of this environment instead of an image's, and it runs as root without any right.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dledger.jepsen_like.chaos import namespaces
from dledger.jepsen_like.chaos.namespaces import RunNetwork, run_network
from tests.harness.deployed_files import DEPLOY, compose_services
from tests.harness.shipped_files import ROOT

TOOLS: Final = ("unshare", "nsenter", "setpriv", "mount")
PROGRAMS: Final = Path(sys.executable).parent
STOP_WITHIN_S: Final = 30


def why_not() -> str | None:
    """Return why none can be played here, in one sentence; None when it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else namespaces.why_not()


@dataclass
class ComposePlayer:
    """The services of a compose file. Get it from `played`.

    Attributes:
        services: As the file has them.
        entrypoint, probe: Of the image.
        folder: For volumes and logs.
    """

    services: dict[str, Any]
    entrypoint: list[str]
    probe: list[str]
    folder: Path
    network: RunNetwork
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service; return when its file system is there."""
        service = self.services[name]
        entrypoint = service.get("entrypoint") or self.entrypoint
        command = [*entrypoint, *(word.replace("$$", "$") for word in service["command"])]
        ready, mounted = os.pipe()
        with (
            (self.folder / f"{name}.log").open("ab") as log,
            open(ready, "rb") as reader,
            open(mounted, "wb") as writer,
        ):
            self.processes[name] = subprocess.Popen(
                [
                    "nsenter",
                    f"--net={self.network.hosts[name].namespace}",
                    *("unshare", "--mount", "--propagation", "private", "sh", "-ec"),
                    "\n".join(
                        [
                            *self._mounts(service),
                            "echo mounted >&0",
                            f"exec {_without_rights(command)} < /dev/null",
                        ]
                    ),
                ],
                stdin=writer,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            # A program that enters between two mounts would lose its files.
            writer.close()
            reader.read()
        return self.processes[name]

    def run_in(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program where a service runs."""
        process = self.processes[name]
        assert process.poll() is None, self.log(name)
        return subprocess.run(
            [
                *("nsenter", f"--target={process.pid}", "--mount", "--net", "sh", "-c"),
                f"exec {_without_rights(command)}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    def health(self, name: str) -> subprocess.CompletedProcess[str]:
        """Carry out the health check of a service."""
        test = self.services[name].get("healthcheck", {}).get("test")
        return self.run_in(name, *(test[1:] if test else self.probe))

    def log(self, name: str) -> str:
        """Return what a service has written."""
        return (self.folder / f"{name}.log").read_text()

    def _mounts(self, service: dict[str, Any]) -> Iterator[str]:
        hosts = self.folder / "hosts"
        yield f"mount --bind {hosts} /etc/hosts"
        # The tree may be below /tmp.
        yield f"mount --rbind {ROOT} /mnt"
        volumes = [volume.split(":") for volume in service.get("volumes", [])]
        for number, (name, *_) in enumerate(volumes):
            folder = self.folder / "volumes" / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield f"exec {number + 4}< {folder}"
        yield "mount -t tmpfs tmpfs /var/lib"
        for number, (_, place, *options) in enumerate(volumes):
            yield f"mkdir -p {place}; mount --bind /proc/$$/fd/{number + 4} {place}"
            if options == ["ro"]:
                yield f"mount -o remount,ro,bind {place}"
        for place in service["tmpfs"]:
            yield f"mount -t tmpfs tmpfs {place}"
        yield f"mkdir -p {ROOT}; mount --rbind /mnt {ROOT}"
        if service["read_only"]:
            yield "mount -o remount,ro,bind /var/lib"
            yield "mount -o remount,ro,bind /"

    def stop(self) -> dict[str, int]:
        """Stop all services that run, and return how each ended."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        return {name: process.wait(STOP_WITHIN_S) for name, process in self.processes.items()}

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _without_rights(command: Sequence[str]) -> str:
    variables = {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "HOME": "/var/lib/dledger"}
    words = [
        *("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        *("env", "-i", *(f"{name}={value}" for name, value in variables.items())),
        *command,
    ]
    return shlex.join(words)


@contextmanager
def played(folder: Path) -> Iterator[ComposePlayer]:
    """Give a player of what is in `deploy/compose`; nothing is started."""
    services = compose_services()
    image = (DEPLOY / "compose" / "Containerfile").read_text()
    entrypoint, probe = (
        json.loads(found)
        for word in ("ENTRYPOINT", r"    CMD")
        for found in re.findall(rf"^{word} (\[.*\])$", image, re.MULTILINE)
    )
    with ExitStack() as stack:
        network = stack.enter_context(run_network([name.replace("-", "") for name in services]))
        lines = [f"{host.address} {name}\n" for name, host in network.hosts.items()]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        player = ComposePlayer(services, entrypoint, probe, folder, network)
        stack.callback(player.kill)
        yield player
