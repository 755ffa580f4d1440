"""Messages as Arrow record batches of the chosen columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from client.core.message import MessageExt

_TIME: Final = pa.timestamp("us", tz="UTC")
_TYPES: Final[Mapping[str, Any]] = {
    "topic": pa.string(),
    "broker": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "born_timestamp": _TIME,
    "store_timestamp": _TIME,
    "message_id": pa.string(),
    "keys": pa.string(),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "body": pa.binary(),
}
_VALUES: Final[Mapping[str, Callable[[MessageExt], Any]]] = {
    "topic": lambda message: message.topic,
    "broker": lambda message: message.broker_name,
    "queue_id": lambda message: message.queue_id,
    "queue_offset": lambda message: message.queue_offset,
    "born_timestamp": lambda message: message.born_timestamp_ms * 1000,
    "store_timestamp": lambda message: message.store_timestamp_ms * 1000,
    "message_id": lambda message: message.message_id,
    "keys": lambda message: message.keys,
    "tags": lambda message: message.tags,
    "properties": lambda message: list(message.properties.items()),
    "body": lambda message: message.body_bytes,
}


def batch_of(messages: Iterable[MessageExt], columns: Sequence[str]) -> Any:
    """Return messages as one record batch.

    Raises:
        CorruptRecordError: A record is not what its checksum says, or is compressed in a way that
            this client cannot read.
    """
    rows = list(messages)
    arrays = []
    for name in columns:
        value = _VALUES[name]
        arrays.append(pa.array([value(message) for message in rows], _TYPES[name]))
    return pa.RecordBatch.from_arrays(
        arrays, schema=pa.schema([(name, _TYPES[name]) for name in columns])
    )
