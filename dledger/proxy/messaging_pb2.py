"""Messages and codes of ``messaging.proto``, made from its compiled form, ``messaging.desc``."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pool
from google.protobuf import duration_pb2 as _duration  # noqa: F401  # the file refers to both
from google.protobuf import timestamp_pb2 as _timestamp  # noqa: F401  # likewise
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.internal import builder

_compiled = FileDescriptorSet.FromString(Path(__file__).with_name("messaging.desc").read_bytes())
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_compiled.file[0].SerializeToString())
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
