"""Clients that were not written here, each in a process of its own: JSON lines both ways."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.harness.beside import beside
from tests.harness.shipped_files import ROOT

TOOLS = ROOT / ".venv" / "interop"
SCRIPTS = ROOT / "tests" / "interop"

ANSWER_TIMEOUT_S = 60.0
"""A client tries a send four times, three seconds each; a start takes one or two."""

END_TIMEOUT_S = 40.0
"""A client that goes away writes its offsets and unregisters at every broker."""

HOW = "run `make interop`, which prepares them"

GRPC_PYTHON = TOOLS / "grpc" / "bin" / "python"
"""Has Apache's client of the gRPC protocol."""

GRPC_GO = TOOLS / "grpc_go"
"""Built from `tests/interop/grpc_go`, with Apache's Go client in it."""

GRPC_JAVA = TOOLS / "grpc_java"
"""Has Apache's Java client, and `tests/interop/grpc_java` compiled with it."""

GRPC_RUST = TOOLS / "grpc_rust"
"""Built from `tests/interop/grpc_rust`, with Apache's Rust client in it."""

REMOTING_GO = TOOLS / "remoting_go"
"""Built from `tests/interop/remoting_go`, with Apache's Go client of the remoting protocol."""

JAVA_VERSIONS = ("4.9.7", "5.5.0")
"""Of RocketMQ's Java client and `mqadmin`; the jars of 5.5.0 have RocketMQ's proxy, too."""


def java_jars(version: str) -> Path:
    """Return the folder of RocketMQ's jars of a version."""
    return TOOLS / f"java-{version}"


needs_cpp_client = pytest.mark.skipif(
    platform.machine() != "x86_64" or not (TOOLS / "bin" / "python").exists(),
    reason=f"the C++ client is there for x86-64 only, or not prepared: {HOW}",
)
needs_js_client = pytest.mark.skipif(
    shutil.which("node") is None or not (TOOLS / "node_modules" / "ali-ons").exists(),
    reason=f"no node, or the JavaScript client is not prepared: {HOW}",
)

needs_grpc_go = pytest.mark.skipif(
    not GRPC_GO.exists(), reason=f"no Go, or Apache's Go client is not prepared: {HOW}"
)
needs_grpc_java = pytest.mark.skipif(
    shutil.which("java") is None or not (GRPC_JAVA / "GrpcClient.class").exists(),
    reason=f"no Java with Maven, or Apache's Java client is not prepared: {HOW}",
)
needs_grpc_node = pytest.mark.skipif(
    shutil.which("node") is None
    or not (TOOLS / "node_modules" / "rocketmq-client-nodejs").exists(),
    reason=f"no node, or Apache's Node.js client is not prepared: {HOW}",
)
needs_java = pytest.mark.skipif(
    shutil.which("javac") is None or not (java_jars(JAVA_VERSIONS[-1]) / "complete").exists(),
    reason=f"no Java, or RocketMQ's jars are not prepared: {HOW}",
)
needs_remoting_go = pytest.mark.skipif(
    not REMOTING_GO.exists(), reason=f"no Go, or RocketMQ's Go client is not prepared: {HOW}"
)
needs_grpc_python = pytest.mark.skipif(
    not GRPC_PYTHON.exists(), reason=f"Apache's Python client is not prepared: {HOW}"
)
needs_grpc_rust = pytest.mark.skipif(
    not GRPC_RUST.exists(), reason=f"no Rust, or Apache's Rust client is not prepared: {HOW}"
)

Line = dict[str, Any]


def compile_java(version: str, classes: Path, *names: str) -> tuple[str, ...]:
    """Compile sources of `tests/interop/java`; return what starts a program of them but its name.

    Args:
        classes: Folder for the result.
    """
    jars = f"{java_jars(version)}/*"
    sources = [str(SCRIPTS / "java" / f"{name}.java") for name in names]
    command = ["javac", "-nowarn", "-cp", jars, "-d", str(classes), *sources]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return "java", "-Xmx300m", "-XX:TieredStopAtLevel=1", "-cp", f"{classes}:{jars}"


class ForeignClient:
    """One running client. Get it from `foreign_client`."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self.lines: list[Line] = []
        """All its output, but for answers."""
        self._process = process
        self._came = trio.Event()
        self._answers: trio.MemorySendChannel[Line] | None = None

    @property
    def messages(self) -> list[Line]:
        """The messages a consumer was given, in its order."""
        return [line for line in self.lines if "body" in line]

    async def ask(self, request: Mapping[str, Any]) -> Line:
        """Return the answer to one request of a producer."""
        assert self._process.stdin is not None
        send, receive = trio.open_memory_channel[Line](1)
        self._answers = send
        await self._process.stdin.send_all(json.dumps(dict(request)).encode() + b"\n")
        with trio.fail_after(ANSWER_TIMEOUT_S):
            answer = await receive.receive()
        self._answers = None
        return answer

    async def tell(self, request: Mapping[str, Any]) -> None:
        """Send one request whose answers are lines like others."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(dict(request)).encode() + b"\n")

    async def until(self, enough: Callable[[list[Line]], bool], timeout_s: float) -> None:
        """Wait until *enough* holds for `lines`."""
        with trio.move_on_after(timeout_s):
            while not enough(self.lines):
                await self._came.wait()
            return
        raise AssertionError(
            f"{self.name}: not within {timeout_s:g} s; {len(self.lines)} lines,"
            f" the last of them {self.lines[-5:]}"
        )

    async def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        async for chunk in self._process.stdout:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._take(json.loads(line))

    def _take(self, line: Line) -> None:
        if self._answers is not None:
            self._answers.send_nowait(line)
            return
        self.lines.append(line)
        self._came.set()
        self._came = trio.Event()


@asynccontextmanager
async def foreign_client(
    folder: Path,
    script: str,
    *arguments: str,
    wait_ready: bool = True,
    command: Sequence[str | Path] = (),
) -> AsyncIterator[ForeignClient]:
    """Run a script of `tests/interop` while the block runs.

    Args:
        folder: Its home, where it writes what it likes; what it complains of is in `<script>.err`.
        arguments: The script's; of a JavaScript client behind the folder of its packages.
        command: What starts it, if not the interpreter of the C++ client.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = str(SCRIPTS / script)
    if script.endswith(".mjs"):
        started = ["node", path, str(TOOLS), *arguments]
    else:
        started = [*map(str, command or (TOOLS / "bin" / "python", path)), *arguments]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "HOME": str(folder),
    }
    with (folder / f"{script}.err").open("ab") as complaints:
        process = await trio.lowlevel.open_process(
            started,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            cwd=folder,
        )
    client = ForeignClient(script, process)
    try:
        async with beside(client._read):
            if wait_ready:
                await client.until(lambda lines: {"ready": True} in lines, ANSWER_TIMEOUT_S)
            yield client
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(END_TIMEOUT_S):
                await process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
