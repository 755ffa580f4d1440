"""What can be wrong with an expression, and with a message it is asked about."""

from __future__ import annotations

from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.remoting.protocol.outcome import Condition


class ExpressionIllegalError(LocalProtocolError):
    """It is no SQL92 expression, or too large a one. The message names the place and the reason."""

    condition = Condition.SUBSCRIPTION_ILLEGAL


class DamagedMessageError(CorruptRecordError):
    """A message cannot be judged: its bytes are damaged, and will be repaired from a peer."""

    condition = Condition.NOT_READY

    def __init__(self, message: str, position: int, size: int) -> None:
        super().__init__(message)
        self.position = position
        self.size = size
