"""What an idempotent producer writes on a send, so that the broker stores it once.

In SEND_RECORDS it is one CBOR field, ``producer`` = [id, epoch, sequence, first open]; in 10, 310
and 320 four text fields, the id in hexadecimal. No other client sends any of them.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from remoting.errors import BadRequestError
from remoting.protocol.command import ExtFields

STAMP_FIELD: Final = "producer"
ID_FIELD: Final = "producerId"
EPOCH_FIELD: Final = "producerEpoch"
SEQUENCE_FIELD: Final = "producerSequence"
FIRST_OPEN_FIELD: Final = "producerFirstOpen"

PRODUCER_ID_BYTES: Final = 16
OPEN_SEQUENCES_MAX: Final = 64
"""Sequences of one session that may be open at the same time: it bounds what is remembered."""
_MAX: Final = (1 << 63) - 1


class ProducerStamp(NamedTuple):
    """Which send of which producer this is.

    Attributes:
        producer_id: 16 random bytes, the producer's own while it is open.
        epoch: As the broker group gave it when the session was opened.
        sequence: Number of the send within the epoch, from 0.
        first_open: Lowest sequence whose outcome the producer still waits for.
    """

    producer_id: bytes
    epoch: int
    sequence: int
    first_open: int

    def as_field(self) -> list[bytes | int]:
        """Return the value of the CBOR field."""
        return [self.producer_id, self.epoch, self.sequence, self.first_open]

    def as_texts(self) -> dict[str, str]:
        """Return the text fields."""
        return {
            ID_FIELD: self.producer_id.hex(),
            EPOCH_FIELD: str(self.epoch),
            SEQUENCE_FIELD: str(self.sequence),
            FIRST_OPEN_FIELD: str(self.first_open),
        }


def stamp_of_field(ext: ExtFields) -> ProducerStamp | None:
    """Return the stamp in the CBOR field, None when there is none.

    Raises:
        BadRequestError: There is something else.
    """
    value = ext.get(STAMP_FIELD)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 4:
        raise BadRequestError("producer is [id, epoch, sequence, first open]")
    return _checked(*value)


def stamp_of_texts(ext: ExtFields) -> ProducerStamp | None:
    """Return the stamp in the text fields, None when there is none.

    Raises:
        BadRequestError: There is something else.
    """
    if ID_FIELD not in ext:
        return None
    try:
        return _checked(
            bytes.fromhex(ext[ID_FIELD]),
            int(ext[EPOCH_FIELD]),
            int(ext[SEQUENCE_FIELD]),
            int(ext[FIRST_OPEN_FIELD]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequestError(f"a producer's stamp that cannot be read: {error}") from error


def producer_id_of(value: object) -> bytes:
    """Return the producer id written as *value*, bytes or hexadecimal.

    Raises:
        BadRequestError: It is none.
    """
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError as error:
            raise BadRequestError(f"a producer id that cannot be read: {error}") from error
    if type(value) is not bytes or len(value) != PRODUCER_ID_BYTES:
        raise BadRequestError(f"a producer id has {PRODUCER_ID_BYTES} bytes")
    return value


def _checked(
    producer_id: object, epoch: object, sequence: object, first_open: object
) -> ProducerStamp:
    known = producer_id_of(producer_id)
    if (
        type(epoch) is not int
        or type(sequence) is not int
        or type(first_open) is not int
        or not 0 < epoch <= _MAX
        or not 0 <= first_open <= sequence <= _MAX
    ):
        raise BadRequestError(f"epoch {epoch}, sequence {sequence}, first open {first_open}")
    return ProducerStamp(known, epoch, sequence, first_open)
