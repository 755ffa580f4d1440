"""The one error tree. Every error states what happened to the message and what to do next.

::

    MQError
    ├── ConfigError                 a setting is unknown or has a bad value; nothing was started
    ├── ProtocolError
    │   ├── LocalProtocolError      the caller asked for something the wire cannot carry
    │   └── RemoteProtocolError     the peer sent something it must not; the connection is closed
    ├── StoreError
    │   ├── CorruptRecordError      a record's size, magic or CRC is wrong; the file stays as it was
    │   ├── CorruptEntryError       an entry's CRC, chain, index or position is wrong
    │   │   └── NewerEntryError     a whole entry of a format this program does not know
    │   ├── CorruptStoreError       damage below the durable mark: the node must not vote or lead
    │   ├── OffsetOutOfRangeError   before the first kept byte, or at or past the end
    │   ├── DiskFullError           nothing was written; retry when there is space
    │   ├── LogBusyError            the log is being enlarged; nothing was written, ask again
    │   ├── FlushFailedError        a flush failed: the node stops, nothing is acknowledged
    │   ├── StoreLockedError        another process owns this data folder
    │   └── ForeignStoreError       the folder belongs to another cluster, group, node or layout
    ├── ReplicationError            (dledger.broker_errors)
    ├── ClientError                 (dledger.client.core.errors)
    └── InvariantBroken             a bug: the node stops, better dead than wrong
"""

from __future__ import annotations

from typing import ClassVar, Literal

Outcome = Literal["stored", "not_stored", "unknown"]


class MQError(Exception):
    """Root of every error this project raises on purpose.

    ``retriable`` means that the same call may succeed later; ``refresh_route`` that the caller's
    picture of the cluster is out of date; ``outcome`` what certainly happened to the message.
    """

    retriable: ClassVar[bool] = False
    refresh_route: ClassVar[bool] = False
    outcome: ClassVar[Outcome] = "not_stored"


class ConfigError(MQError):
    """A setting is unknown or has a bad value. The message names it; nothing was started.

    Attributes:
        mistakes: A sentence for each such setting; the message has them on lines of their own.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class ProtocolError(MQError):
    """Bytes that do not follow the protocol."""


class LocalProtocolError(ProtocolError):
    """The caller asked for something the wire cannot carry; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something it must not send; its connection is closed."""

    outcome = "unknown"


class StoreError(MQError):
    """The log on disk could not do what was asked."""


class CorruptRecordError(StoreError):
    """Size, magic or CRC of a record is wrong. The file is left as it was."""


class CorruptEntryError(StoreError):
    """CRC, chain, index or position of an entry is wrong. The file is left as it was."""


class NewerEntryError(CorruptEntryError):
    """A whole entry of a format that a newer program wrote. It is not damage: nothing is cut."""


class CorruptStoreError(StoreError):
    """Damage below the durable mark. The node must neither vote nor lead with this folder."""


class OffsetOutOfRangeError(StoreError):
    """Before the first kept byte, or at or past the end."""


class DiskFullError(StoreError):
    """There is no space for the bytes asked for; nothing was written."""

    retriable = True


class LogBusyError(StoreError):
    """The files of the log are being enlarged in this moment; nothing was written. Ask again."""

    retriable = True


class FlushFailedError(StoreError):
    """A flush failed. What was written since the last one may be lost: the node stops."""

    outcome = "unknown"


class StoreLockedError(StoreError):
    """Another process owns this data folder; nothing was read or written."""


class ForeignStoreError(StoreError):
    """The folder is another cluster's, group's or node's, or has another layout; left as it was."""


class InvariantBroken(MQError):  # noqa: N818  # a statement about the program, not an error of use
    """Something that cannot be true is true. A bug: the node stops."""

    outcome = "unknown"
