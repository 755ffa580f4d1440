"""RocketMQ's Java client of the remoting protocol, for `tests.harness.remoting_clients`."""

from pathlib import Path
from typing import Any

from tests.harness.foreign_client import compile_java, foreign_client
from tests.harness.remoting_clients import Parts

PROGRAMS = {"produce": "RemotingProducer", "consume": "RemotingConsumers"}
OPTIONS = {"4.9.7": (), "5.5.0": ("-Drocketmq.message.compressType=LZ4",)}
"""The newer one compresses with LZ4, the older one knows zlib alone."""


def java_client(version: str, classes: Path) -> Parts:
    """Return what starts the client of a version in one of its parts.

    Args:
        classes: Folder for what is compiled.
    """
    command = compile_java(version, classes, "Lines", *PROGRAMS.values())

    def started(folder: Path, part: str, *arguments: str) -> Any:
        home = f"-Duser.home={folder}"
        program = (*command, *OPTIONS[version], home, PROGRAMS[part])
        return foreign_client(folder, part, *arguments, command=program)

    return started
