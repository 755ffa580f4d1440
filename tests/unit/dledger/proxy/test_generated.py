"""The stored code of the gRPC protocol is what its interface file makes."""

from __future__ import annotations

from pathlib import Path

import grpc_tools
import pytest
from grpc_tools import protoc

from dledger.proxy import messaging_pb2 as pb
from tests.harness.shipped_files import ROOT

SOURCE = "dledger/proxy/messaging.proto"
CALLS = 17
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


@pytest.mark.parametrize(
    ("message", "field", "number"),
    [
        ("Message", "body", 4),
        ("SystemProperties", "receipt_handle", 12),
        ("SystemProperties", "message_group", 17),
        ("Settings", "metric", 8),
        ("SendResultEntry", "recall_handle", 5),
        ("ReceiveMessageRequest", "attempt_id", 8),
        ("TelemetryCommand", "recover_orphaned_transaction_command", 5),
        ("ChangeInvisibleDurationRequest", "invisible_duration", 4),
    ],
)
def test_fields_have_the_numbers_of_the_protocol(message: str, field: str, number: int) -> None:
    descriptor = pb.DESCRIPTOR.message_types_by_name[message]
    assert descriptor.fields_by_name[field].number == number


def test_service_has_every_call() -> None:
    service = pb.DESCRIPTOR.services_by_name["MessagingService"]
    assert service.full_name == "apache.rocketmq.v2.MessagingService"
    assert len(service.methods) == CALLS
