"""The stored code of the gRPC protocol is what its interface file makes."""

from __future__ import annotations

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

from tests.harness.shipped_files import ROOT

SOURCE = "dledger/proxy/messaging.proto"
"""Calls of apache.rocketmq.v2.MessagingService."""


def test_stored_code_is_what_the_file_makes(tmp_path: Path) -> None:
    known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{known}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        str(ROOT / SOURCE),
    ]
    assert protoc.main(arguments) == 0
    for name in ("dledger/proxy/messaging_pb2.py", "dledger/proxy/messaging_pb2.pyi"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run make proto"
